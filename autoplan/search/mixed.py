"""The search on a mixed cluster: groups of hosts, each of its own kind.

Plans are of three sorts, and the best of all is the answer:

    one group       everything that `search` finds in a group alone, the other groups idle
    several groups  a pipeline: some ranks in a row on one group, some on the next; dp and tp the same everywhere,
                    dp never spans groups; 1f1b or gpipe, one stage per rank; groups in every order
    shared batch    data parallelism over several groups, pp 1, each with its own micro-batches (`mixed_shares`)

The meshes of pipelines are examined in the order of their bounds (`mixed_meshes`): priced, cut by `best_partition` (a
rank's stage by its own figures, so that faster ranks get more layers), simulated; of a small mesh all plans are. What
is left unproved is the gap of the result.

Groups alone are searched first, the strongest first, and only those whose devices could do the work of a step in less
than the best plan takes: quick to search, they rule out most of the rest. Shared batches come next, then pipelines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, product

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.errors import InfeasibleError
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan
from autoplan.search import GOOD_ENOUGH, search
from autoplan.search.bounds import least_passes_s
from autoplan.search.linear_model import INFINITY
from autoplan.search.meshes import fixed, legal_tensor_degrees, micro_batch_sizes
from autoplan.search.mixed_meshes import Groups, GroupSpace, MeshQueue, MixedSpace, Shape, shapes
from autoplan.search.mixed_plans import best_of_shares, fitting, neighbours, repaired
from autoplan.search.mixed_rejections import least_short, rejection
from autoplan.search.mixed_shares import ShareQueue
from autoplan.search.one_mesh import MAX_TRIED_PASSES, Judged, faster_than
from autoplan.search.partition import best_partition, partitions_below
from autoplan.search.plans import all_plans, count_plans, piece_edges, runs_of
from autoplan.search.relaxed_step import RelaxedStep
from autoplan.search.result import Candidate, Rejection, SearchResult
from autoplan.simulate import simulate

MAX_REPLAYED_PASSES = 200_000  # cuts x stages x micro-batches that are replayed at once to settle a mesh
WORTH_IMPROVING = 0.05  # by how much a plan may be slower than the best one, to be improved piece by piece


def search_mixed(
    space: MixedSpace, *, options: Options, clock: Callable[[], float] = time.perf_counter
) -> SearchResult:
    """The best plan of `space`, with the bound that is proved; see `search`.

    Of the pipelines over several groups, those examined are among the result's `rejected`, the rest are only counted.

    Raises: InfeasibleError if there is no mesh at all; InputError for a wrong fix.
    """
    state = _Search(space, options, clock, clock())
    try:
        state.shapes = tuple(shapes(space, options))
        state.queue = MeshQueue(space, state.shapes)
        _search_groups(state)
        _examine_shares(state)
        _examine_pipelines(state)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    return _result(state)


# ---------------------------------------------------------------------------------------------------- the search so far


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan of a mesh."""

    mesh: Mesh
    groups: Groups
    judged: Judged
    bound_s: float


@dataclass(slots=True)
class _Search:
    """A search under way."""

    space: MixedSpace
    options: Options
    clock: Callable[[], float]
    started_s: float
    shapes: tuple[Shape, ...] = ()
    queue: MeshQueue | None = None  # of pipelines, not yet
    shares: ShareQueue | None = None  # not yet
    found: list[_Found] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    results: dict[int, SearchResult] = field(default_factory=dict)  # of groups alone
    left_bounds_s: dict[int, float] = field(default_factory=dict)  # of groups that cannot hold a better plan
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

    def remaining_s(self) -> float:
        """Time left; INFINITY when there is no limit."""
        limit_s = self.options.time_limit_s
        return INFINITY if limit_s is None else limit_s - (self.clock() - self.started_s)


# ------------------------------------------------------------------------------------------------------- examining them


