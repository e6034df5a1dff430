"""Measure parts of a model on one device: copied beside the segments' sources and `runtime/`, with a `measure.py`.

    python measure.py [--device cuda|cpu] [--out measured.json] [--seconds 1.0] [--backend inductor] [--cache FILE]

`autoplan profile` writes this package into a folder with `measurement.json`, which says what to measure. It needs torch
and nothing else of autoplan; the user's own blocks need what model.py imports.

    strides      how what blocks are called with lies in memory
    generated    makes a Call of a generated segment ----+
    own          makes a Call of a block of model.py ----+--> timing, replays, memory --> program writes one line per
                                                                              result of `results`, tells `progress`

timing is that of kernels launched one by one, replays that of a CUDA graph. values are those that weights have
meanwhile; ops has the time of each op, optimizer that of its step; stand_ins take the place of torch.distributed, and
copies are theirs, which are taken off.
"""
