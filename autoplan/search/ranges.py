"""Numbers per segment and sums over ranges of pieces, as arrays: what bounds on whole pieces are made of.

Arrays over ranges have one value per kind of range (`Ranges`): some pieces (see `plans`) as one stage. All that
communication adds to a pass is taken between the neighbours a segment has (`hidden_extra_s`), as in
`stage_pass.replay_pass`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, backward_s, forward_s
from autoplan.overlap import Overlap
from autoplan.search.bounds import alone_bytes
from autoplan.search.plans import piece_edges, repeated_segments
from autoplan.solver.linear_model import INFINITY

Array = Any  # numpy.ndarray of floats

ONE_BYTE = 1.0  # of slack: a plan that fits to the byte is never cut off


# -------------------------------------------------------------------------------------------------- numbers per segment


@dataclass(frozen=True, slots=True)
class Segments:
    """Per segment, in order. With the choice that is faster; `again` is the other one, where it spares memory.

    Attributes:
        inputs_s, weights_s: the halves of a split backward pass, each with the choice that is faster in it.
        forward_extra_s, backward_extra_s: what communication adds while the segment computes, between all neighbours.
        opening_extra_s: likewise for the segment that opens a backward pass; `closing_extra_s`: that closes it.
        again_s: what recomputing adds to a backward pass; INFINITY where it spares nothing.
        spared_bytes: what it spares per micro-batch in flight; easy_bytes: the same of the segment that spares most for
            its time, if it is the only one of its kind (a loss in slices); bounds on recomputation take it for free.
        resident_bytes: what it holds all step; gradient_bytes: after its first backward pass.
        alone_bytes: what it needs while it runs; least_alone_bytes, pending_bytes: of either choice.
        is_again: whether the faster choice is to recompute, or the only one.
        ending_bytes: where it is the last of a range and not the only one, what a pass that makes gradients needs at
            the least beside all that is saved, while it runs or while the segment before it does (`_ending_bytes`).
        late_bytes: of the input of a reduction at the end of a pass, which is there until the end of the next forward
            pass, beside all that is saved.
    """

    forward_s: Array
    backward_s: Array
    inputs_s: Array
    weights_s: Array
    gather_s: Array
    gather_back_s: Array
    reduce_s: Array
    last_reduce_s: Array
    optimizer_s: Array
    forward_extra_s: Array
    backward_extra_s: Array
    opening_extra_s: Array
    closing_extra_s: Array
    resident_bytes: Array
    gradient_bytes: Array
    saved_bytes: Array
    alone_bytes: Array
    least_alone_bytes: Array
    again_s: Array
    spared_bytes: Array
    easy_bytes: Array
    pending_bytes: Array
    is_again: tuple[bool, ...]
    ending_bytes: Array
    late_bytes: Array

    @classmethod
    def of(cls, table: CostTable, recompute: str | None) -> Segments:
        """The segments of the table."""
        base, other, is_again = zip(*_choices(table, recompute), strict=True)
        kinds, overlap = np.array(table.kinds), table.overlap

        def column(value: Callable[[SegmentCost], float], costs: tuple[SegmentCost, ...] = base) -> Array:
            return np.array([value(cost) for cost in costs], dtype=float)[kinds]

        def least(value: Callable[[SegmentCost], float]) -> Array:
            return np.minimum(column(value), column(value, other))

        forward, backward = column(forward_s), column(backward_s)
        gather, reduce = column(lambda cost: cost.gather_s), column(lambda cost: cost.reduce_s)
        gather_back = column(lambda cost: cost.gather_back_s)
        beside = _Beside.of(table, gather_back, reduce)
        longer = column(backward_s, other) - backward
        spared = column(lambda cost: cost.saved_bytes) - column(lambda cost: cost.saved_bytes, other)
        added = np.where(
            beside.gathers_s > 0.0, longer + beside.extra_s(backward + longer) - beside.extra_s(backward), longer
        )
        resident, gathered = column(lambda cost: cost.state_bytes), column(lambda cost: cost.gathered_bytes)
        late = column(lambda cost: cost.reducing_bytes if cost.late_gradient_bytes else 0)
        return cls(
            forward_s=forward,
            backward_s=backward,
            inputs_s=least(partial(backward_part_s, kind="I", is_first=False)),
            weights_s=least(lambda cost: cost.weight_backward_s),
            gather_s=gather,
            gather_back_s=gather_back,
            reduce_s=reduce,
            last_reduce_s=column(lambda cost: cost.last_reduce_s),
            optimizer_s=column(lambda cost: cost.optimizer_s),
            forward_extra_s=hidden_extra_s(forward, _of_next(gather), overlap),
            backward_extra_s=beside.extra_s(backward),
            opening_extra_s=hidden_extra_s(backward, beside.gathers_s, overlap),
            closing_extra_s=slowing_s(backward, beside.reduces_s, overlap),
            resident_bytes=resident + (gathered if table.keeps_gathered else 0.0),
            gradient_bytes=column(lambda cost: cost.gradient_bytes),
            saved_bytes=column(lambda cost: cost.saved_bytes),
            alone_bytes=column(partial(alone_bytes, table)),
            least_alone_bytes=least(partial(alone_bytes, table)),
            again_s=np.where(spared > 0.0, added, INFINITY),
            spared_bytes=np.maximum(spared, 0.0),
            easy_bytes=_easy_bytes(table, added, spared),
            pending_bytes=least(lambda cost: cost.pending_bytes),
            is_again=tuple(map(is_again.__getitem__, table.kinds)),
            ending_bytes=_ending_bytes(table, column, (base, other)),
            late_bytes=late * table.reduces_per_micro_batch,
        )


@dataclass(frozen=True, slots=True)
class _Beside:
    """What communicates while a segment runs backward: the gather of the one before, the reduction of that behind."""

    gathers_s: Array
    reduces_s: Array
    overlap: Overlap

    @classmethod
    def of(cls, table: CostTable, gather_back_s: Array, reduce_s: Array) -> _Beside:
        nothing = np.zeros(len(table.kinds))
        gathers = np.append(0.0, gather_back_s[:-1]) if table.gathers_per_micro_batch else nothing
        reduces = _of_next(reduce_s) if table.reduces_per_micro_batch else nothing
        return cls(gathers, reduces, table.overlap)

    def extra_s(self, backward_s: Array) -> Array:
        """What that adds: the segment before waits for its gather, and nothing waits for a reduction alone."""
        waits = hidden_extra_s(backward_s, self.gathers_s + self.reduces_s, self.overlap)
        return np.where(self.gathers_s > 0.0, waits, slowing_s(backward_s, self.reduces_s, self.overlap))


def _of_next(values: Array) -> Array:
    """Per segment the value of the one behind it; 0 for the last."""
    return np.append(values[1:], 0.0)


def _easy_bytes(table: CostTable, added_s: Array, spared_bytes: Array) -> Array:
    """See `Segments`: of the segment with the least added_s / spared_bytes, 0 for all others."""
    per_byte = np.where(spared_bytes > 0.0, added_s / np.maximum(spared_bytes, ONE_BYTE), INFINITY)
    easy = int(per_byte.argmin())
    is_easy = (np.arange(len(table.kinds)) == easy) & (spared_bytes > 0.0)
    return np.where(is_easy & (table.kinds.count(table.kinds[easy]) == 1), spared_bytes, 0.0)


def _ending_bytes(
    table: CostTable,
    column: Callable[..., Array],
    choices: tuple[tuple[SegmentCost, ...], ...],
) -> Array:
    """See `Segments`; `column` gives a value per segment for costs per kind.

    While the segment before the last runs, the activations of the last are gone, and the input of the reduction of its
    gradients is there, or these as they were computed. Where gradients are not reduced in every pass that is left out.
    """
    alone = partial(alone_bytes, table)
    own = [column(alone, costs) for costs in choices]
    if not table.reduces_per_micro_batch:
        return np.minimum(*own)
    before = np.append(0.0, np.minimum(*own)[:-1])
    behind = column(lambda cost: cost.late_gradient_bytes or cost.reducing_bytes)
    saved = [column(lambda cost: cost.saved_bytes, costs) for costs in choices]
    return np.minimum(*(np.maximum(one, before + behind - kept) for one, kept in zip(own, saved, strict=True)))


def _choices(table: CostTable, recompute: str | None) -> list[tuple[SegmentCost, SegmentCost, bool]]:
    """Per kind, the faster choice, the other one (if the user leaves it), and whether the first recomputes."""
    repeated = {table.kinds[segment] for segment in repeated_segments(table)}
    pairs = []
    for kind, costs in enumerate(table.costs):
        kept, again = costs[0], costs[-1]
        if recompute == "full" and kind in repeated:
            pairs.append((again, again, True))
        elif recompute == "none":
            pairs.append((kept, kept, False))
        else:
            is_again = backward_s(again) < backward_s(kept)
            pairs.append((again, kept, True) if is_again else (kept, again, False))
    return pairs


def figures_of(table: CostTable) -> tuple[int, ...]:
    """The same for tables of pipeline ranks that differ in nothing but their cuts."""
    return tuple(id(getattr(table, field.name)) for field in fields(table) if field.name not in ("cut_s", "sendrecv_s"))


def hidden_extra_s(compute_s: Array | float, communication_s: Array | float, overlap: Overlap) -> Array:
    """What communication adds to compute that must wait for its end: the rest of it, and the slowdown by the overlap.

    g - q + beta q, where q = min(r c, g) is hidden: c + that is max(c + beta g, g + gamma c); see `Overlap`.
    """
    hidden = np.minimum(overlap.hidden_per_compute * compute_s, communication_s)
    return communication_s - hidden + overlap.communication_exposed * hidden


def slowing_s(compute_s: Array | float, communication_s: Array | float, overlap: Overlap) -> Array:
    """What communication adds to compute that need not wait for it: the slowdown by the overlap."""
    return overlap.communication_exposed * np.minimum(overlap.hidden_per_compute * compute_s, communication_s)


# --------------------------------------------------------------------------------------------------- ranges of pieces


@dataclass(frozen=True, slots=True)
class Ranges:
    """All ranges of at most `width` consecutive pieces, each kind of range once: arrays are over these, by length.

    Two ranges within a run of equal pieces that begin and end alike are of one kind, wherever they are: a model of many
    layers has about as many kinds as it has layers.

    Attributes:
        edges: the first segment of each piece, and the end.
        start, stop: of the first range of each kind, in pieces.
        by_count: where the kinds of each length begin, from length 1 on.
        kind: (stop, count - 1), the kind of the `count` pieces before boundary `stop`; 0 if there are not as many.
    """

    edges: Array
    width: int
    widest_possible: int
    start: Array
    stop: Array
    by_count: Array
    kind: Array

    @classmethod
    def of(cls, table: CostTable, width: int) -> Ranges:
        """The ranges that a stage may be."""
        edges = stage_edges(table)
        widest_possible = len(edges) - table.mesh.pp
        tables = (table, *table.rank_tables)
        columns = [values for own in tables for values in (own.cut_s, own.sendrecv_s, own.message_bytes) if values]
        marks = tuple(dict.fromkeys(map(_places_of_values, {id(values): values for values in columns}.values())))
        width = min(width, widest_possible)
        return cls(np.array(edges), width, widest_possible, *_kinds_of_ranges(table.kinds, edges, marks, width))

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
        return per_segment[self.edges[self.start]]

    def last(self, per_segment: Array) -> Array:
        """The value of the last segment of each range."""
        return per_segment[self.edges[self.stop] - 1]

    def ending(self, per_segment: Array, *, alone: Array) -> Array:
        """The value of the last segment of each range; its value in `alone` where there is no other."""
        has_several = self.edges[self.stop] - self.edges[self.start] > 1
        return np.where(has_several, self.last(per_segment), self.last(alone))

    def largest(self, per_piece: Array) -> Array:
        """The largest value of any piece of each range, which two stretches of a power of two pieces make up."""
        found, stretches, length = np.empty(len(self.start)), per_piece, 1
        for own in np.split(np.arange(len(self.start)), self.by_count[_powers_of_two(self.width)]):
            while len(own) and 2 * length <= self.stop[own[0]] - self.start[own[0]]:
                stretches, length = np.maximum(stretches[:-length], stretches[length:]), 2 * length
            found[own] = np.maximum(stretches[self.start[own]], stretches[self.stop[own] - length])
        return found

    def largest_segment(self, per_segment: Array) -> Array:
        """The largest value of any segment of each range."""
        return self.largest(np.maximum.reduceat(per_segment, self.edges[:-1]))

    def largest_moment(self, *, saved_bytes: Array, alone_bytes: Array) -> Array:
        """The most that a pass of each range holds: what is saved up to a segment, and what that one needs alone."""
        so_far = np.cumsum(saved_bytes)
        before = np.append(0.0, so_far)[self.edges]
        return self.largest_segment(so_far + alone_bytes) - before[self.start]

    def least_of_count(self, values: Array) -> Array:
        """Per number of pieces, from 1 on, the least value of any range."""
        return np.minimum.reduceat(values, self.by_count)


@lru_cache(maxsize=64)
def _places_of_values(values: tuple[float | None, ...]) -> tuple[int, ...]:
    """Where each value occurs first: the same for boundaries that are alike in the same places."""
    first = {value: place for place, value in reversed(list(enumerate(values)))}
    return tuple(map(first.__getitem__, values))


def _powers_of_two(most: int) -> list[int]:
    """2 - 1, 4 - 1, 8 - 1, ... below `most`."""
    return [2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power <= most]


@lru_cache(maxsize=64)
def _kinds_of_ranges(
    kinds: tuple[int, ...], edges: tuple[int, ...], marks: tuple[tuple[int, ...], ...], width: int
) -> tuple[Array, Array, Array, Array]:
    """`start`, `stop`, `by_count` and `kind` of `Ranges`; `marks` are what a stage sees of the boundaries of segments.

    A range may be moved to the left as long as it takes up pieces equal to its own, and marks equal to those at its
    ends. Moved as far as that goes, it is the first of its kind.
    """
    n_pieces = len(edges) - 1
    pieces = [kinds[start:stop] for start, stop in pairwise(edges)]
    seen = [None, *(tuple(values[edge - 1] for values in marks) for edge in edges[1:-1]), None]
    starts_back, stops_back, run_end = (np.zeros(n_pieces + 1, dtype=np.int32) for _ in range(3))
    for edge in range(1, n_pieces + 1):
        if seen[edge] == seen[edge - 1]:
            stops_back[edge] = stops_back[edge - 1] + 1
            if edge < n_pieces and pieces[edge] == pieces[edge - 1]:
                starts_back[edge] = starts_back[edge - 1] + 1
    run_end[n_pieces] = n_pieces
    for piece in reversed(range(n_pieces)):
        is_run = piece + 1 < n_pieces and pieces[piece] == pieces[piece + 1]
        run_end[piece] = run_end[piece + 1] if is_run else piece + 1
    stop = np.arange(n_pieces + 1, dtype=np.int32)[:, None]
    count = np.arange(1, width + 1, dtype=np.int32)[None, :]
    exists, start = stop >= count, np.maximum(stop - count, 0)
    back = np.where(stop <= run_end[start], np.minimum(starts_back[start], stops_back[stop]), 0)
    counts, stops = np.nonzero((exists & (back == 0)).T)
    number = np.zeros(start.shape, dtype=np.int32)
    number[stops, counts] = np.arange(len(stops))
    kind = np.where(exists, number[np.where(exists, stop - back, 0), count - 1], 0)
    return stops - counts - 1, stops, np.searchsorted(counts, np.arange(width)), kind


def stage_edges(table: CostTable) -> tuple[int, ...]:
    """Where a stage may begin or end; with one stage, only where the model does."""
    return (0, len(table.kinds)) if table.mesh.n_stages == 1 else piece_edges(table)


def forward_pass_s(segments: Segments, ranges: Ranges, *, gathers: bool) -> Array:
    """Time of a forward pass of each range."""
    if not gathers:
        return ranges.total(segments.forward_s)
    waits = ranges.total(segments.forward_s + segments.forward_extra_s) - ranges.last(segments.forward_extra_s)
    return waits + ranges.first(segments.gather_s)


def first_forward_s(table: CostTable, segments: Segments, ranges: Ranges, *, is_first: bool) -> Array:
    """The least time of the first forward pass of each range: as the first stage of the model, or as any other one.

    Where gathers begin with the step, another stage than the first may find all of them done.
    """
    return forward_pass_s(segments, ranges, gathers=is_first or not table.gathers_at_start)


def gathering_pass_s(compute_s: Array, left_s: Array, *, closing_s: Array, overlap: Overlap) -> Array:
    """The least time of a pass beside which gathers of so long go on, all of which the last segment waits for."""
    return compute_s + hidden_extra_s(compute_s - closing_s, left_s, overlap)


def backward_pass_s(table: CostTable, segments: Segments, ranges: Ranges) -> Array:
    """Time of a backward pass of each range, nothing recomputed: its last segment opens it, its first one closes it."""
    extra = segments.backward_extra_s
    opening = ranges.last(extra - segments.opening_extra_s)
    closing = ranges.first(extra - segments.closing_extra_s)
    is_alone = ranges.first(np.arange(len(extra))) == ranges.last(np.arange(len(extra)))
    missing = np.where(is_alone, ranges.first(extra), opening + closing)
    first_gather = ranges.last(segments.gather_back_s) if table.gathers_per_micro_batch else 0.0
    return ranges.total(segments.backward_s + extra) - missing + first_gather


def reducing_pass_s(table: CostTable, ranges: Ranges, *, compute_s: Array, reduce_s: Array) -> Array:
    """Time of a pass that computes and reduces so long per segment, from the last one on; nothing is gathered."""
    extra = slowing_s(compute_s, np.append(reduce_s[1:], 0.0), table.overlap)
    return ranges.total(compute_s + extra) - ranges.last(extra)


def left_s(table: CostTable, ranges: Ranges, *, compute_s: Array, reduce_s: Array) -> Array:
    """The least that such a pass leaves to be reduced: what its compute after the first reduction cannot hide."""
    hiding_s = ranges.total(compute_s) - ranges.last(compute_s)
    queued_s = ranges.total(reduce_s) - table.overlap.hidden_per_compute * hiding_s
    return np.maximum(ranges.first(reduce_s), queued_s)


def carries(table: CostTable, segments: Segments) -> bool:
    """Whether every pass waits for the reduction that the pass before it left.

    In a pipeline one backward pass may follow another; where there is one stage, a forward pass comes between.
    """
    gathers = segments.gather_s if table.mesh.pp == 1 else segments.gather_back_s
    return table.gathers_per_micro_batch and table.reduces_per_micro_batch and min(gathers) > 0.0
