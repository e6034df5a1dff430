"""Several stages per rank: a bound for all sizes and all ways to recompute at once, by weights of paths.

With stages of given sizes, of which stage s recomputes r_s segments, every path p through the schedule takes at least

    a_p(sizes) + sum_s c_ps r_s

Memory leaves each rank some ways to recompute: every plan that fits recomputes at least as much as one of them on each
of its stages (`Shares.least_recomputed`). So for any weights w_p >= 0 with the sum 1, the step takes at least

    sum_p w_p a_p(sizes) + sum over ranks of (min over ways r of the rank of sum_p w_p c_p . r)

For one choice of sizes the weights that make this largest are the duals of a linear program (`_Mix`): the least time
that no path exceeds when each rank mixes its ways. Paths and ways enter it as they are needed: the longest path of the
mix (`longest_paths`), and of each rank the way with the least weight. The weights hold for every choice of sizes; few
programs settle thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoplan.schedules import splits_backward
from autoplan.search.paths.longest_paths import longest_paths
from autoplan.search.paths.rank_paths import SYMBOLS
from autoplan.search.paths.schedule_paths import BACKWARD, CARRY, LAST_BACKWARD, LAST_CARRY
from autoplan.search.plans import stage_sizes
from autoplan.search.ranges import Array, Ranges, slowing_s
from autoplan.search.several_stages.rank_shares import Shares
from autoplan.search.several_stages.stage_needs import per_stage
from autoplan.solver.linear_model import INFINITY, LinearModel
from autoplan.solver.solve import minimize

MAX_PROGRAMS = 150  # solved for one mesh; a count, so that the machine decides nothing
MAX_WALKED = 400_000  # actions of the schedule that are walked along for one mesh
UNITS_PER_STEP = 1000.0  # the limit is so many units of a program
LONGER = 1e-7  # share of the limit by which a path must exceed a mix to enter its program


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to recompute, for some choices of sizes; see the module docstring.

    Attributes:
        listed: per rank, per way to size its stages, (way to recompute, stage of the rank); none where nothing fits.
        sized: (rank, choice): the way to size the stages.
    """

    listed: tuple[tuple[Array, ...], ...]
    sized: Array

    @classmethod
    def of(cls, shares: Shares, sizes: Array) -> Ways:
        """Those of choices of sizes (choice, stage)."""
        found = [np.unique(shares.way_of(rank, sizes), return_inverse=True) for rank in range(shares.table.mesh.pp)]
        listed = [tuple(shares.least_recomputed(rank, own)) for rank, (own, _) in enumerate(found)]
        return cls(tuple(listed), np.array([places for _, places in found]))

    def at(self, choices: Array) -> Ways:
        """Those of some of the choices."""
        return Ways(self.listed, self.sized[:, choices])

    def of_rank(self, rank: int, choice: int) -> Array:
        """(way to recompute, stage of the rank)."""
        return self.listed[rank][self.sized[rank, choice]]

    def fits(self) -> Array:
        """(choice,): whether every rank has a way."""
        has_any = [np.array(list(map(len, listed))) > 0 for listed in self.listed]
        return np.array([own[sized] for own, sized in zip(has_any, self.sized, strict=True)]).all(axis=0)


