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
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autoplan.errors import InputError, UsageError
from autoplan.registry import load_table


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage: "F", "B", "I" or "W"."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]
WHOLE, SPLIT = "FB", "FIW"  # the kinds of action of a schedule
GRADIENT_KINDS = "BW"  # of these, the ones that make gradients of weights and end the life of activations
IN_TEXT = re.compile(r"(\d+)([FBIW])(\d+)", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """How a schedule is built.

    Attributes:
        build: (n_ranks, n_chunks, n_micro_batches) -> one tuple of actions per rank.
        splits_backward: it has I and W actions instead of B.
    """

    build: Callable[[int, int, int], Schedule]
    splits_backward: bool = False


KEPT_SCHEDULES = 256  # a search asks for the same few again and again


@lru_cache(maxsize=KEPT_SCHEDULES)
def build_schedule(name: str, *, n_ranks: int, n_micro_batches: int, n_chunks: int = 1) -> Schedule:
    """The schedule called `name`, checked by `check_schedule`.

    Raises: UsageError if no schedule has this name; InputError if it does not exist for these numbers.
    """
    kind = _kind(name)
    for field, count in (("pp", n_ranks), ("n_chunks", n_chunks), ("n_micro_batches", n_micro_batches)):
        if count < 1:
            raise InputError.of(f"mesh.{field}", found=count, expected="at least 1", fix=f"set {field} to 1 or more")
    schedule = kind.build(n_ranks, n_chunks, n_micro_batches)
    check_schedule(schedule, n_ranks=n_ranks, n_chunks=n_chunks)
    return schedule


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


def stage_ranks(schedule: Schedule) -> tuple[int, ...]:
    """On which rank each stage lives: the first that has an action of it."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            found.setdefault(action.stage, rank)
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


def replay_order(schedule: Schedule, *, n_stages: int) -> tuple[Action, ...]:
    """All actions, each rank's in its own order and every action after the one it waits for.

    Assumes no action appears twice. Raises: InputError if some rank would wait for ever.
    """
    done: set[Action] = set()
    waiting: dict[Action, int] = {}  # what is awaited -> the rank that stands there
    position = [0] * len(schedule)
    order: list[Action] = []
    runnable = list(reversed(range(len(schedule))))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(schedule[rank]):
            action = schedule[rank][position[rank]]
            needed = dependency(action, n_stages)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            done.add(action)
            order.append(action)
            position[rank] += 1
            if action in waiting:
                runnable.append(waiting.pop(action))
    for needed, rank in sorted(waiting.items(), key=lambda item: item[1]):
        raise InputError.of(
            f"schedule: rank {rank}, action {position[rank]}",
            found=str(schedule[rank][position[rank]]),
            expected=f"{needed} to run before it; it never does (deadlock)",
            fix="reorder the actions",
        )
    return tuple(order)


def check_schedule(schedule: Schedule, *, n_ranks: int, n_chunks: int) -> None:
    """Raise InputError, which names the place, unless the schedule is complete and can run.

    Every stage x micro-batch runs forward and backward exactly once, on its own rank, and no rank waits for ever.
    There are as many micro-batches as the largest number says. Either all backward passes are split, or none is.
    """
    if len(schedule) != n_ranks:
        raise InputError.of("schedule", found=f"{len(schedule)} ranks", expected=f"{n_ranks}", fix="one row per rank")
    n_stages = n_ranks * n_chunks
    counts = Counter(action for actions in schedule for action in actions)
    kinds = SPLIT if any(action.kind in "IW" for action in counts) else WHOLE
    _check_places(schedule, n_stages=n_stages, kinds=kinds)
    n_micro_batches = 1 + max((action.micro_batch for action in counts), default=0)
    for stage, kind, micro_batch in product(range(n_stages), kinds, range(n_micro_batches)):
        action = Action(stage, kind, micro_batch)
        if counts[action] != 1:
            raise InputError.of(
                "schedule",
                found=f"{action} {counts[action]} times",
                expected="exactly once",
                fix="add what is missing, remove what is repeated",
            )
    replay_order(schedule, n_stages=n_stages)


def _check_places(schedule: Schedule, *, n_stages: int, kinds: str) -> None:
    owner: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            where = f"schedule: rank {rank}, action {position}"
            if action.kind not in kinds:
                raise InputError.of(
                    where, found=str(action), expected=" or ".join(kinds), fix="use one kind of backward pass"
                )
            if not 0 <= action.stage < n_stages or action.micro_batch < 0:
                expected = f"stage 0 to {n_stages - 1}, micro-batch 0 or more"
                raise InputError.of(where, found=str(action), expected=expected, fix="drop it")
            if owner.setdefault(action.stage, rank) != rank:
                expected = f"rank {owner[action.stage]} to run it, as other actions of its stage"
                raise InputError.of(where, found=str(action), expected=expected, fix="move it there")
    for rank, n_owned in sorted(Counter(owner.values()).items()):
        n_chunks = n_stages // len(schedule)
        if n_owned > n_chunks:
            expected = f"{n_chunks}, as many as on every rank"
            raise InputError.of(f"schedule: rank {rank}", found=f"{n_owned} stages", expected=expected, fix="move some")


def schedule_to_text(schedule: Schedule) -> str:
    """One line per rank: `rank 0: 0F0 0F1 0B0 0B1`; `schedule_from_text` reads it back."""
    return "".join(f"rank {rank}: {' '.join(map(str, actions))}\n" for rank, actions in enumerate(schedule))


def schedule_from_text(text: str) -> Schedule:
    """The schedule that `schedule_to_text` wrote; empty lines and lines that begin with `#` are skipped."""
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        head, _, tail = line.partition(":")
        if head.split() != ["rank", str(len(rows))]:
            raise InputError.of(
                f"schedule: line {number}",
                found=line,
                expected=f"rank {len(rows)}: ...",
                fix="one line per rank, in order",
            )
        rows.append(tuple(_action_from_text(token, line_number=number) for token in tail.split()))
    return tuple(rows)


def _action_from_text(token: str, *, line_number: int) -> Action:
    action = read_action(token)
    if action is None:
        raise InputError.of(
            f"schedule: line {line_number}",
            found=token,
            expected="stage, F or B or I or W, micro-batch: 2F0",
            fix="correct it",
        )
    return action


def read_action(text: str) -> Action | None:
    """The action that prints as `text`; None when there is none."""
    match = IN_TEXT.fullmatch(text)
    return None if match is None else Action(int(match[1]), match[2], int(match[3]))
