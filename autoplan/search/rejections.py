"""Why a mesh does not hold the best plan; and when nothing fits, which stage lacks how much."""

from __future__ import annotations

from dataclasses import replace

from autoplan.cost.table import CostTable
from autoplan.parallel_plan import Mesh
from autoplan.search.one_mesh import faster_than, least_memory
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.result import Rejection
from autoplan.search.state import SearchState
from autoplan.solver.linear_model import INFINITY
from autoplan.units import GiB, MiB

N_CLOSEST = 16  # meshes that are asked for the plan that lacks the least memory, when nothing fits
STOPS = {"interrupted": "interrupted", "time limit": "not examined in time"}  # why a mesh was not examined


def short_somewhere(table: CostTable, short_bytes: int) -> Rejection:
    """That every plan of the mesh lacks so many bytes somewhere, or more."""
    needed = (table.memory_limit_bytes + short_bytes) / GiB
    limit, margin = table.memory_limit_bytes / GiB, with_margin(table)
    detail = f"some stage needs at least {needed:.1f} GiB{margin}, device has {limit:.1f} GiB"
    if short_bytes < MiB:  # proved, but not by how much
        detail = f"some stage always needs more{margin} than the {limit:.1f} GiB that a device has"
    return Rejection(table.mesh, "memory", detail, short_bytes=short_bytes)


def with_margin(table: CostTable) -> str:
    """What stands after the bytes that something needs, where the margin is among them."""
    return " with its margin" if table.memory_margin else ""


def slow(mesh: Mesh, bound_s: float) -> Rejection:
    """That every plan of the mesh is slow."""
    return Rejection(mesh, "bound", f"no plan of it is faster than {bound_s:.6g} s")


def explain_memory(state: SearchState) -> None:
    """When nothing fits, say of the closest meshes which stage lacks how much.

    They are taken in the order of the least that they lack, until no other can lack less than one of them does. Those
    with a CUDA graph need more than the same without. With a margin nothing is said: what is short of memory is told of
    the whole device.
    """
    if state.plans or state.stopped:
        return
    short = sorted(
        (item.short_bytes, index)
        for index, item in state.rejections.items()
        if item.short_bytes is not None and not state.meshes[index].cuda_graph
    )
    least = INFINITY
    for short_bytes, index in short[:N_CLOSEST]:
        if short_bytes >= least or state.is_late() or state.table(state.meshes[index]).memory_margin:
            break
        _explain_shortage(state, index)
        least = min(least, state.rejections[index].short_bytes or 0)
    _explain_graphs(state)


def _explain_graphs(state: SearchState) -> None:
    """Say of meshes with a CUDA graph what was said of the same without, which need no more."""
    said = {item.mesh: item for item in state.rejections.values() if item.stage is not None}
    for index, item in state.rejections.items():
        plain = said.get(replace(item.mesh, cuda_graph=False))
        if item.mesh.cuda_graph and plain is not None:
            state.rejections[index] = replace(plain, mesh=item.mesh)


def _explain_shortage(state: SearchState, index: int) -> None:
    mesh = state.meshes[index]
    closest = least_memory(
        state.table(mesh), shape_of(mesh), recompute=state.recompute, time_limit_s=state.remaining_s()
    )
    if closest is None:
        return
    estimate, least_bytes = closest[0].estimate, max(1, closest[1])
    stage = max(range(mesh.pp), key=lambda rank: estimate.needed_bytes[rank])
    needed, limit = estimate.needed_bytes[stage] / GiB, estimate.memory_limit_bytes / GiB
    detail = f"stage {stage} needs {needed:.1f} GiB, device has {limit:.1f} GiB: {needed - limit:.2f} GiB short"
    state.rejections[index] = Rejection(mesh, "memory", detail, estimate.step_s, least_bytes, stage)


def rejected(state: SearchState, best: int | None) -> tuple[Rejection, ...]:
    """Every mesh but the best one, once, in the order of the enumeration."""
    queued = {index: score for score, index, _ in state.queue}
    to_beat = faster_than(state.score_to_beat(), gap=state.gap)
    chosen = INFINITY if best is None else state.score(best)
    return tuple(
        _rejection(state, index, queued=queued, to_beat=to_beat, chosen=chosen)
        for index in range(len(state.meshes))
        if index != best
    )


def _rejection(state: SearchState, index: int, *, queued: dict[int, float], to_beat: float, chosen: float) -> Rejection:
    mesh = state.meshes[index]
    if index in state.plans:
        step_s = state.plans[index].estimate.step_s
        detail = f"its best plan found takes {step_s:.6g} s"
        if state.score(index) < chosen:
            detail += ", which no proof tells from the chosen one, and is less simple"
        return Rejection(mesh, "slower", detail, step_s=step_s)
    if index in state.rejections:
        return state.rejections[index]
    bound_s = queued.get(index, 0.0) / state.weight(mesh)
    if queued.get(index, 0.0) < to_beat:
        return Rejection(mesh, "time limit", STOPS[state.stopped])
    return slow(mesh, bound_s)
