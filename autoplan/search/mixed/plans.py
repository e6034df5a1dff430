"""Plans of one mesh on a mixed cluster: judged, made to fit, and varied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import in_flight
from autoplan.search.one_mesh import Judged
from autoplan.search.one_stage.partition import Cut, partitions_below
from autoplan.search.plans import all_plans, obeys_recompute, runs_of
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY

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
        ranks = enumerate(stages)
        more = tuple(_recomputing_more(table, rank, stage, estimate.short_bytes(rank)) for rank, stage in ranks)
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


def best_of_shares(table: CostTable, *, recompute: str | None, tries_all: bool = False) -> tuple[Judged | None, float]:
    """A plan of a mesh with shares of the batch, and a bound; that is INFINITY when some share does not fit at all.

    Each share recomputes what is best for it: what is fastest where that fits, else as little as will do; or, where all
    is tried, the best of all. Whether the last segment is recomputed is the same in all, since they compute the loss
    alike; it is not where that is no choice for one of them.
    """
    last, own_tables = len(table.kinds) - 1, table.rank_tables
    cuts = [partitions_below(own, recompute=recompute, limit_s=INFINITY, n_most=1) for own in own_tables]
    if not all(cuts):
        return None, INFINITY
    wholes = [found[0] for found in cuts if found]
    is_choice = all(own.cost_of(last, recomputed=True) != own.cost_of(last, recomputed=False) for own in own_tables)
    found = []
    for is_again in (False, True) if is_choice else (False,):
        pairs = zip(own_tables, wholes, strict=True)
        plans = [
            _best_with(own, _all_with(own, is_again) if tries_all else _varied(cut, is_again), recompute=recompute)
            for own, cut in pairs
        ]
        stages = tuple(plan[0] for plan in plans if plan is not None)
        if len(stages) == len(own_tables):
            found.append(Judged(stages, simulate(table, stages)))
    best = min(found, key=lambda item: item.estimate.step_s, default=None)
    if tries_all:
        return best, INFINITY if best is None else best.estimate.step_s
    pairs = zip(own_tables, wholes, strict=True)
    return best, max(_least_s(own, cut, recompute=recompute) for own, cut in pairs)


def _best_with(
    table: CostTable, plans: Iterable[tuple[StagePlan, ...]], *, recompute: str | None
) -> tuple[StagePlan, ...] | None:
    """The best of these plans of one stage, which agree on the last segment; or the last one with more recomputed."""
    known = tuple(plans)
    best = fitting(table, known, recompute=recompute)
    if best is None and known:
        best = repaired(table, known[-1], recompute=recompute)
        last = len(table.kinds) - 1
        if best is not None and (last in best.stages[0].recomputed) != (last in known[-1][0].recomputed):
            best = None
    return None if best is None else best.stages


def _all_with(table: CostTable, is_again: bool) -> Iterator[tuple[StagePlan, ...]]:
    """All plans that recompute the last segment, or all that do not."""
    last = len(table.kinds) - 1
    return (plan for plan in all_plans(runs_of(table), table.mesh) if (last in plan[0].recomputed) == is_again)


def _varied(cut: Cut, is_again: bool) -> Iterator[tuple[StagePlan, ...]]:
    """The plans of a cut, with the last segment among what is recomputed, or without it."""
    for (stage,) in (cut.fastest, cut.stages):
        last = stage.stop - 1
        others = tuple(segment for segment in stage.recomputed if segment != last)
        yield (replace(stage, recomputed=(*others, *([last] if is_again else []))),)


def _least_s(table: CostTable, cut: Cut, *, recompute: str | None) -> float:
    """No plan of the one stage is faster, given how much it must recompute."""
    relaxed_s = RelaxedStep.of_cuts(table, recompute=recompute).least_s(np.array([cut.sizes]), np.array([cut.again]))
    return max(float(relaxed_s[0]), simulate(table, cut.fastest).step_s)