def raised_bounds_s(
    shares: Shares, sizes: Array, least_s: Array, ways: Ways, *, limit_s: float, is_late: Callable[[], bool]
) -> Array:
    """The bounds `least_s` of choices of sizes (choice, stage), raised, those first that are the least.

    INFINITY for choices that do not fit. It ends when all reach `limit_s`, or when the least of them is as high as
    weights can raise it.
    """
    mesh = shares.table.mesh
    n_left = min(MAX_PROGRAMS, MAX_WALKED // (mesh.n_stages * mesh.n_micro_batches))
    if splits_backward(mesh.schedule) or shares.again_s == 0.0:
        return least_s
    least_s = np.where(ways.fits(), least_s, INFINITY)
    weighing = _Weighing(shares, sizes, ways, _Paths.of(shares))
    while least_s.min(initial=INFINITY) < limit_s and not is_late():
        choice = int(least_s.argmin())
        mix = weighing.mix_of(choice)
        while least_s[choice] < limit_s:
            n_left -= 1
            if n_left < 0 or is_late():
                return least_s
            again = mix.solve(limit_s)
            if again is None:
                return least_s
            least_s = np.maximum(least_s, weighing.least_s(mix))
            if not (mix.add_ways() | weighing.add_paths(mix, choice, again, limit_s=limit_s)):
                return least_s
        weighing.paths.useful |= mix.useful
    return least_s


@dataclass(slots=True)
class _Paths:
    """The paths known.

    Attributes:
        passes_s: (symbol, stage, pieces), the least that each pass takes.
        values_s: per path, (stage, pieces): a_p is the sum over the stages; counts: per path, (stage,): c_p / again_s.
        numbers: of each path, by its counts of passes.
        useful: paths with a weight in any program.
    """

    shares: Shares
    passes_s: Array
    values_s: list[Array] = field(default_factory=list)
    counts: list[Array] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)
    useful: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, shares: Shares) -> _Paths:
        """The chains of `rank_paths`."""
        found = cls(shares, _passes_s(shares))
        for paths in shares.paths:
            for counts, last_stage in zip(paths.counts, paths.last_stages, strict=True):
                found.useful.add(found.number_of(counts, last_stage))
        return found

    def number_of(self, counts: Array, last_stage: int) -> int:
        """The number of a path, (symbol, stage), which ends with a pass of `last_stage`."""
        key = counts.tobytes()
        if key not in self.numbers:
            needs, shape = self.shares.needs, self.shares.shape
            own = list(shape.stages_of[shape.ranks[last_stage]])
            values_s = np.einsum("ys,ysw->sw", counts, self.passes_s)
            values_s[own] += needs.optimizer_s[own]
            values_s[last_stage] += needs.last_reduce_s[last_stage]
            self.numbers[key] = len(self.values_s)
            self.values_s.append(values_s)
            self.counts.append(counts[SYMBOLS.index(BACKWARD)] + counts[SYMBOLS.index(LAST_BACKWARD)])
        return self.numbers[key]


def _passes_s(shares: Shares) -> Array:
    """`Needs.passes_s` with what a reduction that is left adds to whichever pass follows on its rank.

    It goes on beside the segment that opens a backward pass, and beside all of a forward pass.
    """
    table, needs = shares.table, shares.needs
    passes_s = needs.passes_s.copy()
    if table.gathers_per_micro_batch:  # then it is there, where passes wait
        return passes_s
    sizes = stage_sizes(table.mesh, n_pieces=shares.n_pieces)
    ranges = Ranges.of(table, max(own[-1] for own in sizes))
    opening_s = per_stage(ranges, sizes, ranges.last(shares.segments.backward_s))
    beside_s = np.where(needs.possible, np.minimum(opening_s, needs.forward_s), INFINITY).min(axis=1)
    for own in map(list, shares.shape.stages_of):
        shortest_s = beside_s[own].min()
        passes_s[SYMBOLS.index(LAST_CARRY), own] = slowing_s(shortest_s, needs.last_reduce_s[own], table.overlap)
        carried_s = slowing_s(shortest_s, needs.first_reduce_s[own], table.overlap)
        passes_s[SYMBOLS.index(CARRY), own] = carried_s * table.reduces_per_micro_batch
    return passes_s


