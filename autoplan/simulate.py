"""The simulator: replays a plan and says how long a step takes and how much memory each rank needs.

It is the only judge of time and memory. It reads a CostTable and the stages, and knows nothing of the search. All
data- and tensor-parallel ranks of a stage are alike, so one rank per pipeline position is replayed.

**One pass of a stage** (`replay_pass`): a compute stream and a communication stream, each first in, first out.

    communication   gather 0 | gather 1    | reduce 0 | gather 2 | reduce 1 |    reduce 2 -> left over
    compute                  | segment 0 | | segment 1      |    | segment 2   |

- The parameters of segment k+1 are gathered from the moment segment k starts to compute; the first gather is exposed.
- The gradients of segment k are reduced after its backward pass. What is left when the pass ends goes on beside what
  the rank does next; the optimizer waits for it.
- While both streams are busy both run slower: t seconds of work on each take t x `overlap_slowdown`.
- Tensor-parallel communication, recomputation and launch time are serial with compute.
- A backward pass in two halves: the one for weights takes `weight_backward_s` and makes the gradients that are reduced,
  the one for inputs takes the rest. The first stage, whose inputs need no gradient, does all in the pass for weights.

**One step** (`_replay_step`): an action starts when its rank is free and its input has arrived. Sends do not block the
sender; a rank sends its activations one after the other, and so its gradients. Left out: that sends slow compute, and
gathers that begin before the input has arrived. With M micro-batches, on the slowest rank:

    step_s = M x (compute + recompute + tensor-parallel + launch)        `_breakdown`
           + exposed_dp    gathers and reductions beside which nothing is computed, and the slowdown by the others
           + exposed_pp    waiting for a transfer that is under way
           + bubble        waiting for another rank to compute
           + optimizer     optimizer_s of its segments, and per_step_s

The first and the last line of any rank are together a lower bound on the step time, under any schedule.

**Memory** (`_memory_steps`): the bytes of a rank while one action runs.

    state + gathered parameters + unreduced gradients + working bytes of the running stage's largest segment
          + (saved activations + received input) x micro-batches in flight, the running one included
          + gradients pending x micro-batches between their pass for inputs and their pass for weights

Left out: the gradient received by the one running backward pass, and activations whose send is not done.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, forward_s
from autoplan.errors import PlanMismatchError
from autoplan.parallel_plan import Breakdown, Estimate, StagePlan, TimelineEvent
from autoplan.schedules import (
    GRADIENT_KINDS,
    KEPT_SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    dependency,
    replay_order,
    stage_ranks,
)

# ---------------------------------------------------------------------------------------------- one pass of a stage


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What one pass does in one segment: gather its parameters, compute, reduce its gradients."""

    segment: int
    busy_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How long one pass of one stage takes.

    Attributes:
        elapsed_s: `exposed_s` and the compute of all its segments.
        exposed_s: what communication adds.
        left_s: communication still to be done when the pass ends.
        spans: (name, start, stop) of each communication, in seconds from the start of the pass.
    """

    elapsed_s: float
    exposed_s: float
    left_s: float
    spans: tuple[tuple[str, float, float], ...] = ()


class _TwoStreams:
    """The compute and the communication stream of one device during one pass."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.now_s = 0.0
        self.exposed_s = 0.0
        self.spans: list[tuple[str, float, float]] = []
        self._pending: deque[tuple[str, float]] = deque()
        self._head_done_s = 0.0  # of the first pending communication
        self._head_started_s = 0.0
        self._n_issued = 0

    def communicate(self, name: str, seconds: float) -> int:
        """Queue a communication; returns its ticket."""
        if seconds > 0.0:
            if not self._pending:
                self._head_started_s = self.now_s
            self._pending.append((name, seconds))
            self._n_issued += 1
        return self._n_issued if seconds > 0.0 else 0

    def wait_for(self, ticket: int) -> None:
        """Leave compute idle until the communication with this ticket is done."""
        while self._n_issued - len(self._pending) < ticket:
            rest_s = self._pending[0][1] - self._head_done_s
            self.exposed_s += rest_s
            self._communicate_for(rest_s, wall_s=rest_s)

    def compute(self, busy_s: float) -> None:
        """Compute beside whatever communication is pending."""
        while busy_s > 0.0 and self._pending:
            both_s = min(busy_s, self._pending[0][1] - self._head_done_s)
            busy_s -= both_s
            self.exposed_s += both_s * (self.slowdown - 1.0)
            self._communicate_for(both_s, wall_s=both_s * self.slowdown)
        self.now_s += busy_s

    def left_s(self) -> float:
        """Communication not done yet; what has begun is noted as a span."""
        if self._pending and self._head_done_s > 0.0:
            self.spans.append((self._pending[0][0], self._head_started_s, self.now_s))
        return sum(seconds for _, seconds in self._pending) - self._head_done_s

    def _communicate_for(self, done_s: float, *, wall_s: float) -> None:
        name, seconds = self._pending[0]
        self.now_s += wall_s
        if done_s < seconds - self._head_done_s:
            self._head_done_s += done_s
            return
        self._pending.popleft()
        self.spans.append((name, self._head_started_s, self.now_s))
        self._head_done_s, self._head_started_s = 0.0, self.now_s


