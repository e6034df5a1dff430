"""Measured profiles: what to measure on one device, and what the times found there say of a question.

    OpGraph --measurement_folder--> folder --run--> measured.json, rows of `autoplan.measurements`
    rows + question --lookup--> measurements, for `cost.measured`; --op_comparison--> ops

The folder's own code is `autoplan.measuring`.
"""
