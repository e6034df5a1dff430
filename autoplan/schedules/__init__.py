"""Pipeline schedules as tables: for each pipeline rank, the order of its actions.

An action prints as `2F0`: stage 2, forward, micro-batch 0. `B` is the backward pass. A schedule file ends with
`SCHEDULES = {"name": build}`, where `build(n_ranks, n_chunks, n_micro_batches)` returns one tuple of actions per
rank; stage i lives on rank i modulo `n_ranks`.

What an action waits for (`dependency`):

    sF m  waits for (s-1)F m        the activation; stage 0 reads the batch
    sB m  waits for (s+1)B m        the gradient; the last stage waits for its own forward pass
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autoplan.errors import InputError, UsageError
from autoplan.registry import load_table


@dataclass(frozen=True, slots=True)
class Action:
    """One forward ("F") or backward ("B") pass of one micro-batch through one stage."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]
KEPT_SCHEDULES = 256  # a search asks for the same few again and again


@lru_cache(maxsize=KEPT_SCHEDULES)
def build_schedule(name: str, *, n_ranks: int, n_micro_batches: int, n_chunks: int = 1) -> Schedule:
    """The schedule called `name`, checked by `check_schedule`.

    Raises: UsageError if no schedule has this name; InputError if it does not exist for these numbers.
    """
    builders = load_table("autoplan.schedules", "SCHEDULES")
    if name not in builders:
        raise UsageError.of(
            "schedule", found=name, expected=f"one of {', '.join(sorted(builders))}", fix="use one of these names"
        )
    for field, count in (("pp", n_ranks), ("n_chunks", n_chunks), ("n_micro_batches", n_micro_batches)):
        if count < 1:
            raise InputError.of(f"mesh.{field}", found=count, expected="at least 1", fix=f"set {field} to 1 or more")
    schedule: Schedule = builders[name](n_ranks, n_chunks, n_micro_batches)
    check_schedule(schedule, n_ranks=n_ranks, n_chunks=n_chunks)
    return schedule


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
    if action.stage == n_stages - 1:
        return Action(action.stage, "F", action.micro_batch)
    return Action(action.stage + 1, "B", action.micro_batch)


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
    There are as many micro-batches as the largest number says.
    """
    if len(schedule) != n_ranks:
        raise InputError.of("schedule", found=f"{len(schedule)} ranks", expected=f"{n_ranks}", fix="one row per rank")
    n_stages = n_ranks * n_chunks
    _check_places(schedule, n_stages=n_stages)
    counts = Counter(action for actions in schedule for action in actions)
    n_micro_batches = 1 + max((action.micro_batch for action in counts), default=0)
    for stage, kind, micro_batch in product(range(n_stages), "FB", range(n_micro_batches)):
        action = Action(stage, kind, micro_batch)
        if counts[action] != 1:
            raise InputError.of(
                f"schedule: rank {stage % n_ranks}",
                found=f"{action} {counts[action]} times",
                expected="exactly once",
                fix="add what is missing, remove what is repeated",
            )
    replay_order(schedule, n_stages=n_stages)


def _check_places(schedule: Schedule, *, n_stages: int) -> None:
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            where = f"schedule: rank {rank}, action {position}"
            if action.kind not in ("F", "B"):
                raise InputError.of(where, found=str(action), expected="F or B", fix="use one of the two kinds")
            if not 0 <= action.stage < n_stages or action.micro_batch < 0:
                expected = f"stage 0 to {n_stages - 1}, micro-batch 0 or more"
                raise InputError.of(where, found=str(action), expected=expected, fix="drop it")
            if action.stage % len(schedule) != rank:
                owner = action.stage % len(schedule)
                raise InputError.of(where, found=str(action), expected=f"rank {owner} to run it", fix="move it there")


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
    match = re.fullmatch(r"(\d+)([FB])(\d+)", token, flags=re.ASCII)
    if match is None:
        raise InputError.of(
            f"schedule: line {line_number}", found=token, expected="stage, F or B, micro-batch: 2F0", fix="correct it"
        )
    return Action(int(match[1]), match[2], int(match[3]))
