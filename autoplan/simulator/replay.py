"""A plan replayed action by action, on the ranks of a pipeline.

All data- and tensor-parallel ranks of a stage are alike, so one rank per pipeline position is replayed, by the figures
of its own devices (`CostTable.at_rank`). One pass of a stage is replayed by `stage_pass`.

An action starts when its rank is free and its input has arrived. That leaves when it is computed and the receiving rank
is free: NCCL moves nothing before both call it, and ranks call it in front of the action that needs it. A send does
not block its rank, except in a sendrecv (`OrderedSchedule.sendrecvs`), in which both ranks wait until both results have
arrived.

Where the schedule `receives_ahead`, a rank calls a receive as soon as the other rank has come to the send, behind the
action that it has come to itself (`schedules.Call`), and goes on; what goes from one rank to another, through a
communicator of its own, does so in the order of the calls. What waits slows products beside it: that is in the price of
segments.

Where gathers begin with the step (`CostTable.gathers_at_start`), those of a rank go on while it waits for another one
to compute, but not while a transfer to it is under way: that takes the same links. The first stage of the model has its
input when the step begins, so it gathers as it computes; the gathers for later stages of its rank begin after its first
forward pass, if another one of it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import starmap
from typing import NamedTuple

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.errors import PlanMismatchError
from autoplan.overlap import Overlap
from autoplan.parallel_plan import StagePlan
from autoplan.schedules import OrderedSchedule, receives_ahead, schedule_of
from autoplan.simulator.rank_memory import StageBytes, stage_bytes
from autoplan.simulator.stage_pass import PassTimes, SegmentPass, pass_work, replay_first_forward, replay_pass

# ------------------------------------------------------------------------------------------------- stages as numbers


class Transfer(NamedTuple):
    """How long a result travels, and how long in a sendrecv: if another one travels back at the same time."""

    alone_s: float
    sendrecv_s: float


NO_TRANSFER = Transfer(0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class PricedSegments:
    """The segments of a stage, and of all stages alike. It is only equal to itself: it is hashed at once.

    Attributes:
        table: of its rank.
        choices: (kind, whether it is recomputed) of each.
        is_first: whether the model begins with them.
    """

    table: CostTable
    choices: tuple[tuple[int, bool], ...]
    is_first: bool
    costs: tuple[SegmentCost, ...]
    held: StageBytes

    @property
    def gather_s(self) -> float:
        """Gathering all their parameters."""
        return sum(cost.gather_s for cost in self.costs)

    def work(self, kind: str, is_edge: bool) -> tuple[SegmentPass, ...]:
        """What a pass of this kind does in each of them."""
        return pass_work(self.table, self.choices, kind, is_edge=is_edge, is_first=self.is_first)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `before`, `after`: what travels over its boundaries, an activation or its gradient the other way."""

    plan: StagePlan
    rank: int
    priced: PricedSegments
    before: Transfer
    after: Transfer

    def segments(self, kind: str) -> range:
        """The segments in the order in which a pass of this kind takes them."""
        segments = range(self.plan.start, self.plan.stop)
        return segments if kind == "F" else segments[::-1]

    def transfer_in(self, kind: str) -> Transfer:
        """How what an action of this kind needs comes from another rank."""
        return {"F": self.before, "W": NO_TRANSFER}.get(kind, self.after)

    def out_s(self, kind: str) -> float:
        """How long the result of an action of this kind travels to another rank."""
        return {"F": self.after, "W": NO_TRANSFER}.get(kind, self.before).alone_s


def _priced(
    table: CostTable,
    rank: int,
    *,
    choices: tuple[tuple[int, bool], ...],
    is_first: bool,
    message_in: int,
    message_out: int,
) -> PricedSegments:
    own = table.at_rank(rank)
    costs = tuple(own.costs[kind][recomputed] for kind, recomputed in choices)
    held = stage_bytes(own, costs, is_first=is_first, message_in=message_in, message_out=message_out)
    return PricedSegments(own, choices, is_first, costs, held)


def _stages(table: CostTable, plans: tuple[StagePlan, ...], *, ranks: tuple[int, ...]) -> tuple[Stage, ...]:
    priced = cache(partial(_priced, table))
    found = []
    for index, (plan, rank) in enumerate(zip(plans, ranks, strict=True)):
        recomputed, message_bytes = frozenset(plan.recomputed), table.at_rank(rank).message_bytes
        segments = priced(
            rank if table.rank_tables else 0,  # all are alike
            choices=tuple((table.kinds[segment], segment in recomputed) for segment in range(plan.start, plan.stop)),
            is_first=index == 0,
            message_in=sum(message_bytes[plan.start - 1 : plan.start]),  # none at both ends of the model
            message_out=sum(message_bytes[plan.stop - 1 : plan.stop]),
        )
        before = _transfer(table, plan.start, between=ranks[max(0, index - 1) : index + 1])
        after = _transfer(table, plan.stop, between=ranks[index : index + 2])
        found.append(Stage(plan, rank, segments, before, after))
    return tuple(found)


