"""The best plan of one mesh: solve, simulate, tighten, until the proved bound meets the best simulated plan.

    program of the mesh --solve--> counts, bound --simulate--> estimate
           ^                                          |
           +-- its critical paths, or "another plan" -+

Each plan the solver proposes is judged by the simulator. If it is slower than the program believed, its critical paths
become rows; if they were there already, or the plan does not fit, exactly this plan is forbidden. The program is a
relaxation all along, so its bound holds for the mesh, and the loop ends with the optimum of the simulator.

Forbidding plans one by one proves little when there are many and takes long when there are few. So after
`FEW_FORBIDDEN`, all plans of a small mesh are simulated; a large one is left with its gap when its bound stalls, unless
a proof is demanded (`Effort.gap` is 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Estimate, StagePlan
from autoplan.search.bounds import step_bound_s
from autoplan.search.paths.critical_paths import critical_paths
from autoplan.search.paths.peak_moments import Shape
from autoplan.search.paths.schedule_paths import Path
from autoplan.search.plans import all_plans, count_plans, obeys_recompute
from autoplan.search.program.formulation import add_path, decode, forbid, formulate
from autoplan.search.program.terms import Formulation
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY, Solution
from autoplan.solver.solve import minimize
from autoplan.units import MiB

RELATIVE_TOLERANCE = 1e-7  # a plan counts as faster than another only by more than this share
MAX_STALLED = 3  # programs solved for a large mesh without raising its bound by a share `WORTHWHILE`
WORTHWHILE = 5e-4
MAX_NODE_STAGES = 1600  # stages x nodes of the search tree of one program; a count, so that the machine decides nothing
FIRST_GAP = 0.02  # of the first program of a mesh
FEW_FORBIDDEN = 4  # plans forbidden before a small mesh has all its plans simulated
MAX_TRIED_PASSES = 10_000  # "small": plans x stages x micro-batches; about one second


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


def faster_than(step_s: float, *, gap: float = 0.0) -> float:
    """The step time that a plan must not exceed to count as faster (by more than a share `gap`)."""
    return step_s * (1.0 - max(gap, RELATIVE_TOLERANCE))


@dataclass(frozen=True, slots=True)
class Effort:
    """How far to go.

    Attributes:
        interesting_s: the first plan looked for must be faster than this.
        to_beat_s: then, faster than this.
        gap: stop when no plan can be faster than that by more than this share.
        remaining_s: time left; None when there is no limit.
    """

    interesting_s: float
    to_beat_s: float
    gap: float
    remaining_s: Callable[[], float | None]


def relaxed_bound_s(program: MeshProgram, *, time_limit_s: float | None) -> float:
    """No plan of the mesh is faster: the program without integrality. INFINITY when not even that is feasible."""
    program.form.model.upper[program.form.total] = INFINITY
    solution = minimize(program.form.model, time_limit_s=time_limit_s, is_relaxed=True)
    if solution.status == "infeasible":
        return INFINITY
    return 0.0 if solution.objective is None else solution.objective * program.form.unit_s * (1.0 - RELATIVE_TOLERANCE)


def refine(program: MeshProgram, *, known: Judged | None, effort: Effort) -> MeshOutcome:
    """The best plan of the mesh, as far as it matters.

    The solver's own gap starts at `FIRST_GAP` and follows the gap between bound and simulator down: precision in a
    program that is still wrong about its plan is wasted.
    """
    best, bound_s, limit_s, solver_gap = known, program.bound_s, effort.interesting_s, FIRST_GAP
    node_limit = max(1, MAX_NODE_STAGES // program.form.n_stages) if effort.gap > 0.0 else None
    while node_limit is None or program.n_stalled <= MAX_STALLED:
        if best is not None:
            limit_s = min(limit_s, best.estimate.step_s)
        if bound_s >= faster_than(limit_s, gap=effort.gap):
            return MeshOutcome(best, bound_s, is_complete=True)
        time_left_s = effort.remaining_s()
        if _is_over(time_left_s):
            break
        if program.n_forbidden >= FEW_FORBIDDEN and program.is_small:
            break
        solution = program.solve_below(
            faster_than(limit_s), time_limit_s=time_left_s, relative_gap=solver_gap, node_limit=node_limit
        )
        if solution.status == "infeasible":
            return MeshOutcome(best, max(bound_s, faster_than(limit_s)), is_complete=True)
        bound_s = program.raise_bound(solution)
        if solution.objective is None:
            break
        plan, is_tightened = program.tighten(solution)
        if plan.estimate.fits and (best is None or plan.estimate.step_s < best.estimate.step_s):
            best = plan
        if solution.status == "feasible" and not is_tightened:
            break
        limit_s = min(limit_s, effort.to_beat_s)
        wrong = max(0.0, 1.0 - solution.objective * program.form.unit_s / plan.estimate.step_s)
        solver_gap = _next_gap(solver_gap, wrong=wrong if plan.estimate.fits else 0.0, least=effort.gap / 2.0)
    if program.is_small and not _is_over(effort.remaining_s()):
        return program.try_all(best, is_late=lambda: _is_over(effort.remaining_s()))
    return MeshOutcome(best, bound_s, is_complete=False)


def _is_over(time_left_s: float | None) -> bool:
    """Whether no time is left; None is no limit."""
    return time_left_s is not None and time_left_s <= 0.0


def _next_gap(gap: float, *, wrong: float, least: float) -> float:
    """A quarter of what the program was wrong by, and never more than before; nothing below the tolerance."""
    following = max(min(gap, wrong) / 4.0, least)
    return following if following > RELATIVE_TOLERANCE else 0.0


@dataclass(slots=True)
class MeshProgram:
    """The program of a mesh, and what has been added to it."""

    form: Formulation
    recompute: str | None
    bound_s: float
    is_small: bool
    paths: set[Path] = field(default_factory=set)
    n_forbidden: int = 0
    n_stalled: int = 0

    @classmethod
    def of(cls, table: CostTable, shape: Shape, *, recompute: str | None) -> MeshProgram:
        """The program of a mesh, with nothing added yet."""
        form = formulate(table, shape, recompute=recompute)
        return cls(form, recompute, step_bound_s(table), _is_small(form))

    def solve_below(
        self, limit_s: float, *, time_limit_s: float | None, relative_gap: float, node_limit: int | None
    ) -> Solution:
        """The best counts whose believed step time is at most `limit_s`."""
        self.form.model.upper[self.form.total] = limit_s / self.form.unit_s
        return minimize(self.form.model, time_limit_s=time_limit_s, relative_gap=relative_gap, node_limit=node_limit)

    def raise_bound(self, solution: Solution) -> float:
        """The best bound so far; a bound that hardly rises is counted, unless the mesh is small."""
        risen_s = 0.0 if solution.bound is None else solution.bound * self.form.unit_s
        has_stalled = risen_s < self.bound_s * (1.0 + WORTHWHILE) and not self.is_small
        self.n_stalled = self.n_stalled + 1 if has_stalled else 0
        self.bound_s = max(self.bound_s, risen_s)
        return self.bound_s

    def tighten(self, solution: Solution) -> tuple[Judged, bool]:
        """Simulate the plan of a solution; tighten the program where it was wrong about it, and say whether it was."""
        assert solution.objective is not None
        stages = decode(self.form, solution.values)
        estimate = simulate(self.form.table, stages)
        n_rows = len(self.form.model.rows)
        if not estimate.fits:
            self._forbid(solution)
        elif solution.objective * self.form.unit_s < faster_than(estimate.step_s):
            new = set(critical_paths(self.form.table, stages)) - self.paths
            for path in sorted(new, key=lambda path: path.counts):
                add_path(self.form, path)
            self.paths |= new
            if not new:
                self._forbid(solution)
        return Judged(stages, estimate), len(self.form.model.rows) > n_rows

    def _forbid(self, solution: Solution) -> None:
        forbid(self.form, solution.values)
        self.n_forbidden += 1

    def try_all(self, known: Judged | None, *, is_late: Callable[[], bool]) -> MeshOutcome:
        """The best of all plans; of those tried, when it is late."""
        table, best = self.form.table, known
        for stages in all_plans(self.form.runs, self.form.table.mesh):
            if is_late():
                return MeshOutcome(best, self.bound_s, is_complete=False)
            if not obeys_recompute(table, stages, recompute=self.recompute):
                continue
            estimate = simulate(table, stages)
            if estimate.fits and (best is None or estimate.step_s < best.estimate.step_s):
                best = Judged(stages, estimate)
        return MeshOutcome(best, INFINITY if best is None else best.estimate.step_s, is_complete=True)


def _is_small(form: Formulation) -> bool:
    """Whether simulating every plan is cheaper than a long proof."""
    mesh = form.table.mesh
    most_plans = MAX_TRIED_PASSES // (mesh.n_stages * mesh.n_micro_batches)
    n_pieces = sum(run.length for run in form.runs)
    return math.comb(n_pieces - 1, mesh.n_stages - 1) <= most_plans and count_plans(form.runs, mesh) <= most_plans


def least_memory(
    table: CostTable, shape: Shape, *, recompute: str | None, time_limit_s: float | None
) -> tuple[Judged, int] | None:
    """The plan that exceeds the memory by the least, and how many bytes any plan lacks; None if stopped."""
    form = formulate(table, shape, recompute=recompute, measures_shortfall=True)
    solution = minimize(form.model, time_limit_s=time_limit_s)
    if solution.objective is None or solution.bound is None:
        return None
    stages = decode(form, solution.values)
    short_bytes = int(max(0.0, solution.bound) * MiB * table.taken_ratio)
    return Judged(stages, simulate(table, stages)), short_bytes


def is_memory_proof(outcome: MeshOutcome) -> bool:
    """Whether the outcome says that no plan of the mesh fits at all."""
    return outcome.best is None and outcome.is_complete and outcome.bound_s == INFINITY
