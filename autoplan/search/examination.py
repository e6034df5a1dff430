"""One mesh of the best-first queue examined: its bound is raised a level, a plan of it found, or it is settled."""

from __future__ import annotations

import heapq

from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import may_lack_memory, shortfall_bytes, step_bound_s
from autoplan.search.one_mesh import Effort, Judged, faster_than, is_memory_proof, refine, relaxed_bound_s
from autoplan.search.one_stage.partition import best_partition
from autoplan.search.one_stage.replayed_cuts import cuts_below
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.plans import obeys_recompute
from autoplan.search.rejections import short_somewhere, slow
from autoplan.search.several_stages.joint_sizes import MAX_TURNS, QUICK_TURNS, joint_bound
from autoplan.search.several_stages.least_recomputation import balanced_stages, thrifty_plan
from autoplan.search.several_stages.rank_shares import Shares, narrowed_bound_s, shared_bound_s
from autoplan.search.state import CUT, PRICED, RELAXED, UNPRICED, SearchState
from autoplan.search.twins import has_twin, recomputes_kept, spares_cheaply, twin_of
from autoplan.simulator.simulate import simulate
from autoplan.solver.linear_model import INFINITY


def examine(state: SearchState, *, to_beat: float) -> None:
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
        if examined == UNPRICED and state.plain_enters and mesh.cuda_graph and may_lack_memory(state.table(mesh)):
            heapq.heappush(state.queue, (score, state.add_plain(index), UNPRICED))
        if index not in state.rejections:
            heapq.heapreplace(state.queue, (max(score, bound_s * weight), index, examined + 1))
            if examined == PRICED and _needs_twin(state, index):
                heapq.heappush(state.queue, (score, state.add_twin(index), PRICED))
            return
    heapq.heappop(state.queue)
    state.tables.pop(mesh, None)
    state.programs.pop(index, None)


def _needs_twin(state: SearchState, index: int) -> bool:
    """Whether the twin of a mesh that has just been cut may hold a better plan; see `twins`."""
    mesh = state.meshes[index]
    if not state.may_keep_attention or index in state.twins or not has_twin(mesh):
        return False
    table, plan = state.table(mesh), state.plans.get(index)
    twin = state.price(twin_of(mesh))
    is_worth_it = spares_cheaply(table, twin)
    return is_worth_it and (mesh.pp > 1 or plan is None or recomputes_kept(twin, plan.stages))


def _is_settled(state: SearchState, index: int, bound_s: float) -> bool:
    """Whether the plan found of a mesh is as good as its bound allows."""
    plan = state.plans.get(index)
    return plan is not None and bound_s >= faster_than(plan.estimate.step_s, gap=state.gap)


def _price(state: SearchState, index: int) -> float:
    """The bound by arithmetic; INFINITY where memory does not suffice by it."""
    table = state.table(state.meshes[index])
    short_bytes = shortfall_bytes(table)
    if short_bytes > 0:
        state.rejections[index] = short_somewhere(table, short_bytes)
        return INFINITY
    return step_bound_s(table)


def _cut(state: SearchState, index: int) -> float:
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
            consider(state, index, partition.stages)
            if index not in state.plans and bound_s < faster_than(state.score_to_beat() / weight, gap=state.gap):
                _recompute_until_it_fits(state, index, partition.stages)
    if bound_s == INFINITY:
        state.rejections[index] = short_somewhere(table, 1)
    return bound_s


def _share_out(state: SearchState, index: int) -> None:
    """Look for a plan with several stages per rank that fits."""
    stages = balanced_stages(state.table(state.meshes[index]), recompute=state.recompute)
    _recompute_until_it_fits(state, index, stages)


def _recompute_until_it_fits(state: SearchState, index: int, stages: tuple[StagePlan, ...]) -> None:
    """Look for a plan of these stages that fits."""
    mesh, recompute = state.meshes[index], state.recompute
    table = state.table(mesh)
    plan = thrifty_plan(table, shape_of(mesh), stages, recompute=recompute, is_late=state.is_late)
    if plan is not None and obeys_recompute(table, plan.stages, recompute=recompute):
        _keep_if_better(state, index, plan)


def consider(state: SearchState, index: int, stages: tuple[StagePlan, ...]) -> None:
    """Keep a plan that is allowed, fits, and is the fastest of its mesh."""
    if not obeys_recompute(state.table(state.meshes[index]), stages, recompute=state.recompute):
        return
    _keep_if_better(state, index, Judged(stages, simulate(state.table(state.meshes[index]), stages)))


def consider_cut(state: SearchState, index: int, *, limit: float) -> None:
    """Keep the plan of a mesh with one stage per rank that whole pieces give, if its score may be within the limit."""
    mesh = state.meshes[index]
    table, limit_s = state.table(mesh), limit / state.weight(mesh)
    if shortfall_bytes(table) == 0 and step_bound_s(table) <= limit_s:
        stages = best_partition(table, recompute=state.recompute, limit_s=limit_s).stages
        if stages:
            consider(state, index, stages)
    state.tables.pop(mesh, None)


