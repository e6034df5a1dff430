"""GPipe: all forward passes, then all backward passes; every micro-batch is in flight at once.

    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
"""

from __future__ import annotations

from autoplan.schedules import Action, Schedule, ScheduleKind, require_one_chunk


def gpipe(n_ranks: int, n_chunks: int, n_micro_batches: int) -> Schedule:
    """Each rank runs all its forward passes, then all its backward passes, both in order of micro-batch."""
    require_one_chunk("gpipe", n_chunks)
    return tuple(
        tuple(Action(rank, kind, micro_batch) for kind in "FB" for micro_batch in range(n_micro_batches))
        for rank in range(n_ranks)
    )


SCHEDULES = {"gpipe": ScheduleKind(gpipe)}
