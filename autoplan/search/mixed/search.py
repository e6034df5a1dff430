"""The search on a mixed cluster: groups of hosts, each of its own kind.

Plans are of three sorts, and the best of all is the answer:

    one group       everything that `search` finds in a group alone, the other groups idle
    several groups  a pipeline: some ranks in a row on one group, some on the next; dp and tp the same everywhere,
                    dp never spans groups; 1f1b or gpipe, one stage per rank; groups in every order
    shared batch    data parallelism over several groups, pp 1, each with its own micro-batches (`shares`)

The meshes of pipelines are examined in the order of their bounds (`meshes`): priced, cut by `best_partition` (a
rank's stage by its own figures, so that faster ranks get more layers), simulated; of a small mesh all plans are. What
is left unproved is the gap of the result.

A group alone is searched only when its devices could do the work of a step in less than the best plan takes. A few
pipelines come first of all, then what may hold the best plan by its bound (`_examine_all`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count, product

from autoplan.cost.table import CostTable
from autoplan.errors import InfeasibleError
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search import search
from autoplan.search.bounds import least_passes_s
from autoplan.search.meshes import fixed, legal_tensor_degrees, micro_batch_sizes
from autoplan.search.mixed.answer import result_of
from autoplan.search.mixed.meshes import Groups, GroupSpace, MeshQueue, MixedSpace, shapes
from autoplan.search.mixed.plans import best_of_shares, fitting, neighbours, repaired
from autoplan.search.mixed.rejections import rejection
from autoplan.search.mixed.shares import ShareQueue
from autoplan.search.mixed.state import Found, MixedState
from autoplan.search.one_mesh import MAX_TRIED_PASSES, Judged, faster_than
from autoplan.search.one_stage.partition import best_partition
from autoplan.search.one_stage.replayed_cuts import cuts_below
from autoplan.search.plans import all_plans, count_plans, piece_edges, runs_of
from autoplan.search.result import SearchResult
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY

FIRST_PIPELINES = 32  # examined before all else: where pipelines are best, groups alone need not be searched
PROMISING = 0.7  # share of the best plan's time; a group that could do the work in less is searched before shares
SHARES_UNTIL = 0.75  # of the time
WORTH_IMPROVING = 0.05  # by how much a plan may be slower than the best one, to be improved piece by piece


def search_mixed(
    space: MixedSpace,
    *,
    options: Options,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float | None = None,
    planless_share: float = 1.0,
) -> SearchResult:
    """The best plan of `space`, with the bound that is proved; for the last two see `search`.

    Of the pipelines over several groups, those examined are among the result's `rejected`, the rest are only counted.

    Raises: InfeasibleError if there is no mesh at all; InputError for a wrong fix.
    """
    state = MixedState(space, options, clock, clock(), patience_s, planless_share)
    try:
        state.shapes = tuple(shapes(space, options))
        state.queue = MeshQueue(space, state.shapes)
        _examine_all(state)
    except KeyboardInterrupt:
        state.stopped = "interrupted"
    return result_of(state)


# ------------------------------------------------------------------------------------------------------- examining them


def _examine_all(state: MixedState) -> None:
    """What may hold the best plan by its bound comes first; shared batches wait for a good plan, and are then quick."""
    assert state.queue is not None
    state.work_s = {index: _work_s(group, state.options) for index, group in enumerate(state.space.groups)}
    _examine_pipelines(state, n_most=FIRST_PIPELINES)
    _search_groups(state, below_s=max(state.queue.bound_s, PROMISING * state.best_s))
    _examine_shares(state)
    left = set(state.work_s) - set(state.results) - set(state.impossible)
    if left:
        _examine_pipelines(state, below_s=min(state.work_s[index] for index in left), share=0.5)
    _search_groups(state)
    _examine_pipelines(state)


def _examine_pipelines(
    state: MixedState, *, n_most: int | None = None, below_s: float = INFINITY, share: float = 1.0
) -> None:
    """Examine pipelines in order of their bounds: `n_most` of them, until none below `below_s` can be better, or this
    share of the time is over.
    """
    assert state.queue is not None
    for n_examined in count():
        if state.queue.bound_s >= min(state.to_beat_s, below_s) or n_examined == n_most:
            return
        if state.is_over(share):
            state.stopped = "time limit" if share == 1.0 else ""
            return
        _examine_first(state, state.queue.pop(known_s=state.to_beat_s), _examine)


def _examine_first(
    state: MixedState,
    first: tuple[float, Mesh, Groups] | None,
    examine: Callable[[MixedState, float, Mesh, Groups], None],
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


def _examine(state: MixedState, bound_s: float, mesh: Mesh, groups: Groups) -> None:
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


def _examine_shares(state: MixedState) -> None:
    """Examine meshes with shares of the batch in order of their bounds until none can be better, or time is over."""
    state.shares = ShareQueue(state.space, state.options, known_s=state.best_s)
    while state.shares.bound_s < state.to_beat_s:
        if state.is_over(SHARES_UNTIL):
            state.stopped = "time limit"
            return
        _examine_first(state, state.shares.pop(known_s=state.best_s), _examine_share)


def _examine_share(state: MixedState, least_s: float, mesh: Mesh, groups: Groups) -> None:
    """The plan of a mesh with shares; where the mesh is small and that proves too little, the best of all plans."""
    table, recompute = state.space.price(mesh, groups), fixed(state.options, "recompute")
    best, bound_s = best_of_shares(table, recompute=recompute)
    bound_s = max(bound_s, least_s)
    known_s = min(state.best_s, INFINITY if best is None else best.estimate.step_s)
    if bound_s < faster_than(known_s, gap=state.gap) and all(map(_is_small, table.rank_tables)):
        best, bound_s = best_of_shares(table, recompute=recompute, tries_all=True)
    _keep(state, table, groups, best, bound_s=bound_s)


def _keep(state: MixedState, table: CostTable, groups: Groups, best: Judged | None, *, bound_s: float) -> None:
    """Remember what was found of a mesh."""
    state.least_bound_s = min(state.least_bound_s, bound_s)
    if best is None:
        state.rejections.append(rejection(table, groups, bound_s=bound_s))
    else:
        state.found.append(Found(table.mesh, groups, best, min(bound_s, best.estimate.step_s)))


def _settled(
    state: MixedState, table: CostTable, best: Judged | None, *, bound_s: float, known_s: float
) -> tuple[Judged | None, float]:
    """Plan and bound after replaying every way to cut that may be faster; unchanged where these are too many."""
    recompute, limit_s = fixed(state.options, "recompute"), faster_than(known_s, gap=state.gap)
    cuts = cuts_below(table, recompute=recompute, limit_s=limit_s)
    if cuts is None:
        return best, bound_s
    least_s = limit_s
    for replayed_s, cut in cuts:
        if replayed_s >= least_s:
            break
        cut_s = max(replayed_s, simulate(table, cut.fastest).step_s)
        least_s = min(least_s, cut_s)
        better = fitting(table, [cut.stages], recompute=recompute) if cut_s < known_s else None
        if better is not None and (best is None or better.estimate.step_s < best.estimate.step_s):
            best = better
    return best, max(bound_s, least_s)


def _improved(state: MixedState, table: CostTable, best: Judged, *, recompute: str | None) -> Judged:
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


def _search_groups(state: MixedState, *, below_s: float = INFINITY) -> None:
    """Search the groups whose devices could do the work of a step in less than `below_s`, and than the best plan takes.

    The strongest is the first.
    """
    waiting = [index for index in state.work_s if index not in state.results and index not in state.impossible]
    for number, index in enumerate(sorted(waiting, key=lambda index: (state.work_s[index], index))):
        if state.work_s[index] > below_s or (state.best_s < INFINITY and state.work_s[index] >= state.to_beat_s):
            return
        group, remaining_s = state.space.groups[index], state.remaining_s()
        share_s = None if remaining_s == INFINITY else max(0.0, remaining_s / (len(waiting) - number + 1))
        options, began_s = replace(state.options, time_limit_s=share_s), state.clock()
        try:
            result = search(
                group.space, price=group.price, options=options, make_plan=group.make_plan, clock=state.clock
            )
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
        sizes = micro_batch_sizes(space, options, dp=1)
        for sharding, size, way in product(dict(space.shardings)[tp], sizes, space.executions):
            mesh = Mesh(
                tp=tp, sharding=sharding, micro_batch_size=size, cuda_graph=True in space.graphs_of(tp=tp, is_own=False)
            )
            table = group.price(mesh.run_as(way))
            least_s = min(least_s, tp * sum(least_passes_s(table)) / size)
    return least_s * space.global_batch / space.n_devices
