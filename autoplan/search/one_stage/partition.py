"""One stage per rank: where to cut the model, by dynamic programming over the stages. A bound, and the plan behind it.

Under gpipe, 1F1B and interleaved, with one stage per rank, some path through the step takes at least

    per_step + sum over stages t of A_t + max over stages s of G_s

    A_t   first forward pass and a backward pass of stage t, the transfers over its first boundary;
          for stage 0 also its last reduction and its optimizer
    G_s   (M - 1) backward passes and what their reductions leave to the next pass, and the forward passes after the
          first backward pass (gpipe: M - 1), for M micro-batches

so for each threshold on G the least sum of A is a shortest path: `least[stop] = min over start of least[start] + A`.
With D(x) this least sum under G <= x, the bound is the minimum of D(x) + x; between two thresholds a < b it is at least
D(b) + a, and thresholds are halved until that is not below the best found (`banded_path.best_threshold`).

A stage that lacks memory recomputes as little as will do. Exact for one kind of block: whole blocks; else the fraction
of the kind with the most bytes per second. Ranks on different devices have times and memory of their own (`_Passes`);
the path is the same. Everything is an array over ranges of pieces (see `ranges`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.search.bounds import in_flight
from autoplan.search.one_stage.banded_path import (
    Times,
    bands_of,
    best_threshold,
    least_bottleneck_s,
    least_rests,
    least_sum,
    most_pieces,
)
from autoplan.search.one_stage.stage_memory import StageMemory
from autoplan.search.ranges import (
    Array,
    Ranges,
    Segments,
    backward_pass_s,
    carries,
    figures_of,
    first_forward_s,
    forward_pass_s,
    stage_edges,
)
from autoplan.solver.linear_model import INFINITY

MAX_VISITS = 4  # of `partitions_below`: stages looked at per stage that may be returned
ROUNDING = 1e-9  # share by which a sum may be wrong that is made up in another way


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
    ranges, stages, most_s = _prepared(table, recompute=recompute, limit_s=limit_s)
    if ranges.width >= ranges.widest_possible and most_pieces(ranges, _times(stages), INFINITY).sum() < ranges.n_pieces:
        return Partition(INFINITY, ())
    bands = bands_of(ranges, _times(stages), most_s)
    bottleneck_s = least_bottleneck_s(bands) if bands else INFINITY
    if bottleneck_s == INFINITY:
        is_all = most_s == INFINITY and ranges.width >= ranges.widest_possible
        return Partition(INFINITY if is_all else limit_s, ())
    floor_s, _ = least_sum(bands, INFINITY)
    if floor_s + bottleneck_s + table.per_step_s >= limit_s:
        return Partition(limit_s, ())
    bound_s, stops = best_threshold(bands, bottleneck_s, floor_s=floor_s)
    bound_s += table.per_step_s
    if bound_s >= limit_s:
        return Partition(limit_s, ())
    return Partition(bound_s, _decode(ranges, stages, stops=stops))


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut the model.

    Attributes:
        stages: the plan that recomputes as little as will do.
        fastest: that with the fastest choice of every segment; it may not fit, and no other of this cut is faster.
        sizes: of each stage, in pieces.
        again: of each stage, the segments that it must recompute at the least.
    """

    stages: tuple[StagePlan, ...]
    fastest: tuple[StagePlan, ...]
    sizes: tuple[int, ...]
    again: tuple[int, ...]


def partitions_below(table: CostTable, *, recompute: str | None, limit_s: float, n_most: int) -> list[Cut] | None:
    """Every way to cut the model whose bound is below `limit_s`; None if there are more than `n_most`, or nearly."""
    ranges, stages, most_s = _prepared(table, recompute=recompute, limit_s=limit_s)
    bands = bands_of(ranges, _times(stages), most_s)
    if not bands:
        return []
    rest_s, worst_s = least_rests(ranges.n_pieces, bands)
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[tuple[int, ...], float, float]] = [((), table.per_step_s, 0.0)]  # stops, sum of A, most of G
    for n_visited in count():
        if len(found) > n_most or n_visited > n_most * len(stages) * MAX_VISITS:
            return None
        if not waiting:
            break
        stops, sum_s, most_s = waiting.pop()
        if len(stops) == len(stages):
            found.append(stops)
            continue
        own, start = stages[len(stops)], stops[-1] if stops else 0
        stop = np.arange(start + 1, min(start + ranges.width, ranges.n_pieces) + 1)
        spans = ranges.kind[stop, stop - start - 1]
        sums_s = sum_s + own.sum_s[spans]
        mosts_s = np.maximum(most_s, own.bottleneck_s[spans])
        least_s = sums_s + rest_s[len(stops) + 1][stop] + np.maximum(mosts_s, worst_s[len(stops) + 1][stop])
        for place in np.flatnonzero(least_s < limit_s):
            waiting.append(((*stops, int(stop[place])), float(sums_s[place]), float(mosts_s[place])))
    return [_cut(ranges, stages, stops=list(stops)) for stops in found]