def _examine_pipelines(state: _Search) -> None:
    """Examine pipelines in order of their bounds until none can be better, or time is over."""
    assert state.queue is not None
    while state.queue.bound_s < state.to_beat_s:
        if state.remaining_s() <= 0.0:
            state.stopped = "time limit"
            return
        _examine_first(state, state.queue.pop(known_s=state.to_beat_s), _examine)


def _examine_first(
    state: _Search, first: tuple[float, Mesh, Groups] | None, examine: Callable[[_Search, float, Mesh, Groups], None]
) -> None:
    """Examine what came out of a queue; when interrupted, its bound is not lost."""
    if first is None:
        return
    try:
        examine(state, *first)
        state.note_plan()
    except KeyboardInterrupt:
        state.least_bound_s = min(state.least_bound_s, first[0])
        raise


def _examine(state: _Search, bound_s: float, mesh: Mesh, groups: Groups) -> None:
    """The plan of a mesh by whole pieces; where the mesh is small and that proves too little, the best of all plans."""
    table, recompute = state.space.price(mesh, groups), fixed(state.options, "recompute")
    limit_s = state.best_s
    partition = best_partition(table, recompute=recompute, limit_s=limit_s)
    bound_s = max(bound_s, partition.bound_s)
    best = fitting(table, [partition.stages] if partition.stages else [], recompute=recompute)
    if best is None and partition.stages:
        best = repaired(table, partition.stages, recompute=recompute)
    if best is not None and best.estimate.step_s < (1.0 + WORTH_IMPROVING) * limit_s:
        best = _improved(state, table, best, recompute=recompute)
    known_s = min(limit_s, INFINITY if best is None else best.estimate.step_s)
    if known_s < INFINITY and bound_s < faster_than(known_s, gap=state.gap):
        best, bound_s = _settled(state, table, best, bound_s=bound_s, known_s=known_s)
        known_s = min(known_s, INFINITY if best is None else best.estimate.step_s)
    if bound_s < faster_than(known_s, gap=state.gap) and _is_small(table):
        known = [] if best is None else [best.stages]
        best = fitting(table, chain(known, all_plans(runs_of(table), mesh)), recompute=recompute)
        bound_s = INFINITY if best is None else best.estimate.step_s
    _keep(state, table, groups, best, bound_s=bound_s)


def _examine_shares(state: _Search) -> None:
    """Examine meshes with shares of the batch in order of their bounds until none can be better, or time is over."""
    state.shares = ShareQueue(state.space, state.options, known_s=state.best_s)
    while state.shares.bound_s < state.to_beat_s:
        if state.remaining_s() <= 0.0:
            state.stopped = "time limit"
            return
        _examine_first(state, state.shares.pop(known_s=state.best_s), _examine_share)


def _examine_share(state: _Search, least_s: float, mesh: Mesh, groups: Groups) -> None:
    """The plan of a mesh with shares; where the mesh is small and that proves too little, the best of all plans."""
    table, recompute = state.space.price(mesh, groups), fixed(state.options, "recompute")
    best, bound_s = best_of_shares(table, recompute=recompute)
    bound_s = max(bound_s, least_s)
    known_s = min(state.best_s, INFINITY if best is None else best.estimate.step_s)
    if bound_s < faster_than(known_s, gap=state.gap) and all(map(_is_small, table.rank_tables)):
        best, bound_s = best_of_shares(table, recompute=recompute, tries_all=True)
    _keep(state, table, groups, best, bound_s=bound_s)


def _keep(state: _Search, table: CostTable, groups: Groups, best: Judged | None, *, bound_s: float) -> None:
    """Remember what was found of a mesh."""
    state.least_bound_s = min(state.least_bound_s, bound_s)
    if best is None:
        state.rejections.append(rejection(table, groups, bound_s=bound_s))
    else:
        state.found.append(_Found(table.mesh, groups, best, min(bound_s, best.estimate.step_s)))


