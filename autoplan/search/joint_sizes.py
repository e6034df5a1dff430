"""Several stages per rank: every choice of sizes for all stages, each with a bound. The last step of arithmetic.

`rank_shares` lets each rank choose its sizes by itself. Where at most `MAX_CHOICES` choices for all stages together are
left, each is bounded by all chains of all ranks at once. The choice with the least bound is simulated: nothing that
has these sizes is faster than that without recomputation, and its critical paths bound all other choices, too. So they
are ruled out many at a time, until none is below the limit or `MAX_ROUNDS` are over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoplan.parallel_plan import StagePlan
from autoplan.search.linear_model import INFINITY
from autoplan.search.one_mesh import Judged
from autoplan.search.paths import Path, critical_paths
from autoplan.search.plans import piece_edges
from autoplan.search.ranges import Array
from autoplan.search.rank_paths import SYMBOLS
from autoplan.search.rank_shares import Shares
from autoplan.search.thrift import fastest_stages, thrifty_plan
from autoplan.simulate import simulate

MAX_CHOICES = 200_000
MAX_ROUNDS = 12  # choices simulated


@dataclass(frozen=True, slots=True)
class JointBound:
    """Attributes:
    bound_s: no plan of the mesh that fits is faster.
    best: the fastest plan found on the way that fits.
    """

    bound_s: float
    best: Judged | None


def joint_bound(
    shares: Shares, *, recompute: str | None, bound_s: float, limit_s: float, is_late: Callable[[], bool]
) -> JointBound:
    """The bound raised from `bound_s`, at most to `limit_s`, or to the best plan found."""
    allowed = shares.allowed_below(limit_s)
    if allowed is None:
        return JointBound(limit_s, None)
    choices = _choices(allowed, shares.n_pieces)
    if choices is None:
        return JointBound(bound_s, None)
    table, best = shares.table, None
    least_s = _bounds_s(shares, choices, limit_s=limit_s)
    for _ in range(MAX_ROUNDS):
        is_open = least_s < limit_s
        choices, least_s = choices[is_open], least_s[is_open]
        if not len(choices) or is_late():
            break
        place = int(least_s.argmin())
        stages = _stages(shares, choices[place], recompute)
        estimate = simulate(table, stages, with_timeline=True)
        plan = thrifty_plan(table, shares.shape, stages, recompute=recompute, is_late=is_late)
        if plan is not None and (best is None or plan.estimate.step_s < best.estimate.step_s):
            best = plan
            limit_s = min(limit_s, plan.estimate.step_s)
        for path in critical_paths(table.mesh, estimate.timeline):
            least_s = np.maximum(least_s, _path_s(shares, path, choices) + table.per_step_s)
        least_s[place] = max(least_s[place], estimate.step_s)
    least = float(least_s.min()) if len(least_s) else INFINITY
    return JointBound(max(bound_s, min(limit_s, least)), best)


def _choices(allowed: Array, n_pieces: int) -> Array | None:
    """(choice, stage): every choice of allowed sizes that makes up the model; None if there are too many."""
    sizes = [np.flatnonzero(own) for own in allowed]
    least = np.append(np.cumsum([own[0] for own in reversed(sizes)])[::-1], 0)
    most = np.append(np.cumsum([own[-1] for own in reversed(sizes)])[::-1], 0)
    found, totals = np.zeros((1, 0), dtype=np.int16), np.zeros(1, dtype=int)
    for stage, own in enumerate(sizes):
        totals = (totals[:, None] + own[None, :]).ravel()
        left = n_pieces - totals
        is_possible = (left >= least[stage + 1]) & (left <= most[stage + 1])
        if is_possible.sum() > MAX_CHOICES:
            return None
        rows = np.repeat(found, len(own), axis=0)[is_possible]
        column = np.tile(own, len(found))[is_possible]
        found, totals = np.column_stack([rows, column]), totals[is_possible]
    return found


def _bounds_s(shares: Shares, choices: Array, *, limit_s: float) -> Array:
    """Per choice, its longest chain of any rank; those that pass the limit are not looked at further."""
    least_s = np.zeros(len(choices))
    for rank in range(shares.table.mesh.pp):
        rows = np.flatnonzero(least_s < limit_s)
        least_s[rows] = np.maximum(least_s[rows], shares.choices_s(rank, choices[rows]) + shares.table.per_step_s)
    return least_s


def _path_s(shares: Shares, path: Path, choices: Array) -> Array:
    """Per choice, the least time of a path, and what recomputation adds to it."""
    needs, mesh = shares.needs, shares.table.mesh
    counts = np.zeros((len(SYMBOLS), mesh.n_stages))
    for (symbol, stage), n_times in path.counts:
        counts[SYMBOLS.index(symbol), stage] = n_times
    values = np.einsum("ys,ysw->sw", counts, needs.passes_s)
    owner = shares.shape.ranks[path.last_stage]
    values[list(shares.shape.stages_of[owner])] += needs.optimizer_s[list(shares.shape.stages_of[owner])]
    values[path.last_stage] += needs.last_reduce_s[path.last_stage]
    return values[np.arange(mesh.n_stages), choices].sum(axis=1) + shares.again_on_path_s(counts, choices)


def _stages(shares: Shares, sizes: Array, recompute: str | None) -> tuple[StagePlan, ...]:
    """The stages of these sizes, with the faster choice of each segment."""
    edges = np.array(piece_edges(shares.table))[np.append(0, np.cumsum(sizes))].tolist()
    return fastest_stages(shares.table, pairwise(edges), recompute=recompute)
