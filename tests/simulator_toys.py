"""Toy tables for the simulator: whole seconds and bytes, so that every expected number is a short sum."""

import dataclasses

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.overlap import Overlap
from autoplan.parallel_plan import Mesh, StagePlan

NO_SLOWDOWN, HALF = Overlap(0.0, 0.0), Overlap(0.5, 0.5)  # half: while both run, both take 1.5 times as long
FREE = SegmentCost(*[0.0] * 10, *[0] * 5)


def segment(**figures):
    """A segment that costs nothing but `figures`."""
    return dataclasses.replace(FREE, **figures)


def table_of(costs, *, mesh=None, cut_s=0.0, gathers=False, reduces=False, overlap=NO_SLOWDOWN, **fields):
    """A table with one kind per entry of `costs`: a SegmentCost, or a pair (without, with recomputation)."""
    pairs = tuple(cost if isinstance(cost, tuple) else (cost, cost) for cost in costs)
    n_cuts = len(pairs) - 1
    defaults = {"per_step_s": 0.0, "reserved_fixed_bytes": 0, "reserved_ratio": 1.0, "memory_limit_bytes": 10**6}
    return CostTable(
        mesh=mesh or Mesh(),
        kinds=tuple(range(len(pairs))),
        costs=pairs,
        cut_s=(cut_s,) * n_cuts,
        gathers_per_micro_batch=gathers,
        reduces_per_micro_batch=reduces,
        overlap=overlap,
        **{**defaults, **fields},
    )


def whole(n_segments, *, recomputed=()):
    """One stage of all segments."""
    return (StagePlan(0, n_segments, recomputed),)


def one_each(n_stages):
    """One segment per stage."""
    return tuple(StagePlan(index, index + 1) for index in range(n_stages))


def pipeline(pp, n_micro_batches, *, schedule="1f1b", n_chunks=1):
    return Mesh(pp=pp, n_micro_batches=n_micro_batches, schedule=schedule, n_chunks=n_chunks)


def tick(queue):
    """A second of the communication stream: the first entry with anything left goes on."""
    for entry in queue:
        if entry[1] > 0:
            entry[1] -= 1
            break
    return 1
