"""Where a search on a mixed cluster stands: what waits, what was found, and the time left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search import GOOD_ENOUGH
from autoplan.search.mixed.meshes import Groups, MeshQueue, MixedSpace, Shape
from autoplan.search.mixed.shares import ShareQueue
from autoplan.search.one_mesh import Judged, faster_than
from autoplan.search.result import Rejection, SearchResult
from autoplan.solver.linear_model import INFINITY


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan of a mesh."""

    mesh: Mesh
    groups: Groups
    judged: Judged
    bound_s: float


@dataclass(slots=True)
class MixedState:
    """A search under way."""

    space: MixedSpace
    options: Options
    clock: Callable[[], float]
    started_s: float
    patience_s: float | None = None  # the time limit while there is no plan
    planless_share: float = 1.0  # of the time limit, while there is no plan
    shapes: tuple[Shape, ...] = ()
    queue: MeshQueue | None = None  # of pipelines, not yet
    shares: ShareQueue | None = None  # not yet
    found: list[Found] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    results: dict[int, SearchResult] = field(default_factory=dict)  # of groups alone
    work_s: dict[int, float] = field(default_factory=dict)  # per group, no plan on it alone is faster
    impossible: dict[int, str] = field(default_factory=dict)  # why a group has no mesh at all
    least_bound_s: float = INFINITY  # of meshes over several groups that may hold a better plan than was found
    first_plan_s: float | None = None
    stopped: str = ""

    def note_plan(self) -> None:
        """Remember that the first plan that fits is known by now."""
        if self.first_plan_s is None and self.best_s < INFINITY:
            self.first_plan_s = self.clock() - self.started_s

    @property
    def best_s(self) -> float:
        """The step time of the best plan so far."""
        groups_s = (result.best.estimate.step_s for result in self.results.values() if result.best is not None)
        return min((*(item.judged.estimate.step_s for item in self.found), *groups_s), default=INFINITY)

    @property
    def gap(self) -> float:
        """How much faster a plan must be to be worth looking for."""
        return 0.0 if self.options.require_optimal else GOOD_ENOUGH

    @property
    def to_beat_s(self) -> float:
        """The step time that a plan must be below to be worth looking for."""
        return faster_than(self.best_s, gap=self.gap)

    @property
    def limit_s(self) -> float:
        """The time limit as it is now; INFINITY when there is none."""
        limit_s = self.options.time_limit_s
        if limit_s is not None and self.patience_s is not None and self.best_s == INFINITY:
            limit_s = self.patience_s
        if limit_s is None:
            return INFINITY
        return self.planless_share * limit_s if self.best_s == INFINITY else limit_s

    def remaining_s(self) -> float:
        """Time left; INFINITY when there is no limit."""
        return self.limit_s - (self.clock() - self.started_s)

    def is_over(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return self.clock() - self.started_s >= share * self.limit_s
