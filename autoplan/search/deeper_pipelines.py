"""Pipelines with more stages per rank than the space has.

Where a rank has few micro-batches for a long pipeline, more stages per rank shorten the bubble. When arithmetic has
found the plans of the space, meshes near those with much of a bubble (`deeper_meshes`) are planned and simulated
without a solver, those first that should be fastest (`_ideal_s`). The best plan is kept if it is faster than all plans
so far by more than `WORTHWHILE`; it is then what the rest of the search has to beat. What is proved is of the space
alone: that no plan of it is faster. Of other plans beyond it nothing is, nor that more devices never make them slower.
"""

from __future__ import annotations

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.search.bounds import shortfall_bytes, step_bound_s
from autoplan.search.meshes import SearchSpace, deeper_meshes
from autoplan.search.one_mesh import faster_than
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.plans import obeys_recompute
from autoplan.search.ranges import Segments
from autoplan.search.several_stages.least_recomputation import balanced_stages, thrifty_plan
from autoplan.search.state import SearchState

MIN_RANKS = 4  # of a pipeline that is worth it
N_NEAR = 4  # meshes of the space near which others are looked for; counts, so that the machine decides nothing
N_PLANNED = 8  # meshes beyond it
WORTHWHILE = 0.03  # share of the step; what the messages of more stages really cost is not known any better

Stages = tuple[StagePlan, ...]


def look_beyond(state: SearchState, space: SearchSpace) -> None:
    """Keep the best plan found beyond the space, if it is much better than the best one of the space so far."""
    limit, found = faster_than(state.score_to_beat(), gap=WORTHWHILE), None
    for ideal, table, stages in _hopeful(state, space, limit=limit)[:N_PLANNED]:
        if ideal >= limit or state.is_late():
            break
        shape = shape_of(table.mesh)
        plan = thrifty_plan(table, shape, stages, recompute=state.recompute, is_late=state.is_late)
        if plan is None or not obeys_recompute(table, plan.stages, recompute=state.recompute):
            continue
        score = plan.estimate.step_s * state.weight(table.mesh)
        if score < limit:
            limit, found = score, (table, plan)
    if found is not None:
        state.keep_beyond(*found)


def _hopeful(state: SearchState, space: SearchSpace, *, limit: float) -> list[tuple[float, CostTable, Stages]]:
    """The meshes whose ideal score is below the limit, best first, with the most even stages."""
    hopeful = []
    for mesh in _meshes_near(state, space, limit=limit):
        if state.is_late():
            break
        table, weight = state.price(mesh), state.weight(mesh)
        if shortfall_bytes(table) > 0 or step_bound_s(table) * weight >= limit:
            continue
        stages = balanced_stages(table, recompute=state.recompute)
        ideal = _ideal_s(table, stages, recompute=state.recompute) * weight
        if ideal < limit:
            hopeful.append((ideal, table, stages))
    return sorted(hopeful, key=lambda item: item[0])


def _meshes_near(state: SearchState, space: SearchSpace, *, limit: float) -> tuple[Mesh, ...]:
    """The meshes to try, each once: near the pipelines that would be below the limit without their bubble."""
    pipelines = [index for index in state.ranking() if state.meshes[index].pp >= MIN_RANKS]
    near = [index for index in pipelines if state.score(index) * (1.0 - _bubble_share(state.meshes[index])) < limit]
    deeper = (deeper_meshes(space, state.options, near=state.meshes[index]) for index in near[:N_NEAR])
    return tuple(dict.fromkeys(mesh for meshes in deeper for mesh in meshes))


def _bubble_share(mesh: Mesh) -> float:
    """Of the step, if all stages are alike and nothing else is waited for."""
    return (mesh.pp - 1) / (mesh.pp - 1 + mesh.n_chunks * mesh.n_micro_batches)


def _ideal_s(table: CostTable, stages: Stages, *, recompute: str | None) -> float:
    """What the slowest rank computes, and the bubble, as if no pass waited for a message and everything fitted."""
    mesh, segments = table.mesh, Segments.of(table, recompute)
    passes_s = np.append(0.0, np.cumsum(segments.forward_s + segments.backward_s))
    of_stages_s = np.array([passes_s[stage.stop] - passes_s[stage.start] for stage in stages])
    slowest_s = of_stages_s.reshape(mesh.n_chunks, mesh.pp).sum(axis=0).max()
    bubble_s = (mesh.pp - 1) * of_stages_s.mean()
    return max(step_bound_s(table), table.per_step_s + float(mesh.n_micro_batches * slowest_s + bubble_s))
