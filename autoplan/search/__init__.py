"""The search: the best plan of a space, with a proof.

    meshes --least compute--> bound --price--> bound --whole pieces--> bound, plan --relaxed--> bound
               `compute_bound_s`    `step_bound_s`      `best_partition`,             `relaxed_bound_s`,
                                                        `shared_bound_s`              `cuts_below`, `joint_bound`
           --integer program and simulator--> plan, bound
                       `refine`

Meshes wait in a queue, ordered by the best lower bound known of each. The first one's bound is raised by one more step,
as far as arithmetic goes; then those left are solved, the easy ones first (`_prove`). When no bound in the queue is
below the best plan, no mesh left can hold a better one; that is the proof. Most meshes are never priced, and few reach
a solver: one stage per rank is cut by dynamic programming, whose plan is judged at once, and the cuts that may be fast
enough are replayed; several are bounded rank by rank, then by all ranks together, and get plans that recompute as
little as will do. Equal bounds are taken in the order of the enumeration, so the same input gives the same answer.

Of plans that are as good as each other the simplest is the answer (`preference`).

Unless `require_optimal`, meshes that cannot be faster than the best plan by more than `GOOD_ENOUGH` are left alone. The
status is then "feasible", and the gap says how much is unproved.

After arithmetic, pipelines with more stages per rank than the space has are tried too (`deeper_pipelines`). If one of
them is the answer, the proof is still of the space: no plan of it is faster.

The simulator alone judges plans. Of meshes that `bounds.compute_key` takes for alike, `price` must not give a longer
forward or backward pass to that of `bounds.computes_least` than to any other: the first bound rests on it.

Bounds and comparisons hold within `RELATIVE_TOLERANCE` (1e-7).

    the space       meshes, twins, baselines, one_device: what is tried        deeper_pipelines: and what else
                    outlook: whether anything is likely to fit
                    fixed_values: what a plan has of what the user may fix
    the answer      result, conclusion: what is returned    preference, rejections, remedies: which, and why no other
                    without_graph: which plans go without a CUDA graph
    the queue       state, examination: where it stands, and one mesh of it examined
    bounds          bounds: by arithmetic        ranges: numbers per segment and sums over them
                    relaxed_step: the least step of given sizes of stages
    one mesh        one_mesh: its integer program, made and solved        plans: its plans, piece by piece

    one_stage/        of meshes with one stage per rank, where to cut
    several_stages/   of the others, bounds on all choices of sizes and recomputation, and plans without a solver
    program/          the rows and columns of the integer program
    paths/            what a schedule implies: paths through it, and when ranks are fullest
    mixed/            the same search over groups of hosts
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import replace

from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan
from autoplan.search.baselines import Baseline, plain_recipes
from autoplan.search.bounds import compute_bound_s, compute_key, computes_least, least_passes_s
from autoplan.search.conclusion import result_of
from autoplan.search.deeper_pipelines import look_beyond
from autoplan.search.examination import consider, consider_cut, examine, replay_cuts
from autoplan.search.meshes import MakePlan, Price, SearchSpace, list_meshes
from autoplan.search.one_device import one_device
from autoplan.search.one_mesh import faster_than
from autoplan.search.plans import obeys_recompute
from autoplan.search.preference import mesh_complexity
from autoplan.search.rejections import explain_memory
from autoplan.search.result import SearchResult
from autoplan.search.state import CUT, GOOD_ENOUGH, MIN_FIRST_S, RELAXED, SOLVED, UNPRICED, SearchState
from autoplan.search.twins import spares_cheaply

__all__ = ["GOOD_ENOUGH", "SearchSpace", "search"]

N_SIMPLER = 8  # meshes tried after the proof
N_SHARED = 20  # meshes in which the best plan's stages are tried
# Of the time limit, for the plain recipes and one device, and for listing all meshes. What else is done once for each
# mesh takes twice as long as to list it.
RECIPES_SHARE, LISTING_SHARE = 0.5, 0.2
KEPT_SHARE = 0.1  # of the time limit, which is left to what comes after arithmetic


def search(
    space: SearchSpace,
    *,
    price: Price,
    options: Options,
    make_plan: MakePlan,
    warm_start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float | None = None,
    planless_share: float = 1.0,
) -> SearchResult:
    """The best plan of `space`, or the proof that none fits.

    With objective "cost" the best plan is the one with the least step time x devices used, and `bound_s` is the bound
    on that product, divided by the devices of the best plan. After Ctrl-C the best plan so far is returned; the meshes
    not examined are rejected for "time limit" with the detail "interrupted". `warm_start` is a plan of the same model
    that may be good, say the best one on a similar cluster; where the space has its mesh, it is judged first.

    The time limit counts from the start, and what the answer takes to write is within it. With patience it counts from
    when all meshes are known and a plan is, and a sample of the meshes that it left takes as long again at the most; a
    search without any plan goes on for `patience_s`. It ends after `planless_share` of either when no plan is known by
    then. Of spaces that take long to list, not all is listed; then nothing is proved.

    Raises: InfeasibleError if no mesh divides the devices and the batch; InputError for a wrong fix; PlanMismatchError
        when `warm_start` is of another model.
    """
    may_keep = space.may_keep_attention
    state = SearchState(options, price, clock, clock(), patience_s, planless_share, may_keep_attention=may_keep)
    state.plain_enters = space.plain_enters
    found: tuple[Baseline, ...] = ()
    alone = None
    late_s = state.started_s + state.first_limit_s(RECIPES_SHARE)
    try:
        found = plain_recipes(space, options, price=state.table, is_late=lambda: clock() >= late_s)
        alone = one_device(space, options, price=state.table, is_late=lambda: clock() >= late_s)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    listing_s = clock()
    recipes_s, until_s = listing_s - state.started_s, listing_s + state.first_limit_s(LISTING_SHARE)
    meshes, state.lists_all = list_meshes(space, options, is_late=lambda: clock() >= until_s)
    state.meshes, state.answer_s = list(meshes), clock() - listing_s
    try:
        _start(state, found, warm_start, recipes_s=recipes_s)
        _prove(state, space)
        _try_simpler(state)
        _fill_alternatives(state)
        _improve_alternatives(state)
        explain_memory(state)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    return result_of(state, found, make_plan=make_plan, alone=alone)


# ---------------------------------------------------------------------------------------------------------- the queue


def _start(state: SearchState, found: tuple[Baseline, ...], warm_start: Plan | None, *, recipes_s: float) -> None:
    """Baselines that belong to the space, and the warm start, are the first plans; every mesh enters the queue."""
    if state.stopped:
        return
    for baseline in found:
        index = state.index_of(baseline.table.mesh)
        obeys = obeys_recompute(baseline.table, baseline.judged.stages, recompute=state.recompute)
        if index is not None and obeys and baseline.judged.estimate.fits:
            state.keep(index, baseline.judged)
            state.first_plan_s = recipes_s
    index = None if warm_start is None else _index_of_warm_start(state, warm_start.mesh)
    if warm_start is not None and index is not None:
        consider(state, index, warm_start.stages)
    keys = tuple(map(compute_key, state.meshes))
    until_s = state.clock() + MIN_FIRST_S
    passes_s = {
        key: (0.0, 0.0) if state.is_late() and state.clock() >= until_s else least_passes_s(state.table(mesh))
        for key, mesh in computes_least(state.meshes, keys).items()
    }
    for index, (mesh, key) in enumerate(zip(state.meshes, keys, strict=True)):
        forward_s, backward_s = passes_s[key]
        bound_s = compute_bound_s(mesh, forward_s=forward_s, backward_s=backward_s)
        state.queue.append((bound_s * state.weight(mesh), index, UNPRICED))
    heapq.heapify(state.queue)
    state.ready_s = state.clock() - state.started_s


def _index_of_warm_start(state: SearchState, mesh: Mesh) -> int | None:
    """Where its mesh stands; a twin that the search would look at enters the space for it.

    A plan that went without its CUDA graph in the end (`without_graph`) stands where it has one.
    """
    for like in (mesh, replace(mesh, cuda_graph=True)):
        index = state.index_of(like)
        if index is not None:
            return index
        other = state.index_of(replace(like, keeps_attention=False))
        if other is not None and state.may_keep_attention:
            is_cheap = spares_cheaply(state.table(state.meshes[other]), state.table(like))
            return state.add_twin(other) if is_cheap else None
    return None


def _prove(state: SearchState, space: SearchSpace) -> None:
    """Examine meshes in order of their bounds until none can beat the best plan.

    First all are taken as far as arithmetic goes; its plans spare most meshes the solver, and lead to those beyond the
    space. Those with one stage per rank come first: they are quick, and their plans spare many of the others.
    """
    state.kept_share = KEPT_SHARE
    for up_to, with_chunks in ((CUT, False), (CUT, True)):
        _advance(state, up_to=up_to, with_chunks=with_chunks)
    state.kept_share = 0.0
    if state.stopped == "time limit":
        _sample(state)
        if not state.is_late():
            state.stopped = ""
    if not state.stopped:
        look_beyond(state, space)
    for up_to, with_chunks in ((SOLVED, False), (RELAXED, True), (SOLVED, True)):
        _advance(state, up_to=up_to, with_chunks=with_chunks)


def _advance(state: SearchState, *, up_to: int, with_chunks: bool) -> None:
    """Examine meshes that may beat the best plan up to a step: those with several stages per rank, or the others."""
    if state.stopped and state.is_late():
        return
    if not _may_hold_better(state):
        return
    meant: list[tuple[float, int, int]] = []
    waiting: list[tuple[float, int, int]] = []
    for entry in state.queue:
        (meant if (state.meshes[entry[1]].n_chunks > 1) == with_chunks else waiting).append(entry)
    state.queue = meant
    heapq.heapify(state.queue)
    try:
        while _may_hold_better(state) and not state.is_over():
            if state.queue[0][2] >= up_to:
                waiting.append(heapq.heappop(state.queue))
            else:
                examine(state, to_beat=state.score_to_beat())
    finally:  # also when interrupted, no mesh may be lost
        state.queue += waiting
        heapq.heapify(state.queue)


def _may_hold_better(state: SearchState) -> bool:
    """Whether the first mesh of the queue may beat the best plan."""
    return bool(state.queue) and state.queue[0][0] < faster_than(state.score_to_beat(), gap=state.gap)


def _sample(state: SearchState) -> None:
    """Cut the most promising mesh of each combination of degrees that uses all devices, where time ran out before.

    Where communication is slow, bounds by arithmetic are far below, and the same for thousands of meshes.
    """
    until_s = state.clock() + state.sampling_s()
    most = max((mesh.n_devices for mesh in state.meshes), default=0)
    first: dict[tuple[int, int], tuple[float, int]] = {}
    for score, index, examined in state.queue:
        mesh = state.meshes[index]
        if examined < CUT and mesh.n_chunks == 1 and mesh.n_devices == most:
            degrees = mesh.tp, mesh.pp
            first[degrees] = min(first.get(degrees, (score, index)), (score, index))
    for score, index in sorted(first.values()):
        limit = state.score_to_beat()
        if score >= limit or (state.is_late() and state.clock() >= until_s):
            return
        consider_cut(state, index, limit=limit)


def _try_simpler(state: SearchState) -> None:
    """Cut the simplest of the meshes that nobody has cut and that may, by their bounds, be as good as the best plan.

    They cannot be better by the gap, so the proof did not ask for them; but the answer is the simplest of equals.
    """
    if state.stopped or not state.plans:
        return
    limit, best = state.score_to_beat() / (1.0 - state.gap), state.meshes[state.ranking()[0]]
    equals = (index for score, index, examined in state.queue if score <= limit and examined < CUT)
    simpler = (index for index in equals if mesh_complexity(state.meshes[index]) < mesh_complexity(best))
    alike = [index for index in simpler if state.meshes[index].n_chunks == 1]
    for index in sorted(alike, key=lambda index: mesh_complexity(state.meshes[index]))[:N_SIMPLER]:
        if state.is_late():
            return
        consider_cut(state, index, limit=limit)


def _fill_alternatives(state: SearchState) -> None:
    """Solve a few more meshes, so that there is something to compare the best plan with."""
    n_tries = 2 * state.options.top
    while state.queue and state.plans and len(state.plans) <= state.options.top and n_tries > 0 and not state.stopped:
        n_tries -= state.queue[0][2] == RELAXED
        if state.is_late():
            return
        examine(state, to_beat=0.0)


def _improve_alternatives(state: SearchState) -> None:
    """Try the stages of the best plan in other meshes, and all cuts of those that may be shown: they were searched only
    until they could not beat it.

    Otherwise a plan would be compared with others whose stages are worse, not only their meshes.
    """
    if state.stopped or not state.plans:
        return
    best, *others = state.ranking()
    stages = state.plans[best].stages
    for index in others[:N_SHARED]:
        if state.is_late():
            return
        if state.meshes[index].n_stages == len(stages):
            consider(state, index, stages)
    replayed = {best}
    n_most = 2 * state.options.top  # of alike ones only the first is shown
    while waiting := [index for index in state.ranking()[: n_most + 1] if index not in replayed]:
        if state.is_late():
            return
        index = waiting[0]
        replayed.add(index)
        if state.meshes[index].n_chunks == 1:
            replay_cuts(state, index, limit_s=state.plans[index].estimate.step_s)
