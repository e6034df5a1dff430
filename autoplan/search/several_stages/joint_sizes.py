"""Several stages per rank: every choice of sizes and of recomputation that may be fast enough. The last arithmetic.

`rank_shares` lets each rank choose by itself. Here all choose together, and each choice is bounded by the whole step,
replayed (`relaxed_step`), in two rounds:

    sizes        from the least that every stage may have, piece by piece (`_grow_sizes`)
    recompute    rank by rank, what memory asks for at the least, in every way that is enough (`_recompute`); where
                 these are too many, all of them are bounded together (`path_weights`)

A choice whose bound is not below the limit is left out with all that grow from it. What remains is simulated in order
of the bounds. Where there are more choices than `MAX_TURNS` allows, the least bound of those at hand holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoplan.search.one_mesh import Judged
from autoplan.search.plans import piece_edges
from autoplan.search.ranges import Array
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.search.several_stages.least_recomputation import recomputing_stages, thrifty_plan
from autoplan.search.several_stages.path_weights import Ways, raised_bounds_s
from autoplan.search.several_stages.rank_shares import Shares
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY

MAX_TURNS = 50_000_000  # actions x choices that are replayed for one mesh; a count, so that the machine decides nothing
QUICK_TURNS = MAX_TURNS // 2  # likewise, before a solver has tried
MAX_CHOICES = 200_000  # replayed for one mesh, at the most
MAX_AT_ONCE = 1024  # choices
MAX_ROUNDS = 12  # choices simulated
MAX_STALLED = 3  # of them, one after the other, that give no better plan


@dataclass(frozen=True, slots=True)
class JointBound:
    """Attributes:
    bound_s: no plan of the mesh that fits is faster.
    best: the fastest plan found on the way that fits.
    """

    bound_s: float
    best: Judged | None


@dataclass(frozen=True, slots=True)
class _Choices:
    """Choices with their bounds: `sizes` and `again` are (choice, stage), pieces and segments recomputed at least."""

    sizes: Array
    again: Array
    least_s: Array

    def __len__(self) -> int:
        return len(self.least_s)

    def take(self, rows: Array) -> _Choices:
        """These rows, or those that are True."""
        return _Choices(self.sizes[rows], self.again[rows], self.least_s[rows])


@dataclass(slots=True)
class _Replays:
    """Choices that may take less than `limit_s` are kept, as long as no more than `n_left` have to be replayed."""

    step: RelaxedStep
    n_left: int
    limit_s: float
    is_late: Callable[[], bool]

    def below(self, sizes: Array, again: Array, at_least_s: Array) -> tuple[_Choices, Array] | None:
        """The choices kept, and which these are; None when there are too many. Their bounds are `at_least_s`."""
        self.n_left -= len(sizes)
        if self.n_left < 0 or self.is_late():
            return None
        parts = [slice(start, start + MAX_AT_ONCE) for start in range(0, len(sizes), MAX_AT_ONCE)]
        found = [self.step.least_s(sizes[part], again[part]) for part in parts]
        least_s = np.maximum(at_least_s, np.concatenate(found)) if found else at_least_s
        is_kept = least_s < self.limit_s
        return _Choices(sizes, again, least_s).take(is_kept), is_kept


def joint_bound(
    shares: Shares,
    *,
    recompute: str | None,
    bound_s: float,
    limit_s: float,
    is_late: Callable[[], bool],
    max_turns: int = MAX_TURNS,
) -> JointBound:
    """The bound raised from `bound_s`, at most to `limit_s`, or to the best plan found."""
    allowed = shares.allowed_below(limit_s)
    if allowed is None:
        return JointBound(limit_s, None)
    mesh = shares.table.mesh
    n_choices = min(MAX_CHOICES, max_turns // (2 * mesh.n_stages * mesh.n_micro_batches))
    replays = _Replays(RelaxedStep.of(shares.table, shares.segments), n_choices, limit_s, is_late)
    choices, has_all_sizes = _grow_sizes(replays, allowed, shares.n_pieces)
    best = None
    if has_all_sizes:
        choices = _recompute(replays, shares, _within_chains(shares, choices, limit_s=limit_s))
        best = _best_of(shares, choices, recompute=recompute, limit_s=limit_s, is_late=is_late)
    limit_s = limit_s if best is None else min(limit_s, best.estimate.step_s)
    return JointBound(max(bound_s, min(limit_s, float(choices.least_s.min(initial=INFINITY)))), best)


def _grow_sizes(replays: _Replays, allowed: Array, n_pieces: int) -> tuple[_Choices, bool]:
    """Every choice of allowed sizes that makes up the model and may be fast enough, and True.

    False when there are too many: then some have fewer pieces, and every other plan grows from one of them.
    """
    n_stages = len(allowed)
    most = allowed.shape[1] - 1 - allowed[:, ::-1].argmax(axis=1)
    following = _following(allowed)
    whole = [_Choices(*(np.zeros((0, n_stages), dtype=int),) * 2, np.zeros(0))]
    sizes = allowed.argmax(axis=1)[None, :]
    last = np.zeros(1, dtype=int)  # the stage that grew last: none before it will
    growing = _Choices(sizes, np.zeros(sizes.shape, dtype=int), np.zeros(1))
    found = replays.below(growing.sizes, growing.again, growing.least_s)
    while found is not None:
        growing, is_kept = found
        last = last[is_kept]
        n_missing = n_pieces - growing.sizes.sum(axis=1)
        whole.append(growing.take(n_missing == 0))
        can_grow = (most - growing.sizes) * (np.arange(n_stages) >= last[:, None])
        keep = (n_missing > 0) & (can_grow.sum(axis=1) >= n_missing)
        growing = growing.take(keep)
        if not len(growing):
            return _joined(whole), True
        rows, stages = np.nonzero(can_grow[keep])
        if len(rows) > replays.n_left:
            break
        sizes = growing.sizes[rows]
        places = np.arange(len(rows)), stages
        sizes[places] = following[stages, sizes[places]]
        fits = sizes.sum(axis=1) <= n_pieces
        last = stages[fits]
        found = replays.below(sizes[fits], growing.again[rows[fits]], growing.least_s[rows[fits]])
    return _joined([*whole, growing]), False


def _following(allowed: Array) -> Array:
    """(stage, pieces): the next larger size that is allowed; where there is none, as many pieces as there may be."""
    width = allowed.shape[1]
    following = np.full(allowed.shape, width - 1)
    for size in reversed(range(width - 1)):
        following[:, size] = np.where(allowed[:, size + 1], size + 1, following[:, size + 1])
    return following


def _joined(parts: list[_Choices]) -> _Choices:
    return _Choices(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("sizes", "again", "least_s"))
    )


def _within_chains(shares: Shares, choices: _Choices, *, limit_s: float) -> _Choices:
    """The choices without those that the chains of some rank, with what it must recompute, rule out."""
    for rank in range(shares.table.mesh.pp):
        least_s = np.maximum(choices.least_s, shares.choices_s(rank, choices.sizes) + shares.table.per_step_s)
        choices = _Choices(choices.sizes, choices.again, least_s).take(least_s < limit_s)
    return choices


def _recompute(replays: _Replays, shares: Shares, choices: _Choices) -> _Choices:
    """Each choice of sizes with every way to recompute that may be enough and fast enough.

    Where these are too many, on some ranks nothing is recomputed, and the choices are bounded by weights of paths.
    """
    ways = Ways.of(shares, choices.sizes)
    origin = np.arange(len(choices))
    for rank, own in enumerate(shares.shape.stages_of):
        options = [ways.of_rank(rank, choice) for choice in origin.tolist()]
        if not any(len(found) != 1 or found.any() for found in options):
            continue
        n_options = list(map(len, options))
        if sum(n_options) > replays.n_left:
            return _weighed(replays, shares, choices, ways, origin)
        rows = np.repeat(np.arange(len(choices)), n_options)
        again = choices.again[rows]
        again[:, list(own)] = np.concatenate(options)
        found = replays.below(choices.sizes[rows], again, choices.least_s[rows])
        if found is None:
            break
        choices, origin = found[0], origin[rows[found[1]]]
    return choices


def _weighed(replays: _Replays, shares: Shares, choices: _Choices, ways: Ways, origin: Array) -> _Choices:
    """The choices with the bounds of `path_weights`; `origin`: of each, its choice in `ways`."""
    own, first, places = np.unique(origin, return_index=True, return_inverse=True)
    known_s = np.full(len(own), INFINITY)
    np.minimum.at(known_s, places, choices.least_s)
    raised_s = raised_bounds_s(
        shares, choices.sizes[first], known_s, ways.at(own), limit_s=replays.limit_s, is_late=replays.is_late
    )
    least_s = np.maximum(choices.least_s, raised_s[places])
    return _Choices(choices.sizes, choices.again, least_s).take(least_s < replays.limit_s)


def _best_of(
    shares: Shares, choices: _Choices, *, recompute: str | None, limit_s: float, is_late: Callable[[], bool]
) -> Judged | None:
    """The fastest plan that fits of those behind the first choices, in the order of their bounds."""
    best, n_stalled = None, 0
    edges = np.array(piece_edges(shares.table))
    for row in np.argsort(choices.least_s, kind="stable")[:MAX_ROUNDS]:
        if is_late() or choices.least_s[row] >= limit_s or n_stalled >= MAX_STALLED:
            break
        n_stalled += 1
        spans = list(pairwise(edges[np.append(0, np.cumsum(choices.sizes[row]))].tolist()))
        plan = _plan_of(shares, spans, choices.again[row], recompute=recompute, is_late=is_late)
        if plan is not None and (best is None or plan.estimate.step_s < best.estimate.step_s):
            best, n_stalled = plan, 0
            limit_s = min(limit_s, plan.estimate.step_s)
    return best


def _plan_of(
    shares: Shares,
    spans: list[tuple[int, int]],
    again: Array,
    *,
    recompute: str | None,
    is_late: Callable[[], bool],
) -> Judged | None:
    """The plan with so many segments recomputed in each stage, or if that does not fit, a thrifty one."""
    for with_easy in (False, True):
        stages = recomputing_stages(shares.segments, spans, again.tolist(), with_easy=with_easy)
        estimate = simulate(shares.table, stages)
        if estimate.fits:
            return Judged(stages, estimate)
    return thrifty_plan(shares.table, shares.shape, stages, recompute=recompute, is_late=is_late)
