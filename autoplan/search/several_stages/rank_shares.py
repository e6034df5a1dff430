"""Several stages per rank: what each rank must do and hold at the least. A bound by arithmetic.

What a stage of each size needs at the least is known (`stage_needs`). The step takes at least as long as each chain of
`rank_paths`. With the sizes of the rank's own stages given, a chain takes at the least

    own passes, and what their reductions add to the next pass        `Shares._own_s`, `Shares._carried_s`
    + recomputation of the own stages                                  `Shares._recomputing_s`
    + passes of the other stages, which hold all the other pieces      `Shares._others_s`

The last line is sum over stages of min over sizes (passes - price x size) + price x other pieces, for any price of a
piece; two prices are tried. Recomputation is what memory asks for at the worst moment of the rank's schedule. How large
its stages are is the rank's choice; the sum over all ranks is not: the bound is the least time within which the ranks
can hold all pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.schedules import splits_backward
from autoplan.search.bounds import least_message_bytes, memory_room_bytes
from autoplan.search.paths.peak_moments import Shape
from autoplan.search.paths.rank_paths import CARRY_FORWARD, RankPaths, rank_paths
from autoplan.search.paths.schedule_paths import BACKWARD, LAST_BACKWARD, LAST_WEIGHTS, WEIGHTS
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import ONE_BYTE, Array, Segments, slowing_s
from autoplan.search.several_stages.stage_needs import Needs, places_of
from autoplan.solver.linear_model import INFINITY

N_HALVINGS = 5  # of the span in which a bound is raised
MAX_RECOMPUTED = 100_000  # ways to recompute on one rank that are listed


def shared_bound_s(table: CostTable, shape: Shape, *, recompute: str | None, limit_s: float = INFINITY) -> float:
    """No plan of the mesh that fits is faster; INFINITY when none fits.

    `shape` is of the mesh's schedule; `recompute` is what the user fixed. A bound that passes `limit_s` for one rank
    alone is not raised further.
    """
    shares = Shares.of(table, shape, recompute)
    times_s = []
    for rank in range(table.mesh.pp):
        times_s.append(shares.times_s(rank))
        alone_s = float(times_s[-1].min()) + table.per_step_s
        if alone_s >= limit_s:
            return alone_s
    return _least_s(shares, times_s)


def narrowed_bound_s(shares: Shares, *, bound_s: float, limit_s: float) -> float:
    """The bound raised from `bound_s`, at most to `limit_s`; see `Shares.allowed_below`."""
    if shares.allowed_below(limit_s) is None:
        return limit_s
    high_s = limit_s
    for _ in range(N_HALVINGS):
        middle_s = (bound_s + high_s) / 2.0
        bound_s, high_s = (bound_s, middle_s) if shares.allowed_below(middle_s) is not None else (middle_s, high_s)
    return bound_s


def _least_s(shares: Shares, times_s: list[Array]) -> float:
    """The least time within which the ranks, each with its `Shares.times_s`, can hold all pieces."""
    fastest_s = max(float(times.min()) for times in times_s)
    candidates = np.unique(np.concatenate(times_s))
    candidates = candidates[(candidates >= fastest_s) & (candidates < INFINITY)]

    def holds_all(limit_s: float) -> bool:
        possible = [np.flatnonzero(times <= limit_s) for times in times_s]
        return sum(int(p[0]) for p in possible) <= shares.n_pieces <= sum(int(p[-1]) for p in possible)

    low, high = 0, len(candidates)  # the first that holds all is among candidates[low:high + 1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_all(candidates[middle]) else (middle + 1, high)
    return INFINITY if low == len(candidates) else float(candidates[low]) + shares.table.per_step_s


@lru_cache(maxsize=256)
def _ways(n_pieces: int, sizes: tuple[range, ...], own: tuple[int, ...]) -> Array:
    """Every choice of sizes for the stages of one rank that leaves the other stages what they may have."""
    owners, counts, _, _ = places_of(n_pieces, sizes)
    found = np.array(list(product(*(counts[owners == stage].tolist() for stage in own))))
    others = [possible for stage, possible in enumerate(sizes) if stage not in own]
    least, most = n_pieces - sum(s[-1] for s in others), n_pieces - sum(s[0] for s in others)
    totals = found.sum(axis=1)
    return found[(totals >= least) & (totals <= most)]


def _prices(values_s: Array, size: int) -> Array:
    """Per path, what a piece more than `size` costs in the median stage; `values_s` are (path, stage, pieces)."""
    if size + 1 >= values_s.shape[2]:
        return np.zeros(len(values_s))
    least, most = values_s[:, :, size], values_s[:, :, size + 1]
    known = np.isfinite(least) & np.isfinite(most)
    slopes = np.sort(np.where(known, np.where(known, most, 0.0) - np.where(known, least, 0.0), 0.0), axis=1)
    return slopes[:, slopes.shape[1] // 2]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the paths of a rank are made of: `values_s` are (path, stage, pieces), the others (path, way)."""

    values_s: Array
    own_s: Array
    carried_s: Array
    slowed_s: Array
    others_s: Array


