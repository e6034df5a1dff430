"""Measure a model (`autoplan profile`): what to measure on one device, and what the times say of a question.

    OpGraph --measurement_folder--> folder --run--> measured.json, rows of a `measured_profile`
    rows + question --lookup--> measurements, for `cost.measured`; --op_comparison--> ops

The folder's own code is `autoplan.measuring_program`.
"""
