"""The simulator: replays a plan and says how long a step takes and how much memory each rank needs.

It is the only judge of time and memory. It reads a CostTable and the stages, and knows nothing of the search.

**One pass of a stage** is replayed by `stage_pass`, **memory** is added up by `rank_memory`.

**One step** is replayed by `replay`. With M micro-batches, it takes on the slowest rank

    step_s = M x (compute + recompute + tensor-parallel + launch) + what launch adds once      `_breakdown`
             (launch: what the host adds to the segments, and to every action of a pipeline; and start_s)
           + exposed_dp    gathers and reductions beside which nothing is computed, and the slowdown by the others
           + exposed_pp    waiting for a transfer that is under way
           + bubble        waiting for another rank to compute
           + optimizer     optimizer_s of its segments less what they wait for the host once, and the rest of per_step_s
           + exposed_batch_copy    by how much copying the next batch outlasts all of that; see `cost.batch`

The first line and that of the optimizer, of any rank, are together a lower bound on the step time, under any schedule.

Where data parallelism spans groups of hosts of which each takes its own micro-batches, one rank of each is replayed by
itself (`shared_step`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Breakdown, Estimate, StagePlan, TimelineEvent
from autoplan.simulator.rank_memory import largest_moments, memories, moment_after, moments, needed_parts
from autoplan.simulator.replay import RankClock, Replay, Stage, TimedAction, replay_plan
from autoplan.simulator.shared_step import slowest_of


def simulate(table: CostTable, stages: tuple[StagePlan, ...], *, with_timeline: bool = False) -> Estimate:
    """The estimate of a plan: `stages` on the mesh of `table`, one per share of the batch where it has some.

    The breakdown is that of the slowest rank (of the first, if several are equally slow).

    Raises: PlanMismatchError if the stages do not cut the segments of the table into `mesh.n_stages` parts;
    InputError if the schedule does not exist for the mesh.
    """
    if table.mesh.shares:
        of_shares = zip(table.rank_tables, stages, strict=True)
        return slowest_of([simulate(own, (stage,), with_timeline=with_timeline) for own, stage in of_shares])
    replay = replay_plan(table, stages)
    own_tables = tuple(map(table.at_rank, range(table.mesh.pp)))
    breakdowns = tuple(
        _with_copy(
            _breakdown(table, replay.stages_of(rank), replay.clocks[rank], actions_s=len(actions) * own.action_s),
            own.batch_copy_s,
        )
        for rank, (own, actions) in enumerate(zip(own_tables, replay.ordered.schedule, strict=True))
    )
    slowest_rank = max(range(table.mesh.pp), key=lambda rank: breakdowns[rank].total_s)
    slowest = breakdowns[slowest_rank]
    peaks = tuple(
        max(memories(table, replay.held_by(rank), at=at), key=sum)
        for rank, at in enumerate(largest_moments(replay.ordered))
    )
    parts = tuple(needed_parts(own, peak) for own, peak in zip(own_tables, peaks, strict=True))
    limits_bytes = tuple(own.memory_limit_bytes for own in own_tables)
    return Estimate(
        step_s=slowest.total_s,
        breakdown=slowest,
        slowest_rank=slowest_rank,
        allocated_bytes=tuple(peak.total_bytes for peak in peaks),
        needed_bytes=tuple(sum(n_bytes for _, n_bytes in rank_parts) for rank_parts in parts),
        memory_parts_bytes=parts,
        memory_limit_bytes=min(limits_bytes),
        rank_limits_bytes=limits_bytes if len(set(limits_bytes)) > 1 else (),
        memory_margin=table.memory_margin,
        drift=table.drift * slowest.exposed_communication_s / slowest.total_s if table.drift else 0.0,
        segment_sources=tuple(table.sources[kind] for kind in table.kinds) if table.sources else (),
        timeline=_timeline(table, replay) if with_timeline else (),
    )


def _breakdown(table: CostTable, stages: tuple[Stage, ...], clock: RankClock, *, actions_s: float) -> Breakdown:
    """Where the time of one rank, which owns `stages`, goes; `actions_s` is what all its actions wait for the host."""
    costs = tuple(cost for stage in stages for cost in stage.priced.costs)
    n_micro_batches = table.mesh.n_micro_batches
    return Breakdown(
        compute_s=n_micro_batches * sum(cost.forward_s + cost.backward_s for cost in costs),
        recompute_s=n_micro_batches * sum(cost.recompute_s for cost in costs),
        exposed_tp_s=n_micro_batches * sum(cost.tp_forward_s + cost.tp_backward_s for cost in costs),
        exposed_dp_s=clock.exposed_dp_s,
        exposed_pp_s=clock.exposed_pp_s,
        bubble_s=clock.bubble_s,
        optimizer_s=table.per_step_s - table.start_s + sum(cost.optimizer_s - cost.launch_once_s for cost in costs),
        launch_s=n_micro_batches * sum(cost.launch_forward_s + cost.launch_backward_s for cost in costs)
        + actions_s
        + table.start_s
        + sum(cost.launch_once_s for cost in costs),
    )


def _with_copy(breakdown: Breakdown, copy_s: float) -> Breakdown:
    """With what copying the next batch to that rank, which takes `copy_s`, outlasts all else."""
    outlasting_s = copy_s - breakdown.total_s
    return replace(breakdown, exposed_batch_copy_s=outlasting_s) if outlasting_s > 0.0 else breakdown


def memory_over_time(table: CostTable, stages: tuple[StagePlan, ...]) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Per pipeline rank, (time, allocated bytes from then on), in order of time; raises what `simulate` does."""
    if table.mesh.shares:
        of_shares = zip(table.rank_tables, stages, strict=True)
        return tuple(curve for own, stage in of_shares for curve in memory_over_time(own, (stage,)))
    replay = replay_plan(table, stages)
    runs, curves = replay.runs(), []
    for rank, places in enumerate(replay.places()):
        running = tuple(moments(replay.ordered.schedule[rank]))
        during = memories(table, replay.held_by(rank), at=running)
        after = memories(table, replay.held_by(rank), at=map(moment_after, running))
        curve: list[tuple[float, int]] = []
        for place, one, other in zip(places, during, after, strict=True):
            curve += (runs[place].start_s, one.total_bytes), (runs[place].stop_s, other.total_bytes)
        curves.append(tuple(curve))
    return tuple(curves)