def replay_pass(work: tuple[SegmentWork, ...], *, slowdown: float, left_s: float = 0.0) -> PassTimes:
    """The times of one pass through `work`, in this order; `left_s` is communication the rank still has to do."""
    busy_s = sum(item.busy_s for item in work)
    if left_s == 0.0 and not any(item.gather_s or item.reduce_s for item in work):
        return PassTimes(busy_s, exposed_s=0.0, left_s=0.0)
    streams = _TwoStreams(slowdown)
    streams.communicate("reduce", left_s)
    ticket = streams.communicate(f"gather {work[0].segment}", work[0].gather_s)
    for item, following in zip(work, (*work[1:], None), strict=True):
        streams.wait_for(ticket)
        if following is not None:
            ticket = streams.communicate(f"gather {following.segment}", following.gather_s)
        streams.compute(item.busy_s)
        streams.communicate(f"reduce {item.segment}", item.reduce_s)
    left_s = streams.left_s()
    return PassTimes(busy_s + streams.exposed_s, streams.exposed_s, left_s, tuple(streams.spans))


# ------------------------------------------------------------------------------------------------- stages as numbers


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage, ready to be replayed. Bytes are those of a running action, except `state_bytes`."""

    rank: int
    costs: tuple[SegmentCost, ...]
    passes: dict[tuple[str, bool], tuple[SegmentWork, ...]]  # by kind, and whether it is at the edge of the step
    send_activation_s: float
    send_gradient_s: float
    state_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    saved_bytes: int
    received_bytes: int
    pending_bytes: int
    working_bytes: int


def _stage(table: CostTable, stage: StagePlan, *, index: int, ranks: tuple[int, ...]) -> _Stage:
    recomputed = frozenset(stage.recomputed)
    priced = tuple(
        (segment, table.cost_of(segment, recomputed=segment in recomputed))
        for segment in range(stage.start, stage.stop)
    )
    costs = tuple(cost for _, cost in priced)
    return _Stage(
        rank=ranks[index],
        costs=costs,
        passes=_passes(table, priced),
        send_activation_s=_send_s(table, stage.stop, between=ranks[index : index + 2]),
        send_gradient_s=_send_s(table, stage.start, between=ranks[max(0, index - 1) : index + 1]),
        state_bytes=sum(cost.state_bytes for cost in costs),
        gathered_bytes=_held_bytes((cost.gathered_bytes for cost in costs), all_of_them=table.keeps_gathered),
        gradient_bytes=_held_bytes((cost.gradient_bytes for cost in costs), all_of_them=_accumulates(table)),
        saved_bytes=sum(cost.saved_bytes for cost in costs),
        received_bytes=table.cut_bytes[stage.start - 1] if stage.start > 0 else 0,
        pending_bytes=sum(cost.pending_bytes for cost in costs),
        working_bytes=max(cost.working_bytes for cost in costs),
    )


def _passes(
    table: CostTable, priced: tuple[tuple[int, SegmentCost], ...]
) -> dict[tuple[str, bool], tuple[SegmentWork, ...]]:
    """The work of each kind of pass of a stage; the first forward and the last backward pass are at the edge."""
    is_first = priced[0][0] == 0
    backward = tuple(reversed(priced))
    found = {}
    for is_edge in (False, True):
        gathers, reduces = table.gathers_per_micro_batch, table.reduces_per_micro_batch or is_edge
        found["F", is_edge] = tuple(_work(s, c, forward_s(c), gathers=gathers or is_edge) for s, c in priced)
        for kind, has_gradients in (("B", True), ("I", False), ("W", True)):
            busy = [backward_part_s(cost, kind, is_first=is_first) for _, cost in backward]
            found[kind, is_edge] = tuple(
                _work(segment, cost, busy_s, gathers=gathers, reduces=reduces and has_gradients)
                for (segment, cost), busy_s in zip(backward, busy, strict=True)
            )
    return found


def _work(segment: int, cost: SegmentCost, busy_s: float, *, gathers: bool, reduces: bool = False) -> SegmentWork:
    return SegmentWork(segment, busy_s, cost.gather_s if gathers else 0.0, cost.reduce_s if reduces else 0.0)


def _send_s(table: CostTable, segment: int, *, between: tuple[int, ...]) -> float:
    """Time of a transfer over the boundary before `segment`; 0 at both ends of the model and within a rank."""
    if len(set(between)) == 1:
        return 0.0
    cut_s = table.cut_s[segment - 1]
    assert cut_s is not None
    return cut_s


def _accumulates(table: CostTable) -> bool:
    """Whether whole gradients are kept from one micro-batch to the next."""
    return not table.reduces_per_micro_batch and table.mesh.n_micro_batches > 1


def _held_bytes(parts: Iterable[int], *, all_of_them: bool) -> int:
    """The sum, or the two neighbours that are largest together: the current segment's and the next one's."""
    values = tuple(parts)
    if all_of_them or len(values) == 1:
        return sum(values)
    return max(first + second for first, second in pairwise(values))


def _check_stages(table: CostTable, stages: tuple[StagePlan, ...]) -> None:
    mesh, n_segments = table.mesh, len(table.kinds)
    if len(stages) != mesh.n_stages or stages[-1].stop != n_segments:
        raise PlanMismatchError.of(
            "plan.stages",
            found=f"{len(stages)} stages that end at segment {stages[-1].stop if stages else 0}",
            expected=f"{mesh.n_stages} stages (pp {mesh.pp} x n_chunks {mesh.n_chunks}) that end at {n_segments}",
            fix="use a plan that was made for this model and mesh",
        )
    for index, stage in enumerate(stages):
        start = stages[index - 1].stop if index > 0 else 0
        if stage.start != start or stage.stop <= start or not set(stage.recomputed) <= set(range(start, stage.stop)):
            raise PlanMismatchError.of(
                f"plan.stages[{index}]",
                found=f"segments {stage.start} to {stage.stop}, recomputed {stage.recomputed}",
                expected=f"one segment or more from {start} on, recomputed segments among them",
                fix="make the stages follow one another",
            )
        if index > 0 and table.cut_s[start - 1] is None:
            raise PlanMismatchError.of(
                f"plan.stages[{index}].start",
                found=start,
                expected="a boundary at which the pipeline can be cut",
                fix="move the cut to another segment",
            )


# ---------------------------------------------------------------------------------------------------------- one step


@dataclass(frozen=True, slots=True)
class _Run:
    """An action with its times; its result leaves at `sent_s` and is there at `arrived_s`."""

    action: Action
    rank: int
    start_s: float
    stop_s: float
    times: PassTimes
    sent_s: float
    arrived_s: float


@dataclass(slots=True)
class _RankClock:
    """Where a rank stands in the replay, and what it has waited for so far."""

    free_s: float = 0.0
    left_s: float = 0.0  # communication not done at `free_s`
    activation_link_free_s: float = 0.0
    gradient_link_free_s: float = 0.0
    exposed_dp_s: float = 0.0
    exposed_pp_s: float = 0.0
    bubble_s: float = 0.0


def _replay_step(
    table: CostTable, stages: tuple[_Stage, ...], *, order: tuple[Action, ...]
) -> tuple[tuple[_RankClock, ...], tuple[_Run, ...]]:
    clocks = tuple(_RankClock() for _ in range(table.mesh.pp))
    runs: dict[Action, _Run] = {}
    n_runs: Counter[tuple[int, str]] = Counter()
    known: dict[tuple[int, str, bool, float], PassTimes] = {}  # most passes are alike and are replayed once
    for action in order:
        stage = stages[action.stage]
        clock = clocks[stage.rank]
        needed = dependency(action, len(stages))
        start_s = _wait(clock, None if needed is None else runs[needed], rank=stage.rank)
        n_runs[action.stage, action.kind] += 1
        is_edge = n_runs[action.stage, action.kind] == (1 if action.kind == "F" else table.mesh.n_micro_batches)
        key = (action.stage, action.kind, is_edge, clock.left_s)
        if key not in known:
            work = stage.passes[action.kind, is_edge]
            known[key] = replay_pass(work, slowdown=table.overlap_slowdown, left_s=clock.left_s)
        runs[action] = _run(action, stage, clock=clock, start_s=start_s, times=known[key])
    for clock in clocks:
        clock.exposed_dp_s += clock.left_s
    return clocks, tuple(runs.values())


def _wait(clock: _RankClock, needed: _Run | None, *, rank: int) -> float:
    """When the rank starts its next action; books what it waits for and lets pending communication go on.

    What it did itself is there.
    """
    if needed is None or needed.rank == rank:
        return clock.free_s
    start_s = max(clock.free_s, needed.arrived_s)
    if start_s > clock.free_s:
        idle_s = start_s - clock.free_s
        transfer_s = min(idle_s, needed.arrived_s - needed.stop_s)
        clock.exposed_pp_s += transfer_s
        clock.bubble_s += idle_s - transfer_s
        clock.left_s = max(0.0, clock.left_s - idle_s)
    return start_s


def _run(action: Action, stage: _Stage, *, clock: _RankClock, start_s: float, times: PassTimes) -> _Run:
    """Run the action on its rank's clock and send its result, if another rank needs it."""
    stop_s = start_s + times.elapsed_s
    clock.free_s, clock.left_s = stop_s, times.left_s
    clock.exposed_dp_s += times.exposed_s
    send_s = {"F": stage.send_activation_s, "W": 0.0}.get(action.kind, stage.send_gradient_s)
    if send_s == 0.0:
        return _Run(action, stage.rank, start_s, stop_s, times, sent_s=stop_s, arrived_s=stop_s)
    if action.kind == "F":
        sent_s = max(stop_s, clock.activation_link_free_s)
        arrived_s = clock.activation_link_free_s = sent_s + stage.send_activation_s
    else:
        sent_s = max(stop_s, clock.gradient_link_free_s)
        arrived_s = clock.gradient_link_free_s = sent_s + stage.send_gradient_s
    return _Run(action, stage.rank, start_s, stop_s, times, sent_s, arrived_s)


