"""One stage per rank: where to cut the model.

partition: the cut whose slowest stage is fastest, by dynamic programming    banded_path: its recurrence, at once
stage_memory: what a range of pieces holds, with as little recomputed as will do
replayed_cuts: every cut that may be fast enough, by a bound on the whole step
"""
