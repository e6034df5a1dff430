"""A quick search looks at few schedules: the mesh of a plan under 1f1b is then judged under all others.

What is faster is taken (`other_sizes.with_judged`). Plans of mixed clusters and plans under gpipe stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.checks.options import parse_fix
from autoplan.hardware import HardwareProfile
from autoplan.planning.problem import checked
from autoplan.what_if.points import QUICK_SCHEDULE, PointResult
from autoplan.what_if.sweep import Task


def of_all_schedules(tasks: Sequence[Task], results: Sequence[PointResult]) -> dict[int, Task]:
    """Per place of a plan that a quick search found under 1f1b, the search of its mesh under every schedule."""
    found = {}
    for place, (task, result) in enumerate(zip(tasks, results, strict=True)):
        fix = {} if result.fix is None else dict(parse_fix([result.fix]))
        is_chosen = QUICK_SCHEDULE in task.options.fix and isinstance(task.hardware, HardwareProfile)
        if is_chosen and fix.pop("schedule", None) == "1f1b":
            found[place] = replace(task, options=checked(replace(task.options, fix=tuple(fix.items()))))
    return found
