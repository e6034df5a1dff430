"""Several stages per rank: what each rank must do and hold at the least. A bound by arithmetic.

How many pieces a stage may have is known (`plans.stage_sizes`), so it is known within a few pieces where it begins, and
what it needs at the least (`_Needs`). The step takes at least as long as this path, for each rank and each of its
stages:

    first forward passes of all stages before  +  all the rank does from the first pass of this stage to the last one,
    recomputation included  +  backward passes of all stages before                                          `_turn_s`

Recomputation is what memory asks for at the worst moment of the rank's schedule. How large its stages are is the rank's
choice; the sum over all ranks is not: the bound is the least time within which the ranks can hold all pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import StagePlan
from autoplan.schedules import splits_backward
from autoplan.search.bounds import memory_room_bytes
from autoplan.search.linear_model import INFINITY
from autoplan.search.paths import Shape
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import ONE_BYTE, Array, Ranges, Segments, backward_pass_s, carries, forward_pass_s


def shared_bound_s(table: CostTable, shape: Shape, *, recompute: str | None, limit_s: float = INFINITY) -> float:
    """No plan of the mesh that fits is faster; INFINITY when none fits.

    `shape` is of the mesh's schedule; `recompute` is what the user fixed. A bound that passes `limit_s` without memory
    is not raised further.
    """
    shares = _Shares.of(table, shape, recompute)
    bound_s = _least_s(shares, recomputes=False)
    return bound_s if bound_s >= limit_s else _least_s(shares, recomputes=True)


def _least_s(shares: _Shares, *, recomputes: bool) -> float:
    """The least time within which the ranks can hold all pieces."""
    times_s = [shares.times_s(rank, recomputes=recomputes) for rank in range(shares.table.mesh.pp)]
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


@dataclass(frozen=True, slots=True)
class _Needs:
    """The least that a stage needs, wherever it begins: each (stages, pieces); INFINITY for sizes it cannot have.

    Attributes:
        alone_bytes: by the last segment while it runs.
        n_spared: segments that spare memory when they are recomputed, at the most.
    """

    first_forward_s: Array
    forward_s: Array
    backward_s: Array
    carry_s: Array
    last_reduce_s: Array
    optimizer_s: Array
    resident_bytes: Array
    gradient_bytes: Array
    saved_bytes: Array
    pending_bytes: Array
    alone_bytes: Array
    n_spared: Array

    @classmethod
    def of(cls, table: CostTable, segments: Segments) -> _Needs:
        """What the stages of the mesh need."""
        n_stages, is_split = table.mesh.n_stages, splits_backward(table.mesh.schedule)
        n_pieces = len(piece_edges(table)) - 1
        sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
        ranges = Ranges.of(table, max(own[-1] for own in sizes))
        owners, counts, stops, offsets = _places(n_pieces, sizes)

        def stage_values(values: Array, *, largest: bool = False) -> Array:
            choose = np.maximum if largest else np.minimum
            found = np.full((n_stages, ranges.width + 1), INFINITY)
            found[owners, counts] = choose.reduceat(
                values[stops, np.repeat(counts, np.diff(offsets, append=len(stops))) - 1], offsets
            )
            return found

        backward = ranges.total(segments.backward_s) if is_split else backward_pass_s(table, segments, ranges)
        return cls(
            first_forward_s=stage_values(forward_pass_s(segments, ranges, gathers=True)),
            forward_s=stage_values(forward_pass_s(segments, ranges, gathers=table.gathers_per_micro_batch)),
            backward_s=stage_values(backward),
            carry_s=stage_values(ranges.first(segments.reduce_s) * carries(table, segments)),
            last_reduce_s=stage_values(ranges.first(segments.reduce_s)),
            optimizer_s=stage_values(ranges.total(segments.optimizer_s)),
            resident_bytes=stage_values(ranges.total(segments.resident_bytes)),
            gradient_bytes=stage_values(ranges.total(segments.gradient_bytes)),
            saved_bytes=stage_values(ranges.total(segments.saved_bytes)),
            pending_bytes=stage_values(ranges.total(segments.pending_bytes)),
            alone_bytes=stage_values(np.broadcast_to(ranges.last(segments.least_alone_bytes), ranges.start.shape)),
            n_spared=stage_values(ranges.total(1.0 * (segments.spared_bytes > 0.0)), largest=True),
        )


@lru_cache(maxsize=256)
def _places(n_pieces: int, sizes: tuple[range, ...]) -> tuple[Array, Array, Array, Array]:
    """Where each stage may lie with each size: (stage, size) of each pair, all its stops, and where they begin."""
    owners: list[int] = []
    counts: list[int] = []
    stops: list[int] = []
    offsets: list[int] = []
    for stage, own in enumerate(sizes):
        before, after = sizes[:stage], sizes[stage + 1 :]
        for count in own:
            left = n_pieces - count
            fewest = max(sum(s[0] for s in before), left - sum(s[-1] for s in after))
            most = min(sum(s[-1] for s in before), left - sum(s[0] for s in after))
            if fewest <= most:
                owners.append(stage)
                counts.append(count)
                offsets.append(len(stops))
                stops += range(fewest + count, most + count + 1)
    return np.array(owners), np.array(counts), np.array(stops), np.array(offsets)


@lru_cache(maxsize=256)
def _ways(n_pieces: int, sizes: tuple[range, ...], own: tuple[int, ...]) -> Array:
    """Every choice of sizes for the stages of one rank that leaves the other stages what they may have."""
    owners, counts, _, _ = _places(n_pieces, sizes)
    found = np.array(list(product(*(counts[owners == stage].tolist() for stage in own))))
    others = [possible for stage, possible in enumerate(sizes) if stage not in own]
    least, most = n_pieces - sum(s[-1] for s in others), n_pieces - sum(s[0] for s in others)
    totals = found.sum(axis=1)
    return found[(totals >= least) & (totals <= most)]


@dataclass(frozen=True, slots=True)
class _Shares:
    """What `times_s` needs; `ways` are (way, stage of the rank), every choice of sizes, per rank."""

    table: CostTable
    shape: Shape
    needs: _Needs
    segments: Segments
    n_pieces: int
    ways: tuple[Array, ...]

    @classmethod
    def of(cls, table: CostTable, shape: Shape, recompute: str | None) -> _Shares:
        """The shares of the ranks of a mesh."""
        segments, n_pieces = Segments.of(table, recompute), len(piece_edges(table)) - 1
        sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
        ways = tuple(_ways(n_pieces, sizes, own) for own in shape.stages_of)
        return cls(table, shape, _Needs.of(table, segments), segments, n_pieces, ways)

    def times_s(self, rank: int, *, recomputes: bool) -> Array:
        """Per number of pieces, the least time of this rank's part of the step; INFINITY where it cannot be.

        Without `recomputes` memory is left out.
        """
        mesh, ways = self.table.mesh, self.ways[rank]
        again_s = self._recomputing_s(rank) if recomputes else np.zeros(len(ways))
        n_turns = 1 if splits_backward(mesh.schedule) else mesh.n_chunks
        found = self._turn_s(rank, 0, again_s)
        for chunk in range(1, n_turns):
            found = np.maximum(found, self._turn_s(rank, chunk, again_s))
        least = np.full(self.n_pieces + 1, INFINITY)
        np.minimum.at(least, ways.sum(axis=1), found)
        return least

    def _turn_s(self, rank: int, chunk: int, again_s: Array) -> Array:
        """Per way, the path to the first pass of the rank's stage `chunk` and from the last one back.

        Before that, `pp` micro-batches have passed forward through each of the rank's earlier stages, and after it
        backward. A split backward pass leads back to no other stage.
        """
        table, needs, pp, n = self.table, self.needs, self.table.mesh.pp, self.table.mesh.n_micro_batches
        own = self.shape.stages_of[rank]
        before = [stage for stage in range(own[chunk]) if stage not in own]
        cut_s = own[chunk] * min((s for s in table.cut_s if s is not None), default=0.0)
        there_s = cut_s + float(needs.first_forward_s[before].min(axis=1).sum())
        back_s = cut_s + float(needs.backward_s[before].min(axis=1).sum())
        if splits_backward(table.mesh.schedule):
            back_s = 0.0
        else:  # the first stage reduces the gradients of its first segment last
            back_s += float((needs.optimizer_s[0] + needs.last_reduce_s[0]).min())
        first_s = self._chosen(needs.first_forward_s, rank) - self._chosen(needs.forward_s, rank)
        passes_s = self._chosen(needs.forward_s + needs.backward_s, rank)
        n_passes = np.array([n - pp + 1 if place < chunk else n for place in range(len(own))])
        own_s = first_s[:, : chunk + 1].sum(axis=1) + passes_s @ n_passes + n_passes.min() * again_s
        carry_s = self._chosen(needs.carry_s, rank) @ np.maximum(0, n_passes - 1)
        return there_s + own_s + carry_s + np.maximum(back_s, self._sum(needs.optimizer_s, rank) if chunk == 0 else 0.0)

    def _chosen(self, per_stage: Array, rank: int) -> Array:
        """(way, stage of the rank): the values of its stages."""
        return per_stage[list(self.shape.stages_of[rank]), self.ways[rank]]

    def _sum(self, per_stage: Array, rank: int) -> Array:
        return self._chosen(per_stage, rank).sum(axis=1)

    def _recomputing_s(self, rank: int) -> Array:
        """Per way, the least that a rank must recompute per micro-batch; INFINITY where that does not help."""
        able = self.segments.spared_bytes > 0.0
        again_s = float(self.segments.again_s[able].min()) if able.any() else 0.0
        worst = self._n_recomputed(rank).max(axis=1)
        return np.where(np.isfinite(worst), np.where(np.isfinite(worst), worst, 0.0) * again_s, INFINITY)

    def _n_recomputed(self, rank: int) -> Array:
        """(way, moment): how many segments must be recomputed; INFINITY where that does not help."""
        needs, moments = self.needs, self.shape.counts[rank]
        used = self._sum(needs.resident_bytes, rank)[:, None]
        used = used + self._chosen(needs.saved_bytes, rank) @ moments.in_flight.T
        used = used + self._chosen(needs.pending_bytes, rank) @ moments.pending.T
        used = used + self._chosen(needs.gradient_bytes, rank) @ moments.accumulating.T
        used = used + self._chosen(needs.alone_bytes, rank)[:, moments.running]
        room_bytes = memory_room_bytes(self.table, stages=self.shape.stages_of[rank])
        missing_bytes = np.maximum(0.0, used - room_bytes - ONE_BYTE)
        n_spared = self._chosen(needs.n_spared, rank)
        largest_bytes, chosen = float(self.segments.spared_bytes.max()), np.zeros(missing_bytes.shape)
        most_first = np.argsort(-moments.in_flight, axis=1, kind="stable")
        for place in range(self.table.mesh.n_chunks):
            stage = most_first[:, place]
            bytes_each = np.take_along_axis(moments.in_flight, stage[:, None], axis=1)[:, 0] * largest_bytes
            wanted = np.ceil(missing_bytes / np.where(bytes_each > 0.0, bytes_each, 1.0))
            n_segments = np.where(bytes_each > 0.0, np.minimum(n_spared[:, stage], wanted), 0.0)
            chosen, missing_bytes = chosen + n_segments, missing_bytes - n_segments * bytes_each
        return np.where(missing_bytes > 0.0, INFINITY, chosen)


def balanced_plans(table: CostTable, *, recompute: str | None) -> tuple[tuple[StagePlan, ...], ...]:
    """Plans whose slowest stage is as fast as can be: with nothing recomputed, and with everything that may be."""
    segments, n_pieces = Segments.of(table, recompute), len(piece_edges(table)) - 1
    sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
    ranges = Ranges.of(table, max(own[-1] for own in sizes))
    time_s = np.where(ranges.exists, ranges.total(segments.forward_s + segments.backward_s), INFINITY)
    worst = np.append(0.0, np.full(n_pieces, INFINITY))
    chosen = []
    for own in sizes:
        columns = slice(own[0] - 1, own[-1])
        found = np.maximum(worst[ranges.start[:, columns]], time_s[:, columns])
        chosen.append(found.argmin(axis=1) + own[0])
        worst = found.min(axis=1)
    stops = [n_pieces]
    for counts in reversed(chosen[1:]):
        stops.append(stops[-1] - int(counts[stops[-1]]))
    edges = ranges.edges[[0, *reversed(stops)]].tolist()
    plans = []
    for switches in (False, True):
        able = segments.spared_bytes > 0.0
        recomputed = [is_again != (switches and bool(able[i])) for i, is_again in enumerate(segments.is_again)]
        plans.append(
            tuple(
                StagePlan(start, stop, tuple(i for i in range(start, stop) if recomputed[i]))
                for start, stop in pairwise(edges)
            )
        )
    return tuple(dict.fromkeys(plans))