@dataclass(frozen=True, slots=True)
class Shares:
    """What `times_s` needs; `ways` are (way, stage of the rank), every choice of sizes, per rank."""

    table: CostTable
    shape: Shape
    paths: tuple[RankPaths, ...]
    needs: Needs
    segments: Segments
    n_pieces: int
    ways: tuple[Array, ...]
    parts: dict[int, _Parts]

    @classmethod
    def of(cls, table: CostTable, shape: Shape, recompute: str | None) -> Shares:
        """The shares of the ranks of a mesh."""
        segments, n_pieces = Segments.of(table, recompute), len(piece_edges(table)) - 1
        sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
        ways = tuple(_ways(n_pieces, sizes, own) for own in shape.stages_of)
        return cls(
            table, shape, rank_paths(table.mesh), Needs.of(table, segments), segments, n_pieces, ways,
            parts={},
        )  # fmt: skip

    def times_s(self, rank: int) -> Array:
        """Per number of pieces, the least time of this rank's part of the step; INFINITY where it cannot be."""
        ways, again_s = self.ways[rank], self._recomputing_s(rank)
        least = np.full(self.n_pieces + 1, INFINITY)
        if np.isfinite(again_s).any():
            np.minimum.at(least, ways.sum(axis=1), self._way_s(rank, again_s, allowed=None))
        return least

    def _way_s(self, rank: int, again_s: Array, *, allowed: Array | None) -> Array:
        """Per way, the longest path of the rank.

        `again_s` is what it recomputes per micro-batch; `allowed` are (stage, pieces), all by default.
        """
        parts = self._parts_of(rank)
        others_s = parts.others_s
        if allowed is not None:
            others_s = self._others_s(rank, np.where(allowed, parts.values_s, INFINITY))
        return (self._own_s(rank, again_s) + others_s).max(axis=0)

    def _own_s(self, rank: int, again_s: Array) -> Array:
        """(path, way): what the paths of a rank spend in its own stages; INFINITY for ways that do not fit."""
        paths, parts, own = self.paths[rank], self._parts_of(rank), list(self.shape.stages_of[rank])
        fits, again_s = np.isfinite(again_s), np.where(np.isfinite(again_s), again_s, 0.0)
        n_backwards = (paths.of(BACKWARD) + paths.of(LAST_BACKWARD))[:, own].min(axis=1)[:, None]
        # A second that is recomputed hides r seconds of reductions at most (`Overlap`), which would add beta r to the
        # next pass. At the end of the step it may spare all it takes. It never spares more: hiding a second takes beta.
        overlap = self.table.overlap
        spares = overlap.communication_exposed * overlap.hidden_per_compute
        hides_s = np.maximum(0.0, (1.0 - spares) * n_backwards - 1.0) * again_s
        own_s = parts.own_s + np.maximum(n_backwards * again_s, parts.carried_s + hides_s)
        return np.where(fits, np.maximum(own_s, parts.slowed_s + n_backwards * again_s), INFINITY)

    def choices_s(self, rank: int, choices: Array) -> Array:
        """Per choice of sizes for all stages (choice, stage), the longest path of the rank."""
        own_s, values_s = self._own_s(rank, self._recomputing_s(rank)), self._parts_of(rank).values_s
        way_of, own = self.way_of(rank, choices), self.shape.stages_of[rank]
        others = [stage for stage in range(self.table.mesh.n_stages) if stage not in own]
        longest = np.zeros(len(choices))
        for number in range(len(own_s)):
            spent_s = own_s[number, way_of]
            for stage in others:
                spent_s = spent_s + values_s[number, stage, choices[:, stage]]
            longest = np.maximum(longest, spent_s)
        return longest

    def way_of(self, rank: int, choices: Array) -> Array:
        """Per choice, the place of its sizes on this rank among the rank's ways."""
        own, width = list(self.shape.stages_of[rank]), self.needs.possible.shape[1]
        weights = width ** np.arange(len(own))
        codes = self.ways[rank] @ weights
        order = np.argsort(codes)
        return order[np.searchsorted(codes, choices[:, own].astype(int) @ weights, sorter=order)]

    def _parts_of(self, rank: int) -> _Parts:
        """Worked out once."""
        if rank not in self.parts:
            own, values_s = list(self.shape.stages_of[rank]), self._values_s(rank)
            self.parts[rank] = _Parts(
                values_s=values_s,
                own_s=values_s[:, own, self.ways[rank]].sum(axis=2),
                carried_s=self._carried_s(rank),
                slowed_s=self._slowed_s(rank),
                others_s=self._others_s(rank, values_s),
            )
        return self.parts[rank]

    def allowed_below(self, limit_s: float) -> Array | None:
        """(stage, pieces): the sizes with which a plan may take less than `limit_s`; None when none may.

        That is what the ranks' paths say when they agree on the sizes.

        Sizes that make a path of their own rank too long are ruled out, which makes the paths of the others longer.
        """
        limit_s -= self.table.per_step_s
        allowed = self.needs.possible
        again_s = [self._recomputing_s(rank) for rank in range(self.table.mesh.pp)]
        while True:
            kept = []
            for rank, own in enumerate(self.shape.stages_of):
                found = self._way_s(rank, again_s[rank], allowed=allowed)
                within = allowed[list(own), self.ways[rank]].all(axis=1)
                kept.append(self.ways[rank][within & (found < limit_s)])
                if not len(kept[-1]):
                    return None
            narrowed = self._agreed(kept)
            if not narrowed.any(axis=1).all():
                return None
            if (narrowed == allowed).all():
                return allowed
            allowed = narrowed

    def _agreed(self, kept: list[Array]) -> Array:
        """(stage, pieces): the sizes in some way that leaves the other ranks a number of pieces that they may have."""
        totals = [ways.sum(axis=1) for ways in kept]
        least, most = (sum(int(choose(own)) for own in totals) for choose in (np.min, np.max))
        allowed = np.zeros(self.needs.possible.shape, dtype=bool)
        for own, ways, total in zip(self.shape.stages_of, kept, totals, strict=True):
            left = self.n_pieces - total
            fits = (left >= least - total.min()) & (left <= most - total.max())
            for place, stage in enumerate(own):
                allowed[stage, ways[fits, place]] = True
        return allowed

    def _values_s(self, rank: int) -> Array:
        """(path, stage, pieces): what each path of a rank spends in each stage; INFINITY for sizes it cannot have.

        Left out is what the rank's own reductions leave beyond the last of them (`_carried_s`).
        """
        needs, paths = self.needs, self.paths[rank]
        values = np.einsum("pys,ysw->psw", paths.counts, needs.passes_s)
        for number, stage in enumerate(paths.last_stages):
            owner = self.shape.ranks[stage]
            stages = list(self.shape.stages_of[owner])
            values[number, stages] += needs.optimizer_s[stages]
            values[number, stage] += (needs.last_reduce_s if owner == rank else needs.last_left_s)[stage]
        return np.where(needs.possible, values, INFINITY)

    def _carried_s(self, rank: int) -> Array:
        """(path, way): what the reductions that a rank's passes leave add to its forward passes, and at the end."""
        needs, paths, own = self.needs, self.paths[rank], list(self.shape.stages_of[rank])
        carried = np.zeros((len(paths.counts), len(self.ways[rank])))
        if not (self.table.gathers_per_micro_batch or splits_backward(self.table.mesh.schedule)):
            shortest_s = self._chosen(needs.forward_s, rank).min(axis=1)[:, None]
            slowed_s = slowing_s(shortest_s, self._chosen(needs.left_s, rank), self.table.overlap)
            carried += paths.of(CARRY_FORWARD)[:, own] @ slowed_s.T
        beyond_s = self._chosen(needs.last_left_s - needs.last_reduce_s, rank)
        for number, stage in enumerate(paths.last_stages):
            if stage in own:
                carried[number] += beyond_s[:, own.index(stage)]
        return carried

    def _slowed_s(self, rank: int) -> Array:
        """(path, way): what paths with all its backward passes spend in the rank's own stages and its optimizer.

        Each second of reduction is beside compute and slows it, or it is beside nothing, or left over: it takes at
        least beta (`Overlap`). 0.0 for other paths, and where gathers are in between.
        """
        needs, paths, own = self.needs, self.paths[rank], list(self.shape.stages_of[rank])
        n = self.table.mesh.n_micro_batches
        n_backwards = sum(paths.of(symbol)[:, own] for symbol in (BACKWARD, LAST_BACKWARD, WEIGHTS, LAST_WEIGHTS))
        has_all = (n_backwards == n).all(axis=1) & np.array([stage in own for stage in paths.last_stages])
        if self.table.gathers_per_micro_batch or not has_all.any():
            return np.zeros((len(has_all), 1))
        values = np.einsum("pys,ysw->psw", paths.counts[:, :, own], needs.plain_s[:, own])
        n_reduces = n if self.table.reduces_per_micro_batch else 1
        reduce_s = n_reduces * needs.reduce_s[own] + needs.replicas_s[own]
        values += needs.optimizer_s[own] + self.table.overlap.communication_exposed * reduce_s
        found = values[:, np.arange(len(own)), self.ways[rank]].sum(axis=2)
        return np.where(has_all[:, None], found, 0.0)

    def _others_s(self, rank: int, values_s: Array) -> Array:
        """(path, way): the least that each path spends in the stages of other ranks; see the module docstring."""
        own = set(self.shape.stages_of[rank])
        others = values_s[:, [stage for stage in range(self.table.mesh.n_stages) if stage not in own]]
        n_left = self.n_pieces - self.ways[rank].sum(axis=1)
        prices = _prices(others, self.n_pieces // self.table.mesh.n_stages)
        at_price = others - prices[:, None, None] * np.arange(others.shape[2])
        priced = at_price.min(axis=2).sum(axis=1)[:, None] + prices[:, None] * n_left
        return np.maximum(others.min(axis=2).sum(axis=1)[:, None], priced)

    def _chosen(self, per_stage: Array, rank: int) -> Array:
        """(way, stage of the rank): the values of its stages."""
        return per_stage[list(self.shape.stages_of[rank]), self.ways[rank]]

    def _sum(self, per_stage: Array, rank: int) -> Array:
        return self._chosen(per_stage, rank).sum(axis=1)

    def _recomputing_s(self, rank: int) -> Array:
        """Per way, the least that a rank must recompute per micro-batch; INFINITY where that does not help."""
        worst = self._n_recomputed(rank).max(axis=1)
        return np.where(np.isfinite(worst), np.where(np.isfinite(worst), worst, 0.0) * self.again_s, INFINITY)

    @property
    def again_s(self) -> float:
        """The least that recomputing a segment adds to a backward pass."""
        able = self.segments.spared_bytes > self.segments.easy_bytes
        return float(self.segments.again_s[able].min()) if able.any() else 0.0

    def _sent_bytes(self, rank: int) -> Array:
        """(moment,): the least that the outputs sent of the micro-batches in flight hold."""
        sends = np.array([stage < self.table.mesh.n_stages - 1 for stage in self.shape.stages_of[rank]])
        return least_message_bytes(self.table) * (self.shape.counts[rank].in_flight @ sends)

    def _missing_bytes(self, rank: int) -> Array:
        """(way, moment): what must be spared by recomputing, the easy segment left out."""
        needs, moments = self.needs, self.shape.counts[rank]
        used = self._sum(needs.resident_bytes, rank)[:, None] + self._sent_bytes(rank)
        used = used + self._chosen(needs.saved_bytes, rank) @ moments.in_flight.T
        used = used + self._chosen(needs.pending_bytes, rank) @ moments.pending.T
        used = used + self._chosen(needs.gradient_bytes, rank) @ moments.accumulating.T
        alone, ending = (self._chosen(own, rank)[:, moments.running] for own in (needs.alone_bytes, needs.ending_bytes))
        late = np.where(moments.follows, self._chosen(needs.late_bytes, rank)[:, moments.running], 0.0)
        used = used + np.maximum(np.where(moments.makes_gradients, ending, alone), late)
        room_bytes = memory_room_bytes(self.table, stages=self.shape.stages_of[rank])
        easy_bytes = self._chosen(needs.easy_bytes, rank) @ moments.in_flight.T
        return np.maximum(0.0, used - room_bytes - ONE_BYTE - easy_bytes)

    def _hard_bytes(self) -> float:
        """The most that a segment spares per micro-batch in flight, but for the easy one."""
        return float(np.where(self.segments.easy_bytes > 0.0, 0.0, self.segments.spared_bytes).max())

    def _n_recomputed(self, rank: int) -> Array:
        """(way, moment): how many segments must be recomputed; INFINITY where that does not help."""
        moments, missing_bytes = self.shape.counts[rank], self._missing_bytes(rank)
        n_spared = self._chosen(self.needs.n_spared, rank)
        largest_bytes, chosen = self._hard_bytes(), np.zeros(missing_bytes.shape)
        most_first = np.argsort(-moments.in_flight, axis=1, kind="stable")
        for place in range(self.table.mesh.n_chunks):
            stage = most_first[:, place]
            bytes_each = np.take_along_axis(moments.in_flight, stage[:, None], axis=1)[:, 0] * largest_bytes
            wanted = np.ceil(missing_bytes / np.where(bytes_each > 0.0, bytes_each, 1.0))
            n_segments = np.where(bytes_each > 0.0, np.minimum(n_spared[:, stage], wanted), 0.0)
            chosen, missing_bytes = chosen + n_segments, missing_bytes - n_segments * bytes_each
        return np.where(missing_bytes > 0.0, INFINITY, chosen)

    def least_recomputed(self, rank: int, ways: Array) -> list[Array]:
        """Per way of sizes, (choice, stage of the rank): segments to recompute, no more than is enough.

        Every plan of these sizes that fits recomputes at least as many in every stage as one of the choices.
        """
        missing_bytes = self._missing_bytes(rank)[ways]
        n_spared = self._chosen(self.needs.n_spared, rank)[ways].astype(int)
        return [self._least_counts(rank, *of_way) for of_way in zip(missing_bytes, n_spared, strict=True)]

    def _least_counts(self, rank: int, missing_bytes: Array, n_spared: Array) -> Array:
        """The choices of one way, where so many segments can spare memory and so much is missing at each moment.

        For every choice of the other stages' counts, the least count of the last one.
        """
        if missing_bytes.max() <= 0.0 or np.prod(n_spared[:-1] + 1) > MAX_RECOMPUTED:
            return np.zeros((1, len(n_spared)), dtype=int)
        others = np.moveaxis(np.indices(n_spared[:-1] + 1), 0, -1)
        bytes_each = self.shape.counts[rank].in_flight * self._hard_bytes()
        left_bytes = np.maximum(missing_bytes - others @ bytes_each[:, :-1].T, 0.0)
        helps = bytes_each[:, -1] > 0.0
        wanted = np.ceil(left_bytes / np.where(helps, bytes_each[:, -1], 1.0))
        least = np.where(helps | (left_bytes == 0.0), wanted, INFINITY).max(axis=-1)
        is_least = least <= n_spared[-1]
        for place in range(len(n_spared) - 1):
            one_less = np.full(least.shape, INFINITY)
            np.moveaxis(one_less, place, 0)[1:] = np.moveaxis(least, place, 0)[:-1]
            is_least &= least < one_less
        return np.column_stack([others[is_least], least[is_least].astype(int)])
