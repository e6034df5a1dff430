"""The memory of one pipeline rank: the bytes of a rank while one action runs.

    state + workspaces + batches + message buffers + parameters that stay gathered
          + gradients of earlier passes + saved activations of the other micro-batches in flight + sent outputs of all
          + pending gradients x micro-batches between their pass for inputs and their pass for weights
          + the peak of the running pass: one of its segments runs, with what that pass has made so far

**The peak of a pass** (`_passes`) is the largest moment of its segments. While segment s runs backward there are

    saved activations of segments up to s, working bytes of s, parameters of s and of the one gathered ahead
    gradients of the segments behind s: in the first pass of the step only these, later all of them
    gradients, as computed, of what is outside of blocks, from its own backward to the end of the pass, which reduces it
    likewise of a block that is called several times, from the last of its calls to the first
    the input of the last reduction, until the next one begins

so neither the gradients nor, after the head, the activations of all segments meet the largest working bytes. At the
end of a pass no activations are left, but what is outside of blocks is reduced. All of this is the order in which
`fully_shard` takes and frees references; the caching allocator counts by these, not by when kernels are done.

Parameters whose gathers begin with the step (`CostTable.gathers_at_start`) lie in the buffers that receive them until
the first forward pass of their stage, in which each segment copies its own out of its buffer before it computes: there
they are twice.

The numbers of micro-batches are the schedule's (`moments`), the bytes the plan's (`stage_bytes`); `memories` puts them
together, for a peak only at the `largest_moments`. A forward pass is taken to need the working bytes of the backward
pass. Left out: that the halves of a split backward pass free activations one by one, and that a rank with several
stages has the input of the last reduction of each, not only of the one that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import ge, mul
from typing import NamedTuple

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.parallel_plan import OUTSIDE_ALLOCATOR
from autoplan.schedules import GRADIENT_KINDS, KEPT_SCHEDULES, Action, OrderedSchedule, splits_backward

GRADIENT_PEAKS = ("first", "later", "last")  # of `StageBytes`, those of passes that make gradients of weights


class Moment(NamedTuple):
    """A moment of a rank. Micro-batches are counted per stage of the rank, the one of the running action included.

    Attributes:
        running: place of the running stage among those of the rank; None between two actions.
        peak: which of the peaks of `StageBytes` its pass has; "" between two.
        accumulating: whether a pass that is over has made gradients of weights.
        in_flight: micro-batches from their forward pass to the gradients of weights.
        pending: micro-batches from their pass for inputs to that for weights.
    """

    running: int | None
    peak: str
    accumulating: tuple[bool, ...]
    in_flight: tuple[int, ...]
    pending: tuple[int, ...]

    def exceeds(self, other: Moment) -> bool:
        """Whether at least as much is held as in another moment with all else alike, under any plan."""
        return all(map(ge, (*self.in_flight, *self.pending), (*other.in_flight, *other.pending)))


def moments(actions: Sequence[Action]) -> Iterator[Moment]:
    """The moments of a rank, one while each of its actions runs."""
    place = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    in_flight, pending, accumulating = [0] * len(place), [0] * len(place), [False] * len(place)
    n_left = [0] * len(place)
    for stage, kind, _ in actions:
        n_left[place[stage]] += kind in GRADIENT_KINDS
    for stage, kind, _ in actions:
        running, makes_gradients = place[stage], kind in GRADIENT_KINDS
        in_flight[running] += kind == "F"
        pending[running] += kind == "I"
        n_left[running] -= makes_gradients
        is_first = not accumulating[running]
        peak = _peak_of(kind, is_first=is_first, n_in_flight=in_flight[running], n_left=n_left[running])
        yield Moment(running, peak, tuple(accumulating), tuple(in_flight), tuple(pending))
        if makes_gradients:
            in_flight[running] -= 1
            pending[running] -= kind == "W"
            accumulating[running] = True


def _peak_of(kind: str, *, is_first: bool, n_in_flight: int, n_left: int) -> str:
    """Of a running action; `n_left`: of those behind it that make gradients; `is_first`: none of these is over."""
    if kind in GRADIENT_KINDS:
        if is_first:
            return "first"
        return "later" if n_left else "last"
    if kind == "F" and not is_first:
        return "following"
    return "opening" if kind == "F" and n_in_flight == 1 else "forward"


@lru_cache(maxsize=KEPT_SCHEDULES)
def largest_moments(ordered: OrderedSchedule) -> tuple[tuple[Moment, ...], ...]:
    """Per rank, moments of which one is its peak, whatever the plan."""
    return tuple(tuple(_largest_of(moments(actions))) for actions in ordered.schedule)


def _largest_of(found: Iterable[Moment]) -> Iterable[Moment]:
    """In order, without those that the last one before them or the next one exceeds, with all else alike."""
    latest: dict[tuple[int | None, str, tuple[bool, ...]], Moment] = {}
    kept: dict[Moment, None] = {}
    for moment in found:
        alike = moment.running, moment.peak, moment.accumulating
        before = latest.get(alike)
        if before is not None and before.exceeds(moment):
            continue
        if before is not None and moment.exceeds(before):
            del kept[before]
        latest[alike] = moment
        kept[moment] = None
    return kept


def moment_after(moment: Moment) -> Moment:
    """The moment right after the action that runs in `moment`."""
    in_flight, pending, accumulating = list(moment.in_flight), list(moment.pending), list(moment.accumulating)
    if moment.peak in GRADIENT_PEAKS and moment.running is not None:
        in_flight[moment.running] -= 1
        pending[moment.running] = max(0, pending[moment.running] - 1)  # none is pending where B makes them
        accumulating[moment.running] = True
    return Moment(None, "", tuple(accumulating), tuple(in_flight), tuple(pending))


class PassPeak(NamedTuple):
    """What a running pass holds at its peak; `gradients` beyond those that earlier passes left, or less than these."""

    gathered: int
    gradients: int
    saved: int
    working: int


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage.

    Attributes:
        state, buffers: all step. `buffers` are those for what is sent and received over the cuts.
        gathered: of parameters that stay gathered.
        gradients: of all its segments, after a pass.
        saved, sent, pending: per micro-batch.
        opening, forward, following: of the first forward pass, of another one, and of one after a backward pass.
        first, later, last: of the first, another and the last backward pass.
    """

    state: int
    buffers: int
    gathered: int
    gradients: int
    saved: int
    sent: int
    pending: int
    opening: PassPeak
    forward: PassPeak
    following: PassPeak
    first: PassPeak
    later: PassPeak
    last: PassPeak


