"""Which of the plans that are as good as each other is the answer: the simplest.

Plans are as good as each other when no proof tells them apart: they are within the search's gap of what is proved, or,
where less is proved, of the best plan found. With a gap of 0 only plans of the same score are. What is simple:

    fewer axes split < plainer schedule < lower ZeRO stage < less recomputed < fewer stages < modules as they are
    < fewer groups of a mixed cluster < fewer devices

each counts only where those before it are equal; of what is left the better plan is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.parallel_plan import Execution, Mesh, StagePlan
from autoplan.search.meshes import SCHEDULES
from autoplan.search.one_mesh import RELATIVE_TOLERANCE, faster_than


@dataclass(frozen=True, slots=True)
class Scored:
    """A plan and its score (step time, or step time x devices); lower is better."""

    score: float
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    n_groups: int = 1


def simplest(ranking: Sequence[Scored], *, bound: float, gap: float) -> int:
    """The place of the answer in a ranking, best first, that is not empty; `bound` is the proved bound on the score."""
    best = ranking[0].score
    proved = bound if bound >= faster_than(best, gap=gap) else best
    limit = max(best, proved / (1.0 - gap))
    equals = [index for index, item in enumerate(ranking) if item.score <= limit * (1.0 + RELATIVE_TOLERANCE)]
    return min(equals, key=lambda index: (_complexity(ranking[index]), index))


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
        (mesh.execution != Execution()) + mesh.generated + mesh.keeps_attention + mesh.cuda_graph,
        item.n_groups,
        mesh.n_devices,
    )
