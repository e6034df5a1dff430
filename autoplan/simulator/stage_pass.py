"""One pass of a stage: how long it takes beside the gathers and reductions of its segments.

A compute stream and a communication stream, each first in, first out (`replay_pass`):

    communication   gather 0 | gather 1    | reduce 0 | gather 2 | reduce 1 |    reduce 2 -> left over
    compute                  | segment 0 | | segment 1      |    | segment 2   |

- The parameters of segment k+1 are gathered from the moment segment k starts to compute; the first gather is exposed.
  In a backward pass those are not that were kept.
- In pipelines, where they stay gathered, all gathers of a stage are queued long before its first pass, unless it is the
  first stage of the model (`replay_first_forward`). What is outside of blocks is gathered before the blocks of its
  stage: it is the group of the stage itself, which waits for it first.
- The gradients of segment k are reduced after its backward pass, in the last one of a step over replicas, too. What is
  left when the pass ends goes on beside what the rank does next; the optimizer waits for it.
- While both streams are busy both run slower, each by a factor of its own (`Overlap`).
- Tensor-parallel communication, recomputation and what launch adds to every pass are serial with compute; what it adds
  once is part of `optimizer_s`.
- A backward pass in two halves: the one for weights takes `weight_backward_s` and makes the gradients that are reduced,
  the one for inputs takes the rest. The first stage, whose inputs need no gradient, does all in the pass for weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, forward_s
from autoplan.overlap import Overlap
from autoplan.schedules import GRADIENT_KINDS

LEFT_OVER = "left over"  # from before; the rank knows of what


class SegmentPass(NamedTuple):
    """What one pass does in one segment: gather its parameters, compute, reduce its gradients."""

    busy_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


class Span(NamedTuple):
    """One communication of a pass, in seconds from its start.

    `place` is that of its segment in the work of the pass; None for what was left over from before.
    """

    what: str
    place: int | None
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How long one pass of one stage takes.

    Attributes:
        elapsed_s: `exposed_s` and the compute of all its segments.
        exposed_s: what communication adds.
        left_s: communication still to be done when the pass ends.
        spans: its communication, in order.
    """

    elapsed_s: float
    exposed_s: float
    left_s: float
    spans: tuple[Span, ...] = ()


def pass_work(
    table: CostTable, choices: Sequence[tuple[int, bool]], kind: str, *, is_edge: bool, is_first: bool
) -> tuple[SegmentPass, ...]:
    """What a pass of this kind does in each segment of a stage, in its order: a backward pass from the last on.

    `choices` are (kind, whether it is recomputed) of the stage's segments. The first forward and the last backward pass
    of a step are at its edge. `is_first`: of the first stage.
    """

    def work(cost: SegmentCost) -> SegmentPass:
        is_forward = kind == "F"
        busy_s = forward_s(cost) if is_forward else backward_part_s(cost, kind, is_first=is_first)
        gather_s = cost.gather_s if is_forward else cost.gather_back_s
        reduce_s = cost.last_reduce_s if is_edge else cost.reduce_s
        return SegmentPass(busy_s, gather_s if gathers else 0.0, reduce_s if reduces else 0.0)

    is_first_forward = is_edge and kind == "F"
    gathers = table.gathers_per_micro_batch or is_first_forward
    reduces = (table.reduces_per_micro_batch or is_edge) and kind in GRADIENT_KINDS
    works = {choice: work(table.costs[choice[0]][choice[1]]) for choice in set(choices)}
    ordered = tuple(works[choice] for choice in (choices if kind == "F" else reversed(choices)))
    if is_first or not (is_first_forward and table.gathers_at_start):
        return ordered
    return _outer_first(ordered, [table.costs[number][again].late_gradient_bytes > 0 for number, again in choices])


def _outer_first(work: tuple[SegmentPass, ...], is_outer: Sequence[bool]) -> tuple[SegmentPass, ...]:
    """The gathers of what is outside of blocks put before all others."""
    outer_s = sum(item.gather_s for item, outer in zip(work, is_outer, strict=True) if outer)
    blocks = [item._replace(gather_s=0.0) if outer else item for item, outer in zip(work, is_outer, strict=True)]
    return blocks[0]._replace(gather_s=outer_s + blocks[0].gather_s), *blocks[1:]


