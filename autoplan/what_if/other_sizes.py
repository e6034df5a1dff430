"""A plan serves every cluster that has its devices: a larger one, or a smaller one where whole hosts are idle.

A search that its time limit ends may miss that plan. Where a sweep found a slower plan, or none, for another number of
hosts of the same hardware, with the same batch, the mesh of the best that fits is judged there, and taken if it is
faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.checks.options import parse_fix
from autoplan.planning.problem import checked
from autoplan.search import GOOD_ENOUGH
from autoplan.what_if.points import Point, PointResult
from autoplan.what_if.sweep import Sweep, Task


def of_other_sizes(points: Sequence[Point], tasks: Sequence[Task], results: Sequence[PointResult]) -> dict[int, Task]:
    """Per place of a point that another number of hosts outdoes, the search of its mesh on the devices of the point."""
    found = {}
    for place, (point, task) in enumerate(zip(points, tasks, strict=True)):
        alike = [
            results[other]
            for other, same in enumerate(points)
            if same.n_hosts != point.n_hosts and replace(same, n_hosts=point.n_hosts) == point
        ]
        known = (own for own in alike if own.step_s is not None)
        serve = (own for own in known if (own.n_used_devices or 0) <= results[place].n_devices)
        best = min(serve, key=lambda own: _score(own, task), default=None)
        if best is not None and best.fix is not None and _is_outdone(results[place], best, task):
            fix = dict(task.options.fix) | dict(parse_fix([best.fix]))
            found[place] = replace(task, options=checked(replace(task.options, fix=tuple(fix.items()))))
    return found


def _is_outdone(result: PointResult, best: PointResult, task: Task) -> bool:
    """Whether a plan is worse than that of another size by more than searches leave, or was not found in time."""
    if result.step_s is None:
        return result.status == "unknown"
    return _score(result, task) * (1.0 - GOOD_ENOUGH) > _score(best, task)


def _is_better(result: PointResult, before: PointResult, task: Task) -> bool:
    """Whether a plan is faster, and its memory no less sure to suffice."""
    is_sure = result.unmet_confidence is None or before.unmet_confidence is not None
    return is_sure and _score(result, task) < _score(before, task)


def _score(result: PointResult, task: Task) -> float:
    """What the search makes as small as it can."""
    assert result.step_s is not None and result.n_used_devices is not None
    return result.step_s * (result.n_used_devices if task.options.objective == "cost" else 1)


def with_judged(sweep: Sweep, tasks: Mapping[int, Task], judged: Sweep) -> Sweep:
    """The sweep with what was judged for these places, where that is better; what was proved of them stays."""
    results = list(sweep.results)
    for (place, task), result in zip(tasks.items(), judged.results, strict=True):
        before = results[place]
        if result.step_s is None or (before.step_s is not None and not _is_better(result, before, task)):
            continue
        gap = None
        if before.step_s is not None and before.gap is not None:
            gap = max(0.0, 1.0 - (1.0 - before.gap) * _score(before, task) / _score(result, task))
        results[place] = replace(result, status="feasible", gap=gap)
    return replace(
        sweep,
        results=tuple(results),
        processor_s=sweep.processor_s + judged.processor_s,
        wall_s=sweep.wall_s + judged.wall_s,
        is_interrupted=judged.is_interrupted,
    )
