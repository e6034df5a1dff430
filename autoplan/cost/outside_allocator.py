"""What a process takes on its device outside of torch's allocator: the context, and buffers of its communicators.

    context + first communicator + further communicator x others + neighbours in the pipeline
    + all-to-alls x other ranks of tensor parallelism, where its layouts have some

NCCL makes a communicator when a process group first communicates, with buffers for every channel. A program has one of
all its processes (gradient norm, barriers), one per axis of its mesh (replicas, shards, tensor parallel), and one per
neighbour in the pipeline, or one each way. torch gives an axis that holds all processes the group of all; an axis of
one process communicates with nobody. Weights tied across stages have a group of their own.
"""

from __future__ import annotations

from autoplan.parallel_plan import Mesh
from autoplan.schedules import receives_ahead
from autoplan.units import MiB

# Of H100 and H200 over NVLink, torch 2.11, NCCL 2.28 (`outside_allocator_bytes_per_rank` of the runs in
# benchmarks/results/predictions_h200_x*2026-11-22*.jsonl and predictions_h100_*.jsonl). The context takes
# 1,325 to 1,337 MiB, and torch is offered 616 MiB less of an H200 than its driver tells, which is what hardware
# profiles have. Without NVLink a context with its communicators was smaller (1,145 to 1,219 MiB).
CONTEXT_BYTES = (1330 + 616) * MiB
FIRST_COMMUNICATOR_BYTES = 288 * MiB
FURTHER_COMMUNICATOR_BYTES = 486 * MiB
# Of a group of two neighbouring stages: 516 to 518 MiB; in programs of pp 2 with one for all, which is the same then,
# 448 to 465, and 655 where ranks of another axis lie beside. By few thread blocks, of ranks that receive ahead: 130 one
# way and 70 more for the way back. Without NVLink at most 30, and 120 both ways (neighbour_sends_h100_x4_2026-11-27_
# ninth_machine.jsonl and predictions_h100_x4_2026-11-27_send_blocks.jsonl in benchmarks/results). The largest is taken.
# Of torch 2.13, which makes another one for sends that are not in a batch, nothing is measured.
NEIGHBOUR_BYTES = 655 * MiB
FEW_BLOCKS_NEIGHBOUR_BYTES = (130 + 70) * MiB
FIRST_ALL_TO_ALL_BYTES, FURTHER_ALL_TO_ALL_BYTES = 442 * MiB, 385 * MiB  # by other rank: 442 with one, 1,212 with three


def communicators(mesh: Mesh, *, has_tied_weights: bool, n_groups: int = 1) -> tuple[str, ...]:
    """The process groups of a rank that communicate, "all" first, then by axis.

    `n_groups`: of hosts of a mixed cluster, each with the replicas of such a mesh.
    """
    n_devices = mesh.n_devices * n_groups
    if n_devices == 1:
        return ()
    degrees = {
        "replica": mesh.dp // mesh.zero_shard_degree * n_groups,
        "shard": mesh.zero_shard_degree,
        "tp": mesh.tp,
    }
    axes = tuple(axis for axis, degree in degrees.items() if 1 < degree < n_devices)
    return ("all", *axes, *(("tied weights",) if has_tied_weights and mesh.pp > 1 else ()))


def outside_allocator_bytes(
    mesh: Mesh, *, has_tied_weights: bool, has_all_to_alls: bool = False, n_groups: int = 1
) -> int:
    """Context and communicators of one process; `has_all_to_alls`: among tensor-parallel ranks."""
    first, *others = communicators(mesh, has_tied_weights=has_tied_weights, n_groups=n_groups) or ("",)
    return (
        CONTEXT_BYTES
        + (FIRST_COMMUNICATOR_BYTES if first else 0)
        + FURTHER_COMMUNICATOR_BYTES * len(others)
        + _neighbours_bytes(mesh)
        + (FIRST_ALL_TO_ALL_BYTES + (mesh.tp - 2) * FURTHER_ALL_TO_ALL_BYTES if has_all_to_alls else 0)
    )


def _neighbours_bytes(mesh: Mesh) -> int:
    n_neighbours = min(mesh.pp - 1, 2)
    return n_neighbours * (FEW_BLOCKS_NEIGHBOUR_BYTES if receives_ahead(mesh.schedule) else NEIGHBOUR_BYTES)
