"""Plans of one mesh on a mixed cluster: judged, made to fit, and varied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import in_flight
from autoplan.search.linear_model import INFINITY
from autoplan.search.one_mesh import Judged
from autoplan.search.partition import Cut, partitions_below
from autoplan.search.plans import obeys_recompute
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.simulate import simulate

MAX_REPAIRS = 4  # of one plan that lacks memory


def fitting(table: CostTable, plans: Iterable[tuple[StagePlan, ...]], *, recompute: str | None) -> Judged | None:
    """The fastest of these plans that fits and has the recomputation the user fixed."""
    allowed = (stages for stages in plans if obeys_recompute(table, stages, recompute=recompute))
    judged = (Judged(stages, simulate(table, stages)) for stages in allowed)
    return min((item for item in judged if item.estimate.fits), key=lambda item: item.estimate.step_s, default=None)


def repaired(table: CostTable, stages: tuple[StagePlan, ...], *, recompute: str | None) -> Judged | None:
    """The plan with more recomputed on the ranks that lack memory; None when that is not enough."""
    for _ in range(MAX_REPAIRS):
        estimate = simulate(table, stages)
        if estimate.fits:
            return fitting(table, [stages], recompute=recompute)
        short_bytes = [needed - estimate.limit_bytes(rank) for rank, needed in enumerate(estimate.reserved_bytes)]
        more = tuple(_recomputing_more(table, rank, stage, short_bytes[rank]) for rank, stage in enumerate(stages))
        if more == stages:
            return None
        stages = more
    return None


def _recomputing_more(table: CostTable, rank: int, stage: StagePlan, short_bytes: int) -> StagePlan:
    own, n_in_flight, chosen = table.at_rank(rank), in_flight(table.mesh, rank), list(stage.recomputed)
    for segment in range(stage.start, stage.stop):
        kept, again = own.cost_of(segment, recomputed=False), own.cost_of(segment, recomputed=True)
        if short_bytes <= 0:
            break
        if segment not in stage.recomputed and again.saved_bytes < kept.saved_bytes:
            chosen.append(segment)
            short_bytes -= n_in_flight * (kept.saved_bytes - again.saved_bytes)
    return replace(stage, recomputed=tuple(sorted(chosen)))


def neighbours(stages: tuple[StagePlan, ...], edges: tuple[int, ...]) -> Iterator[tuple[StagePlan, ...]]:
    """The plans in which one boundary is a piece further, or a piece less far; what is recomputed stays."""
    chosen = {segment for stage in stages for segment in stage.recomputed}
    cuts = [stage.start for stage in stages[1:]]
    for place, cut in enumerate(cuts):
        number = edges.index(cut)
        for moved in (edges[number - 1], edges[number + 1]):
            ends = (0, *cuts[:place], moved, *cuts[place + 1 :], edges[-1])
            if ends[place] < moved < ends[place + 2]:
                yield tuple(
                    StagePlan(start, stop, tuple(i for i in range(start, stop) if i in chosen))
                    for start, stop in pairwise(ends)
                )


def best_of_shares(table: CostTable, *, recompute: str | None) -> tuple[Judged | None, float]:
    """A plan of a mesh with shares of the batch, and a bound; that is INFINITY when some share does not fit at all.

    All shares recompute the same segments: what is fastest where that fits, else what one of them needs, or all
    together.
    """
    cuts, bound_s = [], 0.0
    for own in table.rank_tables:
        whole = partitions_below(own, recompute=recompute, limit_s=INFINITY, n_most=1)
        if not whole:
            return None, INFINITY
        cuts.append(whole[0])
        bound_s = max(bound_s, _least_s(own, whole[0], recompute=recompute))
    needed = [cut.stages for cut in cuts]
    recomputed = {segment for (stage,) in needed for segment in stage.recomputed}
    together = (replace(needed[0][0], recomputed=tuple(sorted(recomputed))),)
    plans = dict.fromkeys([*(cut.fastest for cut in cuts), *needed, together])
    return fitting(table, plans, recompute=recompute), bound_s


def _least_s(table: CostTable, cut: Cut, *, recompute: str | None) -> float:
    """No plan of the one stage is faster, given how much it must recompute."""
    relaxed_s = RelaxedStep.of_cuts(table, recompute=recompute).least_s(np.array([cut.sizes]), np.array([cut.again]))
    return max(float(relaxed_s[0]), simulate(table, cut.fastest).step_s)
