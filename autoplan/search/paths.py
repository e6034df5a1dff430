"""Paths through the actions of a schedule, each of which bounds the step of any plan.

The actions of a schedule form a graph: an action waits for the one before it on its rank, and for its input, which
travels when its source is done and, unless ranks receive ahead, the one before, too; where they do, it travels when the
receiving rank has called it and what goes the same way before it is there (`schedules.Call`). Each path through the
graph is a lower bound on the step, linear in the times of the stages. The longest one is the step, but for reductions
beside a transfer, sendrecvs, which are counted as one transfer, and waits for transfers that take no time. With M
micro-batches on pp stages, for each stage s,

    through     sum_{t < s} (f_t + b_t + 2 cut_t) + M (f_s + b_s)
    1F1B fill   sum_t (f_t + b_t + 2 cut_t) + (M - 1) b_s + (M - pp + s) f_s
    GPipe       sum_t (f_t + b_t + 2 cut_t) + (M - 1) (b_s + f_s)

where ranks receive ahead, and otherwise a transfer in front of each of these passes that receives. At the end of a path
there is what is left of its last gradient reduction, and the optimizer of its last rank. Where the backward pass is
split, the path goes back by the passes for inputs, and ends with one for weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autoplan.parallel_plan import Mesh, TimelineEvent
from autoplan.schedules import (
    GRADIENT_KINDS,
    KEPT_SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    dependency,
    ordered_schedule,
    read_action,
    receives_ahead,
    splits_backward,
    stage_ranks,
)

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD = "first forward", "forward", "backward", "last backward"
INPUTS, WEIGHTS, LAST_WEIGHTS = "backward for inputs", "backward for weights", "last backward for weights"
CARRY = "carry"  # what communication left by a backward pass adds to the next pass of the rank
LAST_CARRY = "last carry"  # the same, left by the last backward pass of a stage
CUT = "cut"  # one transfer over the boundary after a stage; a sendrecv takes no less


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of passes and transfers, each after the one before: ((what, stage), how often), ... .

    It ends with the last backward pass (for weights) of `last_stage`, or before it.
    """

    counts: tuple[tuple[tuple[str, int], int], ...]
    last_stage: int


def _path(counts: Counter[tuple[str, int]], *, last_stage: int) -> Path:
    return Path(tuple(sorted((key, count) for key, count in counts.items() if count)), last_stage)


def initial_paths(mesh: Mesh) -> tuple[Path, ...]:
    """Paths that bound any plan of the mesh, well where no transfer waits; `critical_paths` adds what a plan needs."""
    schedule = _schedule_of(mesh)
    ranks = stage_ranks(schedule)
    chains = (chain for rank in range(mesh.pp) for chain in chains_of(mesh, schedule, rank))
    ways = product(chains, (True, False))
    return tuple(dict.fromkeys(path_of(mesh, ranks, chain, carries=carries) for chain, carries in ways))


def chains_of(mesh: Mesh, schedule: Schedule, rank: int) -> list[list[Action]]:
    """Chains of actions on which this rank does most, each with and without the way back to the first stage."""
    chains = [_through(schedule, rank), *(_around(mesh, schedule, rank, is_fill=is_fill) for is_fill in (True, False))]
    chains += [_gpipe_chain(mesh, rank)] if mesh.schedule == "gpipe" else []
    return [*(chain + _tail(chain[-1]) for chain in chains), *chains]


def _head(action: Action) -> list[Action]:
    """The forward passes through the stages before, for the same micro-batch."""
    return [Action(stage, "F", action.micro_batch) for stage in range(action.stage)]


def _tail(action: Action) -> list[Action]:
    """The backward passes through the stages before, for the same micro-batch; none waits for one for weights."""
    if action.kind == "W":
        return []
    back = [Action(stage, action.kind, action.micro_batch) for stage in reversed(range(action.stage))]
    return [*back, Action(0, "W", action.micro_batch)] if action.kind == "I" else back


def _through(schedule: Schedule, rank: int) -> list[Action]:
    """To a rank's first action, then all its actions."""
    return [*_head(schedule[rank][0]), *schedule[rank]]


