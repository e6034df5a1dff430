"""The best plan of one mesh: solve, simulate, tighten, until the proved bound meets the best simulated plan.

    program of the mesh --solve--> counts, bound --simulate--> estimate
           ^                                          |
           +-- its critical path, or "another plan" --+

Each plan the solver proposes is judged by the simulator. If it is slower than the program believed, its critical path
becomes a row; if that row was there already, or the plan does not fit, exactly this plan is forbidden. The program is a
relaxation all along, so its bound holds for the mesh, and the loop ends with the optimum of the simulator.

Forbidding plans one by one proves little when there are many and takes long when there are few. So after a few, all
plans of a small mesh are simulated; a large one keeps its gap after `MAX_FORBIDDEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Estimate, StagePlan
from autoplan.schedules import Schedule
from autoplan.search.bounds import Path, critical_path, step_bound_s
from autoplan.search.formulation import (
    Formulation,
    add_path,
    all_plans,
    count_plans,
    decode,
    forbid,
    formulate,
    obeys_recompute,
)
from autoplan.search.linear_model import INFINITY, Solution
from autoplan.search.solve import solve
from autoplan.simulate import simulate
from autoplan.units import MiB

RELATIVE_TOLERANCE = 1e-7  # a plan counts as faster than another only by more than this share
MAX_PATHS = 100  # critical paths added to one mesh before its bound is left as it is
MAX_FORBIDDEN = 25  # the same for plans forbidden
FEW_FORBIDDEN = 4  # after so many, a mesh with few plans has all of them simulated
MAX_TRIED_PASSES = 5000  # "few": plans x stages x micro-batches; about one second


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan of one mesh with the simulator's verdict."""

    stages: tuple[StagePlan, ...]
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class MeshOutcome:
    """What is known of a mesh after `refine`.

    Attributes:
        best: its fastest plan found that fits; None when none was found.
        bound_s: no plan of the mesh that fits is faster; INFINITY when none fits.
        is_complete: whether the bound reaches the best plan, or the step time that had to be beaten.
    """

    best: Judged | None
    bound_s: float
    is_complete: bool


def faster_than(step_s: float) -> float:
    """The step time that a plan must not exceed to count as faster."""
    return step_s * (1.0 - RELATIVE_TOLERANCE)


def refine(
    table: CostTable,
    schedule: Schedule,
    *,
    recompute: str | None,
    known: Judged | None,
    interesting_s: float,
    to_beat_s: float,
    remaining_s: Callable[[], float | None],
) -> MeshOutcome:
    """The best plan of the mesh, as far as it matters.

    Looks for one plan faster than `interesting_s`, then goes on until no plan can be faster than the best one found,
    or than `to_beat_s`.
    """
    program = _Program(formulate(table, schedule, recompute=recompute))
    best, bound_s, limit_s = known, step_bound_s(table), interesting_s
    while program.n_forbidden <= MAX_FORBIDDEN and program.n_paths <= MAX_PATHS:
        if best is not None:
            limit_s = min(limit_s, best.estimate.step_s)
        if bound_s >= faster_than(limit_s):
            return MeshOutcome(best, bound_s, is_complete=True)
        time_left_s = remaining_s()
        if time_left_s is not None and time_left_s <= 0.0:
            break
        if program.n_forbidden >= FEW_FORBIDDEN and program.is_small():
            return program.try_all(known, recompute=recompute)
        solution = program.solve_below(faster_than(limit_s), time_limit_s=time_left_s)
        if solution.status == "infeasible":
            return MeshOutcome(best, max(bound_s, faster_than(limit_s)), is_complete=True)
        bound_s = bound_s if solution.bound is None else max(bound_s, solution.bound * program.form.unit_s)
        if solution.objective is None:
            break
        plan = program.judge(solution)
        if plan.estimate.fits and (best is None or plan.estimate.step_s < best.estimate.step_s):
            best = plan
        limit_s = min(limit_s, to_beat_s)
    return MeshOutcome(best, bound_s, is_complete=False)


@dataclass(slots=True)
class _Program:
    """The program of a mesh, and what has been added to it."""

    form: Formulation
    paths: set[Path] = field(default_factory=set)
    n_forbidden: int = 0

    @property
    def n_paths(self) -> int:
        return len(self.paths)

    def solve_below(self, limit_s: float, *, time_limit_s: float | None) -> Solution:
        """The best counts whose believed step time is at most `limit_s`."""
        self.form.model.upper[self.form.total] = limit_s / self.form.unit_s
        return solve(self.form.model, time_limit_s=time_limit_s)

    def judge(self, solution: Solution) -> Judged:
        """Simulate the plan of a solution, and tighten the program where it was wrong about it."""
        assert solution.objective is not None
        stages = decode(self.form, solution.values)
        estimate = simulate(self.form.table, stages, with_timeline=True)
        if not estimate.fits:
            self._forbid(solution)
        elif solution.objective * self.form.unit_s < faster_than(estimate.step_s):
            path = critical_path(self.form.table.mesh, estimate.timeline)
            if path in self.paths:
                self._forbid(solution)
            else:
                add_path(self.form, path)
                self.paths.add(path)
        return Judged(stages, replace(estimate, timeline=()))

    def _forbid(self, solution: Solution) -> None:
        forbid(self.form, solution.values)
        self.n_forbidden += 1

    def is_small(self) -> bool:
        """Whether simulating every plan is cheaper than going on."""
        mesh = self.form.table.mesh
        return count_plans(self.form) * mesh.n_stages * mesh.n_micro_batches <= MAX_TRIED_PASSES

    def try_all(self, known: Judged | None, *, recompute: str | None) -> MeshOutcome:
        """The best of all plans."""
        table, best = self.form.table, known
        for stages in all_plans(self.form):
            if not obeys_recompute(table, stages, recompute=recompute):
                continue
            estimate = simulate(table, stages)
            if estimate.fits and (best is None or estimate.step_s < best.estimate.step_s):
                best = Judged(stages, estimate)
        return MeshOutcome(best, INFINITY if best is None else best.estimate.step_s, is_complete=True)


def least_memory(
    table: CostTable, schedule: Schedule, *, recompute: str | None, time_limit_s: float | None
) -> tuple[Judged, int] | None:
    """The plan that exceeds the memory by the least, and how many bytes any plan lacks; None if stopped."""
    form = formulate(table, schedule, recompute=recompute, measures_shortfall=True)
    solution = solve(form.model, time_limit_s=time_limit_s)
    if solution.objective is None or solution.bound is None:
        return None
    stages = decode(form, solution.values)
    short_bytes = int(max(0.0, solution.bound) * MiB * table.reserved_ratio)
    return Judged(stages, simulate(table, stages)), short_bytes


def is_memory_proof(outcome: MeshOutcome) -> bool:
    """Whether the outcome says that no plan of the mesh fits at all."""
    return outcome.best is None and outcome.is_complete and outcome.bound_s == INFINITY
