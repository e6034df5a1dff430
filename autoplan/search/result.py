"""What a search returns: values, never exceptions, for "optimal", "stopped" and "nothing fits" alike."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from autoplan.options import AS_COMPUTED
from autoplan.parallel_plan import Estimate, Mesh, Plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its estimate and the proved lower bound on the step time of its mesh.

    `baseline` names the plain recipe it stands for ("DDP", "FSDP", "hand rule"), or is "".
    """

    plan: Plan
    estimate: Estimate
    bound_s: float
    baseline: str = ""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A mesh that is not the answer, and why.

    Attributes:
        reason: one of "memory", "bound" (cannot beat the best plan), "slower", "time limit".
        detail: a sentence with the figures: `stage 0 needs 96.2 GiB, device has 80.0 GiB`.
        step_s: its simulated step time where it was simulated; None otherwise.
        short_bytes: how much memory it lacks at the least; None unless the reason is "memory".
        stage: which pipeline rank lacks the most in the plan that lacks the least; None where no plan was made.
    """

    mesh: Mesh
    reason: str
    detail: str
    step_s: float | None = None
    short_bytes: int | None = None
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes an infeasible request feasible, verified by a search that found this plan.

    Attributes:
        change: in words: "zero=1 instead of zero=0", "3 hosts instead of 1".
        fix: what to fix then, as in `Options`.
        n_hosts: how many hosts to have then.
        peak_bytes: of the rank that needs the most memory.
    """

    change: str
    fix: tuple[tuple[str, str], ...]
    n_hosts: int
    mesh: Mesh
    recompute: str
    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class OneDevice:
    """What the step takes on one device alone.

    Attributes:
        step_s: of the fastest plan that fits; None when none does.
        needed_bytes: of that plan; of the one that needs the least, or fewer, when none fits. Then it may still be
            within `memory_limit_bytes`, but not with the margin (see `CostTable.memory_margin`).
    """

    step_s: float | None
    needed_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer of a search, with its proof.

    Attributes:
        status: "optimal" (no other plan of the space is faster), "feasible" (stopped; see `gap`),
            "infeasible" (proved), or "unknown" (stopped with nothing); of a plan that was only judged "given", of a
            question that no search could be made for "unusable".
        best: the fastest plan, or the simplest of those that are as fast, see `preference`; None when there is none. It
            may have more stages per rank than the space, see `deeper_pipelines`; of such plans nothing else is proved.
        alternatives: the best plan found of other meshes, fastest first, without `best`.
        baselines: the plain recipes; a recipe that does not fit has an estimate that says so, or is absent
            when it does not exist for this model and cluster.
        bound_s: proved lower bound on the step time over the whole space, or the step time of `best` where that is
            less; None when nothing is proved.
        nearest_fix: when infeasible, the first of `remedies` in a sentence; when not one mesh divides devices and
            batch (`n_meshes` is 0), the numbers that would.
        remedies: when infeasible, the changes that were verified to make it feasible, the cheapest first.
        rejected: every mesh but that of `best`; of an answer that was read back, only the nearest where they were many.
        rejected_counts: (reason, how many meshes) pairs where `rejected` does not hold all of them.
        stopped_by: what ended the search before its proof: "time limit", "interrupted" (Ctrl-C), "stalled" (meshes
            are left whose bounds would not rise any further), or "" when nothing worth looking for is left.
        first_plan_s: when the first plan that fits was known, from the start of the search.
        one_device: the same step on one device; None where there is no other, or none may be left idle.
        memory_confidence: the chance with which memory suffices for the plans found; `bound_s` is of all plans for
            which it does (see `Options.memory_confidence`). `AS_COMPUTED` of a plan that was only judged.
        unmet_confidence: the higher one that was asked for, where no plan was found that fits so; else None.
        unmet_status: whether that is proved ("infeasible") or there was no time to look further ("unknown").
    """

    status: str
    best: Candidate | None
    alternatives: tuple[Candidate, ...]
    baselines: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    bound_s: float | None
    n_meshes: int
    search_s: float
    nearest_fix: str = ""
    stopped_by: str = ""
    first_plan_s: float | None = None
    remedies: tuple[Remedy, ...] = ()
    rejected_counts: tuple[tuple[str, int], ...] = ()
    one_device: OneDevice | None = None
    memory_confidence: float = AS_COMPUTED
    unmet_confidence: float | None = None
    unmet_status: str = ""

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        """How many meshes fell to each reason."""
        return dict(self.rejected_counts or sorted(Counter(item.reason for item in self.rejected).items()))

    @property
    def closest(self) -> Rejection | None:
        """When nothing fits, the mesh that lacks the least memory, among those of which a plan was made if any."""
        short = [item for item in self.rejected if item.short_bytes is not None]
        return min(short, key=lambda item: (item.stage is None, item.short_bytes), default=None)

    @property
    def why_nothing(self) -> str:
        """When nothing fits: what the closest mesh lacks, or which numbers would give a mesh at all."""
        return self.nearest_fix if self.closest is None else self.closest.detail

    @property
    def gap(self) -> float | None:
        """(step time - bound) / step time; 0.0 is a proof of optimality, None when there is no plan or no bound."""
        if self.best is None or self.bound_s is None:
            return None
        return max(0.0, 1.0 - self.bound_s / self.best.estimate.step_s)


def nearest_rejections(rejected: tuple[Rejection, ...], *, most: int) -> tuple[Rejection, ...]:
    """Those that came closest, in their order: the fastest plans first, then those that lack the least memory."""
    kept = heapq.nsmallest(most, range(len(rejected)), key=lambda index: (_distance(rejected[index]), index))
    return tuple(rejected[index] for index in sorted(kept))


def _distance(item: Rejection) -> tuple[float, ...]:
    if item.reason == "slower":
        return 0, item.step_s or 0.0
    return (2,) if item.short_bytes is None else (1, item.stage is None, item.short_bytes)
