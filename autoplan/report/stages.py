"""Which segments of the model each pipeline stage has, and on which rank it is."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.answers.answer import Answer
from autoplan.parallel_plan import StagePlan
from autoplan.plain_text import text_table
from autoplan.schedules import schedule_of

MOST_SHOWN = 16  # of more, the folder's plan.json and report.html tell


def span_text(stage: StagePlan, names: Sequence[str]) -> str:
    """`tok to layers.6`, or by number where the names of the segments are not known."""
    first, last = stage.start, stage.stop - 1
    if last >= len(names):
        return f"segments {first} to {last}"
    return names[first] if first == last else f"{names[first]} to {names[last]}"


def stages_text(answer: Answer) -> str:
    """A row of each stage of a pipeline; nothing without one, or where there are too many."""
    plan = answer.best.plan
    if plan.mesh.pp == 1 or len(plan.stages) > MOST_SHOWN:
        return ""
    rows = [
        (str(index), str(rank), str(stage.stop - stage.start), span_text(stage, answer.workload.segment_texts))
        for index, (stage, rank) in enumerate(zip(plan.stages, schedule_of(plan.mesh).ranks, strict=True))
    ]
    return text_table(("stage", "rank", "segments", "from and to"), rows, right=frozenset({0, 1, 2}))
