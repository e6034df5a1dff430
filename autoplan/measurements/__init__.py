"""What was measured of segments, as values: rows of measured.json, and the keys that say what a row is about.

    segment_key      segment --> content key, assignment key: equal where the same thing is computed
    segment_times    measured.json --> MeasuredProfile: times and bytes of segments, for `cost.measured`
    op_times         times of the ops of a segment

`autoplan.profile` has them measured; the program that measures is `autoplan.measuring`.
"""