def _transfer(table: CostTable, segment: int, *, between: tuple[int, ...]) -> Transfer:
    """What travels over the boundary before `segment`; nothing at both ends of the model and within a rank."""
    if len(set(between)) == 1:
        return NO_TRANSFER
    own = table.at_rank(between[0])
    alone_s, sendrecv_s = own.cut_s[segment - 1], (own.sendrecv_s or own.cut_s)[segment - 1]
    assert alone_s is not None
    assert sendrecv_s is not None
    return Transfer(alone_s, sendrecv_s)


def _check_order(table: CostTable, stages: tuple[StagePlan, ...]) -> None:
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


class TimedAction(NamedTuple):
    """One action with its times; what it needs of another rank leaves there at `sent_s` and is here at `arrived_s`.

    `left_what`: the communication still to be done when it starts; `gathered_s`: what was gathered while it waited.
    """

    sent_s: float
    arrived_s: float
    start_s: float
    stop_s: float
    times: PassTimes
    left_what: str
    gathered_s: float


# Of a `TimedAction`; an estimate does not ask their names.
TimedActionFields = tuple[float, float, float, float, PassTimes, str, float]


@dataclass(slots=True)
class RankClock:
    """Where a rank stands in the replay, and what it has waited for so far."""

    free_s: float = 0.0
    left_s: float = 0.0  # communication not done at `free_s`: gathers begun with the step, afterwards reductions
    left_what: str = "reduce"
    exposed_dp_s: float = 0.0
    exposed_pp_s: float = 0.0
    bubble_s: float = 0.0

    def wait_until(self, arrived_s: float, *, since_s: float) -> float:
        """Be free when a result that has been under way since then has arrived; what was gathered meanwhile.

        Reductions go on all the time, gathers until the transfer begins.
        """
        idle_s = arrived_s - self.free_s
        if idle_s <= 0.0:
            return 0.0
        transfer_s = arrived_s - since_s if since_s > self.free_s else idle_s
        self.exposed_pp_s += transfer_s
        self.bubble_s += idle_s - transfer_s
        self.free_s = arrived_s
        if not self.left_s:
            return 0.0
        if self.left_what == "reduce":
            self.left_s = max(0.0, self.left_s - idle_s)
            return 0.0
        gathered_s = min(self.left_s, idle_s - transfer_s)
        self.left_s -= gathered_s
        return gathered_s

    def gather(self, seconds: float) -> None:
        """Begin so many seconds of gathers; nothing is left of other ones."""
        self.left_s, self.left_what = seconds, "gather"


