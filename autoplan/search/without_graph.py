"""Plans whose CUDA graph gains nothing, or may not fit, go without.

In the search, meshes whose passes can be captured are (`SearchSpace.cuda_graph`). A graph takes waiting for the host
out of every pass, shortens those whose blocks were faster when they were replayed, and adds no time, so the same plan
without it is no faster, and meshes need not be priced twice; but where blocks draw random numbers, as in dropout, plans
without a graph may recompute them and so are in the search too. A graph holds a batch of its own in memory: a plan that
fits only without that is not found. In the end a plan that gains no more than the gap of the search goes without:
simpler, as fast. So does one whose graph may take more memory than there is; where another mesh has a faster plan then,
that is the answer.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.parallel_plan import Estimate, Mesh
from autoplan.search.meshes import Price
from autoplan.search.one_mesh import RELATIVE_TOLERANCE, Judged
from autoplan.simulator.simulate import simulate

# What a graph holds of what its step has allocated at once: nothing is given back while it is captured. Of 17 programs
# 16 held 1.01 to 1.17 times as much, and an interleaved pipeline 1.23 times
# (benchmarks/results/graph_memory_h200_2026-11-28.jsonl, graph_memory_h200_x2_2026-11-29.jsonl).
GRAPH_HOLDS = 1.25


def may_capture(estimate: Estimate) -> bool:
    """Whether the graph of a plan fits on every rank."""
    ranks = range(len(estimate.needed_bytes))
    outside_bytes = [estimate.needed_bytes[rank] - estimate.allocator_bytes[rank] for rank in ranks]
    return all(
        GRAPH_HOLDS * estimate.allocated_bytes[rank] + outside_bytes[rank] <= estimate.limit_bytes(rank)
        for rank in ranks
    )


def without_graph(mesh: Mesh, judged: Judged, *, price: Price, gap: float) -> tuple[Mesh, Judged]:
    """The plan, without its graph where that may not fit, or where it is slower without by no more than `gap`."""
    if not mesh.cuda_graph:
        return mesh, judged
    plain = replace(mesh, cuda_graph=False)
    estimate = simulate(price(plain), judged.stages)
    limit_s = judged.estimate.step_s * (1.0 + max(gap, RELATIVE_TOLERANCE))
    is_kept = estimate.step_s > limit_s and may_capture(judged.estimate)
    return (mesh, judged) if is_kept else (plain, Judged(judged.stages, estimate))