def _breakdown(table: CostTable, stages: tuple[_Stage, ...], *, clock: _RankClock) -> Breakdown:
    """Where the time of one rank, which owns `stages`, goes."""
    costs = tuple(cost for stage in stages for cost in stage.costs)
    n_micro_batches = table.mesh.n_micro_batches
    return Breakdown(
        compute_s=n_micro_batches * sum(cost.forward_s + cost.backward_s for cost in costs),
        recompute_s=n_micro_batches * sum(cost.recompute_s for cost in costs),
        exposed_tp_s=n_micro_batches * sum(cost.tp_forward_s + cost.tp_backward_s for cost in costs),
        exposed_dp_s=clock.exposed_dp_s,
        exposed_pp_s=clock.exposed_pp_s,
        bubble_s=clock.bubble_s,
        optimizer_s=table.per_step_s + sum(cost.optimizer_s for cost in costs),
        launch_s=n_micro_batches * sum(cost.launch_forward_s + cost.launch_backward_s for cost in costs),
    )


# ------------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True, slots=True)
class _Memory:
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
        return (
            self.state
            + self.gathered_parameters
            + self.unreduced_gradients
            + self.saved_activations
            + self.received_inputs
            + self.pending_gradients
            + self.working
        )


def _memory_steps(
    table: CostTable, stages: tuple[_Stage, ...], *, actions: tuple[Action, ...]
) -> tuple[tuple[_Memory, _Memory], ...]:
    """Memory of one rank while each of its actions runs, and right after it.

    Parameters that stay gathered are counted all step; whole gradients that accumulate, from the first backward
    pass of their stage.
    """
    own = {action.stage: stages[action.stage] for action in actions}
    state = sum(stage.state_bytes for stage in own.values())
    kept = sum(stage.gathered_bytes for stage in own.values()) if table.keeps_gathered else 0
    accumulating: set[int] = set()
    accumulated = saved = received = pending = 0
    steps = []
    for action in actions:
        stage, makes_gradients = own[action.stage], action.kind in GRADIENT_KINDS
        if action.kind == "F":
            saved += stage.saved_bytes
            received += stage.received_bytes
        elif action.kind == "I":
            pending += stage.pending_bytes
        elif _accumulates(table) and action.stage not in accumulating:
            accumulating.add(action.stage)
            accumulated += stage.gradient_bytes
        gathered = kept if table.keeps_gathered else stage.gathered_bytes
        unreduced = stage.gradient_bytes if makes_gradients and not _accumulates(table) else accumulated
        running = _Memory(state, gathered, unreduced, saved, received, pending, stage.working_bytes)
        if makes_gradients:
            saved -= stage.saved_bytes
            received -= stage.received_bytes
            pending -= stage.pending_bytes if action.kind == "W" else 0
        steps.append((running, _Memory(state, kept, accumulated, saved, received, pending, 0)))
    return tuple(steps)