Times = Callable[[float], PassTimes]  # of a pass, by the communication its rank still has to do when it starts


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of one stage, ready to be replayed.

    Attributes:
        times: how long it takes.
        action_s: what the rank waits for its host after it; its communication is taken to wait, too.
        transfer: of what it needs from another rank; `out_s`: the time of that of its result.
        begins_s: the gathers that begin when it is done.
    """

    clock: RankClock
    times: Times
    action_s: float
    transfer: Transfer
    out_s: float
    begins_s: float


def _passes(
    table: CostTable, stages: tuple[Stage, ...], *, ordered: OrderedSchedule, clocks: tuple[RankClock, ...]
) -> tuple[_Pass, ...]:
    """Of each pass of the schedule; alike stages share the work of their passes, and equal works their times."""
    work_of, times_of = cache(PricedSegments.work), cache(_times)
    waiting_s, begins_s = _begin_gathers(table, stages, clocks)
    found = []
    for index, kind, is_edge in ordered.passes:
        stage, is_first_forward = stages[index], kind == "F" and is_edge
        own, later_s = stage.priced.table, waiting_s[index] if is_first_forward else None
        times = times_of(work_of(stage.priced, kind, is_edge), own.overlap, later_s)
        begun_s = begins_s if index == 0 and is_first_forward else 0.0
        transfers = stage.transfer_in(kind), stage.out_s(kind)
        found.append(_Pass(clocks[stage.rank], times, own.action_s, *transfers, begun_s))
    return tuple(found)


def _times(work: tuple[SegmentPass, ...], overlap: Overlap, later_s: float | None) -> Times:
    """The times of a pass by the communication still to be done; most passes of a step are alike.

    `later_s`: where its gathers have begun before it, those of the later stages of its rank; else None.
    """
    if later_s is None:
        return cache(lambda left_s: replay_pass(work, overlap=overlap, left_s=left_s))
    return cache(lambda left_s: replay_first_forward(work, overlap=overlap, left_s=left_s, later_s=later_s))


def _begin_gathers(
    table: CostTable, stages: tuple[Stage, ...], clocks: tuple[RankClock, ...]
) -> tuple[tuple[float | None, ...], float]:
    """Begin the gathers of all ranks but the first one; what that one begins after its first pass.

    Before it, per stage: the gathers for later stages of its rank; None where its own begin with its first pass.
    """
    later_s: list[float | None] = []
    waiting_s = [0.0] * table.mesh.pp
    for index, stage in reversed(list(enumerate(stages))):
        begins_early = index > 0 and (stage.rank > 0 or table.mesh.n_micro_batches > 1)
        later_s.append(waiting_s[stage.rank] if begins_early and table.gathers_at_start else None)
        waiting_s[stage.rank] += 0.0 if later_s[-1] is None else stage.priced.gather_s
    for clock, seconds in zip(clocks[1:], waiting_s[1:], strict=True):
        clock.gather(seconds)
    return tuple(reversed(later_s)), waiting_s[0]


def _replay_step(
    table: CostTable, stages: tuple[Stage, ...], *, ordered: OrderedSchedule
) -> tuple[tuple[RankClock, ...], list[TimedActionFields]]:
    """The clocks at the end of the step, and the run of each action."""
    clocks = tuple(RankClock() for _ in range(table.mesh.pp))
    passes = _passes(table, stages, ordered=ordered, clocks=clocks)
    runs: list[TimedActionFields] = []
    stops_s: list[float] = []
    goes_ahead = receives_ahead(table.mesh.schedule)
    ahead: dict[int, tuple[float, float]] = {}  # when the results of actions leave and arrive
    for place, (number, awaited, call, is_sendrecv) in enumerate(
        zip(ordered.cues, ordered.awaited, ordered.calls, ordered.sendrecvs, strict=True)
    ):
        running = passes[number]
        clock = running.clock
        sent_s = arrived_s = gathered_s = 0.0
        if awaited is not None and goes_ahead:
            sent_s, arrived_s = ahead[awaited]
        elif awaited is not None:
            sent_s = max(stops_s[awaited], clock.free_s)
            arrived_s = sent_s + running.transfer[is_sendrecv]
        if awaited is not None:
            gathered_s = clock.wait_until(arrived_s, since_s=sent_s)
        times, left_what = running.times(clock.left_s), clock.left_what
        start_s = clock.free_s
        stop_s = clock.free_s = start_s + times.elapsed_s + running.action_s
        clock.left_s = times.left_s
        clock.exposed_dp_s += times.exposed_s
        if left_what == "gather" and not times.left_s:  # for good: all gathers come before the first reduction
            clock.left_what = "reduce"
        if running.begins_s:
            clock.gather(running.begins_s)
        if goes_ahead and call is not None:
            before_s = 0.0 if call.behind is None else ahead[call.behind][1]
            leaves_s = max(stop_s, clocks[call.receiver].free_s, before_s)
            ahead[place] = leaves_s, leaves_s + running.out_s
        stops_s.append(stop_s)
        runs.append((sent_s, arrived_s, start_s, stop_s, times, left_what, gathered_s))
    for clock in clocks:
        clock.exposed_dp_s += clock.left_s
    return clocks, runs


# --------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole step, replayed; `run_fields` has the order of the schedule's actions."""

    ordered: OrderedSchedule
    stages: tuple[Stage, ...]
    clocks: tuple[RankClock, ...]
    run_fields: list[TimedActionFields]

    def runs(self) -> list[TimedAction]:
        """The run of each action."""
        return list(starmap(TimedAction, self.run_fields))

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def held_by(self, rank: int) -> tuple[StageBytes, ...]:
        return tuple(stage.priced.held for stage in self.stages_of(rank))

    def places(self) -> tuple[list[int], ...]:
        """Per rank, the places of its actions."""
        found: tuple[list[int], ...] = tuple([] for _ in self.clocks)
        for place, action in enumerate(self.ordered.actions):
            found[self.ordered.ranks[action.stage]].append(place)
        return found


def replay_plan(table: CostTable, plans: tuple[StagePlan, ...]) -> Replay:
    """The step of this plan; raises what `simulate` does."""
    _check_order(table, plans)
    ordered = schedule_of(table.mesh)
    stages = _stages(table, plans, ranks=ordered.ranks)
    clocks, runs = _replay_step(table, stages, ordered=ordered)
    return Replay(ordered, stages, clocks, runs)