def stage_bytes(
    table: CostTable, costs: Sequence[SegmentCost], *, is_first: bool, message_in: int, message_out: int
) -> StageBytes:
    """The bytes of a stage of these segments, the first one or not; `message_in`, `message_out`: of a micro-batch."""
    n_micro_batches = table.mesh.n_micro_batches
    forward, first, later, last = _passes(table, costs)
    opening = _largest([forward, *_copies(costs)]) if table.gathers_at_start and not is_first else forward
    return StageBytes(
        state=sum(cost.state_bytes for cost in costs),
        buffers=n_micro_batches * (message_in + message_out) + message_in,  # the last gradient is still being sent
        gathered=sum(cost.gathered_bytes for cost in costs) if table.keeps_gathered else 0,
        gradients=sum(cost.gradient_bytes for cost in costs),
        saved=sum(cost.saved_bytes for cost in costs),
        sent=message_out,
        pending=sum(cost.pending_bytes for cost in costs),
        opening=opening,
        forward=forward,
        following=_largest([forward, _with_last_reduction(table, costs)]),
        first=first,
        later=later,
        last=last,
    )


def _copies(costs: Sequence[SegmentCost]) -> Iterator[PassPeak]:
    """Per segment whose parameters were received in a buffer, the moment when it copies them out of it."""
    saved = 0
    for cost in costs:
        if cost.gather_s:
            yield PassPeak(cost.gathered_bytes, 0, saved, 0)
        saved += cost.saved_bytes


def _with_last_reduction(table: CostTable, costs: Sequence[SegmentCost]) -> PassPeak:
    """The end of a forward pass, before the loss: what the micro-batch before reduced last is freed there.

    That is outside of blocks. What the loss takes while it runs comes later.
    """
    reducing = sum(cost.reducing_bytes for cost in costs if cost.late_gradient_bytes)
    return PassPeak(0, reducing if table.reduces_per_micro_batch else 0, sum(cost.saved_bytes for cost in costs), 0)


class _Behind(NamedTuple):
    """What the segments behind one have left when it runs backward.

    Attributes:
        made, reduced: gradients of blocks, before and after their reduction.
        late: gradients, as computed, of what is reduced at the end of the pass, or waits for another call of its block.
        reducing: the input of the last reduction.
    """

    made: int = 0
    reduced: int = 0
    late: int = 0
    reducing: int = 0


def _behind(costs: Sequence[SegmentCost]) -> list[_Behind]:
    """What the segments have left at the end of a pass, and then those behind each one."""
    found = [_Behind()]
    for cost in reversed(costs):
        made, reduced, late, reducing = found[-1]
        late += cost.waiting_bytes
        if cost.late_gradient_bytes:
            late += cost.late_gradient_bytes
        else:
            made, reduced = made + cost.gradient_bytes, reduced + cost.reduced_bytes
            reducing = cost.reducing_bytes or reducing
        found.append(_Behind(made, reduced, late, reducing))
    return found[::-1]


