"""Several stages per rank: plans by arithmetic and simulation, no solver.

`balanced_stages` cuts the model so that the slowest stage is as fast as can be. Where that does not fit, `thrifty_plan`
recomputes on each rank about as little as will do: the simulator says what a rank lacks, and what one segment more
spares there. Segments of the stages with most micro-batches in flight come first: they spare most, and on all ranks
they are in stages that run at about the same time, so that the ranks wait little for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import StagePlan
from autoplan.search.one_mesh import Judged
from autoplan.search.paths.peak_moments import Shape
from autoplan.search.plans import piece_edges, stage_sizes
from autoplan.search.ranges import Ranges, Segments
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY

MAX_TRIES = 12  # plans simulated until one fits


def balanced_stages(table: CostTable, *, recompute: str | None) -> tuple[StagePlan, ...]:
    """The plan whose slowest stage is as fast as can be, with the faster choice of each segment."""
    segments, n_pieces = Segments.of(table, recompute), len(piece_edges(table)) - 1
    sizes = stage_sizes(table.mesh, n_pieces=n_pieces)
    ranges = Ranges.of(table, max(own[-1] for own in sizes))
    span_s = ranges.total(segments.forward_s + segments.backward_s)
    starts = np.arange(n_pieces + 1)[:, None] - np.arange(1, ranges.width + 1)
    worst = np.append(0.0, np.full(n_pieces, INFINITY))
    chosen = []
    for own in sizes:
        columns = slice(own[0] - 1, own[-1])
        begins = starts[:, columns]
        before_s = np.where(begins >= 0, worst[np.maximum(begins, 0)], INFINITY)
        found = np.maximum(before_s, span_s[ranges.kind[:, columns]])
        chosen.append(found.argmin(axis=1) + own[0])
        worst = found.min(axis=1)
    counts = [n_pieces]
    for places in reversed(chosen[1:]):
        counts.append(counts[-1] - int(places[counts[-1]]))
    edges = ranges.edges[[0, *reversed(counts)]].tolist()
    return _recomputing(segments, list(pairwise(edges)), switched=set())


def recomputing_stages(
    segments: Segments, spans: Sequence[tuple[int, int]], counts: Sequence[int], *, with_easy: bool
) -> tuple[StagePlan, ...]:
    """These stages, each with so many segments recomputed, the first that can spare memory; the easy one or not."""
    is_easy = segments.easy_bytes > 0.0
    chosen = set(np.flatnonzero(is_easy).tolist()) if with_easy else set()
    for span, count in zip(spans, counts, strict=True):
        able = [index for index in range(*span) if segments.spared_bytes[index] > 0.0 and not is_easy[index]]
        chosen |= set(able[:count])
    return _recomputing(segments, list(spans), switched=chosen)


def _recomputing(segments: Segments, spans: list[tuple[int, int]], *, switched: set[int]) -> tuple[StagePlan, ...]:
    """Stages with the faster choice of each segment, but for those switched to the other one."""
    return tuple(
        StagePlan(start, stop, tuple(i for i in range(start, stop) if segments.is_again[i] != (i in switched)))
        for start, stop in spans
    )


def thrifty_plan(
    table: CostTable,
    shape: Shape,
    stages: tuple[StagePlan, ...],
    *,
    recompute: str | None,
    is_late: Callable[[], bool] = lambda: False,
) -> Judged | None:
    """A plan of these stages that fits and recomputes about as little as will do; None when none was found in time."""
    segments, spans = Segments.of(table, recompute), [(stage.start, stage.stop) for stage in stages]
    able = [tuple(_candidates(segments, spans, shape, rank)) for rank in range(table.mesh.pp)]
    needs = [_Need(len(own)) for own in able]
    for _ in range(MAX_TRIES):
        if is_late():
            return None
        switched = {index for own, need in zip(able, needs, strict=True) for index in own[: need.n_chosen]}
        plan = _recomputing(segments, spans, switched=switched)
        estimate = simulate(table, plan)
        if estimate.fits:
            return Judged(plan, estimate)
        helped = [need.raise_for(estimate.short_bytes(rank)) for rank, need in enumerate(needs)]
        if not all(helped):
            return None
    return None


def _candidates(segments: Segments, spans: list[tuple[int, int]], shape: Shape, rank: int) -> list[int]:
    """The segments of a rank that can spare memory: the easy one first, then those of stages with most in flight."""
    most = shape.counts[rank].in_flight.max(axis=0)
    places = np.argsort(-most, kind="stable")
    own = (range(*spans[shape.stages_of[rank][place]]) for place in places)
    able = [index for span in own for index in span if segments.spared_bytes[index] > 0.0]
    return sorted(able, key=lambda index: segments.easy_bytes[index] == 0.0)


@dataclass(slots=True)
class _Need:
    """How many segments a rank recomputes, of those that can, and what it lacked before."""

    n_able: int
    n_chosen: int = 0
    n_before: int = 0
    short_before: int = 0

    def raise_for(self, short_bytes: int) -> bool:
        """Recompute more if bytes are lacking, by what the last step spared; False when nothing is left."""
        if short_bytes <= 0:
            return True
        if self.n_chosen >= self.n_able:
            return False
        spared = self.short_before - short_bytes
        each = spared / (self.n_chosen - self.n_before) if self.n_chosen > self.n_before and spared > 0 else 0.0
        step = max(1, math.floor(short_bytes / each)) if each > 0.0 else max(1, self.n_chosen)
        self.n_before, self.short_before = self.n_chosen, short_bytes
        self.n_chosen = min(self.n_able, self.n_chosen + step)
        return True
