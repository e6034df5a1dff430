"""Meshes that differ in one thing: whether recomputation keeps attention. The one that does is the other one's twin.

Nothing that is not recomputed differs between the two, so no bound by arithmetic does, which takes the faster choice of
each segment. A twin therefore enters the queue with the bound of its mesh before that was cut, and only then, when

    the mesh may fit        what is recomputed whole needs less memory, so else the twin does not fit either
    it may recompute        where its one stage fits with nothing recomputed that has attention, the twin's best plan is
                            the same
    attention is worth it   `spares_cheaply`

A plan of a twin that recomputes no attention is one of its mesh.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.schedules import splits_backward

# Of the seconds per byte that recomputation spares without it, what keeping attention may take at most. Llama-70B of
# 4,096 tokens takes 97 to 108 %, and would gain less than 1 % of a step for a search that is a fifth longer.
WORTHWHILE = 0.95


def twin_of(mesh: Mesh) -> Mesh:
    """The mesh that keeps attention and is else the same."""
    return replace(mesh, keeps_attention=True)


def has_twin(mesh: Mesh) -> bool:
    """Whether a mesh can recompute, all but attention too."""
    return not mesh.keeps_attention and not splits_backward(mesh.schedule)


def recomputes_kept(table: CostTable, stages: tuple[StagePlan, ...]) -> bool:
    """Whether a plan of this table recomputes a segment and keeps its attention; `table` is of a twin."""
    return any(table.cost_of(i, recomputed=True).kept_bytes > 0 for stage in stages for i in stage.recomputed)


def spares_cheaply(table: CostTable, twin: CostTable) -> bool:
    """Whether a second of recomputation spares clearly more bytes of some segment where that keeps attention.

    If it spares fewer, a plan that recomputes fewer segments, and these whole, is as fast and needs as little memory,
    but for what whole segments cannot share out. Such twins are not of the space.
    """
    pairs = [(own, kept[-1]) for own, kept in zip(table.costs, twin.costs, strict=True)]
    return any(
        kept.kept_bytes > 0 and _per_byte(own[0], kept) < WORTHWHILE * _per_byte(own[0], own[-1]) for own, kept in pairs
    )


def _per_byte(plain: SegmentCost, again: SegmentCost) -> float:
    spared_bytes = plain.saved_bytes - again.saved_bytes
    return again.recompute_s / spared_bytes if spared_bytes > 0 else float("inf")
