"""The whole step replayed with the least that stages of given sizes need. A bound, for many choices at once.

`RelaxedStep.least_s` replays the schedule action by action, as `simulator` does, for many choices of sizes. Each rank
is two times: when it is free, and when all that it has to communicate is done. A pass with compute C, reductions R
and at least B of them left when it ends, beside L seconds left over from before, takes

    C + beta D,    D = min(r C, L + R - B)             reduced beside it
    left when it ends = max(L + R - r C, B)

(beta, gamma, r: see `Overlap`), and a pass that gathers takes what `ranges` says. Where the gathers of a rank begin
with the step, they are what is left over until they are done. A first forward pass, with G left over of its own if they
went on all the time, takes no less than a pass beside G, nor than C + beta min(r C, L); and all gathers are done no
earlier than when it ends, nor than gamma C after they would have been.

Both times rise with both times before, with C and with the size of a stage, so sizes that are no more than those of a
plan, each with the least C, R - r C, R - B and B of any place where the stage may begin, give a step that is no longer.
Likewise fewer segments recomputed than in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.overlap import Overlap
from autoplan.schedules import (
    GRADIENT_KINDS,
    input_boundary,
    receives_ahead,
    result_boundary,
    schedule_of,
    splits_backward,
)
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import (
    Array,
    Ranges,
    Segments,
    backward_pass_s,
    carries,
    figures_of,
    forward_pass_s,
    gathering_pass_s,
    slowing_s,
)
from autoplan.search.several_stages.stage_needs import per_stage

_Place = Any  # numbers or arrays of numbers: an index of arrays over places


class _Begun(NamedTuple):
    """Of a first forward pass: its gathers, the first of these, and what its last segment computes."""

    gather_s: Array
    opening_s: Array
    closing_s: Array

    def at(self, place: _Place, before_s: Array) -> _Begun:
        """At these places, in time: when its gathers are done behind those `before`, and the first of them."""
        gather_s, opening_s, closing_s = (values[place] for values in self)
        return _Begun(before_s + gather_s, before_s + opening_s, closing_s)


class _Needs(NamedTuple):
    """What a pass needs at the least; arrays over places (`RelaxedStep`).

    `waits`: it gathers; `begun`: or its gathers were begun with the step.
    """

    compute_s: Array
    reduce_s: Array
    left_s: Array
    closing_s: Array
    waits: bool
    begun: _Begun | None = None

    def at(self, place: _Place, again: Array, again_s: tuple[float, float], *, r: float) -> _Pass:
        """At these places, with so many segments recomputed, each of which takes from .. to `again_s`.

        `r`: see `Overlap`. What is recomputed hides reductions, but not that of the segment which closes the pass.
        """
        compute_s, reduce_s, left_s = (values[place] for values in self[:3])
        hidden_s = r * again * again_s[1]
        behind_s, grown_s = reduce_s - left_s, reduce_s - r * compute_s - hidden_s
        compute_s = compute_s + again * again_s[0]
        left_s = np.maximum(self.closing_s[place], left_s - hidden_s)
        return _Pass(compute_s, behind_s, grown_s, left_s, self.waits, bool(left_s.any()))


class _Pass(NamedTuple):
    """A pass per choice: C, R - B, R - r C and B of the module docstring."""

    compute_s: Array
    behind_s: Array
    grown_s: Array
    left_s: Array
    waits: bool
    reduces: bool
    begun: _Begun | None = None


@dataclass(frozen=True, slots=True)
class _RankNeeds:
    """What the stages of a rank need; `passes` are by (kind of action, whether an edge, whether of the first stage)."""

    passes: dict[tuple[str, bool, bool], _Needs]
    optimizer_s: Array
    again_s: tuple[float, float]
    action_s: float
    overlap: Overlap
    carries: bool

    @classmethod
    def of(cls, table: CostTable, segments: Segments, ranges: Ranges, sizes: tuple[range, ...] | None) -> _RankNeeds:
        """The least needs over the places where a stage of these `sizes` may begin, or of each range."""

        def least(values: Array) -> Array:
            return values if sizes is None else per_stage(ranges, sizes, values)

        is_able = np.isfinite(segments.again_s) & (segments.spared_bytes > segments.easy_bytes)
        again_s = segments.again_s[is_able]
        cases = product("FIW" if splits_backward(table.mesh.schedule) else "FB", (False, True), (False, True))
        return cls(
            passes={case: _needs(table, segments, ranges, least, *case) for case in cases},
            optimizer_s=least(ranges.total(segments.optimizer_s)),
            again_s=(float(again_s.min()), float(again_s.max())) if is_able.any() else (0.0, 0.0),
            action_s=table.action_s,
            overlap=table.overlap,
            carries=carries(table, segments),
        )


@dataclass(frozen=True, slots=True)
class RelaxedStep:
    """What `least_s` needs of a mesh.

    With several stages per rank, arrays over places are (stage, pieces) and the least cut counts; with one, they are
    over `ranges`, so that every figure is that of the very segments.
    """

    table: CostTable
    ranks: tuple[_RankNeeds, ...]
    ranges: Ranges

    @classmethod
    def of(cls, table: CostTable, segments: Segments) -> RelaxedStep:
        """For a mesh with several stages per rank."""
        sizes = stage_sizes(table.mesh, n_pieces=len(piece_edges(table)) - 1)
        ranges = Ranges.of(table, max(own[-1] for own in sizes))
        return cls(table, (_RankNeeds.of(table, segments, ranges, sizes),) * table.mesh.pp, ranges)

    @classmethod
    def of_cuts(cls, table: CostTable, *, recompute: str | None) -> RelaxedStep:
        """For a mesh with one stage per rank; `recompute` is what the user fixed."""
        ranges, tables = Ranges.of(table, len(piece_edges(table)) - 1), list(map(table.at_rank, range(table.mesh.pp)))
        kinds = {figures_of(own): own for own in tables}
        needs = {kind: _RankNeeds.of(own, Segments.of(own, recompute), ranges, None) for kind, own in kinds.items()}
        return cls(table, tuple(needs[figures_of(own)] for own in tables), ranges)

    def least_s(self, sizes: Array, again: Array) -> Array:
        """Per choice of sizes and of segments recomputed, both (choice, stage), the least time of a step.

        It is no more than that of any plan whose stages recompute as much, or more; and with several stages per rank,
        have as many pieces, or more.
        """
        mesh = self.table.mesh
        ordered, places = schedule_of(mesh), self._places(sizes)
        passes, gathered_s = [], [np.zeros(len(sizes))] * mesh.pp
        for stage, kind, is_edge in ordered.passes:
            rank, place = ordered.ranks[stage], places[stage]
            needs = self.ranks[rank]
            own = needs.passes[kind, is_edge, stage == 0]
            n_again, r = again[:, stage] * (kind == "B"), needs.overlap.hidden_per_compute
            passes.append(own.at(place, n_again, needs.again_s, r=r))
            if own.begun is not None:  # first forward passes of a rank are in the order of its stages
                passes[-1] = passes[-1]._replace(begun=own.begun.at(place, gathered_s[rank]))
                gathered_s[rank] = gathered_s[rank] + own.begun.gather_s[place]
        clocks = [_Clock(np.zeros(len(sizes))) for _ in range(mesh.pp)]
        for clock, own_s in zip(clocks[1:], gathered_s[1:], strict=True):
            clock.gather(own_s)
        cuts_s, goes_ahead = self._cuts_s(sizes), receives_ahead(mesh.schedule)
        moved_s: dict[tuple[int, int], Array] = {}  # ahead: when the last transfer from one rank to another is done
        done_s: dict[int, Array] = {}  # per awaited action: when it is done; ahead, when it has arrived
        for place, (number, awaited, call, is_sendrecv) in enumerate(
            zip(ordered.cues, ordered.awaited, ordered.calls, ordered.sendrecvs, strict=True)
        ):
            stage, kind, _ = ordered.passes[number]
            rank = ordered.ranks[stage]
            clock = clocks[rank]
            if awaited is not None and goes_ahead:
                clock.wait_until(done_s.pop(awaited))
            elif awaited is not None:
                cut_s = cuts_s[input_boundary(stage, kind), is_sendrecv]
                clock.wait_until(np.maximum(clock.free_s, done_s.pop(awaited)) + cut_s)
            clock.run(passes[number], self.ranks[rank])
            if place == 0 and mesh.n_micro_batches > 1:  # of the first stage, whose rank gathers for its others now
                clock.gather(gathered_s[rank])
            if call is not None:
                done_s[place] = clock.free_s
            if call is not None and goes_ahead:
                called_s = np.maximum(clock.free_s, clocks[call.receiver].free_s)
                way, cut_s = (rank, call.receiver), cuts_s[result_boundary(stage, kind), False]
                done_s[place] = moved_s[way] = np.maximum(called_s, moved_s.get(way, 0.0)) + cut_s
        ends_s = [clock.end_s for clock in clocks]
        for stage, rank in enumerate(ordered.ranks):
            ends_s[rank] = ends_s[rank] + self.ranks[rank].optimizer_s[places[stage]]
        return np.maximum.reduce(ends_s) + self.table.per_step_s

    def _places(self, sizes: Array) -> list[_Place]:
        """Per stage, where the arrays have its values."""
        if self.table.mesh.n_chunks > 1:
            return [(stage, own) for stage, own in enumerate(sizes.T)]
        return [self.ranges.kind[stop, own - 1] for stop, own in zip(np.cumsum(sizes, axis=1).T, sizes.T, strict=True)]

    def _cuts_s(self, sizes: Array) -> dict[tuple[int, bool], Array | float]:
        """By boundary and whether it is a sendrecv, the time of a transfer between a stage and the next one."""
        mesh = self.table.mesh
        if mesh.n_chunks > 1:
            cut_s = min((s for s in self.table.cut_s if s is not None), default=0.0)
            return dict.fromkeys(product(range(mesh.n_stages - 1), (False, True)), cut_s)
        edges = np.array(piece_edges(self.table))
        found: dict[tuple[int, bool], Array | float] = {}
        for stage in range(mesh.pp - 1):  # one on each rank, in their order
            own = self.table.at_rank(stage)
            stops = edges[sizes[:, : stage + 1].sum(axis=1)]
            for is_sendrecv, transfers_s in ((False, own.cut_s), (True, own.sendrecv_s or own.cut_s)):
                found[stage, is_sendrecv] = np.array([s or 0.0 for s in transfers_s])[stops - 1]
        return found


class _Clock:
    """Where a rank stands, per choice: it is free at `free_s`, and its communication is done at `done_s`, if any."""

    __slots__ = ("done_s", "free_s", "gathers_from_s")

    def __init__(self, free_s: Array) -> None:
        self.free_s = self.gathers_from_s = free_s
        self.done_s: Array | None = None

    @property
    def end_s(self) -> Array:
        """When all is done."""
        return self.free_s if self.done_s is None else self.done_s

    def gather(self, seconds: Array) -> None:
        """Begin gathers that take so long; nothing else is left over."""
        self.gathers_from_s = self.free_s
        self.done_s = self.free_s + seconds if seconds.any() else None

    def wait_until(self, arrived_s: Array) -> None:
        """Be free when a result has arrived; communication goes on meanwhile."""
        self.free_s = np.maximum(self.free_s, arrived_s)
        if self.done_s is not None:
            self.done_s = np.maximum(self.done_s, arrived_s)

    def run(self, item: _Pass, rank: _RankNeeds) -> None:
        """Do a pass."""
        action_s, overlap = rank.action_s, rank.overlap
        if item.begun is not None:
            own_done_s, opened_s, closing_s = item.begun
            start_s = np.maximum(self.free_s, self.gathers_from_s + opened_s)
            own_left_s = np.maximum(self.gathers_from_s + own_done_s - start_s, 0.0)
            pass_s = gathering_pass_s(item.compute_s, own_left_s, closing_s=closing_s, overlap=overlap)
            all_done_s = start_s if self.done_s is None else np.maximum(self.done_s, start_s)
            slowed_s = item.compute_s + slowing_s(item.compute_s, all_done_s - start_s, overlap)
            self.free_s = start_s + (np.maximum(pass_s, slowed_s) + action_s)
            all_done_s = all_done_s + overlap.compute_exposed * item.compute_s
            self.done_s = np.maximum(self.free_s, all_done_s) if (all_done_s > self.free_s).any() else None
        elif item.waits:
            start_s = self.end_s if rank.carries else self.free_s
            self.free_s = start_s + (item.compute_s + action_s)
            self.done_s = self.free_s + item.left_s if item.reduces else None
        elif self.done_s is None and not item.reduces:
            self.free_s = self.free_s + (item.compute_s + action_s)
        else:
            left_s = 0.0 if self.done_s is None else self.done_s - self.free_s
            slowed_s = item.compute_s + slowing_s(item.compute_s, left_s + item.behind_s, overlap)
            self.free_s = self.free_s + (slowed_s + action_s)
            left_s = np.maximum(left_s + item.grown_s, item.left_s)
            self.done_s = self.free_s + left_s if item.reduces or left_s.any() else None


def _needs(
    table: CostTable,
    segments: Segments,
    ranges: Ranges,
    least: Callable[[Array], Array],
    kind: str,
    is_edge: bool,
    is_first: bool,
) -> _Needs:
    """The least that a pass needs. `is_first`: of the first stage, which does all of a split pass in that for weights.

    The triple C, R, B has the least R - r C and R - B, too.
    """
    gathers = table.gathers_per_micro_batch or (is_edge and kind == "F")
    begins = is_edge and kind == "F" and table.gathers_at_start and not is_first
    gathered_s = segments.gather_s if kind == "F" else segments.gather_back_s
    waits = gathers and kind in "FB" and bool(gathered_s.any()) and not begins
    reduces = (table.reduces_per_micro_batch or is_edge) and kind in GRADIENT_KINDS
    own_s = segments.last_reduce_s if is_edge else segments.reduce_s
    reduce_s = own_s if reduces else np.zeros(len(own_s))
    closing_s = least(ranges.first(reduce_s))
    if waits:
        back_s = backward_pass_s(table, segments, ranges) if kind == "B" else None
        whole_s = least(forward_pass_s(segments, ranges, gathers=True) if back_s is None else back_s)
        return _Needs(whole_s, np.zeros(whole_s.shape), closing_s, closing_s, waits=True)
    compute_s, r = _compute_s(segments, kind, is_first=is_first), table.overlap.hidden_per_compute
    begun = None
    if begins:
        all_gather_s, closing_compute_s = ranges.total(segments.gather_s), ranges.last(segments.forward_s)
        begun = _Begun(*map(least, (all_gather_s, ranges.first(segments.gather_s), closing_compute_s)))
    all_s, all_reduce_s = ranges.total(compute_s), ranges.total(reduce_s)
    all_left_s = _left_s(ranges, hiding_s=r * compute_s, reduce_s=reduce_s)
    least_s, left_s = least(all_s), least(all_left_s)
    behind_s, grown_s = least(all_reduce_s - all_left_s), least(all_reduce_s - r * all_s)
    return _Needs(least_s, np.minimum(left_s + behind_s, r * least_s + grown_s), left_s, closing_s, False, begun)


def _compute_s(segments: Segments, kind: str, *, is_first: bool) -> Array:
    """What each segment computes in a pass."""
    if kind in "FB":
        return segments.forward_s if kind == "F" else segments.backward_s
    if is_first:
        return segments.backward_s if kind == "W" else 0.0 * segments.backward_s
    return segments.weights_s if kind == "W" else segments.inputs_s


def _left_s(ranges: Ranges, *, hiding_s: Array, reduce_s: Array) -> Array:
    """What a pass without gathers, with nothing left from before, leaves to be reduced.

    From the last time on that nothing was to be reduced: all reductions - what all segments but the first hide.
    """
    reduced, hidden = (np.append(0.0, np.cumsum(values)) for values in (reduce_s, hiding_s))
    most = ranges.largest_segment(reduced[1:] - hidden[:-1])
    return most - (reduced - hidden)[ranges.edges[ranges.start]]
