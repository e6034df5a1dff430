"""What a search on a mixed cluster found, and what it proved, as a `SearchResult`."""

from __future__ import annotations

from dataclasses import replace

from autoplan.errors import InfeasibleError
from autoplan.parallel_plan import Plan
from autoplan.search import GOOD_ENOUGH
from autoplan.search.mixed.rejections import least_short
from autoplan.search.mixed.state import Found, MixedState
from autoplan.search.one_mesh import faster_than
from autoplan.search.preference import Scored, simplest
from autoplan.search.result import Candidate, OneDevice, Rejection, SearchResult
from autoplan.solver.linear_model import INFINITY


def result_of(state: MixedState) -> SearchResult:
    """The best plans found, the bound that is proved, and why the others are not the answer.

    Raises: InfeasibleError if there is no mesh at all.
    """
    n_meshes = sum(shape.n_meshes for shape in state.shapes)
    n_meshes += sum(result.n_meshes for result in state.results.values())
    n_meshes += 0 if state.shares is None else state.shares.n_meshes
    if n_meshes == 0 and state.impossible:
        raise InfeasibleError("\n".join(dict.fromkeys(state.impossible.values())))
    bound_s = _proved_s(state)
    candidates = _simplest_first(_candidates(state), bound_s=bound_s, gap=state.gap)
    best = candidates[0] if candidates else None
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
        stopped_by=_stopped_by(state, bound_s) if status in ("feasible", "unknown") else state.stopped,
        one_device=_one_device(state),
        memory_confidence=state.options.memory_confidence,
    )


def _candidates(state: MixedState) -> list[Candidate]:
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


def _simplest_first(candidates: list[Candidate], *, bound_s: float, gap: float) -> list[Candidate]:
    """The answer, then the others, fastest first."""
    if not candidates:
        return candidates
    scored = [
        Scored(item.estimate.step_s, item.plan.mesh, item.plan.stages, max(1, len(item.plan.groups)))
        for item in candidates
    ]
    chosen = simplest(scored, bound=bound_s, gap=gap)
    return [candidates[chosen], *candidates[:chosen], *candidates[chosen + 1 :]]


def _one_device(state: MixedState) -> OneDevice | None:
    """One device of the group where that is fastest, or where the least memory is lacking when it fits on none."""
    found = [result.one_device for result in state.results.values() if result.one_device is not None]
    fitting = [(own.step_s, own) for own in found if own.step_s is not None]
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    return min(found, key=lambda own: own.needed_bytes - own.memory_limit_bytes, default=None)


def _proved_s(state: MixedState) -> float:
    """No plan of the space that fits is faster; 0 when that is not known of some."""
    shares_s, pipelines_s = (0.0 if queue is None else queue.bound_s for queue in (state.shares, state.queue))
    bounds_s = [state.least_bound_s, shares_s, pipelines_s]
    for index in range(len(state.space.groups)):
        result = state.results.get(index)
        if result is not None:
            bounds_s.append(INFINITY if result.status == "infeasible" else result.bound_s or 0.0)
        elif index not in state.impossible:
            bounds_s.append(state.work_s.get(index, 0.0))
    return min(bounds_s)


def _stopped_by(state: MixedState, bound_s: float) -> str:
    """What ended the search; see `SearchResult`."""
    if bound_s >= faster_than(state.best_s, gap=GOOD_ENOUGH):
        return ""
    reasons = {result.stopped_by for result in state.results.values()} - {""}
    return state.stopped or ("time limit" if "time limit" in reasons else "stalled")


def _is_of(plan: Plan, item: Found) -> bool:
    places = [[(own.group, own.n_ranks) for own in groups] for groups in (plan.groups, item.groups)]
    return plan.mesh == item.mesh and places[0] == places[1]


def _rejected(state: MixedState, best: Candidate | None) -> tuple[Rejection, ...]:
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