def _keep_if_better(state: SearchState, index: int, plan: Judged) -> None:
    known = state.plans.get(index)
    if plan.estimate.fits and (known is None or plan.estimate.step_s < known.estimate.step_s):
        state.keep(index, plan)


def _relax(state: SearchState, index: int) -> float:
    """The bound by the linear program; with several stages per rank by all sizes together, where that is not enough.

    With one stage per rank, all cuts are replayed first.
    """
    mesh = state.meshes[index]
    bound_s = state.queue[0][0] / state.weight(mesh)
    if mesh.n_chunks == 1:
        limit_s = faster_than(state.score_to_beat() / state.weight(mesh), gap=state.gap)
        bound_s = max(bound_s, replay_cuts(state, index, limit_s=limit_s)) if bound_s < limit_s else bound_s
        if bound_s >= limit_s:
            return bound_s
    program = state.program(index, bound_s=bound_s)
    program.bound_s = max(program.bound_s, relaxed_bound_s(program, time_limit_s=state.remaining_s()))
    if program.bound_s == INFINITY:
        state.rejections[index] = short_somewhere(state.table(mesh), 1)
    elif mesh.n_chunks > 1 and program.bound_s < state.score_to_beat() / state.weight(mesh):
        program.bound_s = _agree_on_sizes(state, index, program.bound_s, max_turns=QUICK_TURNS)
    return program.bound_s


def replay_cuts(state: SearchState, index: int, *, limit_s: float) -> float:
    """Keep the plan that replaying all cuts leads to, if it may take less than `limit_s`; a bound up to that, or 0."""
    if state.meshes[index].pp == 1 or limit_s == INFINITY:
        return 0.0
    cuts = cuts_below(state.table(state.meshes[index]), recompute=state.recompute, limit_s=limit_s)
    if cuts:
        _recompute_until_it_fits(state, index, cuts[0][1].stages)
    return 0.0 if cuts is None else cuts[0][0] if cuts else limit_s


def _agree_on_sizes(state: SearchState, index: int, bound_s: float, *, max_turns: int) -> float:
    """The bound raised by all ranks together, with the plans found on the way."""
    mesh, recompute = state.meshes[index], state.recompute
    weight = state.weight(mesh)
    shares = Shares.of(state.table(mesh), shape_of(mesh), recompute)
    limit_s = state.agreed_s[index] = faster_than(state.score_to_beat() / weight, gap=state.gap)
    bound_s = narrowed_bound_s(shares, bound_s=bound_s, limit_s=limit_s)
    if bound_s >= limit_s:
        return bound_s
    found = joint_bound(
        shares, recompute=recompute, bound_s=bound_s, limit_s=limit_s, is_late=state.is_late, max_turns=max_turns
    )
    if found.best is not None and obeys_recompute(shares.table, found.best.stages, recompute=recompute):
        _keep_if_better(state, index, found.best)
    return found.bound_s


RAISE_BOUND = (_price, _cut, _relax)  # by how far a mesh has been examined


def _solve(state: SearchState, index: int, *, to_beat: float) -> None:
    """Find the best plan of a mesh, or why it has none worth having."""
    mesh = state.meshes[index]
    weight = state.weight(mesh)
    bound_s = state.queue[0][0] / weight
    limit_s = faster_than(to_beat / weight, gap=state.gap)
    if 0.0 < limit_s < state.agreed_s.get(index, 0.0):  # a better plan was found since: fewer choices are left
        bound_s = _agree_on_sizes(state, index, bound_s, max_turns=QUICK_TURNS)
        if bound_s >= limit_s:
            state.bounds_s[index] = bound_s
            if index not in state.plans:
                state.rejections[index] = slow(mesh, bound_s)
            return
    effort = Effort(
        interesting_s=state.score_to_beat(state.options.top) / weight,
        to_beat_s=to_beat / weight,
        gap=state.gap,
        remaining_s=state.remaining_s,
    )
    program = state.program(index, bound_s=bound_s)
    outcome = refine(program, known=state.plans.get(index), effort=effort)
    bound_s = outcome.bound_s
    if outcome.best is not None:
        state.keep(index, outcome.best)
    is_open = not outcome.is_complete and bound_s < faster_than(state.score_to_beat() / weight, gap=state.gap)
    if mesh.n_chunks > 1 and is_open and not state.is_late():
        bound_s = _agree_on_sizes(state, index, bound_s, max_turns=MAX_TURNS)
    if is_memory_proof(outcome):
        state.rejections[index] = short_somewhere(state.table(mesh), 1)
    elif index not in state.plans:
        state.rejections[index] = slow(mesh, bound_s)
    state.bounds_s[index] = bound_s
