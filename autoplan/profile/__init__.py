"""Measured profiles: what to measure on one device, and what the times found there say of a question.

    OpGraph --measurement_folder--> folder --run--> measured.json --segment_times, op_times--> rows
    rows + question --lookup--> measurements, for `cost.measured`; --op_comparison--> ops

segment_key says when two segments are the same thing to measure. The folder's own code is `autoplan.measuring`.
"""
