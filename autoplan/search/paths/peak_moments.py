"""The moments of a schedule at which the memory of a rank may peak, whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autoplan.parallel_plan import Mesh
from autoplan.schedules import Schedule, ordered_schedule
from autoplan.simulator.rank_memory import GRADIENT_PEAKS, moments

Array = Any  # numpy.ndarray

FULL_ROUNDS = 3  # of pp micro-batches, after which a schedule repeats itself


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """A moment at which the memory of a rank may peak: a pass of `stage` runs.

    Attributes:
        in_flight: (stage, micro-batches in flight) of the rank's stages, the running one included.
        pending: (stage, micro-batches whose pass for inputs has begun and whose pass for weights is not done).
        accumulating: its stages of which a pass that is over has made gradients of weights, all of which are there: in
            the last pass that makes them, they are reduced one after the other.
        makes_gradients: whether the pass makes gradients of weights, now or at another such moment.
        follows: likewise, whether it is a forward pass after one of its stage that has made gradients.
    """

    stage: int
    in_flight: tuple[tuple[int, int], ...]
    pending: tuple[tuple[int, int], ...]
    accumulating: frozenset[int]
    makes_gradients: bool = False
    follows: bool = False


def moments_of(schedule: Schedule, rank: int) -> tuple[PeakMoment, ...]:
    """The moments of a rank that no other moment with the same running stage exceeds."""
    own = sorted({action.stage for action in schedule[rank]})
    found: dict[PeakMoment, tuple[bool, bool]] = {}
    for at in moments(schedule[rank]):
        assert at.running is not None
        running, makes_gradients = own[at.running], at.peak in GRADIENT_PEAKS
        begun = frozenset(stage for stage, has_begun in zip(own, at.accumulating, strict=True) if has_begun)
        in_flight, pending = (tuple(zip(own, counts, strict=True)) for counts in (at.in_flight, at.pending))
        moment = PeakMoment(running, in_flight, pending, begun - {running} if at.peak == "last" else begun)
        makes, follows = found.get(moment, (False, False))
        found[moment] = makes or makes_gradients, follows or at.peak == "following"
    all_moments = [replace(moment, makes_gradients=makes, follows=after) for moment, (makes, after) in found.items()]
    exceeded = _are_exceeded(all_moments)
    return tuple(moment for moment, is_exceeded in zip(all_moments, exceeded, strict=True) if not is_exceeded)


def _are_exceeded(moments: list[PeakMoment]) -> list[bool]:
    """Per moment, whether another one with the same running stage holds at least as much of everything."""
    counts = MomentCounts.of(moments)
    rows = np.column_stack([counts.accumulating, counts.in_flight, counts.pending])
    at_least = (rows[None, :, :] >= rows[:, None, :]).all(axis=2) & (counts.running[None, :] == counts.running[:, None])
    np.fill_diagonal(at_least, False)
    return [bool(value) for value in at_least.any(axis=1)]


@dataclass(frozen=True, slots=True)
class MomentCounts:
    """The moments of one rank as arrays (moment, stage of the rank); `running` is the place of the running stage."""

    running: Array
    makes_gradients: Array
    follows: Array
    in_flight: Array
    pending: Array
    accumulating: Array

    @classmethod
    def of(cls, moments: Sequence[PeakMoment]) -> MomentCounts:
        """The arrays of these moments."""
        own = [stage for stage, _ in moments[0].in_flight]
        return cls(
            running=np.array([own.index(moment.stage) for moment in moments]),
            makes_gradients=np.array([moment.makes_gradients for moment in moments]),
            follows=np.array([moment.follows for moment in moments]),
            in_flight=np.array([[count for _, count in moment.in_flight] for moment in moments]),
            pending=np.array([[count for _, count in moment.pending] for moment in moments]),
            accumulating=np.array([[stage in moment.accumulating for stage in own] for moment in moments], dtype=int),
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What a program needs to know of a schedule; the same for all meshes of equal pp, chunks and micro-batches.

    Attributes:
        ranks: of each stage.
        stages_of, moments, counts: per rank.
    """

    ranks: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    moments: tuple[tuple[PeakMoment, ...], ...]
    counts: tuple[MomentCounts, ...]


def shape_of(mesh: Mesh) -> Shape:
    """The shape of a mesh's schedule.

    Once a schedule is full, further rounds repeat its moments, but for gpipe: a short schedule has the same ones.
    """
    n_full = FULL_ROUNDS * mesh.pp + mesh.n_micro_batches % mesh.pp
    n_micro_batches = mesh.n_micro_batches if mesh.schedule == "gpipe" else min(mesh.n_micro_batches, n_full)
    return shape_of_schedule(mesh.schedule, mesh.pp, mesh.n_chunks, n_micro_batches)


@lru_cache(maxsize=1024)
def shape_of_schedule(schedule: str, pp: int, n_chunks: int, n_micro_batches: int) -> Shape:
    """The shape of a schedule, by all its actions."""
    ordered = ordered_schedule(schedule, n_ranks=pp, n_micro_batches=n_micro_batches, n_chunks=n_chunks)
    moments_of_ranks = tuple(moments_of(ordered.schedule, rank) for rank in range(pp))
    stages_of = tuple(tuple(s for s, owner in enumerate(ordered.ranks) if owner == rank) for rank in range(pp))
    return Shape(ordered.ranks, stages_of, moments_of_ranks, tuple(map(MomentCounts.of, moments_of_ranks)))
