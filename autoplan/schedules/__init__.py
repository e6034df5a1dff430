"""Pipeline schedules as tables: for each pipeline rank, the order of its actions.

An action prints as `2F0`: stage 2, forward, micro-batch 0. `B` is the backward pass; a schedule that splits it in two
has `I`, the gradients of the stage's inputs, and `W`, those of its weights, instead. A schedule file ends with
`SCHEDULES = {"name": ScheduleKind(build)}`, where `build(n_ranks, n_chunks, n_micro_batches)` returns one tuple of
actions per rank. All actions of a stage are on one rank, and each rank has `n_chunks` stages (`stage_ranks`).

What an action waits for (`dependency`):

    sF m  waits for (s-1)F m        the activation; stage 0 reads the batch
    sB m  waits for (s+1)B m        the gradient; the last stage waits for its own forward pass
    sI m  waits for (s+1)I m        likewise
    sW m  waits for sI m

gpipe, one_f_one_b, interleaved and zero_bubble_v are schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple, NoReturn

from autoplan.errors import InputError, UsageError
from autoplan.parallel_plan import Mesh
from autoplan.registry import load_table


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: "F", "B", "I" or "W".

    A named tuple: a schedule has thousands, which are made, hashed and compared in C.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Pass(NamedTuple):
    """What a stage does for a micro-batch; `is_edge`: the first if it is a forward pass, otherwise the last."""

    stage: int
    kind: str
    is_edge: bool


Schedule = tuple[tuple[Action, ...], ...]
KINDS = "FBIW"  # of action
WHOLE, SPLIT = "FB", "FIW"  # the kinds of one schedule
GRADIENT_KINDS = "BW"  # of these, the ones that make gradients of weights and end the life of activations


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """How a schedule is built.

    Attributes:
        build: (n_ranks, n_chunks, n_micro_batches) -> one tuple of actions per rank.
        splits_backward: it has I and W actions instead of B.
        receives_ahead: a rank calls a receive as soon as the other rank has come to the send, and goes on, as torch's
            schedules of several stages a rank do; not just before the action that needs it.
    """

    build: Callable[[int, int, int], Schedule]
    splits_backward: bool = False
    receives_ahead: bool = False


class Call(NamedTuple):
    """A send and its receive, where the result of an action goes to another rank.

    The last two count where ranks receive ahead. What goes from one rank to another has a communicator of its own
    (`runtime.mesh`), and NCCL moves what goes through one in the order of the calls.

    Attributes:
        receiver: that rank.
        after: place of its action behind which it calls the receive; None if it has come to none.
        behind: place of the action whose result goes the same way before it; None if there is none.
    """

    receiver: int
    after: int | None
    behind: int | None


@dataclass(frozen=True, slots=True, eq=False)
class OrderedSchedule:
    """A schedule as numbers: one order in which all its actions can run. Places are those in this order.

    `ordered_schedule` keeps them, and each is only equal to itself: it is hashed at once.

    Attributes:
        ranks: of each stage.
        actions: each rank's in its own order, and every action after the one it waits for.
        passes: the different passes.
        cues: per action, its pass: the place in `passes`.
        before: per action, the place of the one before on its rank; None if there is none.
        awaited: per action, the place of the one on another rank whose result it needs; None if there is none.
        calls: per action, how its result gets to the rank that waits for it, if that is another one.
        sendrecvs: per action, whether its rank receives its input in a sendrecv, one call that also sends the result of
            the action before to the rank it receives from: so one forward, one backward does in the middle of a step.
            All False where ranks receive ahead.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    passes: tuple[Pass, ...]
    cues: tuple[int, ...]
    before: tuple[int | None, ...]
    awaited: tuple[int | None, ...]
    calls: tuple[Call | None, ...]
    sendrecvs: tuple[bool, ...]


KEPT_SCHEDULES = 256  # a search asks for the same few again and again


@lru_cache(maxsize=KEPT_SCHEDULES)
def ordered_schedule(name: str, *, n_ranks: int, n_micro_batches: int, n_chunks: int = 1) -> OrderedSchedule:
    """The schedule called `name`, checked, and an order to replay it in; see `checked_order`.

    Raises: UsageError if no schedule has this name; InputError if it does not exist for these numbers.
    """
    kind = _kind(name)
    for field, count in (("pp", n_ranks), ("n_chunks", n_chunks), ("n_micro_batches", n_micro_batches)):
        if count < 1:
            raise InputError.of(f"mesh.{field}", found=count, expected="at least 1", fix=f"set {field} to 1 or more")
    schedule = kind.build(n_ranks, n_chunks, n_micro_batches)
    order, needed = checked_order(schedule, n_ranks=n_ranks, n_chunks=n_chunks)
    ranks = stage_ranks(schedule)
    owners = [ranks[action.stage] for action in order]
    before = _before(owners)
    awaited = tuple(
        None if place is None or owners[place] == owner else place for place, owner in zip(needed, owners, strict=True)
    )
    passes = [pass_of(action, n_micro_batches) for action in order]
    numbers = {own: number for number, own in enumerate(dict.fromkeys(passes))}
    return OrderedSchedule(
        schedule,
        ranks,
        tuple(order),
        passes=tuple(numbers),
        cues=tuple(numbers[own] for own in passes),
        before=before,
        awaited=awaited,
        calls=_calls(owners, awaited),
        sendrecvs=(False,) * len(order) if kind.receives_ahead else _sendrecvs(before, awaited),
    )


