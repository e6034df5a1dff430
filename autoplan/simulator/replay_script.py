"""A schedule as numbers: what depends on it alone, worked out once per shape and kept.

A search replays the same few schedules again and again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from autoplan.schedules import KEPT_SCHEDULES, OrderedSchedule, ordered_schedule, stage_ranks
from autoplan.simulator.rank_memory import Moment, moments


@dataclass(frozen=True, slots=True)
class Script:
    """What it takes to replay a schedule, whatever the plan.

    Attributes:
        ordered: the schedule, and an order in which its actions can run; `cues` and `awaited` have this order.
        ranks: of each stage.
        stages: of each rank.
        passes: the different passes: (stage, kind of action, whether it is at the edge of the step).
        cues: per action, the place of its pass in `passes`.
        awaited: per action, the place of the one on another rank whose result it needs; None if there is none.
        moments: per rank, the different moments of its memory.
    """

    ordered: OrderedSchedule
    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[int, str, bool], ...]
    cues: tuple[int, ...]
    awaited: tuple[int | None, ...]
    moments: tuple[tuple[Moment, ...], ...]


@lru_cache(maxsize=KEPT_SCHEDULES)
def script_of(name: str, n_ranks: int, n_micro_batches: int, n_chunks: int) -> Script:
    """The script of a schedule; raises InputError if there is no such schedule for these numbers."""
    ordered = ordered_schedule(name, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_chunks=n_chunks)
    ranks = stage_ranks(ordered.schedule)
    n_runs: Counter[tuple[int, str]] = Counter()
    numbers: dict[tuple[int, str, bool], int] = {}
    cues: list[int] = []
    awaited: list[int | None] = []
    for place, (stage, kind, _) in enumerate(ordered.actions):
        n_runs[stage, kind] += 1
        is_edge = n_runs[stage, kind] == (1 if kind == "F" else n_micro_batches)
        cues.append(numbers.setdefault((stage, kind, is_edge), len(numbers)))
        awaited.append(ordered.awaits_other(place))
    return Script(
        ordered,
        ranks,
        stages=tuple(tuple(sorted({action.stage for action in actions})) for actions in ordered.schedule),
        passes=tuple(numbers),
        cues=tuple(cues),
        awaited=tuple(awaited),
        moments=tuple(tuple(dict.fromkeys(moments(actions))) for actions in ordered.schedule),
    )
