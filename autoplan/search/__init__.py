"""The search: the best plan of a space, with a proof.

    meshes --least compute--> bound --price--> bound --whole pieces--> bound, plan --relaxed--> bound
               `compute_bound_s`    `step_bound_s`      `best_partition`,             `relaxed_bound_s`,
                                                        `shared_bound_s`              `joint_bound`
           --integer program and simulator--> plan, bound
                       `refine`

Meshes wait in a queue, ordered by the best lower bound known of each. The first one's bound is raised by one more step,
as far as arithmetic goes; then those left are solved, the easy ones first (`_prove`). When no bound in the queue is
below the best plan, no mesh left can hold a better one; that is the proof. Most meshes are never priced, and few reach
a solver: one stage per rank is cut by dynamic programming, whose plan is judged at once; several are bounded rank by
rank, then by all ranks together, and get plans that recompute as little as will do. Equal bounds are taken in the order
of the enumeration, so the same input gives the same answer.

Unless `require_optimal`, meshes that cannot be faster than the best plan by more than `GOOD_ENOUGH` are left alone. The
status is then "feasible", and the gap says how much is unproved.

The simulator alone judges plans. `price` must give equal `forward_s` and `backward_s` to meshes that agree in tp,
sharding, micro-batch size, ZeRO stage, and in whether they have a pipeline and are compiled: the first bound rests on
it.

Bounds and comparisons hold within `RELATIVE_TOLERANCE` (1e-7).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoplan.cost.table import CostTable
from autoplan.options import Options
from autoplan.parallel_plan import Execution, Mesh, Plan, StagePlan
from autoplan.search.baselines import Baseline, plain_recipes
from autoplan.search.bounds import compute_bound_s, least_compute_s, shortfall_bytes, step_bound_s
from autoplan.search.joint_sizes import joint_bound
from autoplan.search.linear_model import INFINITY
from autoplan.search.meshes import SearchSpace, enumerate_meshes, fixed
from autoplan.search.one_mesh import (
    Effort,
    Judged,
    Program,
    faster_than,
    is_memory_proof,
    least_memory,
    refine,
    relaxed_bound_s,
)
from autoplan.search.partition import best_partition
from autoplan.search.paths import shape_of
from autoplan.search.plans import obeys_recompute
from autoplan.search.rank_shares import Shares, narrowed_bound_s, shared_bound_s
from autoplan.search.result import Candidate, Rejection, SearchResult
from autoplan.search.thrift import balanced_stages, thrifty_plan
from autoplan.simulate import simulate
from autoplan.units import GiB, MiB

__all__ = ["SearchSpace", "search"]

Price = Callable[[Mesh], CostTable]
MakePlan = Callable[[Mesh, tuple[StagePlan, ...]], Plan]

UNPRICED, PRICED, CUT, RELAXED, SOLVED = range(5)  # how far a mesh in the queue has been examined
N_CLOSEST = 16  # meshes that are asked for the plan that lacks the least memory, when nothing fits
GOOD_ENOUGH = 1e-3  # share of the step time that is not worth a proof; the cost model is not that exact

STOPS = {"interrupted": "interrupted", "time limit": "not examined in time"}  # why a mesh was not examined


@dataclass(slots=True)
class _Search:
    """A search under way."""

    options: Options
    price: Price
    clock: Callable[[], float]
    started_s: float
    meshes: tuple[Mesh, ...] = ()
    answer_s: float = 0.0  # about what the answer takes to write: every mesh is named once more, as when enumerated
    queue: list[tuple[float, int, int]] = field(default_factory=list)  # (score bound, index of the mesh, examined)
    tables: dict[Mesh, CostTable] = field(default_factory=dict)
    compute_s: dict[tuple[int, str, int, int, bool, Execution], tuple[float, float]] = field(default_factory=dict)
    programs: dict[int, Program] = field(default_factory=dict)
    plans: dict[int, Judged] = field(default_factory=dict)  # best plan found, per index
    bounds_s: dict[int, float] = field(default_factory=dict)  # proved bound of the meshes solved, per index
    rejections: dict[int, Rejection] = field(default_factory=dict)
    agreed_s: dict[int, float] = field(default_factory=dict)  # limit of the last `_agree_on_sizes`, per index
    stopped: str = ""
    first_plan_s: float | None = None  # when the first plan that fits was known
    ranked: list[int] | None = None  # `ranking`, while no plan has been added

    def keep(self, index: int, plan: Judged) -> None:
        """Remember the best plan found of a mesh."""
        self.plans[index] = plan
        self.ranked = None
        if self.first_plan_s is None:
            self.first_plan_s = self.clock() - self.started_s

    def remaining_s(self) -> float | None:
        """Time left to search; None when there is no limit."""
        limit_s = self.options.time_limit_s
        return None if limit_s is None else limit_s - self.answer_s - (self.clock() - self.started_s)

    def is_late(self) -> bool:
        """Whether no time is left."""
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= 0.0

    def table(self, mesh: Mesh) -> CostTable:
        """The price of a mesh, asked for once."""
        if mesh not in self.tables:
            self.tables[mesh] = self.price(mesh)
        return self.tables[mesh]

    def program(self, index: int, *, bound_s: float) -> Program:
        """The program of a mesh that cannot be faster than `bound_s`."""
        if index not in self.programs:
            mesh = self.meshes[index]
            self.programs[index] = Program.of(self.table(mesh), shape_of(mesh), recompute=self.recompute)
        program = self.programs[index]
        program.bound_s = max(program.bound_s, bound_s)
        return program

    def weight(self, mesh: Mesh) -> float:
        """What a second of this mesh scores: the price of a step is proportional to the devices used."""
        return float(mesh.n_devices) if self.options.objective == "cost" else 1.0

    def score(self, index: int) -> float:
        """The score of the best plan found of a mesh; lower is better."""
        return self.plans[index].estimate.step_s * self.weight(self.meshes[index])

    def ranking(self) -> list[int]:
        """The meshes with a plan, best first."""
        if self.ranked is None:
            self.ranked = sorted(self.plans, key=lambda index: (self.score(index), index))
        return self.ranked

    def score_to_beat(self, rank: int = 0) -> float:
        """The score of the plan at this place of the ranking; INFINITY when there are fewer."""
        ranking = self.ranking()
        return self.score(ranking[rank]) if rank < len(ranking) else INFINITY

    @property
    def gap(self) -> float:
        """How much faster a plan must be to be worth looking for."""
        return 0.0 if self.options.require_optimal else GOOD_ENOUGH

    @property
    def recompute(self) -> str | None:
        """What the user fixed."""
        return fixed(self.options, "recompute")


def search(
    space: SearchSpace,
    *,
    price: Price,
    options: Options,
    make_plan: MakePlan,
    warm_start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """The best plan of `space`, or the proof that none fits.

    With objective "cost" the best plan is the one with the least step time x devices used, and `bound_s` is the bound
    on that product, divided by the devices of the best plan. After Ctrl-C the best plan so far is returned; the meshes
    not examined are rejected for "time limit" with the detail "interrupted". `warm_start` is a plan of the same model
    that may be good, say the best one on a similar cluster; where the space has its mesh, it is judged first.

    Raises: InfeasibleError if no mesh divides the devices and the batch; InputError for a wrong fix; PlanMismatchError
        when `warm_start` is of another model.
    """
    state = _Search(options, price, clock, clock())
    found: tuple[Baseline, ...] = ()
    try:
        found = plain_recipes(space, options, price=state.table)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    recipes_s = clock() - state.started_s
    state.meshes = enumerate_meshes(space, options)
    state.answer_s = clock() - state.started_s - recipes_s
    try:
        _start(state, found, warm_start, recipes_s=recipes_s)
        _prove(state)
        _fill_alternatives(state)
        _explain_memory(state)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    return _result(state, found, make_plan=make_plan)


# ---------------------------------------------------------------------------------------------------------- the queue


def _start(state: _Search, found: tuple[Baseline, ...], warm_start: Plan | None, *, recipes_s: float) -> None:
    """Baselines that belong to the space, and the warm start, are the first plans; every mesh enters the queue."""
    if state.stopped:
        return
    index_of = {mesh: index for index, mesh in enumerate(state.meshes)}
    for baseline in found:
        index = index_of.get(baseline.table.mesh)
        obeys = obeys_recompute(baseline.table, baseline.judged.stages, recompute=state.recompute)
        if index is not None and obeys and baseline.judged.estimate.fits:
            state.keep(index, baseline.judged)
            state.first_plan_s = recipes_s
    index = None if warm_start is None else index_of.get(warm_start.mesh)
    if warm_start is not None and index is not None:
        _judge(state, index, warm_start.stages)
    for index, mesh in enumerate(state.meshes):
        key = (mesh.tp, mesh.sharding, mesh.micro_batch_size, mesh.zero_stage, mesh.pp > 1, mesh.execution)
        if key not in state.compute_s:
            state.compute_s[key] = least_compute_s(state.table(mesh))
        forward_s, backward_s = state.compute_s[key]
        bound_s = compute_bound_s(mesh, forward_s=forward_s, backward_s=backward_s)
        state.queue.append((bound_s * state.weight(mesh), index, UNPRICED))


def _prove(state: _Search) -> None:
    """Examine meshes in order of their bounds until none can beat the best plan.

    First all are taken as far as arithmetic goes; its plans spare most meshes the solver. Those with one stage per rank
    come first: they are quick, and their plans spare many of the others.
    """
    for up_to, with_chunks in ((CUT, False), (CUT, True), (SOLVED, False), (RELAXED, True), (SOLVED, True)):
        _advance(state, up_to=up_to, with_chunks=with_chunks)


def _advance(state: _Search, *, up_to: int, with_chunks: bool) -> None:
    """Examine meshes that may beat the best plan up to a step: those with several stages per rank, or the others."""
    is_meant = [(state.meshes[index].n_chunks > 1) == with_chunks for _, index, _ in state.queue]
    waiting = [entry for entry, meant in zip(state.queue, is_meant, strict=True) if not meant]
    state.queue = [entry for entry, meant in zip(state.queue, is_meant, strict=True) if meant]
    heapq.heapify(state.queue)
    try:
        while _may_hold_better(state) and not _is_late(state):
            if state.queue[0][2] >= up_to:
                waiting.append(heapq.heappop(state.queue))
            else:
                _examine(state, to_beat=state.score_to_beat())
    finally:  # also when interrupted, no mesh may be lost
        state.queue += waiting
        heapq.heapify(state.queue)


def _may_hold_better(state: _Search) -> bool:
    """Whether the first mesh of the queue may beat the best plan."""
    return bool(state.queue) and state.queue[0][0] < faster_than(state.score_to_beat(), gap=state.gap)


def _fill_alternatives(state: _Search) -> None:
    """Solve a few more meshes, so that there is something to compare the best plan with."""
    n_tries = 2 * state.options.top
    while state.queue and state.plans and len(state.plans) <= state.options.top and n_tries > 0 and not state.stopped:
        n_tries -= state.queue[0][2] == RELAXED
        if _is_late(state, marks=False):
            return
        _examine(state, to_beat=0.0)


def _is_late(state: _Search, *, marks: bool = True) -> bool:
    is_late = state.is_late()
    if is_late and marks:
        state.stopped = "time limit"
    return is_late


def _examine(state: _Search, *, to_beat: float) -> None:
    """Take the first mesh of the queue one step further; it stays there while it may hold a better plan."""
    score, index, examined = state.queue[0]
    mesh = state.meshes[index]
    weight = state.weight(mesh)
    if examined == CUT and _is_settled(state, index, score / weight):
        state.bounds_s[index] = score / weight
    elif examined == RELAXED:
        _solve(state, index, to_beat=to_beat)
    else:
        bound_s = RAISE_BOUND[examined](state, index)
        if index not in state.rejections:
            heapq.heapreplace(state.queue, (max(score, bound_s * weight), index, examined + 1))
            return
    heapq.heappop(state.queue)
    state.tables.pop(mesh, None)
    state.programs.pop(index, None)


def _is_settled(state: _Search, index: int, bound_s: float) -> bool:
    """Whether the plan found of a mesh is as good as its bound allows."""
    plan = state.plans.get(index)
    return plan is not None and bound_s >= faster_than(plan.estimate.step_s, gap=state.gap)


def _price(state: _Search, index: int) -> float:
    """The bound by arithmetic."""
    table = state.table(state.meshes[index])
    short_bytes = shortfall_bytes(table)
    if short_bytes > 0:
        state.rejections[index] = _short_somewhere(table, short_bytes)
    return step_bound_s(table)


def _cut(state: _Search, index: int) -> float:
    """The bound by whole pieces; with one stage per rank the plan behind it is judged too."""
    mesh, weight = state.meshes[index], state.weight(state.meshes[index])
    table = state.table(mesh)
    if mesh.n_chunks > 1:
        limit_s = faster_than(state.score_to_beat() / weight, gap=state.gap)
        bound_s = shared_bound_s(table, shape_of(mesh), recompute=state.recompute, limit_s=limit_s)
        if bound_s < limit_s:
            _share_out(state, index)
    else:
        limit_s = state.score_to_beat(state.options.top) / weight
        partition = best_partition(table, recompute=state.recompute, limit_s=limit_s)
        bound_s = partition.bound_s
        if partition.stages:
            _judge(state, index, partition.stages)
    if bound_s == INFINITY:
        state.rejections[index] = _short_somewhere(table, 1)
    return bound_s


def _share_out(state: _Search, index: int) -> None:
    """Look for a plan with several stages per rank that fits."""
    mesh = state.meshes[index]
    table, recompute = state.table(mesh), state.recompute
    stages = balanced_stages(table, recompute=recompute)
    plan = thrifty_plan(table, shape_of(mesh), stages, recompute=recompute, is_late=state.is_late)
    if plan is not None and obeys_recompute(table, plan.stages, recompute=recompute):
        _keep_if_better(state, index, plan)


def _judge(state: _Search, index: int, stages: tuple[StagePlan, ...]) -> None:
    """Keep a plan that is allowed, fits, and is the fastest of its mesh."""
    if not obeys_recompute(state.table(state.meshes[index]), stages, recompute=state.recompute):
        return
    _keep_if_better(state, index, Judged(stages, simulate(state.table(state.meshes[index]), stages)))


def _keep_if_better(state: _Search, index: int, plan: Judged) -> None:
    known = state.plans.get(index)
    if plan.estimate.fits and (known is None or plan.estimate.step_s < known.estimate.step_s):
        state.keep(index, plan)


def _relax(state: _Search, index: int) -> float:
    """The bound by the linear program; with several stages per rank by all sizes together, where that is enough."""
    mesh = state.meshes[index]
    bound_s = state.queue[0][0] / state.weight(mesh)
    if mesh.n_chunks > 1:
        bound_s = _agree_on_sizes(state, index, bound_s)
        if bound_s >= faster_than(state.score_to_beat() / state.weight(mesh), gap=state.gap):
            return bound_s
    program = state.program(index, bound_s=bound_s)
    program.bound_s = max(program.bound_s, relaxed_bound_s(program, time_limit_s=state.remaining_s()))
    if program.bound_s == INFINITY:
        state.rejections[index] = _short_somewhere(state.table(mesh), 1)
    return program.bound_s


def _agree_on_sizes(state: _Search, index: int, bound_s: float) -> float:
    """The bound raised by all ranks together, with the plans found on the way."""
    mesh, recompute = state.meshes[index], state.recompute
    weight = state.weight(mesh)
    shares = Shares.of(state.table(mesh), shape_of(mesh), recompute)
    limit_s = state.agreed_s[index] = faster_than(state.score_to_beat() / weight, gap=state.gap)
    bound_s = narrowed_bound_s(shares, bound_s=bound_s, limit_s=limit_s)
    if bound_s >= limit_s:
        return bound_s
    found = joint_bound(shares, recompute=recompute, bound_s=bound_s, limit_s=limit_s, is_late=state.is_late)
    if found.best is not None and obeys_recompute(shares.table, found.best.stages, recompute=recompute):
        _keep_if_better(state, index, found.best)
    return found.bound_s


RAISE_BOUND = (_price, _cut, _relax)  # by how far a mesh has been examined


def _solve(state: _Search, index: int, *, to_beat: float) -> None:
    """Find the best plan of a mesh, or why it has none worth having."""
    mesh = state.meshes[index]
    weight = state.weight(mesh)
    bound_s = state.queue[0][0] / weight
    limit_s = faster_than(to_beat / weight, gap=state.gap)
    if 0.0 < limit_s < state.agreed_s.get(index, 0.0):  # a better plan was found since: fewer choices are left
        bound_s = _agree_on_sizes(state, index, bound_s)
        if bound_s >= limit_s:
            state.bounds_s[index] = bound_s
            if index not in state.plans:
                state.rejections[index] = _slow(mesh, bound_s)
            return
    effort = Effort(
        interesting_s=state.score_to_beat(state.options.top) / weight,
        to_beat_s=to_beat / weight,
        gap=state.gap,
        remaining_s=state.remaining_s,
    )
    program = state.program(index, bound_s=bound_s)
    outcome = refine(program, known=state.plans.get(index), effort=effort)
    if outcome.best is not None:
        state.keep(index, outcome.best)
    if is_memory_proof(outcome):
        state.rejections[index] = _short_somewhere(state.table(mesh), 1)
    elif outcome.best is None:
        state.rejections[index] = _slow(mesh, outcome.bound_s)
    state.bounds_s[index] = outcome.bound_s


# ------------------------------------------------------------------------------------------------------ why not a mesh


def _short_somewhere(table: CostTable, short_bytes: int) -> Rejection:
    needed = (table.memory_limit_bytes + short_bytes) / GiB
    limit = table.memory_limit_bytes / GiB
    detail = f"some stage needs at least {needed:.1f} GiB, device has {limit:.1f} GiB"
    if short_bytes < MiB:  # proved, but not by how much
        detail = f"some stage always needs more than the {limit:.1f} GiB that a device has"
    return Rejection(table.mesh, "memory", detail, short_bytes=short_bytes)


def _slow(mesh: Mesh, bound_s: float) -> Rejection:
    return Rejection(mesh, "bound", f"no plan of it is faster than {bound_s:.6g} s")


def _explain_memory(state: _Search) -> None:
    """When nothing fits, say of the closest meshes which stage lacks how much.

    They are taken in the order of the least that they lack, until no other can lack less than one of them does.
    """
    if state.plans or state.stopped:
        return
    short = ((item.short_bytes, index) for index, item in state.rejections.items() if item.short_bytes is not None)
    least = INFINITY
    for short_bytes, index in sorted(short)[:N_CLOSEST]:
        if short_bytes >= least or _is_late(state, marks=False):
            return
        _explain_shortage(state, index)
        least = min(least, state.rejections[index].short_bytes or 0)


def _explain_shortage(state: _Search, index: int) -> None:
    mesh = state.meshes[index]
    closest = least_memory(
        state.table(mesh), shape_of(mesh), recompute=state.recompute, time_limit_s=state.remaining_s()
    )
    if closest is None:
        return
    estimate, least_bytes = closest[0].estimate, max(1, closest[1])
    stage = max(range(mesh.pp), key=lambda rank: estimate.reserved_bytes[rank])
    needed, limit = estimate.reserved_bytes[stage] / GiB, estimate.memory_limit_bytes / GiB
    detail = f"stage {stage} needs {needed:.1f} GiB, device has {limit:.1f} GiB: {needed - limit:.2f} GiB short"
    state.rejections[index] = Rejection(mesh, "memory", detail, estimate.step_s, least_bytes, stage)


# -------------------------------------------------------------------------------------------------------- the answer


def _result(
    state: _Search,
    found: tuple[Baseline, ...],
    *,
    make_plan: MakePlan,
) -> SearchResult:
    ranking = state.ranking()
    best = ranking[0] if ranking else None
    bound = _proved_score(state)
    candidates = [_candidate(state, index, found, make_plan=make_plan) for index in ranking[: state.options.top + 1]]
    status = _status(state, bound)
    weight = 1.0 if best is None else state.weight(state.meshes[best])
    return SearchResult(
        status=status,
        best=candidates[0] if candidates else None,
        alternatives=tuple(candidates[1:]),
        baselines=tuple(
            Candidate(
                make_plan(baseline.table.mesh, baseline.judged.stages),
                baseline.judged.estimate,
                step_bound_s(baseline.table),
                baseline.name,
            )
            for baseline in found
        ),
        rejected=_rejected(state, best),
        bound_s=bound / weight if 0.0 < bound < INFINITY else None,
        n_meshes=len(state.meshes),
        search_s=state.clock() - state.started_s,
        first_plan_s=state.first_plan_s,
        stopped_by=_stopped_by(state, status, bound),
    )


def _proved_score(state: _Search) -> float:
    """The lower bound on the score over the whole space; that of the best plan when it is proved optimal."""
    scores = {index: score for score, index, _ in state.queue}
    scores |= {index: bound_s * state.weight(state.meshes[index]) for index, bound_s in state.bounds_s.items()}
    if len(scores.keys() | state.rejections.keys()) < len(state.meshes):
        return 0.0  # interrupted before every mesh had a bound
    least, best = min(scores.values(), default=INFINITY), state.score_to_beat()
    return best if least >= faster_than(best) else least


def _status(state: _Search, bound: float) -> str:
    if state.plans:
        return "optimal" if bound >= state.score_to_beat() else "feasible"
    is_proved = bound == INFINITY and not state.stopped and len(state.rejections) == len(state.meshes)
    return "infeasible" if is_proved else "unknown"


def _stopped_by(state: _Search, status: str, bound: float) -> str:
    """What ended the search; see `SearchResult`. The clock may also have run out inside the last integer program."""
    if state.stopped or status != "feasible" or bound >= faster_than(state.score_to_beat(), gap=GOOD_ENOUGH):
        return state.stopped
    return "time limit" if state.is_late() else "stalled"


def _candidate(state: _Search, index: int, found: tuple[Baseline, ...], *, make_plan: MakePlan) -> Candidate:
    mesh, judged = state.meshes[index], state.plans[index]
    names = [b.name for b in found if b.table.mesh == mesh and b.judged.stages == judged.stages]
    queued = {number: score / state.weight(mesh) for score, number, _ in state.queue if number == index}
    bound_s = min(state.bounds_s.get(index, queued.get(index, 0.0)), judged.estimate.step_s)
    return Candidate(make_plan(mesh, judged.stages), judged.estimate, bound_s, names[0] if names else "")


def _rejected(state: _Search, best: int | None) -> tuple[Rejection, ...]:
    """Every mesh but the best one, once, in the order of the enumeration."""
    queued = {index: score for score, index, _ in state.queue}
    to_beat = faster_than(state.score_to_beat(), gap=state.gap)
    return tuple(
        _rejection(state, index, queued=queued, to_beat=to_beat) for index in range(len(state.meshes)) if index != best
    )


def _rejection(state: _Search, index: int, *, queued: dict[int, float], to_beat: float) -> Rejection:
    mesh = state.meshes[index]
    if index in state.plans:
        step_s = state.plans[index].estimate.step_s
        return Rejection(mesh, "slower", f"its best plan found takes {step_s:.6g} s", step_s=step_s)
    if index in state.rejections:
        return state.rejections[index]
    bound_s = queued.get(index, 0.0) / state.weight(mesh)
    if queued.get(index, 0.0) < to_beat:
        return Rejection(mesh, "time limit", STOPS[state.stopped])
    return _slow(mesh, bound_s)