def _cut(ranges: Ranges, stages: list[_Stage], *, stops: list[int]) -> Cut:
    spans = list(pairwise([0, *stops]))
    again = tuple(
        stage.n_recomputed(
            float(stage.missing_bytes[ranges.kind[stop, stop - start - 1]]), slice(*ranges.edges[[start, stop]])
        )
        for (start, stop), stage in zip(spans, stages, strict=True)
    )
    return Cut(
        _decode(ranges, stages, stops=stops),
        _decode(ranges, stages, stops=stops, spares=False),
        tuple(stop - start for start, stop in spans),
        again,
    )


def _prepared(table: CostTable, *, recompute: str | None, limit_s: float) -> tuple[Ranges, list[_Stage], float]:
    """The ranges that may be stages, what each is as each stage, and the most that G may be of any of them."""
    own_tables = tuple(map(table.at_rank, range(table.mesh.pp)))
    kinds = {figures_of(own): own for own in own_tables}
    segments = {kind: Segments.of(own, recompute) for kind, own in kinds.items()}
    least_s = np.minimum.reduce([own.forward_s + own.backward_s for own in segments.values()])
    limit_s -= table.per_step_s
    ranges = Ranges.of(table, _widest(table, least_s, limit_s=limit_s))
    passes = {kind: _Passes.of(own, segments[kind], ranges) for kind, own in kinds.items()}
    stages = _stages(table.mesh, own_tables, tuple(passes[figures_of(own)] for own in own_tables), ranges)
    return ranges, stages, limit_s - float(least_s.sum()) * (1.0 - ROUNDING)


def _widest(table: CostTable, least_s: Array, *, limit_s: float) -> int:
    """No fewer than the most pieces that any stage may have in a step of at most `limit_s`.

    All of the model, a half, a quarter and so on, so that the ranges of few widths are listed. `least_s` is the least
    that each segment computes.
    """
    edges = stage_edges(table)
    sums, width = np.append(0.0, np.cumsum(least_s))[list(edges)], len(edges) - 1
    while width > 1:
        half = (width + 1) // 2
        if table.mesh.n_micro_batches * float(np.min(sums[half:] - sums[:-half])) <= limit_s:
            break
        width = half
    return width


# ------------------------------------------------------------------------------------------------------------- stages


@dataclass(frozen=True, slots=True)
class _Stage:
    """A and G of the module docstring for each range as this stage, and the bytes it must spare by recomputing.

    A and G are INFINITY where the range does not fit.
    """

    segments: Segments
    sum_s: Array
    bottleneck_s: Array
    missing_bytes: Array
    n_in_flight: int

    def n_recomputed(self, missing_bytes: float, own: slice) -> int:
        """How many of these segments must be recomputed at the least, the easy one left out."""
        spared, easy = self.segments.spared_bytes[own], self.segments.easy_bytes[own]
        largest_bytes = float(np.where(spared > easy, spared, 0.0).max())
        hard_bytes = missing_bytes - self.n_in_flight * float(easy.sum())
        return math.ceil(hard_bytes / (self.n_in_flight * largest_bytes)) if min(hard_bytes, largest_bytes) > 0 else 0


def _times(stages: list[_Stage]) -> list[Times]:
    return [(stage.sum_s, stage.bottleneck_s) for stage in stages]