def _memory_parts(table: CostTable, memory: _Memory) -> tuple[tuple[str, int], ...]:
    parts = tuple((field.name, getattr(memory, field.name)) for field in fields(memory))
    rounding = math.ceil(memory.total_bytes * table.reserved_ratio) - memory.total_bytes
    return (*parts, ("fragmentation", rounding), ("fixed", table.reserved_fixed_bytes))


# --------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class _Replay:
    """A whole step, replayed."""

    stages: tuple[_Stage, ...]
    schedule: Schedule
    clocks: tuple[_RankClock, ...]
    runs: tuple[_Run, ...]

    def stages_of(self, rank: int) -> tuple[_Stage, ...]:
        return tuple(stage for stage in self.stages if stage.rank == rank)


@lru_cache(maxsize=KEPT_SCHEDULES)
def _schedule_of(name: str, n_ranks: int, n_micro_batches: int, n_chunks: int) -> tuple[Schedule, tuple[Action, ...]]:
    """The schedule and one order in which all its actions can run."""
    schedule = build_schedule(name, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_chunks=n_chunks)
    return schedule, replay_order(schedule, n_stages=n_ranks * n_chunks)


def _replay(table: CostTable, stages: tuple[StagePlan, ...]) -> _Replay:
    _check_stages(table, stages)
    mesh = table.mesh
    schedule, order = _schedule_of(mesh.schedule, mesh.pp, mesh.n_micro_batches, mesh.n_chunks)
    ranks = stage_ranks(schedule)
    priced = tuple(_stage(table, stage, index=index, ranks=ranks) for index, stage in enumerate(stages))
    clocks, runs = _replay_step(table, priced, order=order)
    return _Replay(priced, schedule, clocks, runs)


