"""Which of the plans that are as good as each other is the answer: one with room in memory, and then the simplest.

Plans are as good as each other when no proof tells them apart: they are within the search's gap of what is proved, or,
where less is proved, of the best plan found. With a gap of 0 only plans of the same score are. What is simple:

    fewer axes split < plainer schedule < lower ZeRO stage < less recomputed < fewer stages < modules as they are
    < fewer groups of a mixed cluster < fewer devices

each counts only where those before it are equal; of what is left the better plan is the answer. As a peak may be larger
than predicted, a plan that leaves a part of every device free comes before all that do not, and may be slower than the
best by the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.parallel_plan import Estimate, Execution, Mesh, StagePlan
from autoplan.search.meshes import SCHEDULES
from autoplan.search.one_mesh import RELATIVE_TOLERANCE, faster_than

ROOMY = 0.95  # of a device: computed peaks are off by 4 % (`answers.intervals.MEMORY_ERRORS`)


@dataclass(frozen=True, slots=True)
class Scored:
    """A plan and its score (step time, or step time x devices); lower is better. `is_tight`: see `is_tight`."""

    score: float
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    n_groups: int = 1
    is_tight: bool = False


def is_tight(estimate: Estimate) -> bool:
    """Whether a plan needs more than `ROOMY` of some device."""
    needed = enumerate(estimate.needed_bytes)
    return any(n_bytes > ROOMY * estimate.limit_bytes(rank) for rank, n_bytes in needed)


def simplest(ranking: Sequence[Scored], *, bound: float, gap: float) -> int:
    """The place of the answer in a ranking, best first, that is not empty; `bound` is the proved bound on the score."""
    best = ranking[0].score
    proved = bound if bound >= faster_than(best, gap=gap) else best
    limit = max(best, proved / (1.0 - gap))
    roomy = [index for index, item in enumerate(ranking) if not item.is_tight]
    for most, places in ((limit, roomy), (best / (1.0 - gap), roomy), (limit, range(len(ranking)))):
        equals = [index for index in places if ranking[index].score <= most * (1.0 + RELATIVE_TOLERANCE)]
        if equals:
            return min(equals, key=lambda index: (_complexity(ranking[index]), index))
    raise AssertionError("the best plan is as good as itself")


def mesh_complexity(mesh: Mesh) -> tuple[int, ...]:
    """What comes first in that order, whatever is recomputed."""
    return (
        sum(degree > 1 for degree in (mesh.dp, mesh.tp, mesh.pp)),
        SCHEDULES.index(mesh.schedule) if mesh.pp > 1 else 0,
        mesh.zero_stage,
    )


def _complexity(item: Scored) -> tuple[int, ...]:
    """The order of the module's docstring."""
    mesh = item.mesh
    return (
        *mesh_complexity(mesh),
        sum(len(stage.recomputed) for stage in item.stages),
        mesh.n_stages,
        (mesh.execution != Execution()) + mesh.generated + mesh.keeps_attention,
        item.n_groups,
        mesh.n_devices,
    )