def _timeline(table: CostTable, replay: Replay) -> tuple[TimelineEvent, ...]:
    runs, events = replay.runs(), list[TimelineEvent]()
    for rank, places in enumerate(replay.places()):
        starts_s = (*(runs[place].start_s for place in places[1:]), math.inf)
        stops_s = (0.0, *(runs[place].stop_s for place in places[:-1]))
        for place, stop_s, next_start_s in zip(places, stops_s, starts_s, strict=True):
            events += _events_of(replay, place, runs[place], rank=rank, since_s=stop_s, until_s=next_start_s)
        last = runs[places[-1]]
        done_s = last.stop_s + last.times.left_s
        once_s = table.per_step_s + sum(
            cost.optimizer_s for stage in replay.stages_of(rank) for cost in stage.priced.costs
        )
        events.append(TimelineEvent(rank, rank, "compute", "optimizer", done_s, done_s + once_s))
        copy_s = table.at_rank(rank).batch_copy_s
        if copy_s:
            events.append(TimelineEvent(rank, rank, "copy", "copy of the next batch", 0.0, copy_s))
    return tuple(events)


def _events_of(
    replay: Replay, place: int, run: TimedAction, *, rank: int, since_s: float, until_s: float
) -> list[TimelineEvent]:
    """The boxes of one action: itself, its communication, what is left of that up to `until_s`, what it receives.

    Also what is gathered while it waits, from `since_s` on.
    """
    action = replay.ordered.actions[place]
    stage, name, segments = action.stage, str(action), replay.stages[action.stage].segments(action.kind)
    events = [TimelineEvent(rank, stage, "compute", name, run.start_s, run.stop_s)]
    if run.gathered_s:
        events.insert(0, TimelineEvent(rank, stage, "communication", "gather", since_s, since_s + run.gathered_s))
    for span in run.times.spans:
        what = run.left_what if span.place is None else f"{span.what} {segments[span.place]}"
        start_s, stop_s = run.start_s + span.start_s, run.start_s + span.stop_s
        events.append(TimelineEvent(rank, stage, "communication", what, start_s, stop_s))
    rest_stop_s = min(run.stop_s + run.times.left_s, until_s)
    if rest_stop_s > run.stop_s and run.left_what == "reduce":
        events.append(TimelineEvent(rank, stage, "communication", "reduce", run.stop_s, rest_stop_s))
    awaited = replay.ordered.awaited[place]
    if awaited is not None and run.arrived_s > run.sent_s:
        source = replay.ordered.actions[awaited]
        stream = "send activations" if action.kind == "F" else "send gradients"
        sender = replay.ordered.ranks[source.stage]
        events.append(TimelineEvent(sender, source.stage, stream, str(source), run.sent_s, run.arrived_s))
    return events
