"""One stage per rank: where to cut the model, by dynamic programming over the stages. A bound, and the plan behind it.

Under gpipe and 1F1B, with one stage or more, some path through the step takes at least

    per_step + sum over stages t of A_t + max over stages s of G_s

    A_t   first forward pass and a backward pass of stage t, the transfers over its first boundary;
          for stage 0 also its last reduction and its optimizer
    G_s   (M - 1) backward passes and what their reductions leave to the next pass, and (M - pp + s) forward passes
          (gpipe: M - 1), for M micro-batches

so for each threshold on G the least sum of A is a shortest path: `least[stop] = min over start of least[start] + A`.
With D(x) this least sum under G <= x, the bound is the minimum of D(x) + x; between two thresholds a < b it is at least
D(b) + a, and thresholds are halved until that is not below the best found (`_best_threshold`).

A stage that lacks memory recomputes as little as will do. Exact for one kind of block: whole blocks; else the fraction
of the kind with the most bytes per second. All that communication adds is taken between the neighbours a segment has
(`hidden_extra_s`), as in `simulate.replay_pass`.

Everything is an array over (stop, count): the `count` pieces (see `plans`) before boundary `stop` as one stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.cost.table import CostTable, SegmentCost, backward_s, forward_s
from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import in_flight, memory_room_bytes
from autoplan.search.linear_model import INFINITY
from autoplan.search.plans import piece_edges, repeated_segments

Array = Any  # numpy.ndarray of floats

MAX_HALVINGS = 24
CLOSE_ENOUGH = 2e-4  # share of the bound; thresholds are not halved below it
ONE_BYTE = 1.0  # of slack: a plan that fits to the byte is never cut off


@dataclass(frozen=True, slots=True)
class Partition:
    """Attributes:
    bound_s: no plan of the mesh that fits is faster; INFINITY when none fits.
    stages: the plan whose times make the bound, or nearly; () when there is none below the limit.
    """

    bound_s: float
    stages: tuple[StagePlan, ...]


def best_partition(table: CostTable, *, recompute: str | None, limit_s: float = INFINITY) -> Partition:
    """The bound and its plan for a mesh with one stage per rank.

    `recompute` is what the user fixed, or None. Plans slower than `limit_s` are not looked at: the bound is then
    `limit_s`.
    """
    segments = Segments.of(table, recompute)
    ranges = Ranges.of(table, _widest(table, segments, limit_s=limit_s - table.per_step_s))
    stages = _stages(table, segments, ranges)
    least_bottleneck_s = _least_bottleneck_s(ranges, stages)
    if least_bottleneck_s == INFINITY:
        return Partition(INFINITY if ranges.width >= ranges.widest_possible else limit_s, ())
    bound_s, stops = _best_threshold(ranges, stages, least_bottleneck_s)
    bound_s += table.per_step_s
    if bound_s >= limit_s:
        return Partition(limit_s, ())
    return Partition(bound_s, _decode(segments, ranges, stages, stops=stops))


# -------------------------------------------------------------------------------------------------- numbers per segment


@dataclass(frozen=True, slots=True)
class Segments:
    """Per segment, in order. With the choice that is faster; `again` is the other one, where it spares memory.

    Attributes:
        forward_extra_s, backward_extra_s: what communication adds while the segment computes, between all neighbours.
        alone_extra_s: likewise for the segment that opens a backward pass; `closing_extra_s`: that closes it.
        again_s: what recomputing adds to a backward pass; INFINITY where it spares nothing.
        spared_bytes: what it spares per micro-batch in flight.
        is_again: whether the faster choice is to recompute, or the only one.
    """

    forward_s: Array
    backward_s: Array
    gather_s: Array
    reduce_s: Array
    optimizer_s: Array
    forward_extra_s: Array
    backward_extra_s: Array
    opening_extra_s: Array
    closing_extra_s: Array
    resident_bytes: Array
    gathered_bytes: Array
    gradient_bytes: Array
    saved_bytes: Array
    working_bytes: Array
    least_working_bytes: Array
    again_working_bytes: float
    again_s: Array
    spared_bytes: Array
    accumulated_bytes: Array
    pending_bytes: Array
    is_again: tuple[bool, ...]

    @classmethod
    def of(cls, table: CostTable, recompute: str | None) -> Segments:
        """The segments of the table."""
        pairs = _choices(table, recompute)
        base, other = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

        def column(value: Callable[[SegmentCost], float], costs: list[SegmentCost] = base) -> Array:
            by_cost = {id(cost): value(cost) for cost in costs}
            return np.array([by_cost[id(cost)] for cost in costs], dtype=float)

        forward, backward = column(forward_s), column(backward_s)
        gather, reduce = column(lambda cost: cost.gather_s), column(lambda cost: cost.reduce_s)
        slower = min(table.overlap_slowdown, 2.0) - 1.0
        nothing = np.zeros(len(base))
        before, after = np.append(nothing[:1], gather[:-1]), np.append(gather[1:], nothing[:1])
        gathers_back = before if table.gathers_per_micro_batch else nothing
        reduced = np.append(reduce[1:], nothing[:1]) if table.reduces_per_micro_batch else nothing

        def backward_extra(compute: Array) -> Array:
            waits = hidden_extra_s(compute, gathers_back + reduced, slower)
            return np.where(gathers_back > 0.0, waits, slower * np.minimum(compute, reduced))

        extra = backward_extra(backward)
        spared = column(lambda cost: cost.saved_bytes) - column(lambda cost: cost.saved_bytes, other)
        longer = column(backward_s, other) - backward
        added = np.where(gathers_back > 0.0, longer + backward_extra(backward + longer) - extra, longer)
        working, other_working = column(lambda c: c.working_bytes), column(lambda c: c.working_bytes, other)
        accumulates = not table.reduces_per_micro_batch and table.mesh.n_micro_batches > 1
        resident, gathered = column(lambda cost: cost.state_bytes), column(lambda cost: cost.gathered_bytes)
        gradient = column(lambda cost: cost.gradient_bytes)
        return cls(
            forward_s=forward,
            backward_s=backward,
            gather_s=gather,
            reduce_s=reduce,
            optimizer_s=column(lambda cost: cost.optimizer_s),
            forward_extra_s=hidden_extra_s(forward, after, slower),
            backward_extra_s=extra,
            opening_extra_s=hidden_extra_s(backward, gathers_back, slower),
            closing_extra_s=slower * np.minimum(backward, reduced),
            resident_bytes=resident + (gathered if table.keeps_gathered else 0.0),
            gathered_bytes=nothing if table.keeps_gathered else gathered,
            gradient_bytes=nothing if accumulates else gradient,
            saved_bytes=column(lambda cost: cost.saved_bytes),
            working_bytes=working,
            least_working_bytes=np.minimum(working, other_working),
            again_working_bytes=float(min(other_working[spared > 0.0], default=0.0)),
            again_s=np.where(spared > 0.0, added, INFINITY),
            spared_bytes=np.maximum(spared, 0.0),
            accumulated_bytes=gradient if accumulates else nothing,
            pending_bytes=column(lambda cost: cost.pending_bytes),
            is_again=tuple(cost is not table.costs[kind][0] for kind, cost in zip(table.kinds, base, strict=True)),
        )


def _choices(table: CostTable, recompute: str | None) -> list[tuple[SegmentCost, SegmentCost]]:
    """Per segment, the faster choice and the other one, as far as the user leaves a choice."""
    must = set(repeated_segments(table)) if recompute == "full" else set()
    pairs = []
    for segment, kind in enumerate(table.kinds):
        costs = table.costs[kind]
        kept, again = costs[0], costs[-1]
        if segment in must:
            pairs.append((again, again))
        elif recompute == "none":
            pairs.append((kept, kept))
        else:
            pairs.append((kept, again) if backward_s(kept) <= backward_s(again) else (again, kept))
    return pairs


def hidden_extra_s(compute_s: Array, communication_s: Array, slower: float) -> Array:
    """What communication adds to compute that must wait for its end: the rest of it, and the slowdown by the overlap.

    `slower` is the slowdown - 1.
    """
    both = np.minimum(compute_s, communication_s)
    return communication_s - both + slower * both


# --------------------------------------------------------------------------------------------------- ranges of pieces


@dataclass(frozen=True, slots=True)
class Ranges:
    """All ranges of at most `width` consecutive pieces; arrays are (n_pieces + 1, width), by stop and count - 1.

    Attributes:
        edges: the first segment of each piece, and the end.
        start: first piece of each range; 0 where the range would begin before the model.
        exists: whether it does not.
    """

    edges: Array
    width: int
    widest_possible: int
    stop: Array
    start: Array
    exists: Array

    @classmethod
    def of(cls, table: CostTable, width: int) -> Ranges:
        """The ranges that a stage may be."""
        edges = np.array(_edges(table))
        n_pieces = len(edges) - 1
        widest_possible = n_pieces - table.mesh.pp + 1
        stop = np.arange(n_pieces + 1)[:, None]
        counts = np.arange(1, min(width, widest_possible) + 1)[None, :]
        start = stop - counts
        return cls(edges, counts.shape[1], widest_possible, stop, np.maximum(start, 0), start >= 0)

    @property
    def n_pieces(self) -> int:
        """Pieces of the model."""
        return len(self.edges) - 1

    def total(self, per_segment: Array) -> Array:
        """The sum over the segments of each range."""
        sums = np.append(0.0, np.cumsum(per_segment))[self.edges]
        return sums[self.stop] - sums[self.start]

    def first(self, per_segment: Array) -> Array:
        """The value of the first segment of each range."""
        return per_segment[np.minimum(self.edges[self.start], len(per_segment) - 1)]

    def last(self, per_segment: Array) -> Array:
        """The value of the last segment of each range, as one column."""
        return per_segment[np.maximum(self.edges[self.stop] - 1, 0)]

    def largest(self, per_piece: Array) -> Array:
        """The largest value of any piece of each range."""
        values = np.full((self.n_pieces + 1, self.width), -INFINITY)
        for place in range(self.width):
            values[place + 1 :, place] = per_piece[: self.n_pieces - place]
        return np.maximum.accumulate(values, axis=1)

    def largest_segment(self, per_segment: Array) -> Array:
        """The largest value of any segment of each range."""
        return self.largest(np.maximum.reduceat(per_segment, self.edges[:-1]))

    def largest_neighbours(self, per_segment: Array) -> Array:
        """The largest sum of two neighbouring segments of each range; of the one where it is alone."""
        alone = self.largest_segment(per_segment)
        pairs = np.append(per_segment[:-1] + per_segment[1:], 0.0)
        last_of_piece = self.edges[1:] - 1
        inside = pairs.copy()
        inside[last_of_piece] = 0.0
        most = np.maximum(alone, self.largest_segment(inside))
        if self.width > 1:  # a pair that straddles two pieces belongs to ranges that hold both
            joints = np.append(0.0, pairs[last_of_piece][:-1])
            straddling = self.largest(joints)
            most[:, 1:] = np.maximum(most[:, 1:], straddling[:, :-1])
        return most


def _edges(table: CostTable) -> tuple[int, ...]:
    """Where a stage may begin or end; with one stage, only where the model does."""
    return (0, len(table.kinds)) if table.mesh.n_stages == 1 else piece_edges(table)


def _widest(table: CostTable, segments: Segments, *, limit_s: float) -> int:
    """The most pieces that any stage may have in a step of at most `limit_s`; 1 or more."""
    edges = _edges(table)
    n_pieces = len(edges) - 1
    if limit_s == INFINITY:
        return n_pieces
    sums = np.append(0.0, np.cumsum(segments.forward_s + segments.backward_s))[list(edges)]
    low, high = 1, n_pieces
    while low < high:
        middle = (low + high + 1) // 2
        fits = table.mesh.n_micro_batches * float(np.min(sums[middle:] - sums[:-middle])) <= limit_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


# ------------------------------------------------------------------------------------------------------------- stages


@dataclass(frozen=True, slots=True)
class _Stage:
    """A and G of the module docstring for each range as this stage, and the bytes it must spare by recomputing.

    A and G are INFINITY where the range does not fit.
    """

    sum_s: Array
    bottleneck_s: Array
    missing_bytes: Array
    n_in_flight: int


def _stages(table: CostTable, segments: Segments, ranges: Ranges) -> list[_Stage]:
    mesh = table.mesh
    n, is_gpipe = mesh.n_micro_batches, mesh.schedule == "gpipe"
    first_forward_s = forward_pass_s(segments, ranges, gathers=True)
    forward = forward_pass_s(segments, ranges, gathers=table.gathers_per_micro_batch)
    backward = backward_pass_s(table, segments, ranges)
    carry_s = ranges.first(segments.reduce_s) if carries(table, segments) else 0.0
    cuts_s = np.array([0.0, *(table.cut_s[edge - 1] or 0.0 for edge in ranges.edges[1:-1]), 0.0])[ranges.start]
    memory = _Memory.of(table, segments, ranges)
    stages = []
    for stage in range(mesh.pp):
        missing_bytes, again_s = memory.recomputing(in_flight(mesh, stage))
        whole_s = backward + again_s
        # Under gpipe the path reaches the stages after `s` with the last micro-batch.
        opening_s = forward if is_gpipe and stage > 0 else first_forward_s
        edges_s = 2.0 * cuts_s if stage > 0 else _ends_s(table, segments, ranges, backward_s=whole_s)
        n_forwards = n - 1 if is_gpipe else n - mesh.pp + stage
        fits = np.isfinite(again_s) & ranges.exists
        bottleneck_s = np.where(fits, np.where(fits, whole_s + carry_s, 0.0) * (n - 1) + n_forwards * forward, INFINITY)
        sum_s = np.where(fits, opening_s + whole_s + edges_s, INFINITY)
        stages.append(_Stage(sum_s, bottleneck_s, missing_bytes, in_flight(mesh, stage)))
    return stages


def forward_pass_s(segments: Segments, ranges: Ranges, *, gathers: bool) -> Array:
    """Time of a forward pass of each range."""
    if not gathers:
        return ranges.total(segments.forward_s)
    waits = ranges.total(segments.forward_s + segments.forward_extra_s) - ranges.last(segments.forward_extra_s)
    return waits + ranges.first(segments.gather_s)


def backward_pass_s(table: CostTable, segments: Segments, ranges: Ranges) -> Array:
    """Time of a backward pass of each range, nothing recomputed: its last segment opens it, its first one closes it."""
    extra = segments.backward_extra_s
    opening = ranges.last(extra - segments.opening_extra_s)
    closing = ranges.first(extra - segments.closing_extra_s)
    is_alone = ranges.first(np.arange(len(extra))) == ranges.last(np.arange(len(extra)))
    missing = np.where(is_alone, ranges.first(extra), opening + closing)
    first_gather = ranges.last(segments.gather_s) if table.gathers_per_micro_batch else 0.0
    return ranges.total(segments.backward_s + extra) - missing + first_gather


def carries(table: CostTable, segments: Segments) -> bool:
    """Whether every pass waits for the reduction that the pass before it left."""
    return table.gathers_per_micro_batch and table.reduces_per_micro_batch and min(segments.gather_s) > 0.0


def _ends_s(table: CostTable, segments: Segments, ranges: Ranges, *, backward_s: Array) -> Array:
    """What the first stage does after its last backward pass, and the slowdown of that pass by its reductions.

    left >= all reductions - compute after the first of them;   slowed >= (slowdown - 1) (reductions - left)
    """
    optimizer_s, last_s = ranges.total(segments.optimizer_s), ranges.first(segments.reduce_s)
    if table.gathers_per_micro_batch:
        return optimizer_s + last_s
    slower = min(table.overlap_slowdown, 2.0) - 1.0
    all_s = ranges.total(segments.reduce_s)
    left_s = np.maximum(last_s, all_s - backward_s + ranges.last(segments.backward_s))
    counted_s = last_s if table.reduces_per_micro_batch else all_s  # the rest is in every backward pass
    return optimizer_s + slower * counted_s + (1.0 - slower) * left_s


@dataclass(slots=True)
class _Memory:
    """What each range holds: `held` whatever is recomputed, and what depends on it."""

    segments: Segments
    held_bytes: Array
    saved_bytes: Array
    working_bytes: Array
    least_working_bytes: Array
    spared_bytes: Array
    room_bytes: float
    known: dict[int, tuple[Array, Array]]

    @classmethod
    def of(cls, table: CostTable, segments: Segments, ranges: Ranges) -> _Memory:
        """The memory of each range."""
        held = ranges.total(segments.resident_bytes + segments.accumulated_bytes)
        for neighbours in (segments.gathered_bytes, segments.gradient_bytes):
            if neighbours.any():
                held = held + ranges.largest_neighbours(neighbours)
        return cls(
            segments=segments,
            held_bytes=held,
            saved_bytes=ranges.total(segments.saved_bytes),
            working_bytes=ranges.largest_segment(segments.working_bytes),
            least_working_bytes=ranges.largest_segment(segments.least_working_bytes),
            spared_bytes=ranges.total(segments.spared_bytes),
            room_bytes=memory_room_bytes(table) + ONE_BYTE,
            known={},
        )

    def recomputing(self, n_in_flight: int) -> tuple[Array, Array]:
        """Per range, the bytes to be spared, and the least time that takes; INFINITY where it does not help."""
        if n_in_flight not in self.known:
            self.known[n_in_flight] = self._recomputing(n_in_flight)
        return self.known[n_in_flight]

    def _recomputing(self, n_in_flight: int) -> tuple[Array, Array]:
        segments = self.segments
        kept_bytes = self.held_bytes + n_in_flight * self.saved_bytes
        fits = kept_bytes + self.working_bytes <= self.room_bytes
        working_bytes = np.maximum(self.least_working_bytes, segments.again_working_bytes)
        missing_bytes = np.where(fits, 0.0, np.maximum(kept_bytes + working_bytes - self.room_bytes, ONE_BYTE))
        again_s = np.where(fits, 0.0, INFINITY)
        can = segments.spared_bytes > 0.0
        if not can.any():
            return missing_bytes, again_s
        per_segment_bytes = n_in_flight * segments.spared_bytes[can]
        n_segments = np.ceil(missing_bytes / per_segment_bytes.max())
        least_s = np.maximum(
            n_segments * segments.again_s[can].min(),
            missing_bytes * (segments.again_s[can] / per_segment_bytes).min(),
        )
        is_enough = missing_bytes <= n_in_flight * self.spared_bytes
        return missing_bytes, np.where(is_enough, least_s, again_s)


# ------------------------------------------------------------------------------------------------------ the program


def _least_bottleneck_s(ranges: Ranges, stages: list[_Stage]) -> float:
    """The least possible max of G over the stages; INFINITY when no partition fits."""
    worst = np.append(0.0, np.full(ranges.n_pieces, INFINITY))
    for stage in stages:
        worst = np.maximum(worst[ranges.start], stage.bottleneck_s).min(axis=1)
    return float(worst[-1])


def _least_sum(ranges: Ranges, stages: list[_Stage], threshold_s: float) -> tuple[float, list[int]]:
    """D(x): the least sum of A under G <= x, and where its stages stop; INFINITY when there is none."""
    least = np.append(0.0, np.full(ranges.n_pieces, INFINITY))
    chosen = []
    for stage in stages:
        sums = least[ranges.start] + np.where(stage.bottleneck_s <= threshold_s, stage.sum_s, INFINITY)
        places = sums.argmin(axis=1)
        chosen.append(places)
        least = sums[np.arange(len(places)), places]
    if least[-1] == INFINITY:
        return INFINITY, []
    stops = [ranges.n_pieces]
    for places in reversed(chosen[1:]):
        stops.append(stops[-1] - int(places[stops[-1]]) - 1)
    return float(least[-1]), stops[::-1]


def _best_threshold(ranges: Ranges, stages: list[_Stage], lowest_s: float) -> tuple[float, list[int]]:
    """The least D(x) + x from below, and the stops of the best threshold tried."""
    floor_s, _ = _least_sum(ranges, stages, INFINITY)
    least_s, stops = _least_sum(ranges, stages, lowest_s)
    best_s = least_s + lowest_s
    waiting = [(floor_s + lowest_s, lowest_s, lowest_s + least_s - floor_s, floor_s)]  # bound, from, to, D(to)
    for _ in range(MAX_HALVINGS):
        bound_s, low_s, high_s, least_high_s = waiting[0]
        if bound_s >= best_s * (1.0 - CLOSE_ENOUGH):
            break
        middle_s = (low_s + high_s) / 2.0
        least_s, found = _least_sum(ranges, stages, middle_s)
        if least_s + middle_s < best_s:
            best_s, stops = least_s + middle_s, found
        heapq.heapreplace(waiting, (low_s + least_s, low_s, middle_s, least_s))
        heapq.heappush(waiting, (middle_s + least_high_s, middle_s, high_s, least_high_s))
    return min(best_s, waiting[0][0]), stops


def _decode(segments: Segments, ranges: Ranges, stages: list[_Stage], *, stops: list[int]) -> tuple[StagePlan, ...]:
    """The stages that end at these pieces, each with what it must recompute to fit."""
    found = []
    for start, stop, stage in zip([0, *stops], stops, stages, strict=False):
        first, last = int(ranges.edges[start]), int(ranges.edges[stop])
        missing_bytes = float(stage.missing_bytes[stop, stop - start - 1])
        switched = _switched(segments, range(first, last), missing_bytes=missing_bytes / stage.n_in_flight)
        recomputed = tuple(i for i in range(first, last) if segments.is_again[i] != (i in switched))
        found.append(StagePlan(first, last, recomputed))
    return tuple(found)


def _switched(segments: Segments, own: range, *, missing_bytes: float) -> set[int]:
    """The segments that recompute, or stop doing so, to spare that many bytes: those that cost least per byte."""
    able = [index for index in own if segments.spared_bytes[index] > 0.0]
    able.sort(key=lambda index: (segments.again_s[index] / segments.spared_bytes[index], index))
    chosen: set[int] = set()
    for index in able:
        if missing_bytes <= 0.0:
            break
        chosen.add(index)
        missing_bytes -= segments.spared_bytes[index]
    return chosen