def _around(mesh: Mesh, schedule: Schedule, rank: int, *, is_fill: bool) -> list[Action]:
    """Fill: through the whole pipeline and back to a rank's first backward pass, then the rest of its actions.

    Otherwise drain: all a rank does up to its last forward pass, which then goes to the end of the pipeline and back.
    """
    actions, last = schedule[rank], mesh.n_stages - 1
    kind = "I" if splits_backward(mesh.schedule) else "B"
    if is_fill:
        place = next(index for index, action in enumerate(actions) if action.kind == kind)
        turn = Action(last, "F", actions[place].micro_batch)
        back = [Action(stage, kind, turn.micro_batch) for stage in range(last, actions[place].stage, -1)]
        return [*_head(turn), turn, *back, *actions[place:]]
    place = max(index for index, action in enumerate(actions) if action.kind == "F")
    onward = [Action(s, "F", actions[place].micro_batch) for s in range(actions[place].stage + 1, mesh.n_stages)]
    return [*_through(schedule, rank)[: rank + place + 1], *onward, Action(last, kind, actions[place].micro_batch)]


def _gpipe_chain(mesh: Mesh, rank: int) -> list[Action]:
    """A rank's forward passes, the last on to the last stage, the first micro-batch back, its backward passes."""
    n, last = mesh.n_micro_batches, mesh.pp - 1
    forwards = [*_head(Action(rank, "F", 0)), *(Action(rank, "F", m) for m in range(n))]
    onward = [Action(stage, "F", n - 1) for stage in range(rank + 1, mesh.pp)]
    back = [Action(stage, "B", 0) for stage in range(last, rank, -1)]
    return [*forwards, *onward, *back, *(Action(rank, "B", m) for m in range(n))]


def path_of(mesh: Mesh, ranks: tuple[int, ...], chain: list[Action], *, carries: bool = True) -> Path:
    """The times along a chain of actions, each of which waits for the one before: by data, or by rank.

    Between two actions of a rank there is what the first leaves to be communicated and, unless ranks receive ahead, the
    transfer that the second receives; at the same time, so a path has one of them, the former if it `carries`.
    `ranks`: of each stage.
    """
    counts: Counter[tuple[str, int]] = Counter()
    goes_ahead = receives_ahead(mesh.schedule)
    for before, action in zip((None, *chain), chain, strict=False):
        counts[symbol_of(mesh, action), action.stage] += 1
        source = dependency(action, mesh.n_stages)
        is_by_rank = before is not None and ranks[before.stage] == ranks[action.stage]
        is_received = source is not None and ranks[source.stage] != ranks[action.stage]
        is_received = is_received and not (goes_ahead and (before is None or is_by_rank))
        if before is not None and is_by_rank and before.kind in GRADIENT_KINDS and (carries or not is_received):
            counts[carry_symbol(symbol_of(mesh, before)), before.stage] += 1
        elif source is not None and is_received:
            counts[CUT, min(action.stage, source.stage)] += 1
    return _path(counts, last_stage=chain[-1].stage)


def symbol_of(mesh: Mesh, action: Action) -> str:
    """What the paths of a mesh call this pass."""
    if action.kind == "F":
        return FIRST_FORWARD if action.micro_batch == 0 else FORWARD
    is_last = action.micro_batch == mesh.n_micro_batches - 1
    if action.kind == "B":
        return LAST_BACKWARD if is_last else BACKWARD
    if action.kind == "W":
        return LAST_WEIGHTS if is_last else WEIGHTS
    return INPUTS


def last_pass(mesh: Mesh) -> str:
    """The pass of a stage after which nothing follows but what is left of its reductions."""
    return LAST_WEIGHTS if splits_backward(mesh.schedule) else LAST_BACKWARD


def carry_symbol(symbol: str) -> str:
    """What the communication is called that a pass for gradients leaves."""
    return CARRY if symbol in (BACKWARD, WEIGHTS) else LAST_CARRY


def critical_paths(mesh: Mesh, timeline: tuple[TimelineEvent, ...]) -> tuple[Path, ...]:
    """Per rank, the longest path to the end of its part of a simulated step, read backwards.

    An action begins when the action before it on its rank stops, or when its input arrives. That leaves when its source
    has stopped and the action before has, too, or, where ranks receive ahead, what `_calls` names. Times are equal
    to the last bit where one waits for the other, because each is the maximum of them.
    """
    trace = _Trace(timeline, mesh)
    return tuple(dict.fromkeys(_path_to(mesh, trace, name) for name in trace.last_actions()))


