"""Several stages per rank: the whole step replayed with the least that stages of given sizes need. A bound.

`relaxed_steps_s` replays the schedule action by action, as `simulate` does, for many choices of sizes at once. Each
rank is two times: when it is free, and when all that it has to communicate is done. A pass with compute C, reductions R
and at least B of them left when it ends, beside L seconds left over from before, takes

    C + slower x D,    D = min(C, L + R - B)           reduced beside it
    left when it ends = max(L + R - C, B)

and a pass that gathers takes what `ranges` says. Both times rise with both times before, with C and with the size of a
stage, so sizes that are no more than those of a plan, each with the least C, R - C, R - B and B of any place where the
stage may begin, give a step that is no longer. Likewise fewer segments recomputed than in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh
from autoplan.schedules import GRADIENT_KINDS, KEPT_SCHEDULES, ordered_schedule, splits_backward, stage_ranks
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import Array, Ranges, Segments, backward_pass_s, carries, forward_pass_s
from autoplan.search.stage_needs import per_stage


class _Turn(NamedTuple):
    """An action of the schedule.

    Attributes:
        number: of its pass, see `_Script.passes`.
        awaited: place of the action on another rank whose result it needs; -1 if there is none.
        is_awaited: whether another rank needs its result.
    """

    rank: int
    number: int
    awaited: int
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class _Script:
    """A schedule in an order in which it can run; `passes` are (stage, kind of action, whether it is an edge)."""

    turns: tuple[_Turn, ...]
    passes: tuple[tuple[int, str, bool], ...]


@lru_cache(maxsize=KEPT_SCHEDULES)
def _script(name: str, n_ranks: int, n_micro_batches: int, n_chunks: int) -> _Script:
    ordered = ordered_schedule(name, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_chunks=n_chunks)
    ranks = stage_ranks(ordered.schedule)
    numbers: dict[tuple[int, str, bool], int] = {}
    rows = []
    for (stage, kind, micro_batch), needed in zip(ordered.actions, ordered.awaited, strict=True):
        is_edge = micro_batch == (0 if kind == "F" else n_micro_batches - 1)
        number = numbers.setdefault((stage, kind, is_edge), len(numbers))
        is_elsewhere = needed is not None and ranks[ordered.actions[needed].stage] != ranks[stage]
        rows.append((ranks[stage], number, needed if needed is not None and is_elsewhere else -1))
    awaited = {place for _, _, place in rows}
    return _Script(tuple(_Turn(*row, place in awaited) for place, row in enumerate(rows)), tuple(numbers))


class _Needs(NamedTuple):
    """What a pass needs at the least, each (stage, pieces); see the module docstring. `waits`: it gathers."""

    compute_s: Array
    reduce_s: Array
    left_s: Array
    closing_s: Array
    waits: bool

    def of(self, stage: int, sizes: Array, again: Array, again_s: tuple[float, float]) -> _Pass:
        """For stages of these sizes, with so many segments recomputed, each of which takes from .. to `again_s`.

        What is recomputed hides reductions, but not that of the segment which closes the pass.
        """
        compute_s, reduce_s, left_s = (values[stage, sizes] for values in self[:3])
        behind_s, grown_s = reduce_s - left_s, reduce_s - compute_s - again * again_s[1]
        compute_s = compute_s + again * again_s[0]
        left_s = np.maximum(self.closing_s[stage, sizes], left_s - again * again_s[1])
        return _Pass(compute_s, behind_s, grown_s, left_s, self.waits, bool(left_s.any()))


class _Pass(NamedTuple):
    """A pass per choice: C, R - B, R - C and B of the module docstring."""

    compute_s: Array
    behind_s: Array
    grown_s: Array
    left_s: Array
    waits: bool
    reduces: bool


@dataclass(frozen=True, slots=True)
class RelaxedStep:
    """What `least_s` needs of a mesh; `needs` are by (kind of action, whether it is an edge, whether of stage 0)."""

    mesh: Mesh
    needs: dict[tuple[str, bool, bool], _Needs]
    optimizer_s: Array
    per_step_s: float
    action_s: float
    cut_s: float
    slower: float
    carries: bool
    again_s: tuple[float, float]

    @classmethod
    def of(cls, table: CostTable, segments: Segments) -> RelaxedStep:
        """The least needs of all passes of the mesh."""
        sizes = stage_sizes(table.mesh, n_pieces=len(piece_edges(table)) - 1)
        ranges = Ranges.of(table, max(own[-1] for own in sizes))
        kinds = "FIW" if splits_backward(table.mesh.schedule) else "FB"
        able = np.isfinite(segments.again_s) & (segments.spared_bytes > segments.easy_bytes)
        again_s = segments.again_s[able]
        return cls(
            mesh=table.mesh,
            needs={
                (kind, is_edge, is_first): _needs(table, segments, ranges, sizes, kind, is_edge, is_first)
                for kind in kinds
                for is_edge in (False, True)
                for is_first in (False, True)
            },
            optimizer_s=per_stage(ranges, sizes, ranges.total(segments.optimizer_s)),
            per_step_s=table.per_step_s,
            action_s=table.action_s,
            cut_s=min((s for s in table.cut_s if s is not None), default=0.0),
            slower=table.overlap_extra,
            carries=carries(table, segments),
            again_s=(float(again_s.min()), float(again_s.max())) if able.any() else (0.0, 0.0),
        )

    def least_s(self, sizes: Array, again: Array) -> Array:
        """Per choice of sizes and of segments recomputed, both (choice, stage), the least time of a step.

        It is no more than that of any plan whose stages have as many pieces, or more, and recompute as much, or more.
        """
        mesh = self.mesh
        script = _script(mesh.schedule, mesh.pp, mesh.n_micro_batches, mesh.n_chunks)
        passes = [
            self.needs[kind, is_edge, stage == 0].of(
                stage, sizes[:, stage], again[:, stage] * (kind == "B"), self.again_s
            )
            for stage, kind, is_edge in script.passes
        ]
        kinds = [kind == "F" for _, kind, _ in script.passes]
        clocks = [_Clock(np.zeros(len(sizes))) for _ in range(mesh.pp)]
        links: list[list[Array]] = [[clock.free_s] * 2 for clock in clocks]
        arrived: dict[int, Array] = {}
        for place, (rank, number, awaited, is_awaited) in enumerate(script.turns):
            clock = clocks[rank]
            if awaited >= 0:
                clock.wait_until(arrived.pop(awaited))
            clock.run(passes[number], slower=self.slower, carries=self.carries, action_s=self.action_s)
            if is_awaited and self.cut_s > 0.0:
                link = links[rank]
                link[kinds[number]] = np.maximum(clock.free_s, link[kinds[number]]) + self.cut_s
                arrived[place] = link[kinds[number]]
            elif is_awaited:
                arrived[place] = clock.free_s
        longest_s = np.zeros(len(sizes))
        optimizer_s = self.optimizer_s[np.arange(mesh.n_stages), sizes]
        ranks = np.array(stage_ranks_of(mesh))
        for rank, clock in enumerate(clocks):
            longest_s = np.maximum(longest_s, clock.end_s + optimizer_s[:, ranks == rank].sum(axis=1))
        return longest_s + self.per_step_s


def stage_ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """On which rank each stage of a mesh lives."""
    ordered = ordered_schedule(
        mesh.schedule, n_ranks=mesh.pp, n_micro_batches=mesh.n_micro_batches, n_chunks=mesh.n_chunks
    )
    return stage_ranks(ordered.schedule)


class _Clock:
    """Where a rank stands, per choice: it is free at `free_s`, and its communication is done at `done_s`, if any."""

    __slots__ = ("done_s", "free_s")

    def __init__(self, free_s: Array) -> None:
        self.free_s = free_s
        self.done_s: Array | None = None

    @property
    def end_s(self) -> Array:
        """When all is done."""
        return self.free_s if self.done_s is None else self.done_s

    def wait_until(self, arrived_s: Array) -> None:
        """Be free when a result has arrived; communication goes on meanwhile."""
        self.free_s = np.maximum(self.free_s, arrived_s)
        if self.done_s is not None:
            self.done_s = np.maximum(self.done_s, arrived_s)

    def run(self, item: _Pass, *, slower: float, carries: bool, action_s: float) -> None:
        """Do a pass."""
        if item.waits:
            start_s = self.end_s if carries else self.free_s
            self.free_s = start_s + (item.compute_s + action_s)
            self.done_s = self.free_s + item.left_s if item.reduces else None
        elif self.done_s is None and not item.reduces:
            self.free_s = self.free_s + (item.compute_s + action_s)
        else:
            left_s = 0.0 if self.done_s is None else self.done_s - self.free_s
            beside_s = np.minimum(item.compute_s, left_s + item.behind_s)
            self.free_s = self.free_s + (item.compute_s + action_s) + slower * beside_s
            left_s = np.maximum(left_s + item.grown_s, item.left_s)
            self.done_s = self.free_s + left_s if item.reduces or left_s.any() else None


def _needs(
    table: CostTable,
    segments: Segments,
    ranges: Ranges,
    sizes: tuple[range, ...],
    kind: str,
    is_edge: bool,
    is_first: bool,
) -> _Needs:
    """The least that a pass needs in each stage. `is_first`: of the first stage, which does all in its pass "W"."""
    gathers = table.gathers_per_micro_batch or (is_edge and kind == "F")
    waits = gathers and kind in "FB" and bool(segments.gather_s.any())
    reduces = (table.reduces_per_micro_batch or is_edge) and kind in GRADIENT_KINDS
    weights_s = segments.backward_s if is_first else segments.weights_s
    compute_s = {
        "F": segments.forward_s,
        "B": segments.backward_s,
        "I": segments.backward_s - weights_s,
        "W": weights_s,
    }[kind]
    reduce_s = segments.reduce_s if reduces else np.zeros(len(compute_s))
    closing_s = per_stage(ranges, sizes, ranges.first(reduce_s))
    if waits:
        pass_s = (
            forward_pass_s(segments, ranges, gathers=True) if kind == "F" else backward_pass_s(table, segments, ranges)
        )
        whole_s = per_stage(ranges, sizes, pass_s)
        return _Needs(whole_s, np.zeros(whole_s.shape), closing_s, closing_s, waits=True)
    all_s, all_reduce_s = ranges.total(compute_s), ranges.total(reduce_s)
    all_left_s = _left_s(ranges, compute_s=compute_s, reduce_s=reduce_s)
    least_s, left_s = per_stage(ranges, sizes, all_s), per_stage(ranges, sizes, all_left_s)
    behind_s = per_stage(ranges, sizes, all_reduce_s - all_left_s)
    grown_s = per_stage(ranges, sizes, all_reduce_s - all_s)
    return _Needs(least_s, np.minimum(left_s + behind_s, least_s + grown_s), left_s, closing_s, waits=False)


def _left_s(ranges: Ranges, *, compute_s: Array, reduce_s: Array) -> Array:
    """What a pass without gathers, with nothing left from before, leaves to be reduced.

    From the last time on that nothing was to be reduced: all reductions - compute of all segments but the first.
    """
    reduced, computed = (np.append(0.0, np.cumsum(values)) for values in (reduce_s, compute_s))
    most = ranges.largest_segment(reduced[1:] - computed[:-1])
    return most - (reduced - computed)[ranges.edges[ranges.start]]