def replay_first_forward(
    work: tuple[SegmentPass, ...], *, overlap: Overlap, left_s: float, later_s: float
) -> PassTimes:
    """The times of the first forward pass of a stage whose gathers were queued before it.

    Behind them are `later_s` of those of the later stages of its rank; `left_s` of all these are still to be done.
    """
    busy_s = sum(item.busy_s for item in work)
    if left_s == 0.0:
        return PassTimes(busy_s, exposed_s=0.0, left_s=0.0)
    streams = _TwoStreams(overlap)
    rests_s, own_s = [], max(0.0, left_s - later_s)
    for item in reversed(work):
        rests_s.append(min(item.gather_s, own_s))
        own_s -= rests_s[-1]
    tickets = [streams.communicate("gather", place, rest_s) for place, rest_s in enumerate(reversed(rests_s))]
    streams.communicate(LEFT_OVER, None, min(left_s, later_s))
    for item, ticket in zip(work, tickets, strict=True):
        streams.wait_for(ticket)
        streams.compute(item.busy_s)
    return streams.times(busy_s)


def replay_pass(work: tuple[SegmentPass, ...], *, overlap: Overlap, left_s: float = 0.0) -> PassTimes:
    """The times of one pass through `work`, in this order; `left_s` is communication the rank still has to do."""
    busy_s = sum(item.busy_s for item in work)
    if left_s == 0.0 and not any(item.gather_s or item.reduce_s for item in work):
        return PassTimes(busy_s, exposed_s=0.0, left_s=0.0)
    streams = _TwoStreams(overlap)
    streams.communicate(LEFT_OVER, None, left_s)
    ticket = streams.communicate("gather", 0, work[0].gather_s)
    next_gathers_s = (*(item.gather_s for item in work[1:]), 0.0)
    for place, ((own_s, gather_s, reduce_s), next_gather_s) in enumerate(zip(work, next_gathers_s, strict=True)):
        if gather_s:
            streams.wait_for(ticket)
        if next_gather_s:
            ticket = streams.communicate("gather", place + 1, next_gather_s)
        streams.compute(own_s)
        if reduce_s:
            streams.communicate("reduce", place, reduce_s)
    return streams.times(busy_s)


class _TwoStreams:
    """The compute and the communication stream of one device during one pass."""

    __slots__ = (
        "_exposed_share", "_head_done_s", "_head_started_s", "_hidden_per_compute", "_n_issued", "_pending",
        "exposed_s", "now_s", "spans",
    )  # fmt: skip

    def __init__(self, overlap: Overlap) -> None:
        self._exposed_share, self._hidden_per_compute = overlap.communication_exposed, overlap.hidden_per_compute
        self.now_s = 0.0
        self.exposed_s = 0.0
        self.spans: list[Span] = []
        self._pending: deque[tuple[str, int | None, float]] = deque()  # what, place, seconds
        self._head_done_s = 0.0  # of the first pending communication
        self._head_started_s = 0.0
        self._n_issued = 0

    def communicate(self, what: str, place: int | None, seconds: float) -> int:
        """Queue a communication; returns its ticket."""
        if seconds <= 0.0:
            return 0
        if not self._pending:
            self._head_started_s = self.now_s
        self._pending.append((what, place, seconds))
        self._n_issued += 1
        return self._n_issued

    def wait_for(self, ticket: int) -> None:
        """Leave compute idle until the communication with this ticket is done."""
        while self._n_issued - len(self._pending) < ticket:
            rest_s = self._pending[0][2] - self._head_done_s
            self.exposed_s += rest_s
            self.now_s += rest_s
            self._end_head()

    def compute(self, busy_s: float) -> None:
        """Compute beside whatever communication is pending.

        p seconds of compute and the q = p r of communication done beside it take p + beta q; see `Overlap`.
        """
        while busy_s > 0.0 and self._pending:
            rest_s = self._pending[0][2] - self._head_done_s
            hidden_s = busy_s * self._hidden_per_compute
            is_outlasted = hidden_s < rest_s
            beside_s = busy_s if is_outlasted else rest_s / self._hidden_per_compute
            hidden_s = hidden_s if is_outlasted else rest_s
            busy_s -= beside_s
            self.exposed_s += hidden_s * self._exposed_share
            self.now_s += beside_s + hidden_s * self._exposed_share
            if is_outlasted:
                self._head_done_s += hidden_s
            else:
                self._end_head()
        self.now_s += busy_s

    def times(self, busy_s: float) -> PassTimes:
        """Of a pass that has computed so long and ends now."""
        left_s = self._left_s()
        return PassTimes(busy_s + self.exposed_s, self.exposed_s, left_s, tuple(self.spans))

    def _left_s(self) -> float:
        """Communication not done yet; what has begun is noted as a span."""
        if self._pending and self._head_done_s > 0.0:
            what, place, _ = self._pending[0]
            self.spans.append(Span(what, place, self._head_started_s, self.now_s))
        return sum(seconds for _, _, seconds in self._pending) - self._head_done_s

    def _end_head(self) -> None:
        """The first pending communication is done, and the next one begins."""
        what, place, _ = self._pending.popleft()
        self.spans.append(Span(what, place, self._head_started_s, self.now_s))
        self._head_done_s, self._head_started_s = 0.0, self.now_s