def _path_to(mesh: Mesh, trace: _Trace, name: str) -> Path:
    counts: Counter[tuple[str, int]] = Counter()
    current: str | None = name
    while current is not None:
        action = _parse(current)
        counts[symbol_of(mesh, action), action.stage] += 1
        current = trace.before(current, counts)
    return _path(counts, last_stage=_parse(name).stage)


def _parse(name: str) -> Action:
    """The action that prints as "2F0"."""
    action = read_action(name)
    assert action is not None, name
    return action


class _Trace:
    """A timeline that can be asked what an action waited for."""

    def __init__(self, timeline: tuple[TimelineEvent, ...], mesh: Mesh) -> None:
        is_pass = [event.stream == "compute" and event.name != "optimizer" for event in timeline]
        passes = sorted((e for e, keep in zip(timeline, is_pass, strict=True) if keep), key=_start_s)
        self._passes = {event.name: event for event in passes}
        self._previous = _predecessors(passes, lambda event: str(event.rank))
        self._mesh = mesh
        sends = sorted((event for event in timeline if event.stream.startswith("send")), key=_start_s)
        self._sends = {event.name: event for event in sends}
        ahead = receives_ahead(mesh.schedule)
        self._calls = _calls(mesh.schedule, mesh.pp, mesh.n_micro_batches, mesh.n_chunks) if ahead else None

    def last_actions(self) -> list[str]:
        """The last pass of each rank."""
        last = {event.rank: event.name for event in self._passes.values()}
        return [last[rank] for rank in sorted(last)]

    def before(self, name: str, counts: Counter[tuple[str, int]]) -> str | None:
        """What `name` waited for; transfers and carried communication in between are counted."""
        own, previous = self._passes[name], self._previous[name]
        if previous is not None and self._passes[previous].stop_s >= own.start_s:
            action = _parse(previous)
            if action.kind in GRADIENT_KINDS:
                counts[carry_symbol(symbol_of(self._mesh, action)), action.stage] += 1
            return previous
        source = _source(name, n_stages=self._mesh.n_stages)
        if source is None or self._calls is not None:
            return None if source is None else self._before_transfers(source, counts)
        self._count_cut(source, counts)
        is_free_later = previous is not None and self._passes[previous].stop_s > self._passes[source].stop_s
        return previous if is_free_later else source

    def _before_transfers(self, source: str, counts: Counter[tuple[str, int]]) -> str:
        """The action that set off the chain of transfers which ends with that of the result of `source`."""
        while source in self._sends:
            self._count_cut(source, counts)
            start_s = self._sends[source].start_s
            if self._passes[source].stop_s >= start_s:
                break
            assert self._calls is not None
            after, behind = self._calls[source]
            if behind not in self._sends or self._sends[behind].stop_s < start_s:
                return source if after is None or self._passes[after].stop_s < start_s else after
            source = behind
        return source

    def _count_cut(self, source: str, counts: Counter[tuple[str, int]]) -> None:
        """Count the transfer of its result, if there is one."""
        action = _parse(source)
        if source in self._sends:
            counts[CUT, action.stage if action.kind == "F" else action.stage - 1] += 1


@lru_cache(maxsize=KEPT_SCHEDULES)
def _calls(
    schedule: str, n_ranks: int, n_micro_batches: int, n_chunks: int
) -> dict[str, tuple[str | None, str | None]]:
    """`Call.after` and `Call.behind` of each result that goes to another rank, by the names of actions."""
    ordered = ordered_schedule(schedule, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_chunks=n_chunks)
    names = [str(action) for action in ordered.actions]

    def named(place: int | None) -> str | None:
        return None if place is None else names[place]

    return {
        name: (named(call.after), named(call.behind))
        for name, call in zip(names, ordered.calls, strict=True)
        if call is not None
    }


def _start_s(event: TimelineEvent) -> tuple[float, float]:
    return event.start_s, event.stop_s


def _predecessors(events: list[TimelineEvent], key: Callable[[TimelineEvent], str]) -> dict[str, str | None]:
    last: dict[str, str] = {}
    table: dict[str, str | None] = {}
    for event in events:
        table[event.name] = last.get(key(event))
        last[key(event)] = event.name
    return table


def _source(name: str, *, n_stages: int) -> str | None:
    needed = dependency(_parse(name), n_stages)
    return None if needed is None else str(needed)


def _schedule_of(mesh: Mesh) -> Schedule:
    return build_schedule(mesh.schedule, n_ranks=mesh.pp, n_micro_batches=mesh.n_micro_batches, n_chunks=mesh.n_chunks)
