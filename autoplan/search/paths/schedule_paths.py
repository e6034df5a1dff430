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
from dataclasses import dataclass
from itertools import product

from autoplan.parallel_plan import Mesh
from autoplan.schedules import (
    GRADIENT_KINDS,
    Action,
    Pass,
    Schedule,
    dependency,
    input_boundary,
    pass_of,
    receives_ahead,
    schedule_of,
    splits_backward,
)

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD = "first forward", "forward", "backward", "last backward"
INPUTS, WEIGHTS, LAST_WEIGHTS = "backward for inputs", "backward for weights", "last backward for weights"
CARRY = "carry"  # what communication left by a backward pass adds to the next pass of the rank
LAST_CARRY = "last carry"  # the same, left by the last backward pass of a stage
CUT = "cut"  # one transfer over the boundary after a stage; a sendrecv takes no less
PASS_SYMBOLS = {  # by kind: at the edge of a step, elsewhere
    "F": (FIRST_FORWARD, FORWARD),
    "B": (LAST_BACKWARD, BACKWARD),
    "I": (INPUTS, INPUTS),
    "W": (LAST_WEIGHTS, WEIGHTS),
}


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of passes and transfers, each after the one before: ((what, stage), how often), ... .

    It ends with the last backward pass (for weights) of `last_stage`, or before it.
    """

    counts: tuple[tuple[tuple[str, int], int], ...]
    last_stage: int


def counted(counts: Counter[tuple[str, int]], *, last_stage: int) -> Path:
    """The path with so many passes and transfers."""
    return Path(tuple(sorted((key, count) for key, count in counts.items() if count)), last_stage)


def initial_paths(mesh: Mesh) -> tuple[Path, ...]:
    """Paths that bound any plan of the mesh, well where no transfer waits; `critical_paths` adds what a plan needs."""
    ordered = schedule_of(mesh)
    chains = (chain for rank in range(mesh.pp) for chain in chains_of(mesh, ordered.schedule, rank))
    ways = product(chains, (True, False))
    return tuple(dict.fromkeys(path_of(mesh, ordered.ranks, chain, carries=carries) for chain, carries in ways))


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
        counts[symbol_of(pass_of(action, mesh.n_micro_batches)), action.stage] += 1
        source = dependency(action, mesh.n_stages)
        is_by_rank = before is not None and ranks[before.stage] == ranks[action.stage]
        is_received = source is not None and ranks[source.stage] != ranks[action.stage]
        is_received = is_received and not (goes_ahead and (before is None or is_by_rank))
        if before is not None and is_by_rank and before.kind in GRADIENT_KINDS and (carries or not is_received):
            counts[carry_symbol(symbol_of(pass_of(before, mesh.n_micro_batches))), before.stage] += 1
        elif is_received:
            counts[CUT, input_boundary(action.stage, action.kind)] += 1
    return counted(counts, last_stage=chain[-1].stage)


def symbol_of(own: Pass) -> str:
    """What paths call this pass."""
    of_edge, of_others = PASS_SYMBOLS[own.kind]
    return of_edge if own.is_edge else of_others


def last_pass(mesh: Mesh) -> str:
    """The pass of a stage after which nothing follows but what is left of its reductions."""
    return LAST_WEIGHTS if splits_backward(mesh.schedule) else LAST_BACKWARD


def carry_symbol(symbol: str) -> str:
    """What the communication is called that a pass for gradients leaves."""
    return CARRY if symbol in (BACKWARD, WEIGHTS) else LAST_CARRY