def simulate(table: CostTable, stages: tuple[StagePlan, ...], *, with_timeline: bool = False) -> Estimate:
    """The estimate of a plan: `stages` on the mesh of `table`.

    The breakdown is that of the slowest rank (of the first, if several are equally slow).

    Raises: PlanMismatchError if the stages do not cut the segments of the table into `mesh.n_stages` parts;
    InputError if the schedule does not exist for the mesh.
    """
    replay = _replay(table, stages)
    breakdowns = tuple(
        _breakdown(table, replay.stages_of(rank), clock=clock) for rank, clock in enumerate(replay.clocks)
    )
    slowest = max(breakdowns, key=lambda breakdown: breakdown.total_s)
    peaks = tuple(
        max((running for running, _ in _memory_steps(table, replay.stages, actions=actions)), key=_total_bytes)
        for actions in replay.schedule
    )
    parts = tuple(_memory_parts(table, peak) for peak in peaks)
    return Estimate(
        step_s=slowest.total_s,
        breakdown=slowest,
        allocated_bytes=tuple(peak.total_bytes for peak in peaks),
        reserved_bytes=tuple(sum(n_bytes for _, n_bytes in rank_parts) for rank_parts in parts),
        memory_parts_bytes=parts,
        memory_limit_bytes=table.memory_limit_bytes,
        segment_sources=tuple(table.sources[kind] for kind in table.kinds) if table.sources else (),
        timeline=_timeline(replay, optimizer_s=tuple(b.optimizer_s for b in breakdowns)) if with_timeline else (),
    )