@dataclass(slots=True)
class _Mix:
    """The program of one choice of sizes.

    Attributes:
        paths: numbers of those in it; useful: those that had a weight.
        ways: per rank, (way, stage of the rank), all; chosen: per rank, those in the program.
        weights: of the paths, after `solve`.
        step_s: its optimum.
    """

    shares: Shares
    known: _Paths
    sizes: Array
    ways: tuple[Array, ...]
    paths: list[int]
    chosen: list[list[int]]
    weights: Array = field(default_factory=lambda: np.zeros(0))
    step_s: float = 0.0
    useful: set[int] = field(default_factory=set)

    def stage_weights_s(self) -> Array:
        """(stage,): what a segment recomputed in every micro-batch weighs."""
        counts: Array = self.weights @ np.array([self.known.counts[number] for number in self.paths])
        return counts * self.shares.again_s

    def solve(self, limit_s: float) -> Array | None:
        """Find the weights, and what the mix recomputes on each stage; None when the solver finds none."""
        stages, unit_s = np.arange(len(self.sizes)), limit_s / UNITS_PER_STEP
        model, again_s = LinearModel(), self.shares.again_s
        total = model.add_column("T", cost=1.0, upper=INFINITY)
        columns = [[model.add_column("share of a way") for _ in own] for own in self.chosen]
        stages_of = list(map(list, self.shares.shape.stages_of))
        for number in self.paths:
            counts, fixed_s = self.known.counts[number], self.known.values_s[number][stages, self.sizes].sum()
            terms = [(total, 1.0)]
            for own, ways, chosen, portions in zip(stages_of, self.ways, self.chosen, columns, strict=True):
                each = ways[chosen] @ counts[own] * (-again_s / unit_s)
                terms += zip(portions, each.tolist(), strict=True)
            model.add_row("path", terms, lower=float(fixed_s / unit_s))
        for portions in columns:
            model.add_row("all of a rank", [(column, 1.0) for column in portions], lower=1.0, upper=1.0)
        solution = minimize(model, time_limit_s=None, is_relaxed=True)
        weights = np.maximum(solution.duals[: len(self.paths)], 0.0)
        if solution.objective is None or not weights.any():
            return None
        self.step_s = solution.objective * unit_s
        self.weights = weights / weights.sum()
        self.useful |= {number for number, weight in zip(self.paths, self.weights, strict=True) if weight > 0.0}
        again = np.zeros(len(self.sizes))
        for own, ways, chosen, portions in zip(stages_of, self.ways, self.chosen, columns, strict=True):
            again[own] = np.array([solution.values[column] for column in portions]) @ ways[chosen]
        return again

    def add_ways(self) -> bool:
        """Take in the way of least weight of each rank; False when all were there."""
        stage_s, is_new = self.stage_weights_s(), False
        for own, ways, chosen in zip(self.shares.shape.stages_of, self.ways, self.chosen, strict=True):
            lightest = int((ways @ stage_s[list(own)]).argmin())
            if lightest not in chosen:
                chosen.append(lightest)
                is_new = True
        return is_new


@dataclass(slots=True)
class _Weighing:
    """All choices of sizes with their ways, and the paths known."""

    shares: Shares
    sizes: Array
    ways: Ways
    paths: _Paths
    stage_s: Array | None = None  # (stage,): as the last program weighed them

    def mix_of(self, choice: int) -> _Mix:
        """The program of a choice, with the paths that were useful so far."""
        ways = tuple(self.ways.of_rank(rank, choice) for rank in range(len(self.ways.listed)))
        per_stage_s = np.ones(self.sizes.shape[1]) if self.stage_s is None else self.stage_s
        stages_of = self.shares.shape.stages_of
        chosen = [
            [int((own @ per_stage_s[list(stages)]).argmin())] for own, stages in zip(ways, stages_of, strict=True)
        ]
        return _Mix(self.shares, self.paths, self.sizes[choice], ways, sorted(self.paths.useful), chosen)

    def least_s(self, mix: _Mix) -> Array:
        """The bound of each choice by the weights of a program."""
        fixed_s = np.einsum("p,psw->sw", mix.weights, np.array([self.paths.values_s[number] for number in mix.paths]))
        found = fixed_s[np.arange(self.sizes.shape[1]), self.sizes].sum(axis=1) + self.shares.table.per_step_s
        self.stage_s = mix.stage_weights_s()
        for own, listed, sized in zip(self.shares.shape.stages_of, self.ways.listed, self.ways.sized, strict=True):
            lightest_s = np.array([(ways @ self.stage_s[list(own)]).min(initial=INFINITY) for ways in listed])
            found += lightest_s[sized]
        return found

    def add_paths(self, mix: _Mix, choice: int, again: Array, *, limit_s: float) -> bool:
        """Take in the longest paths of a mix that are longer than its program knows; False when there is none."""
        sizes, is_new = self.sizes[choice], False
        stages = np.arange(len(sizes))
        times_s = self.paths.passes_s[:, stages, sizes]
        for symbol in (BACKWARD, LAST_BACKWARD):
            times_s[SYMBOLS.index(symbol)] += self.shares.again_s * again
        for counts, last_stage in longest_paths(self.shares.table.mesh, times_s):
            number = self.paths.number_of(counts, last_stage)
            length_s = self.paths.values_s[number][stages, sizes].sum()
            length_s += self.paths.counts[number] @ again * self.shares.again_s
            if number not in mix.paths and length_s > mix.step_s + LONGER * limit_s:
                mix.paths.append(number)
                is_new = True
        return is_new
