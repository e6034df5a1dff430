"""What one device alone would take: the figure that every plan is measured against first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoplan.options import Options
from autoplan.search.baselines import best_of
from autoplan.search.bounds import least_needed_bytes, shortfall_bytes
from autoplan.search.meshes import Price, SearchSpace, meshes_of
from autoplan.search.result import OneDevice
from autoplan.search.twins import has_twin, twin_of


def one_device(space: SearchSpace, options: Options, *, price: Price, is_late: Callable[[], bool]) -> OneDevice | None:
    """The same global batch on one device, at its best, with or without recomputation, whatever the user fixed.

    Its modules run in all the ways that those of the plans may (`SearchSpace.executions`, `cuda_graph`), else a plan
    with channels_last would be compared with one device without, and so does what it recomputes.
    None where a plan has no other choice, or must use all devices, or where no micro-batch divides the batch, or where
    it is late before all are tried.
    """
    if space.n_devices == 1 or space.uses_all_devices:
        return None
    meshes = list(meshes_of(space, replace(options, fix=()), tp=1, pp=1, dp=1))
    if space.plain_enters:
        meshes += [replace(mesh, cuda_graph=False) for mesh in meshes if mesh.cuda_graph]
    meshes += [twin_of(mesh) for mesh in meshes if has_twin(mesh)] if space.may_keep_attention else []
    if not meshes:
        return None
    short = {mesh: shortfall_bytes(price(mesh)) for mesh in meshes if not is_late()}
    possible = [mesh for mesh in short if short[mesh] <= 0]
    if is_late():
        return None
    if not possible:  # proved, so nothing is replayed
        closest = min(meshes, key=lambda mesh: short[mesh])
        return OneDevice(None, least_needed_bytes(price(closest)), price(closest).memory_limit_bytes)
    found = best_of("one device", [possible], (False, True), space=space, price=price, is_late=is_late)
    if found is None or is_late():
        return None
    estimate = found.judged.estimate
    step_s = estimate.step_s if estimate.fits else None
    return OneDevice(step_s, max(estimate.needed_bytes), estimate.memory_limit_bytes)
