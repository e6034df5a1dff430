"""A measured profile, as values: the rows of measured.json (`--profile`), and keys that say what a row is about.

Its counterpart for a machine is the hardware profile (`autoplan.hardware`).

    segment_key      segment --> content key, assignment key: equal where the same thing is computed
    segment_times    measured.json --> MeasuredProfile: times and bytes of segments, for `cost.measured`
    op_times         times of the ops of a segment

`autoplan.measure_model` has them measured; the program that measures is `autoplan.measuring_program`.
"""