def _total_bytes(memory: _Memory) -> int:
    return memory.total_bytes


def memory_over_time(table: CostTable, stages: tuple[StagePlan, ...]) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Per pipeline rank, (time, allocated bytes from then on), in order of time; raises what `simulate` does."""
    replay = _replay(table, stages)
    curves = []
    for rank, actions in enumerate(replay.schedule):
        runs = (run for run in replay.runs if run.rank == rank)
        steps = _memory_steps(table, replay.stages, actions=actions)
        curves.append(
            tuple(
                point
                for run, (running, after) in zip(runs, steps, strict=True)
                for point in ((run.start_s, running.total_bytes), (run.stop_s, after.total_bytes))
            )
        )
    return tuple(curves)


def _timeline(replay: _Replay, *, optimizer_s: tuple[float, ...]) -> tuple[TimelineEvent, ...]:
    events = []
    for rank, rank_optimizer_s in enumerate(optimizer_s):
        runs = tuple(run for run in replay.runs if run.rank == rank)
        for run, following in zip(runs, (*runs[1:], None), strict=True):
            events.extend(_events_of(run, until_s=math.inf if following is None else following.start_s))
        done_s = runs[-1].stop_s + runs[-1].times.left_s
        events.append(TimelineEvent(rank, rank, "compute", "optimizer", done_s, done_s + rank_optimizer_s))
    return tuple(events)


def _events_of(run: _Run, *, until_s: float) -> list[TimelineEvent]:
    """The boxes of one action: itself, its communication, what is left of that up to `until_s`, its transfer."""
    stage, name = run.action.stage, str(run.action)
    events = [TimelineEvent(run.rank, stage, "compute", name, run.start_s, run.stop_s)]
    events.extend(
        TimelineEvent(run.rank, stage, "communication", span, run.start_s + start_s, run.start_s + stop_s)
        for span, start_s, stop_s in run.times.spans
    )
    rest_stop_s = min(run.stop_s + run.times.left_s, until_s)
    if rest_stop_s > run.stop_s:
        events.append(TimelineEvent(run.rank, stage, "communication", "reduce", run.stop_s, rest_stop_s))
    if run.arrived_s > run.sent_s:
        stream = "send activations" if run.action.kind == "F" else "send gradients"
        events.append(TimelineEvent(run.rank, stage, stream, name, run.sent_s, run.arrived_s))
    return events
