"""Lower bounds on the step time and on the memory of a mesh, by arithmetic alone: no solver, no simulator.

Everything here is admissible: no plan of the mesh that the simulator accepts is faster, or needs less.

`step_bound_s` puts the cheapest choice of every segment into the
average of the paths of `paths` over the stages: the average stage has 1 / pp of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, backward_s, forward_s
from autoplan.parallel_plan import Mesh
from autoplan.schedules import build_schedule, splits_backward, stage_ranks

BISECTIONS = 30


def compute_bound_s(mesh: Mesh, *, compute_s: float) -> float:
    """The least step time of a mesh whose whole model takes `compute_s` per micro-batch on one rank.

    Needs no cost table of this mesh: compute depends only on `tp`, the sharding, the micro-batch size, the ZeRO stage
    (which may copy parameters in and out) and on whether there is a pipeline (which may hold tied weights twice).
    """
    return mesh.n_micro_batches * compute_s / mesh.pp


def least_compute_s(table: CostTable) -> float:
    """Forward and backward compute of all segments for one micro-batch, without recomputation."""
    return sum(_least(table, lambda cost: cost.forward_s + cost.backward_s))


def step_bound_s(table: CostTable) -> float:
    """A lower bound on the step time of any plan of the mesh. See the module docstring."""
    n = table.mesh.n_micro_batches
    gathers_s, reduces_s = sum(_least(table, _gather_s)), sum(_least(table, _reduce_s))
    communication_s = gathers_s * (2 * n if table.gathers_per_micro_batch else 1)
    communication_s += reduces_s * (n if table.reduces_per_micro_batch else 1)
    bound_s = _whole_bound_s if table.mesh.pp == 1 else _pipeline_bound_s
    return table.per_step_s + bound_s(table, communication_s=communication_s)


def _whole_bound_s(table: CostTable, *, communication_s: float) -> float:
    """One rank does everything: all compute and all communication, beside each other at the slowdown."""
    extra = min(table.overlap_slowdown, 2.0) - 1.0
    compute_s = table.mesh.n_micro_batches * (sum(_least(table, forward_s)) + sum(_least(table, backward_s)))
    longer_s, shorter_s = max(compute_s, communication_s), min(compute_s, communication_s)
    return longer_s + extra * shorter_s + sum(_least(table, _optimizer_s))


def _pipeline_bound_s(table: CostTable, *, communication_s: float) -> float:
    """The average rank does 1 / pp of everything; each other path ends with the optimizer of the first stage.

    Where the backward pass is split, only the passes for inputs lead from the busiest rank back to the first stage.
    """
    mesh = table.mesh
    n, pp = mesh.n_micro_batches, mesh.pp
    forward, backward = sum(_least(table, forward_s)), sum(_least(table, backward_s))
    is_split = splits_backward(mesh.schedule)
    back_s = sum(_least(table, _input_backward_s)) if is_split else backward
    cut_s = 2 * _n_sends(mesh) * min((s for s in table.cut_s if s is not None), default=0.0)
    busiest_s = _busiest_rank_s(table)
    there_and_back_s = forward + back_s + cut_s
    paths_s = [there_and_back_s] if is_split else [n * busiest_s, there_and_back_s]
    if mesh.schedule == "gpipe":
        paths_s.append(there_and_back_s + (n - 1) * busiest_s)
    elif mesh.schedule == "1f1b" and n >= pp:
        paths_s.append(there_and_back_s + ((n - 1) * backward + (n - pp) * forward) / pp)
        paths_s.append(there_and_back_s + (n - pp) * busiest_s)
    optimizers_s = _least(table, _optimizer_s)
    average_s = (max(n * (forward + backward), communication_s) + sum(optimizers_s)) / pp
    return max(average_s, n * busiest_s, max(paths_s) + optimizers_s[0])


def _n_sends(mesh: Mesh) -> int:
    """How often an activation goes from one rank to another on its way through the stages."""
    schedule = build_schedule(mesh.schedule, n_ranks=mesh.pp, n_chunks=mesh.n_chunks, n_micro_batches=mesh.pp)
    return sum(one != other for one, other in pairwise(stage_ranks(schedule)))


def _busiest_rank_s(table: CostTable) -> float:
    """The least that the busiest rank computes per micro-batch, however the pieces are shared out."""
    mesh = table.mesh
    pieces_s = _pieces(table, [f + b for f, b in zip(_least(table, forward_s), _least(table, backward_s), strict=True)])
    if mesh.n_chunks == 1:
        return _least_bottleneck(pieces_s, n_parts=mesh.pp)
    ordered = sorted(pieces_s)
    most_pieces_s = sum(ordered[: -(-len(pieces_s) // mesh.pp)])  # some rank has at least so many pieces
    return max(most_pieces_s, ordered[-1] + sum(ordered[: mesh.n_chunks - 1]))


def _pieces(table: CostTable, values: list[float]) -> list[float]:
    """Values per segment, summed over the segments between two legal cuts."""
    sums = [values[0]]
    for cut_s, value in zip(table.cut_s, values[1:], strict=True):
        if cut_s is None:
            sums[-1] += value
        else:
            sums.append(value)
    return sums


def _least_bottleneck(values: list[float], *, n_parts: int) -> float:
    """The least possible largest sum when consecutive values are cut into at most `n_parts` parts; from below."""
    low, high = max(max(values), sum(values) / n_parts), sum(values)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        if _n_parts_within(values, middle) <= n_parts:
            high = middle
        else:
            low = middle
    return low


def _n_parts_within(values: list[float], limit: float) -> int:
    """How many parts it takes when none may exceed `limit`."""
    n_parts, filled = 1, 0.0
    for value in values:
        filled += value
        if filled > limit:
            n_parts, filled = n_parts + 1, value
    return n_parts


def _gather_s(cost: SegmentCost) -> float:
    return cost.gather_s


def _input_backward_s(cost: SegmentCost) -> float:
    return backward_part_s(cost, "I", is_first=False)


def _reduce_s(cost: SegmentCost) -> float:
    return cost.reduce_s


def _optimizer_s(cost: SegmentCost) -> float:
    return cost.optimizer_s


def _least(table: CostTable, value: Callable[[SegmentCost], float]) -> list[float]:
    """Per segment, the least value over the recompute choices."""
    by_kind = [min(value(cost) for cost in choices) for choices in table.costs]
    return [by_kind[kind] for kind in table.kinds]


def memory_room_bytes(table: CostTable) -> float:
    """What a rank may allocate so that its reserved bytes stay within the limit."""
    return (table.memory_limit_bytes - table.reserved_fixed_bytes) / table.reserved_ratio


def shortfall_bytes(table: CostTable) -> int:
    """How many bytes some rank lacks at the least, whatever the plan; 0 when that is not proved by this.

    With several stages per rank not all need accumulate gradients while all have a micro-batch in flight.
    """
    mesh = table.mesh
    in_flight = mesh.n_micro_batches if mesh.schedule == "gpipe" else 1
    accumulates = not table.reduces_per_micro_batch and mesh.n_micro_batches > 1

    def needed(cost: SegmentCost, *, with_gradients: bool) -> float:
        held = cost.state_bytes + in_flight * cost.saved_bytes
        held += cost.gathered_bytes if table.keeps_gathered else 0
        return held + (cost.gradient_bytes if with_gradients else 0)

    alone = _least(table, _alone(table))
    running = _least(table, partial(needed, with_gradients=accumulates))
    resting = _least(table, partial(needed, with_gradients=accumulates and mesh.n_chunks == 1))
    largest = max(map(sum, zip(running, alone, strict=True)))
    average = sum(resting) / mesh.pp + (max(alone) if mesh.pp == 1 else 0)
    reserved = max(average, largest) * table.reserved_ratio + table.reserved_fixed_bytes
    return max(0, math.floor(reserved) - table.memory_limit_bytes)


def _alone(table: CostTable) -> Callable[[SegmentCost], float]:
    """What a segment needs beyond what `shortfall_bytes` adds up, while it runs."""
    accumulates = not table.reduces_per_micro_batch and table.mesh.n_micro_batches > 1

    def value(cost: SegmentCost) -> float:
        held = cost.working_bytes + (0 if table.keeps_gathered else cost.gathered_bytes)
        return held + (0 if accumulates else cost.gradient_bytes)

    return value