def _settled(
    state: _Search, table: CostTable, best: Judged | None, *, bound_s: float, known_s: float
) -> tuple[Judged | None, float]:
    """Plan and bound after replaying every way to cut that may be faster; unchanged where these are too many."""
    recompute, limit_s = fixed(state.options, "recompute"), faster_than(known_s, gap=state.gap)
    n_most = MAX_REPLAYED_PASSES // (table.mesh.pp * table.mesh.n_micro_batches)
    cuts = partitions_below(table, recompute=recompute, limit_s=limit_s, n_most=n_most)
    if cuts is None:
        return best, bound_s
    if not cuts:
        return best, max(bound_s, limit_s)
    step = RelaxedStep.of_cuts(table, recompute=recompute)
    relaxed_s = step.least_s(np.array([cut.sizes for cut in cuts]), np.array([cut.again for cut in cuts]))
    least_s = limit_s
    for place in np.argsort(relaxed_s, kind="stable"):
        if relaxed_s[place] >= least_s:
            break
        cut_s = max(float(relaxed_s[place]), simulate(table, cuts[place].fastest).step_s)
        least_s = min(least_s, cut_s)
        better = fitting(table, [cuts[place].stages], recompute=recompute) if cut_s < known_s else None
        if better is not None and (best is None or better.estimate.step_s < best.estimate.step_s):
            best = better
    return best, max(bound_s, least_s)


def _improved(state: _Search, table: CostTable, best: Judged, *, recompute: str | None) -> Judged:
    """The plan after moving pieces from stage to stage, one by one, as long as that makes it faster."""
    edges = piece_edges(table)
    while True:
        better = None
        for stages in neighbours(best.stages, edges):
            if state.remaining_s() <= 0.0:
                break
            moved = fitting(table, [stages], recompute=recompute)
            if moved is not None and moved.estimate.step_s < faster_than((better or best).estimate.step_s):
                better = moved
        if better is None:
            return best
        best = better


def _is_small(table: CostTable) -> bool:
    """Whether all plans of a mesh are simulated in about a second."""
    runs, mesh = runs_of(table), table.mesh
    n_most = MAX_TRIED_PASSES // (mesh.pp * mesh.n_micro_batches)
    n_pieces = sum(run.length for run in runs)
    return math.comb(n_pieces - 1, mesh.pp - 1) <= n_most and count_plans(runs, mesh) <= n_most


# --------------------------------------------------------------------------------------------------------- groups alone


def _search_groups(state: _Search) -> None:
    """Search the groups whose devices could do the work of a step in less than the best plan takes, strongest first."""
    work_s = {index: _work_s(group, state.options) for index, group in enumerate(state.space.groups)}
    for number, index in enumerate(sorted(work_s, key=lambda index: (work_s[index], index))):
        if state.best_s < INFINITY and work_s[index] >= state.to_beat_s:
            state.left_bounds_s[index] = work_s[index]
            continue
        group, remaining_s = state.space.groups[index], state.remaining_s()
        share_s = None if remaining_s == INFINITY else max(0.0, remaining_s / (len(work_s) - number + 1))
        options, began_s = replace(state.options, time_limit_s=share_s), state.clock()
        try:
            result = search(group.space, price=group.price, options=options, make_plan=group.make_plan)
        except InfeasibleError as error:
            state.impossible[index] = str(error)
            continue
        state.results[index] = result
        if state.first_plan_s is None and result.first_plan_s is not None:
            state.first_plan_s = began_s - state.started_s + result.first_plan_s
        if result.stopped_by == "interrupted":
            raise KeyboardInterrupt


def _work_s(group: GroupSpace, options: Options) -> float:
    """The least time in which all devices of a group do the compute of a step, whatever the plan."""
    space = group.space
    least_s = INFINITY
    for tp in legal_tensor_degrees(space, options):
        for sharding, size in product(dict(space.shardings)[tp], micro_batch_sizes(space, options, dp=1)):
            table = group.price(Mesh(tp=tp, sharding=sharding, micro_batch_size=size))
            least_s = min(least_s, tp * least_passes_s(table) / size)
    return least_s * space.global_batch / space.n_devices


# ----------------------------------------------------------------------------------------------------------- the answer


