"""What a process takes on its device outside of torch's allocator: the context, and buffers of its communicators.

    context_bytes + communicator_bytes x number of communicators

NCCL makes a communicator when a process group first communicates, with buffers for every channel. A program has one of
all its processes (gradient norm, barriers), and one per axis of its mesh: pipeline, replicas, shards, tensor parallel.
torch gives an axis that holds all processes the group of all; an axis of one process communicates with nobody. Weights
tied across stages have a group of their own.
"""

from __future__ import annotations

from autoplan.parallel_plan import Mesh
from autoplan.units import MiB

# Assumed until `benchmarks/communicator_memory.py` has run on the target, which measures both.
CONTEXT_BYTES = 1024 * MiB
COMMUNICATOR_BYTES = 256 * MiB


def communicators(mesh: Mesh, *, has_tied_weights: bool, n_groups: int = 1) -> tuple[str, ...]:
    """The process groups of a rank that communicate, "all" first, then by axis.

    `n_groups`: of hosts of a mixed cluster, each with the replicas of such a mesh.
    """
    n_devices = mesh.n_devices * n_groups
    if n_devices == 1:
        return ()
    degrees = {
        "pp": mesh.pp,
        "replica": mesh.dp // mesh.zero_shard_degree * n_groups,
        "shard": mesh.zero_shard_degree,
        "tp": mesh.tp,
    }
    axes = tuple(axis for axis, degree in degrees.items() if 1 < degree < n_devices)
    return ("all", *axes, *(("tied weights",) if has_tied_weights and mesh.pp > 1 else ()))


def outside_allocator_bytes(mesh: Mesh, *, has_tied_weights: bool, n_groups: int = 1) -> int:
    """Context and communicators of one process."""
    found = communicators(mesh, has_tied_weights=has_tied_weights, n_groups=n_groups)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * len(found)
