"""Plans whose CUDA graph gains nothing go without.

In the search, meshes whose passes can be captured are (`SearchSpace.cuda_graph`). A graph takes waiting for the host
out of every pass, shortens those whose blocks were faster when they were replayed, and adds no time, so the same plan
without it is no faster. But it needs more memory: where a mesh may lack that, the same without a graph enters the
search. Where blocks draw random numbers, as in dropout, only plans without a graph may recompute them, and both are in
the search from the start. In the end a plan that gains no more than the gap of the search goes without: simpler, as
fast.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.parallel_plan import Mesh
from autoplan.search.meshes import Price
from autoplan.search.one_mesh import RELATIVE_TOLERANCE, Judged
from autoplan.simulator.simulate import simulate


def without_idle_graph(mesh: Mesh, judged: Judged, *, price: Price, gap: float) -> tuple[Mesh, Judged]:
    """The plan, without its graph where that is slower by no more than `gap`."""
    if not mesh.cuda_graph:
        return mesh, judged
    plain = replace(mesh, cuda_graph=False)
    estimate = simulate(price(plain), judged.stages)
    limit_s = judged.estimate.step_s * (1.0 + max(gap, RELATIVE_TOLERANCE))
    return (plain, Judged(judged.stages, estimate)) if estimate.step_s <= limit_s else (mesh, judged)