@dataclass(frozen=True, slots=True)
class _Passes:
    """What each range is on one kind of rank.

    Attributes:
        opening_s: the first forward pass of the first stage; first_forward_s: of another one.
        backward_s: nothing recomputed for want of memory, and the action's wait for the host left out.
        carry_s: what a reduction leaves to the next pass.
    """

    table: CostTable
    segments: Segments
    opening_s: Array
    first_forward_s: Array
    forward_s: Array
    backward_s: Array
    carry_s: Array
    memory: StageMemory

    @classmethod
    def of(cls, table: CostTable, segments: Segments, ranges: Ranges) -> _Passes:
        """The passes of each range."""
        return cls(
            table=table,
            segments=segments,
            opening_s=first_forward_s(table, segments, ranges, is_first=True) + table.action_s,
            first_forward_s=first_forward_s(table, segments, ranges, is_first=False) + table.action_s,
            forward_s=forward_pass_s(segments, ranges, gathers=table.gathers_per_micro_batch) + table.action_s,
            backward_s=backward_pass_s(table, segments, ranges),
            carry_s=ranges.first(segments.reduce_s) if carries(table, segments) else 0.0,
            memory=StageMemory.of(table, segments, ranges),
        )


def _stages(mesh: Mesh, tables: tuple[CostTable, ...], passes: tuple[_Passes, ...], ranges: Ranges) -> list[_Stage]:
    """The stages of a mesh; `tables` and `passes` are those of each rank."""
    n, is_gpipe = mesh.n_micro_batches, mesh.schedule == "gpipe"
    cuts_s = {key: _first_cut_s(own, ranges) for key, own in {id(own.cut_s): own for own in tables}.items()}
    stages = []
    for stage, own in enumerate(passes):
        missing_bytes, again_s = own.memory.recomputing(in_flight(mesh, stage))
        whole_s = own.backward_s + again_s
        # Under gpipe the path reaches the stages after `s` with the last micro-batch.
        opening_s = own.opening_s if stage == 0 else own.forward_s if is_gpipe else own.first_forward_s
        edges_s = 2.0 * cuts_s[id(tables[stage - 1].cut_s)] if stage > 0 else _ends_s(own, ranges, backward_s=whole_s)
        n_forwards = n - 1 if is_gpipe else n - in_flight(mesh, stage)
        fits = np.isfinite(again_s)
        action_s = own.table.action_s
        backwards_s = np.where(fits, whole_s + own.carry_s + action_s, 0.0) * (n - 1)
        bottleneck_s = np.where(fits, backwards_s + n_forwards * own.forward_s, INFINITY)
        sum_s = np.where(fits, opening_s + whole_s + action_s + edges_s, INFINITY)
        stages.append(_Stage(own.segments, sum_s, bottleneck_s, missing_bytes, in_flight(mesh, stage)))
    return stages


def _first_cut_s(table: CostTable, ranges: Ranges) -> Array:
    """The transfer over the first boundary of each range, from the rank before it, which has this table."""
    inner_s = (table.cut_s[edge - 1] or 0.0 for edge in ranges.edges[1:-1])
    return np.array([0.0, *inner_s, 0.0])[ranges.start]


def _ends_s(first: _Passes, ranges: Ranges, *, backward_s: Array) -> Array:
    """What the first stage does after its last backward pass, and the slowdown of that pass by its reductions.

    left >= all reductions - r (compute after the first of them);   slowed >= beta (reductions - left)     (`Overlap`)

    Both together rise with that compute c: c + beta reductions + (1 - beta) left, and (1 - beta) r = 1 - gamma.
    """
    table, segments = first.table, first.segments
    optimizer_s, last_s = ranges.total(segments.optimizer_s), ranges.first(segments.last_reduce_s)
    if table.gathers_per_micro_batch:
        return optimizer_s + last_s
    beta, r = table.overlap.communication_exposed, table.overlap.hidden_per_compute
    all_s = ranges.total(segments.last_reduce_s)
    left_s = np.maximum(last_s, all_s - r * (backward_s - ranges.last(segments.backward_s)))
    counted_s = last_s if table.reduces_per_micro_batch else all_s  # the rest is in every backward pass
    return optimizer_s + beta * counted_s + (1.0 - beta) * left_s


# --------------------------------------------------------------------------------------------------------- the plan


def _decode(ranges: Ranges, stages: list[_Stage], *, stops: list[int], spares: bool = True) -> tuple[StagePlan, ...]:
    """The stages that end at these pieces, each with what it must recompute to fit if it `spares` memory."""
    found = []
    for start, stop, stage in zip([0, *stops], stops, stages, strict=False):
        first, last = int(ranges.edges[start]), int(ranges.edges[stop])
        segments, missing_bytes = (
            stage.segments,
            float(stage.missing_bytes[ranges.kind[stop, stop - start - 1]]) * spares,
        )
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