def _result(state: _Search) -> SearchResult:
    n_meshes = sum(shape.n_meshes for shape in state.shapes)
    n_meshes += sum(result.n_meshes for result in state.results.values())
    n_meshes += 0 if state.shares is None else state.shares.n_meshes
    if n_meshes == 0 and state.impossible:
        raise InfeasibleError("\n".join(dict.fromkeys(state.impossible.values())))
    candidates = _candidates(state)
    best = candidates[0] if candidates else None
    bound_s = _proved_s(state)
    is_proved = best is not None and bound_s >= faster_than(best.estimate.step_s)
    if best is not None:
        status = "optimal" if is_proved else "feasible"
    else:
        status = "infeasible" if bound_s == INFINITY and not state.stopped else "unknown"
    return SearchResult(
        status=status,
        best=best,
        alternatives=tuple(candidates[1:]),
        baselines=tuple(
            replace(item, baseline=f"{item.baseline} on group {index}")
            for index, result in sorted(state.results.items())
            for item in result.baselines
        ),
        rejected=_rejected(state, best),
        bound_s=best.estimate.step_s if best is not None and is_proved else bound_s if 0 < bound_s < INFINITY else None,
        n_meshes=n_meshes,
        search_s=state.clock() - state.started_s,
        first_plan_s=state.first_plan_s,
        stopped_by=_stopped_by(state, bound_s) if status == "feasible" else state.stopped,
    )


def _candidates(state: _Search) -> list[Candidate]:
    """The best plans of different meshes, fastest first."""
    n_kept = state.options.top + 1
    pipelines = sorted(state.found, key=lambda item: item.judged.estimate.step_s)[:n_kept]
    found = [
        Candidate(state.space.make_plan(item.mesh, item.groups, item.judged.stages), item.judged.estimate, item.bound_s)
        for item in pipelines
    ]
    for result in state.results.values():
        found += [item for item in (result.best, *result.alternatives) if item is not None]
    return sorted(found, key=lambda item: item.estimate.step_s)[:n_kept]


def _proved_s(state: _Search) -> float:
    """No plan of the space that fits is faster; 0 when that is not known of some."""
    shares_s, pipelines_s = (0.0 if queue is None else queue.bound_s for queue in (state.shares, state.queue))
    bounds_s = [state.least_bound_s, shares_s, pipelines_s]
    for index in range(len(state.space.groups)):
        result = state.results.get(index)
        if index in state.left_bounds_s:
            bounds_s.append(state.left_bounds_s[index])
        elif result is not None:
            bounds_s.append(INFINITY if result.status == "infeasible" else result.bound_s or 0.0)
        elif index not in state.impossible:
            return 0.0
    return min(bounds_s)


def _stopped_by(state: _Search, bound_s: float) -> str:
    """What ended the search; see `SearchResult`."""
    if bound_s >= faster_than(state.best_s, gap=GOOD_ENOUGH):
        return ""
    reasons = {result.stopped_by for result in state.results.values()} - {""}
    return state.stopped or ("time limit" if "time limit" in reasons else "stalled")


def _is_of(plan: Plan, item: _Found) -> bool:
    places = [[(own.group, own.n_ranks) for own in groups] for groups in (plan.groups, item.groups)]
    return plan.mesh == item.mesh and places[0] == places[1]


def _rejected(state: _Search, best: Candidate | None) -> tuple[Rejection, ...]:
    """Every mesh that was looked at but the best one; without a plan also the least too large of each kind."""
    others = [
        Rejection(item.mesh, "slower", f"its best plan found takes {item.judged.estimate.step_s:.6g} s", step_s)
        for item in state.found
        for step_s in (item.judged.estimate.step_s,)
        if best is None or not _is_of(best.plan, item)
    ]
    priced = state.queue.families if best is None and state.queue is not None else ()
    too_large = [item for item in map(least_short, priced) if item is not None]
    of_groups = [item for result in state.results.values() for item in result.rejected]
    return (*others, *state.rejections, *too_large, *of_groups)
