"""What a search has found, as its result: the plans, the proved bound, and what became of every other mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from autoplan.parallel_plan import Mesh
from autoplan.search.baselines import Baseline
from autoplan.search.bounds import step_bound_s
from autoplan.search.meshes import MakePlan, fixed
from autoplan.search.one_mesh import RELATIVE_TOLERANCE, Judged, faster_than
from autoplan.search.preference import Scored, simplest
from autoplan.search.rejections import rejected
from autoplan.search.result import Candidate, OneDevice, SearchResult
from autoplan.search.state import GOOD_ENOUGH, SearchState
from autoplan.search.without_graph import without_idle_graph
from autoplan.solver.linear_model import INFINITY


def result_of(
    state: SearchState, found: tuple[Baseline, ...], *, make_plan: MakePlan, alone: OneDevice | None = None
) -> SearchResult:
    """The result; `found` are the recipes, whether they are in the space or not, and `alone` is one device."""
    bound = _proved_score(state)
    ranking = _simplest_first(state, bound)
    best = ranking[0] if ranking else None
    candidates = list(islice(_candidates(state, ranking, found, make_plan=make_plan), state.options.top + 1))
    status = _status(state, best, bound)
    if status == "optimal" and best is not None:
        bound = state.score(best)
        if candidates[0].estimate.step_s * state.weight(state.meshes[best]) > bound * (1.0 + RELATIVE_TOLERANCE):
            status = "feasible"  # it went without its graph
    weight = 1.0 if best is None else state.weight(state.meshes[best])
    return SearchResult(
        status=status,
        best=candidates[0] if candidates else None,
        alternatives=tuple(candidates[1:]),
        baselines=tuple(_recipe(state, baseline, make_plan=make_plan) for baseline in found),
        rejected=rejected(state, best),
        bound_s=bound / weight if 0.0 < bound < INFINITY else None,
        n_meshes=len(state.meshes),
        search_s=state.clock() - state.started_s,
        first_plan_s=state.first_plan_s,
        stopped_by=_stopped_by(state, status, bound),
        one_device=alone,
        memory_confidence=state.options.memory_confidence,
    )


def _simplest_first(state: SearchState, bound: float) -> list[int]:
    """The meshes with a plan: the answer, then the others, best first."""
    ranking = list(state.ranking())
    if not ranking:
        return ranking
    scored = [Scored(state.score(index), state.meshes[index], state.plans[index].stages) for index in ranking]
    answer = ranking.pop(simplest(scored, bound=bound, gap=state.gap))
    return [answer, *ranking]


def _proved_score(state: SearchState) -> float:
    """The lower bound on the score over the whole space; that of the best plan when it is proved optimal."""
    if not state.lists_all:
        return 0.0
    scores = {index: score for score, index, _ in state.queue}
    scores |= {index: bound_s * state.weight(state.meshes[index]) for index, bound_s in state.bounds_s.items()}
    if len(scores.keys() | state.rejections.keys()) < len(state.meshes) - len(state.beyond_s):
        return 0.0  # interrupted before every mesh had a bound
    least, best = min(scores.values(), default=INFINITY), state.score_to_beat()
    return best if least >= faster_than(best) else least


def _status(state: SearchState, best: int | None, bound: float) -> str:
    if best is not None:
        return "optimal" if bound >= faster_than(state.score(best)) else "feasible"
    is_proved = bound == INFINITY and not state.stopped and len(state.rejections) == len(state.meshes)
    return "infeasible" if is_proved else "unknown"


def _stopped_by(state: SearchState, status: str, bound: float) -> str:
    """What ended the search; see `SearchResult`. The clock may also have run out inside the last integer program."""
    if not state.lists_all:
        return state.stopped or "time limit"
    if state.stopped or status != "feasible" or bound >= faster_than(state.score_to_beat(), gap=GOOD_ENOUGH):
        return state.stopped
    return "time limit" if state.is_late() else "stalled"


def _candidates(
    state: SearchState, ranking: Sequence[int], found: tuple[Baseline, ...], *, make_plan: MakePlan
) -> Iterator[Candidate]:
    """Those of the meshes in this order; of plans that are alike without their graphs, or but for the memory format as
    fast, the first.
    """
    shown: list[Candidate] = []
    queued = {index: score for score, index, _ in state.queue}
    for index in ranking:
        candidate = _candidate(state, index, found, queued=queued, make_plan=make_plan)
        if not any(_is_as_good(candidate, other) for other in shown):
            shown.append(candidate)
            yield candidate


def _is_as_good(item: Candidate, other: Candidate) -> bool:
    """Whether two plans are alike, but for the memory format where they are as fast."""
    if item.plan == other.plan:
        return True
    mesh = replace(item.plan.mesh, memory_format=other.plan.mesh.memory_format)
    is_alike = replace(item.plan, mesh=mesh) == other.plan
    return is_alike and abs(item.estimate.step_s / other.estimate.step_s - 1.0) < GOOD_ENOUGH


def _candidate(
    state: SearchState, index: int, found: tuple[Baseline, ...], *, queued: dict[int, float], make_plan: MakePlan
) -> Candidate:
    mesh, judged = state.meshes[index], state.plans[index]
    names = [b.name for b in found if b.table.mesh == mesh and b.judged.stages == judged.stages]
    known = state.beyond_s | state.bounds_s
    bound_s = min(known.get(index, queued.get(index, 0.0) / state.weight(mesh)), judged.estimate.step_s)
    mesh, judged = _released(state, mesh, judged)
    return Candidate(make_plan(mesh, judged.stages), judged.estimate, bound_s, names[0] if names else "")


def _recipe(state: SearchState, baseline: Baseline, *, make_plan: MakePlan) -> Candidate:
    mesh, judged = _released(state, baseline.table.mesh, baseline.judged)
    return Candidate(make_plan(mesh, judged.stages), judged.estimate, step_bound_s(baseline.table), baseline.name)


def _released(state: SearchState, mesh: Mesh, judged: Judged) -> tuple[Mesh, Judged]:
    """Without a graph that gains nothing, unless one was asked for."""
    if fixed(state.options, "cuda_graph") == "on":
        return mesh, judged
    return without_idle_graph(mesh, judged, price=state.table, gap=state.gap)