def schedule_of(mesh: Mesh) -> OrderedSchedule:
    """The schedule of a mesh; raises what `ordered_schedule` does."""
    return ordered_schedule(
        mesh.schedule, n_ranks=mesh.pp, n_micro_batches=mesh.n_micro_batches, n_chunks=mesh.n_chunks
    )


@lru_cache
def _kind(name: str) -> ScheduleKind:
    kinds: dict[str, ScheduleKind] = load_table("autoplan.schedules", "SCHEDULES")
    if name not in kinds:
        raise UsageError.of(
            "schedule", found=name, expected=f"one of {', '.join(sorted(kinds))}", fix="use one of these names"
        )
    return kinds[name]


@lru_cache
def splits_backward(name: str) -> bool:
    """Whether the schedule called `name` computes the gradients of weights in passes of their own.

    Raises: UsageError if no schedule has this name.
    """
    return _kind(name).splits_backward


@lru_cache
def receives_ahead(name: str) -> bool:
    """See `ScheduleKind.receives_ahead`; raises UsageError if no schedule has this name."""
    return _kind(name).receives_ahead


def stage_ranks(schedule: Schedule) -> tuple[int, ...]:
    """On which rank each stage of a schedule lives, read off its actions; no stage is on two ranks."""
    found = {stage: rank for rank, actions in enumerate(schedule) for stage in {action.stage for action in actions}}
    return tuple(found[stage] for stage in sorted(found))


def require_one_chunk(name: str, n_chunks: int) -> None:
    """Raise InputError unless `n_chunks` is 1: this schedule has one stage per rank."""
    if n_chunks != 1:
        raise InputError.of(
            "mesh.n_chunks",
            found=n_chunks,
            expected=f'1, because schedule "{name}" has one stage per rank',
            fix='set n_chunks to 1, or use schedule "interleaved"',
        )


def dependency(action: Action, n_stages: int) -> Action | None:
    """The action that must have ended, and whose result must have arrived, before this one starts."""
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.micro_batch) if action.stage > 0 else None
    if action.kind == "W":
        return Action(action.stage, "I", action.micro_batch)
    if action.stage == n_stages - 1:
        return Action(action.stage, "F", action.micro_batch)
    return Action(action.stage + 1, action.kind, action.micro_batch)


def pass_of(action: Action, n_micro_batches: int) -> Pass:
    """The pass that an action is."""
    is_edge = action.micro_batch == (0 if action.kind == "F" else n_micro_batches - 1)
    return Pass(action.stage, action.kind, is_edge)


def input_boundary(stage: int, kind: str) -> int:
    """Over which boundary the input of such an action comes, but of "W": the one behind this stage."""
    return stage - 1 if kind == "F" else stage


def result_boundary(stage: int, kind: str) -> int:
    """Over which boundary its result goes: the one behind this stage."""
    return stage if kind == "F" else stage - 1


def checked_order(schedule: Schedule, *, n_ranks: int, n_chunks: int) -> tuple[list[Action], list[int | None]]:
    """All actions of a schedule that is complete and can run, and for each the place of the one that it waits for.

    Every stage x micro-batch runs forward and backward exactly once, on its own rank, and no rank waits for ever.
    There are as many micro-batches as the largest number says, and each stage takes them in order. Either all backward
    passes are split, or none is.

    Raises: InputError, which names the place, for any other schedule.
    """
    _check_complete(schedule, n_ranks=n_ranks, n_chunks=n_chunks)
    return _in_order(schedule, n_stages=n_ranks * n_chunks)


def _in_order(schedule: Schedule, *, n_stages: int) -> tuple[list[Action], list[int | None]]:
    """In rounds, as torch calls sends and receives: in each, every rank whose input is computed does one action."""
    stage_kinds = product(range(n_stages), KINDS)
    sources = {(stage, kind): dependency(Action(stage, kind, 0), n_stages) for stage, kind in stage_kinds}
    order: list[Action] = []
    places: dict[tuple[int, str, int], int] = {}  # of what has run
    awaited: list[int | None] = []
    position = [0] * len(schedule)
    left = list(range(len(schedule)))  # ranks that have not done all their actions
    while left := [rank for rank in left if position[rank] < len(schedule[rank])]:
        n_before = len(order)
        for rank in left:
            action = schedule[rank][position[rank]]
            source = sources[action.stage, action.kind]
            place = None if source is None else places.get((source.stage, source.kind, action.micro_batch))
            if source is not None and place is None:
                continue
            places[action] = len(order)
            order.append(action)
            awaited.append(place)
            position[rank] += 1
        if len(order) == n_before:
            _refuse_deadlock(schedule, left[0], position[left[0]], n_stages=n_stages)
    return order, awaited


