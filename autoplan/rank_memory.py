"""The memory of one pipeline rank: the bytes of a rank while one action runs.

    state + gathered parameters + unreduced gradients + working bytes of the running stage's largest segment
          + (saved activations + received input) x micro-batches in flight, the running one included
          + gradients pending x micro-batches between their pass for inputs and their pass for weights

The numbers of micro-batches are the schedule's (`moments`), the bytes the plan's (`stage_bytes`); `memories` puts them
together. Parameters that stay gathered are counted all step; whole gradients that accumulate, from the first backward
pass of their stage. Left out: the gradient received by the one running backward pass, and activations whose send is
not done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.schedules import GRADIENT_KINDS, Action


class Moment(NamedTuple):
    """A moment of a rank. Micro-batches are counted per stage of the rank, the one of the running action included.

    Attributes:
        running: place of the running stage among those of the rank; None between two actions.
        makes_gradients: the running action does, of weights.
        in_flight: micro-batches from their forward pass to the gradients of weights.
        pending: micro-batches from their pass for inputs to that for weights.
        accumulating: whether the stage has begun to make gradients of weights.
    """

    running: int | None
    makes_gradients: bool
    in_flight: tuple[int, ...]
    pending: tuple[int, ...]
    accumulating: tuple[bool, ...]


def moments(actions: Sequence[Action]) -> Iterator[Moment]:
    """The moments of a rank, one while each of its actions runs."""
    place = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    in_flight, pending, accumulating = [0] * len(place), [0] * len(place), [False] * len(place)
    for stage, kind, _ in actions:
        running, makes_gradients = place[stage], kind in GRADIENT_KINDS
        if kind == "F":
            in_flight[running] += 1
        elif kind == "I":
            pending[running] += 1
        else:
            accumulating[running] = True
        yield Moment(running, makes_gradients, tuple(in_flight), tuple(pending), tuple(accumulating))
        if makes_gradients:
            in_flight[running] -= 1
            pending[running] -= kind == "W"


def moment_after(moment: Moment) -> Moment:
    """The moment right after the action that runs in `moment`."""
    in_flight, pending = list(moment.in_flight), list(moment.pending)
    if moment.makes_gradients and moment.running is not None:
        in_flight[moment.running] -= 1
        pending[moment.running] = max(0, pending[moment.running] - 1)  # none is pending where B makes them
    return Moment(None, False, tuple(in_flight), tuple(pending), moment.accumulating)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage: saved, received and pending ones per micro-batch, all but `state` only at times."""

    state: int
    gathered: int
    gradients: int
    saved: int
    received: int
    pending: int
    working: int


def stage_bytes(table: CostTable, costs: Sequence[SegmentCost], *, start: int) -> StageBytes:
    """The bytes of a stage of these segments, which begins with segment number `start`."""
    return StageBytes(
        state=sum(cost.state_bytes for cost in costs),
        gathered=_held_bytes([cost.gathered_bytes for cost in costs], all_of_them=table.keeps_gathered),
        gradients=_held_bytes([cost.gradient_bytes for cost in costs], all_of_them=table.accumulates),
        saved=sum(cost.saved_bytes for cost in costs),
        received=table.cut_bytes[start - 1] if start > 0 else 0,
        pending=sum(cost.pending_bytes for cost in costs),
        working=max(cost.working_bytes for cost in costs),
    )


def _held_bytes(parts: Sequence[int], *, all_of_them: bool) -> int:
    """The sum, or the two neighbours that are largest together: the current segment's and the next one's."""
    if all_of_them or len(parts) == 1:
        return sum(parts)
    return max(first + second for first, second in pairwise(parts))


class Memory(NamedTuple):
    """Bytes of one rank at one moment, by part."""

    state: int
    gathered_parameters: int
    unreduced_gradients: int
    saved_activations: int
    received_inputs: int
    pending_gradients: int
    working: int

    @property
    def total_bytes(self) -> int:
        """What is allocated."""
        return sum(self)


def memories(table: CostTable, stages: Sequence[StageBytes], *, at: Iterable[Moment]) -> Iterator[Memory]:
    """The memory of the rank that has these stages, at each of these moments."""
    accumulates = table.accumulates
    state = sum(stage.state for stage in stages)
    kept = sum(stage.gathered for stage in stages) if table.keeps_gathered else 0
    gradients, saved, received, pending = zip(
        *((stage.gradients, stage.saved, stage.received, stage.pending) for stage in stages), strict=True
    )
    for moment in at:
        stage = None if moment.running is None else stages[moment.running]
        unreduced = sum(map(mul, moment.accumulating, gradients)) if accumulates else 0
        if stage is not None and moment.makes_gradients and not accumulates:
            unreduced = stage.gradients
        yield Memory(
            state=state,
            gathered_parameters=kept if stage is None or table.keeps_gathered else stage.gathered,
            unreduced_gradients=unreduced,
            saved_activations=sum(map(mul, moment.in_flight, saved)),
            received_inputs=sum(map(mul, moment.in_flight, received)),
            pending_gradients=sum(map(mul, moment.pending, pending)),
            working=0 if stage is None else stage.working,
        )


def reserved_parts(table: CostTable, memory: Memory) -> tuple[tuple[str, int], ...]:
    """What the rank reserves, by part: its memory, and what the allocator and the device add."""
    rounding = math.ceil(memory.total_bytes * table.reserved_ratio) - memory.total_bytes
    return (
        *zip(Memory._fields, memory, strict=True),
        ("fragmentation", rounding),
        ("fixed", table.reserved_fixed_bytes),
    )
