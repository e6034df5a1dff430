"""Lower bounds on the step time and on the memory of a mesh, by arithmetic alone: no solver, no simulator.

Everything here is admissible: no plan of the mesh that the simulator accepts is faster, or needs less.

`step_bound_s` puts the cheapest choice of every segment into the average of the paths of `schedule_paths` over the
stages: the average stage has 1 / pp of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from operator import mul

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, backward_s, forward_s
from autoplan.parallel_plan import Mesh
from autoplan.schedules import ordered_schedule, splits_backward


def compute_bound_s(mesh: Mesh, *, forward_s: float, backward_s: float) -> float:
    """The least step time of a mesh whose whole model takes so long per micro-batch on one rank.

    Needs no cost table of this mesh; see `computes_least`.
    """
    n, pp = mesh.n_micro_batches, mesh.pp
    both_s = forward_s + backward_s
    if mesh.schedule == "gpipe":
        return both_s + (n - 1) * both_s / pp
    if mesh.schedule == "1f1b":
        return both_s + ((n - 1) * backward_s + max(0, n - pp) * forward_s) / pp
    return n * both_s / pp


def compute_key(mesh: Mesh) -> tuple[Hashable, ...]:
    """Meshes with equal keys take about as long for a micro-batch; `computes_least` says which the least of them.

    That depends on `tp`, the sharding, the micro-batch size, the ZeRO stage (which may copy parameters in and out), on
    whether there is a pipeline (which may hold tied weights twice), on whether gradients are added up, on how modules
    run, and on whether they are a CUDA graph.
    """
    layout = mesh.tp, mesh.sharding, mesh.micro_batch_size, mesh.zero_stage
    modules = mesh.compile, mesh.memory_format, mesh.generated, mesh.wraps_head, mesh.cuda_graph
    return (*layout, mesh.pp > 1, mesh.n_micro_batches > 1, *modules)


def computes_least(meshes: Sequence[Mesh], keys: Sequence[Hashable]) -> dict[Hashable, Mesh]:
    """Per key a mesh that computes no longer than any of them: that with the smallest shards, the backward pass whole,
    and no receives that wait beside it.

    Of gradients and parameters that lie in shards, a rank adds up, copies and casts its own.
    """
    found: dict[Hashable, Mesh] = {}
    for key, mesh in zip(keys, meshes, strict=True):
        known = found.get(key)
        if known is None or known.zero_shard_degree < mesh.zero_shard_degree:
            found[key] = mesh
    return {key: replace(mesh, schedule="1f1b", n_chunks=1) for key, mesh in found.items()}


def least_passes_s(table: CostTable) -> tuple[float, float]:
    """Forward and backward pass of all segments for one micro-batch, with what the host and tensor parallelism add."""
    return _total(table, forward_s), _total(table, backward_s)


def least_communication_s(table: CostTable) -> tuple[float, float]:
    """Gathers and reductions of all segments: in every micro-batch, and once per step."""
    gathers_s, reduces_s = _total(table, _gather_s), _total(table, _reduce_s)
    often_s = (gathers_s + _total(table, _gather_back_s) if table.gathers_per_micro_batch else 0.0) + (
        reduces_s if table.reduces_per_micro_batch else 0.0
    )
    once_s = (0.0 if table.gathers_per_micro_batch else gathers_s) + (
        _total(table, _replicas_s) if table.reduces_per_micro_batch else reduces_s
    )
    return often_s, once_s


def step_bound_s(table: CostTable) -> float:
    """A lower bound on the step time of any plan of the mesh. See the module docstring."""
    often_s, once_s = least_communication_s(table)
    communication_s = table.mesh.n_micro_batches * often_s + once_s
    bound_s = _whole_bound_s if table.mesh.pp == 1 else _pipeline_bound_s
    return max(table.batch_copy_s, table.per_step_s + bound_s(table, communication_s=communication_s))


def _whole_bound_s(table: CostTable, *, communication_s: float) -> float:
    """One rank does everything: all compute C and all communication G, max(C + beta G, G + gamma C) (`Overlap`)."""
    overlap = table.overlap
    compute_s = table.mesh.n_micro_batches * (_total(table, forward_s) + _total(table, backward_s))
    both_s = max(
        compute_s + overlap.communication_exposed * communication_s,
        communication_s + overlap.compute_exposed * compute_s,
    )
    return both_s + _total(table, _optimizer_s)


def _pipeline_bound_s(table: CostTable, *, communication_s: float) -> float:
    """The average rank does 1 / pp of everything; each other path ends with the optimizer of the first stage.

    Where the backward pass is split, only the passes for inputs lead from the busiest rank back to the first stage.
    """
    mesh = table.mesh
    n, pp = mesh.n_micro_batches, mesh.pp
    forward, backward = _total(table, forward_s), _total(table, backward_s)
    is_split = splits_backward(mesh.schedule)
    back_s = _total(table, _input_backward_s) if is_split else backward
    action_s, n_actions = table.action_s, 2  # or more, where the backward pass is split
    cut_s = 2 * _n_sends(mesh.schedule, pp, mesh.n_chunks) * _least_cut_s(table.cut_s)
    busiest_s = max((forward + backward) / pp, _largest(table, lambda cost: forward_s(cost) + backward_s(cost)))
    busiest_s += mesh.n_chunks * n_actions * action_s
    there_and_back_s = forward + back_s + cut_s + (2 * mesh.n_stages - is_split) * action_s
    paths_s = [there_and_back_s] if is_split else [n * busiest_s, there_and_back_s]
    if mesh.schedule == "gpipe":
        paths_s.append(there_and_back_s + (n - 1) * busiest_s)
    elif mesh.schedule == "1f1b" and n >= pp:
        around_s = ((n - 1) * backward + (n - pp) * forward) / pp + (2 * n - 1 - pp) * action_s
        paths_s.append(there_and_back_s + around_s)
        paths_s.append(there_and_back_s + (n - pp) * busiest_s)
    first_s = min(map(_optimizer_s, table.costs[table.kinds[0]]))
    working_s = n * (forward + backward + mesh.n_stages * n_actions * action_s)
    average_s = (max(working_s, communication_s) + _total(table, _optimizer_s)) / pp
    return max(average_s, n * busiest_s, max(paths_s) + first_s)


@lru_cache(maxsize=4096)
def _n_sends(schedule: str, pp: int, n_chunks: int) -> int:
    """How often an activation goes from one rank to another on its way through the stages."""
    ordered = ordered_schedule(schedule, n_ranks=pp, n_micro_batches=pp, n_chunks=n_chunks)
    return sum(one != other for one, other in pairwise(ordered.ranks))


@lru_cache(maxsize=64)
def _least_cut_s(cut_s: tuple[float | None, ...]) -> float:
    return min((own_s for own_s in cut_s if own_s is not None), default=0.0)


def _gather_s(cost: SegmentCost) -> float:
    return cost.gather_s


def _gather_back_s(cost: SegmentCost) -> float:
    return cost.gather_back_s


def _input_backward_s(cost: SegmentCost) -> float:
    return backward_part_s(cost, "I", is_first=False)


def _reduce_s(cost: SegmentCost) -> float:
    return cost.reduce_s


def _replicas_s(cost: SegmentCost) -> float:
    return cost.replicas_s


def _optimizer_s(cost: SegmentCost) -> float:
    return cost.optimizer_s


def _by_kind(table: CostTable, value: Callable[[SegmentCost], float]) -> list[float]:
    """Per kind, the least value over the recompute choices."""
    return [min(map(value, choices)) for choices in table.costs]


def _total(table: CostTable, value: Callable[[SegmentCost], float]) -> float:
    """The sum over the segments of the least value."""
    return sum(map(mul, _by_kind(table, value), _n_of_kind(table.kinds, len(table.costs))))


def _largest(table: CostTable, value: Callable[[SegmentCost], float]) -> float:
    """The largest least value of any segment."""
    values = _by_kind(table, value)
    return max(values[kind] for kind in set(table.kinds))


@lru_cache(maxsize=64)
def _n_of_kind(kinds: tuple[int, ...], n_kinds: int) -> tuple[int, ...]:
    return tuple(map(kinds.count, range(n_kinds)))


def in_flight(mesh: Mesh, stage: int) -> int:
    """Micro-batches whose activations a stage keeps at most before a backward pass, with one stage per rank."""
    n_after = mesh.pp - 1 - stage
    n_warm_up = {"gpipe": mesh.n_micro_batches, "interleaved": 2 * n_after}.get(mesh.schedule, n_after)
    return min(mesh.n_micro_batches, n_warm_up + 1)


def memory_room_bytes(table: CostTable, *, stages: Iterable[int] = ()) -> float:
    """What the segments of a rank may allocate so that what is needed, and the margin, stay within the limit.

    With its stages, what these need at the least to send and to receive is taken off.
    """
    allocated_bytes = (table.memory_limit_bytes - table.reserved_fixed_bytes) / table.taken_ratio
    least = sum(_least_buffer_bytes(table, stage) for stage in stages)
    return allocated_bytes - table.constant_bytes - least


def _least_buffer_bytes(table: CostTable, stage: int) -> int:
    """The least that `StageBytes.buffers` can be of a stage, wherever it begins and ends."""
    has_before, has_after = stage > 0, stage < table.mesh.n_stages - 1
    return least_message_bytes(table) * (table.mesh.n_micro_batches * (has_before + has_after) + has_before)


def least_message_bytes(table: CostTable) -> int:
    """The least that is sent over a boundary at which the pipeline can be cut."""
    return _least_message_bytes(table.message_bytes, table.cut_s)


@lru_cache(maxsize=64)
def _least_message_bytes(message_bytes: tuple[int, ...], cut_s: tuple[float | None, ...]) -> int:
    sizes = (n_bytes for n_bytes, own_s in zip(message_bytes, cut_s, strict=False) if own_s is not None)
    return min(sizes, default=0)


def shortfall_bytes(table: CostTable) -> int:
    """How many bytes some rank lacks at the least, its margin included; 0 when that is not proved by this."""
    taken = math.floor(least_allocated_bytes(table) * table.taken_ratio + table.reserved_fixed_bytes)
    return max(0, taken - table.memory_limit_bytes)


def least_needed_bytes(table: CostTable) -> int:
    """No plan of the mesh needs less on all ranks."""
    return math.floor(least_allocated_bytes(table) * table.reserved_ratio + table.reserved_fixed_bytes)


def may_lack_memory(table: CostTable) -> bool:
    """Whether a rank might not fit with nothing recomputed; not where one that had the whole model would."""
    mesh = table.mesh
    n_in_flight = mesh.n_micro_batches if mesh.schedule == "gpipe" else 2 * mesh.n_stages if mesh.pp > 1 else 1
    n_in_flight = min(mesh.n_micro_batches, n_in_flight)

    def held(cost: SegmentCost) -> int:
        of_weights = cost.state_bytes + 2 * cost.gathered_bytes + 2 * cost.gradient_bytes
        return of_weights + n_in_flight * (cost.saved_bytes + cost.pending_bytes)

    counts = zip(table.costs, _n_of_kind(table.kinds, len(table.costs)), strict=True)
    of_segments = sum(n * held(choices[0]) for choices, n in counts)
    running = max(choices[0].working_bytes + 2 * choices[0].gradient_bytes for choices in table.costs)
    sent = 2 * (mesh.n_micro_batches + 1) * max(table.message_bytes, default=0) if mesh.pp > 1 else 0
    taken = (of_segments + running + sent + table.constant_bytes) * table.taken_ratio + table.reserved_fixed_bytes
    return taken > table.memory_limit_bytes


def least_allocated_bytes(table: CostTable) -> float:
    """What some rank allocates at the least, whatever the plan.

    While one segment runs in a later pass than the first of its stage, that stage holds the gradients of all its
    segments; while the last one of a stage runs, all activations. With several stages per rank not all need accumulate
    gradients while all have a micro-batch in flight. On every rank some last segment runs then. After the first pass
    all gradients are there, as they are kept.
    """
    mesh = table.mesh
    is_gpipe = mesh.schedule == "gpipe"
    n_kept = mesh.n_micro_batches if is_gpipe else 1
    has_later = mesh.n_micro_batches > 1 and not is_gpipe

    def needed(cost: SegmentCost, *, with_gradients: bool) -> float:
        held = cost.state_bytes + n_kept * cost.saved_bytes
        held += cost.gathered_bytes if table.keeps_gathered else 0
        return held + (cost.gradient_bytes if with_gradients else 0)

    def alone(cost: SegmentCost) -> float:
        """In a forward pass parameters are there twice, as they were received and as they are used."""
        return alone_bytes(table, cost) + (0 if table.keeps_gathered else cost.gathered_bytes)

    largest = _largest(table, lambda cost: needed(cost, with_gradients=has_later) + alone(cost))
    together = partial(needed, with_gradients=has_later and mesh.n_chunks == 1)
    lasts = table.costs if mesh.n_stages > 1 else (table.costs[table.kinds[-1]],)
    running = min(min(together(c) + alone(c) for c in choices) - min(map(together, choices)) for choices in lasts)
    average = _total(table, together) / mesh.pp + running
    if leaves_all_gradients(table):
        average = max(average, _total(table, partial(after_pass_bytes, table)) / mesh.pp)
    buffers = min(_least_buffer_bytes(table, stage) for stage in (0, mesh.n_stages - 1))
    return max(average, largest) + table.constant_bytes + buffers


def alone_bytes(table: CostTable, cost: SegmentCost) -> int:
    """What a segment needs while it runs, beyond what stays: of parameters at least its own."""
    return cost.working_bytes + (0 if table.keeps_gathered else cost.gathered_bytes)


def leaves_all_gradients(table: CostTable) -> bool:
    """Whether the stages of a rank have all gradients at once, as they are kept: not if some are reduced before."""
    return table.mesh.n_chunks == 1 or not table.accumulates


def after_pass_bytes(table: CostTable, cost: SegmentCost) -> int:
    """What a segment holds at the end of a backward pass."""
    return cost.state_bytes + cost.gradient_bytes + (cost.gathered_bytes if table.keeps_gathered else 0)