def _before(owners: Sequence[int]) -> tuple[int | None, ...]:
    """See `OrderedSchedule`; `owners`: the rank of each action."""
    last: dict[int, int] = {}
    found: list[int | None] = []
    for place, rank in enumerate(owners):
        found.append(last.get(rank))
        last[rank] = place
    return tuple(found)


def _calls(owners: Sequence[int], awaited: Sequence[int | None]) -> tuple[Call | None, ...]:
    """See `OrderedSchedule`; `owners`: the rank of each action."""
    receivers = {needed: rank for rank, needed in zip(owners, awaited, strict=True) if needed is not None}
    last_actions: dict[int, int] = {}  # of each rank, and below the last one whose result goes from one to another
    last_called: dict[tuple[int, int], int] = {}
    found: list[Call | None] = []
    for place, rank in enumerate(owners):
        receiver = receivers.get(place)
        last_actions[rank] = place
        if receiver is None:
            found.append(None)
            continue
        found.append(Call(receiver, last_actions.get(receiver), last_called.get((rank, receiver))))
        last_called[rank, receiver] = place
    return tuple(found)


def _refuse_deadlock(schedule: Schedule, rank: int, position: int, *, n_stages: int) -> NoReturn:
    action = schedule[rank][position]
    expected = f"{dependency(action, n_stages)} to run before it; it never does (deadlock)"
    where = f"schedule: rank {rank}, action {position}"
    raise InputError.of(where, found=str(action), expected=expected, fix="reorder the actions")


def _sendrecvs(before: Sequence[int | None], awaited: Sequence[int | None]) -> tuple[bool, ...]:
    """See `OrderedSchedule`."""
    after = {first: second for second, first in enumerate(before) if first is not None}
    found = []
    for own, needed in zip(before, awaited, strict=True):
        theirs = None if needed is None else after.get(needed)
        found.append(theirs is not None and own is not None and awaited[theirs] == own)
    return tuple(found)


def _check_complete(schedule: Schedule, *, n_ranks: int, n_chunks: int) -> None:
    if len(schedule) != n_ranks:
        raise InputError.of("schedule", found=f"{len(schedule)} ranks", expected=f"{n_ranks}", fix="one row per rank")
    n_stages = n_ranks * n_chunks
    counts = Counter(chain.from_iterable(schedule))
    kinds = SPLIT if any(action.kind in "IW" for action in counts) else WHOLE
    _check_places(schedule, n_stages=n_stages, kinds=kinds)
    n_micro_batches = 1 + max((action.micro_batch for action in counts), default=0)
    if len(counts) == sum(counts.values()) == n_stages * len(kinds) * n_micro_batches:
        return  # as all are where they belong, each is there once
    for numbers in product(range(n_stages), kinds, range(n_micro_batches)):
        action = Action(*numbers)
        if counts[action] != 1:
            raise InputError.of(
                "schedule",
                found=f"{action} {counts[action]} times",
                expected="exactly once",
                fix="add what is missing, remove what is repeated",
            )


def _check_places(schedule: Schedule, *, n_stages: int, kinds: str) -> None:
    owner: dict[int, int] = {}
    last: dict[tuple[int, str], int] = {}
    for rank, actions in enumerate(schedule):
        for position, (stage, kind, micro_batch) in enumerate(actions):
            if kind not in kinds:
                _refuse(schedule, rank, position, expected=" or ".join(kinds), fix="use one kind of backward pass")
            if not 0 <= stage < n_stages or micro_batch < 0:
                expected = f"stage 0 to {n_stages - 1}, micro-batch 0 or more"
                _refuse(schedule, rank, position, expected=expected, fix="drop it")
            if owner.setdefault(stage, rank) != rank:
                expected = f"rank {owner[stage]} to run it, as other actions of its stage"
                _refuse(schedule, rank, position, expected=expected, fix="move it there")
            if micro_batch < last.get((stage, kind), 0):  # the first and the last pass are told by their number
                expected = f"no lower micro-batch than {last[stage, kind]}, which is before it"
                _refuse(schedule, rank, position, expected=expected, fix="let the passes of a stage go in their order")
            last[stage, kind] = micro_batch
    for rank, n_owned in sorted(Counter(owner.values()).items()):
        n_chunks = n_stages // len(schedule)
        if n_owned > n_chunks:
            expected = f"{n_chunks}, as many as on every rank"
            raise InputError.of(f"schedule: rank {rank}", found=f"{n_owned} stages", expected=expected, fix="move some")


def _refuse(schedule: Schedule, rank: int, position: int, *, expected: str, fix: str) -> NoReturn:
    where, found = f"schedule: rank {rank}, action {position}", str(schedule[rank][position])
    raise InputError.of(where, found=found, expected=expected, fix=fix)