def _passes(table: CostTable, costs: Sequence[SegmentCost]) -> tuple[PassPeak, PassPeak, PassPeak, PassPeak]:
    """The peaks of a forward pass, and of the first, another and the last backward pass of the step.

    The only pass is the first one. What was reduced last in a pass is freed before the next backward pass.
    """
    n_micro_batches, reduces = table.mesh.n_micro_batches, table.reduces_per_micro_batch
    outer = [cost for cost in costs if cost.late_gradient_bytes]
    saved = list(accumulate(cost.saved_bytes for cost in costs))
    if splits_backward(table.mesh.schedule):
        saved = [saved[-1]] * len(saved)
    forward, first, later, last = [], [], [], []
    ended, *behind = _behind(costs)
    for cost, before, kept, left in zip(costs, (None, *costs[:-1]), saved, behind, strict=True):
        received = ahead = 0  # parameters where they are received, besides where they are used
        if not table.keeps_gathered:
            received, ahead = cost.gathered_bytes, 0 if before is None else before.gathered_bytes
        gathered, working = received, cost.working_bytes
        forward.append(PassPeak(gathered + received, 0, kept, working))
        made = left.made + left.late + (left.reducing if reduces or n_micro_batches == 1 else 0)
        first.append(PassPeak(gathered + ahead, made, kept, working))
        later.append(PassPeak(gathered + ahead, left.late + (left.reducing if reduces else 0), kept, working))
        freed = left.made - left.reduced if table.accumulates else 0
        last.append(PassPeak(gathered + ahead, left.late + left.reducing - freed, kept, working))
    for passes, gradients in zip((first, later, last), _ends(table, ended, outer), strict=True):
        passes.append(PassPeak(0, gradients, 0, 0))
    return _largest(forward), _largest(first), _largest(later), _largest(last)


def _ends(table: CostTable, ended: _Behind, outer: Sequence[SegmentCost]) -> tuple[int, int, int]:
    """Gradients at the end of the first, another and the last pass, beyond those of earlier passes.

    There the gradients of what is outside of blocks are reduced, or added to those of earlier micro-batches.
    """
    gradients = sum(cost.gradient_bytes for cost in outer)
    reducing, reduced = (sum(getattr(c, name) for c in outer) for name in ("reducing_bytes", "reduced_bytes"))
    if table.accumulates:
        return ended.made + gradients + ended.late, ended.late, ended.reduced - ended.made + reducing
    reduction = reducing + max(ended.late, reduced)
    return ended.made + reduction, reduction, reduction


def _largest(passes: Sequence[PassPeak]) -> PassPeak:
    return max(passes, key=sum)


class Memory(NamedTuple):
    """Bytes of one rank at one moment, by part."""

    state: int
    workspaces: int
    batches: int
    gathered_parameters: int
    gradients: int
    saved_activations: int
    messages: int
    pending_gradients: int
    working: int

    @property
    def total_bytes(self) -> int:
        """What is allocated."""
        return sum(self)


NO_PASS = PassPeak(0, 0, 0, 0)


def memories(table: CostTable, stages: Sequence[StageBytes], *, at: Iterable[Moment]) -> Iterator[Memory]:
    """The memory of the rank that has these stages, at each of these moments."""
    state = sum(stage.state for stage in stages)
    kept = sum(stage.gathered for stage in stages)
    buffers = sum(stage.buffers for stage in stages)
    gradients, saved, messages, pending = zip(
        *((stage.gradients, stage.saved, stage.sent, stage.pending) for stage in stages), strict=True
    )
    for moment in at:
        peak, own_saved = NO_PASS, 0
        if moment.running is not None:
            running = stages[moment.running]
            peak, own_saved = getattr(running, moment.peak), running.saved
        yield Memory(
            state=state,
            workspaces=table.workspace_bytes,
            batches=table.batch_bytes,
            gathered_parameters=kept + peak.gathered,
            gradients=sum(map(mul, moment.accumulating, gradients)) + peak.gradients,
            saved_activations=sum(map(mul, moment.in_flight, saved)) - own_saved + peak.saved,
            messages=buffers + sum(map(mul, moment.in_flight, messages)),
            pending_gradients=sum(map(mul, moment.pending, pending)),
            working=peak.working,
        )


def needed_parts(table: CostTable, memory: Memory) -> tuple[tuple[str, int], ...]:
    """What the rank needs of its device, by part: its memory, and what the allocator and the device add."""
    rounding = math.ceil(memory.total_bytes * table.reserved_ratio) - memory.total_bytes
    return (
        *zip(Memory._fields, memory, strict=True),
        ("fragmentation", rounding),
        (OUTSIDE_ALLOCATOR, table.reserved_fixed_bytes),
    )
