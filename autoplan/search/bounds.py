"""Lower bounds on the step time and on the memory of a mesh, by arithmetic alone: no solver, no simulator.

Everything here is admissible: no plan of the mesh that the simulator accepts is faster, or needs less.

**Paths** (`fill_paths`, `rank_paths`, `critical_path`). The actions of a schedule form a graph: an action waits for the
one before it on its rank and for its input. Each path through the graph is a lower bound on the step, linear in the
times of the stages; the longest path *is* the step. With M micro-batches on pp stages, for each stage s,

    1F1B    sum_t (f_t + b_t + 2 cut_t) + (M - 1) b_s + (M - pp + s) f_s
    GPipe   sum_t (f_t + b_t + 2 cut_t) + (M - 1) (b_s + f_s)
    any     sum_{t < r} (f_t + b_t + 2 cut_t) + M sum_{stages of rank r} (f + b)

and at the end of a path what is left of its last gradient reduction, and the optimizer of its last rank.

**Mesh bounds** (`step_bound_s`, `compute_bound_s`, `shortfall_bytes`) put the cheapest choice of every segment into the
average of these rows over s: the average stage has 1 / pp of the work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.parallel_plan import Mesh, TimelineEvent

FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD = "first forward", "forward", "backward", "last backward"
CARRY = "carry"  # what communication left by a backward pass adds to the next pass of the rank
LAST_CARRY = "last carry"  # the same, left by the last backward pass of a stage
CUT = "cut"  # one transfer over the boundary after a stage
PASSES = (FIRST_FORWARD, FORWARD, BACKWARD, LAST_BACKWARD)


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of passes and transfers, each after the one before: ((what, stage), how often), ... .

    It ends with the last backward pass of `last_stage`.
    """

    counts: tuple[tuple[tuple[str, int], int], ...]
    last_stage: int


def _path(counts: Counter[tuple[str, int]], *, last_stage: int) -> Path:
    return Path(tuple(sorted((key, count) for key, count in counts.items() if count)), last_stage)


def forward_s(cost: SegmentCost) -> float:
    """Compute-stream time of one forward pass."""
    return cost.forward_s + cost.launch_forward_s + cost.tp_forward_s


def backward_s(cost: SegmentCost) -> float:
    """Compute-stream time of one backward pass, recomputation included."""
    return cost.recompute_s + cost.backward_s + cost.launch_backward_s + cost.tp_backward_s


# ------------------------------------------------------------------------------------------------------------- paths


def initial_paths(mesh: Mesh) -> tuple[Path, ...]:
    """The paths that bound any plan of the mesh well; `critical_path` adds what a given plan needs."""
    paths = [rank_path(mesh, rank, whole=whole) for rank in range(mesh.pp) for whole in (True, False)]
    if mesh.n_chunks == 1 and mesh.pp > 1 and (mesh.schedule == "gpipe" or _is_full_1f1b(mesh)):
        paths.extend(fill_path(mesh, stage, whole=whole) for stage in range(mesh.pp) for whole in (True, False))
    return tuple(dict.fromkeys(paths))


def _is_full_1f1b(mesh: Mesh) -> bool:
    return mesh.schedule == "1f1b" and mesh.n_micro_batches >= mesh.pp


def rank_path(mesh: Mesh, rank: int, *, whole: bool) -> Path:
    """Head of the pipeline, then everything rank `rank` does, then (`whole`) the tail back to stage 0.

    Assumes that a rank begins with the first forward pass of its first stage and ends with its last backward pass.
    """
    n = mesh.n_micro_batches
    counts: Counter[tuple[str, int]] = Counter()
    _add_ends(counts, stages=range(rank), whole=whole)
    for stage in range(rank, mesh.n_stages, mesh.pp):
        _add_passes(counts, stage, n_forward=n, n_backward=n)
        counts[CARRY, stage] += n - 1
        counts[LAST_CARRY, stage] += stage != rank
    return _path(counts, last_stage=0 if whole else rank)


def fill_path(mesh: Mesh, stage: int, *, whole: bool) -> Path:
    """Through the whole pipeline and back to `stage`, whose remaining passes follow; then (`whole`) back to stage 0."""
    n, is_gpipe = mesh.n_micro_batches, mesh.schedule == "gpipe"
    counts: Counter[tuple[str, int]] = Counter()
    _add_ends(counts, stages=range(stage), whole=whole)
    n_forward = n if is_gpipe else 1 + n - (mesh.pp - stage)
    _add_passes(counts, stage, n_forward=n_forward, n_backward=n)
    counts[CARRY, stage] += n - 1
    for later in range(stage + 1, mesh.pp):
        counts[FORWARD if is_gpipe and n > 1 else FIRST_FORWARD, later] += 1
        counts[BACKWARD if n > 1 else LAST_BACKWARD, later] += 1
        counts[CUT, later - 1] += 2
    return _path(counts, last_stage=0 if whole else stage)


def _add_ends(counts: Counter[tuple[str, int]], *, stages: range, whole: bool) -> None:
    """The first forward passes of the stages before, and (`whole`) their last backward passes, with transfers."""
    for stage in stages:
        counts[FIRST_FORWARD, stage] += 1
        counts[LAST_BACKWARD, stage] += 1 if whole else 0
        counts[CUT, stage] += 2 if whole else 1


def _add_passes(counts: Counter[tuple[str, int]], stage: int, *, n_forward: int, n_backward: int) -> None:
    counts[FIRST_FORWARD, stage] += 1
    counts[FORWARD, stage] += n_forward - 1
    counts[BACKWARD, stage] += n_backward - 1
    counts[LAST_BACKWARD, stage] += 1


def critical_path(mesh: Mesh, timeline: tuple[TimelineEvent, ...]) -> Path:
    """The longest path of a simulated step, read backwards from the rank that ends last.

    An action begins when the action before it on its rank stops, or when its input arrives, whichever is later; a
    transfer begins when its action stops, or when the transfer before it on the same link is done. Times are equal to
    the last bit where one waits for the other, because each is the maximum of the two.
    """
    trace = _Trace(timeline)
    action = trace.last_action()
    last_stage = _parse(action)[0]
    counts: Counter[tuple[str, int]] = Counter()
    current: str | None = action
    while current is not None:
        counts[_symbol(mesh, current)] += 1
        current = trace.before(current, counts, mesh=mesh)
    return _path(counts, last_stage=last_stage)


def _parse(name: str) -> tuple[int, str, int]:
    """ "2F0" as (stage, kind, micro-batch)."""
    kind = "F" if "F" in name else "B"
    stage, micro_batch = name.split(kind)
    return int(stage), kind, int(micro_batch)


def _symbol(mesh: Mesh, name: str) -> tuple[str, int]:
    stage, kind, micro_batch = _parse(name)
    if kind == "F":
        return (FIRST_FORWARD if micro_batch == 0 else FORWARD), stage
    return (LAST_BACKWARD if micro_batch == mesh.n_micro_batches - 1 else BACKWARD), stage


class _Trace:
    """A timeline that can be asked what an action waited for."""

    def __init__(self, timeline: tuple[TimelineEvent, ...]) -> None:
        is_pass = [event.stream == "compute" and event.name != "optimizer" for event in timeline]
        passes = sorted((e for e, keep in zip(timeline, is_pass, strict=True) if keep), key=_start_s)
        self._passes = {event.name: event for event in passes}
        self._previous = _predecessors(passes, lambda event: str(event.rank))
        sends = sorted((event for event in timeline if event.stream.startswith("send")), key=_start_s)
        self._sends = {event.name: event for event in sends}
        self._previous_send = _predecessors(sends, lambda event: f"{event.rank} {event.stream}")
        self._ends = [event for event in timeline if event.name == "optimizer"]

    def last_action(self) -> str:
        """The last pass of the rank that finishes last."""
        rank = max(self._ends, key=lambda event: event.stop_s).rank
        return max((e for e in self._passes.values() if e.rank == rank), key=lambda event: event.stop_s).name

    def before(self, name: str, counts: Counter[tuple[str, int]], *, mesh: Mesh) -> str | None:
        """What `name` waited for; transfers and carried communication in between are counted."""
        previous = self._previous[name]
        if previous is not None and self._passes[previous].stop_s >= self._passes[name].start_s:
            symbol, stage = _symbol(mesh, previous)
            if symbol in (BACKWARD, LAST_BACKWARD):
                counts[CARRY if symbol == BACKWARD else LAST_CARRY, stage] += 1
            return previous
        source = _source(name, n_stages=mesh.n_stages)
        return None if source is None else self._behind_link(source, counts)

    def _behind_link(self, source: str, counts: Counter[tuple[str, int]]) -> str:
        """The action whose transfer set off the chain of transfers that ends with that of `source`."""
        while source in self._sends:
            stage, kind, _ = _parse(source)
            counts[CUT, stage if kind == "F" else stage - 1] += 1
            previous = self._previous_send[source]
            waited = previous is not None and self._sends[source].start_s > self._passes[source].stop_s
            if not waited or previous is None:
                break
            source = previous
        return source


def _start_s(event: TimelineEvent) -> tuple[float, float]:
    return event.start_s, event.stop_s


def _predecessors(events: list[TimelineEvent], key: Callable[[TimelineEvent], str]) -> dict[str, str | None]:
    last: dict[str, str] = {}
    table: dict[str, str | None] = {}
    for event in events:
        table[event.name] = last.get(key(event))
        last[key(event)] = event.name
    return table


def _source(name: str, *, n_stages: int) -> str | None:
    stage, kind, micro_batch = _parse(name)
    if kind == "F":
        return f"{stage - 1}F{micro_batch}" if stage > 0 else None
    return f"{stage + 1}B{micro_batch}" if stage < n_stages - 1 else f"{stage}F{micro_batch}"


# ------------------------------------------------------------------------------------------------------- mesh bounds


def compute_bound_s(mesh: Mesh, *, compute_s: float) -> float:
    """The least step time of a mesh whose whole model takes `compute_s` per micro-batch on one rank.

    Needs no cost table of this mesh: compute depends only on `tp`, the sharding and the micro-batch size.
    """
    return mesh.n_micro_batches * compute_s / mesh.pp


def least_compute_s(table: CostTable) -> float:
    """Forward and backward compute of all segments for one micro-batch, without recomputation."""
    return sum(_least(table, lambda cost: cost.forward_s + cost.backward_s))


def step_bound_s(table: CostTable) -> float:
    """A lower bound on the step time of any plan of the mesh. See the module docstring."""
    mesh = table.mesh
    n, pp = mesh.n_micro_batches, mesh.pp
    forward, backward = sum(_least(table, forward_s)), sum(_least(table, backward_s))
    slowdown = min(table.overlap_slowdown, 2.0)
    gathers_s, reduces_s = sum(_least(table, _gather_s)), sum(_least(table, _reduce_s))
    communication_s = gathers_s * (2 * n if table.gathers_per_micro_batch else 1)
    communication_s += reduces_s * (n if table.reduces_per_micro_batch else 1)
    bounds = [n * (forward + backward) / pp, communication_s / pp]
    if pp == 1:
        bounds = [n * (forward + backward) + (slowdown - 1.0) * communication_s]
        bounds.append(communication_s + (slowdown - 1.0) * n * (forward + backward))
    else:
        cut_s = 2 * (mesh.n_stages - 1) * min((s for s in table.cut_s if s is not None), default=0.0)
        bounds.append(forward + backward + cut_s)
        if mesh.schedule == "gpipe":
            bounds.append(forward + backward + cut_s + (n - 1) * (forward + backward) / pp)
        elif mesh.n_chunks == 1 and _is_full_1f1b(mesh):
            bounds.append(forward + backward + cut_s + ((n - 1) * backward + (n - pp) * forward) / pp)
    return max(bounds) + table.per_step_s + sum(_least(table, _optimizer_s)) / pp


def _gather_s(cost: SegmentCost) -> float:
    return cost.gather_s


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
    """How many bytes some rank lacks at the least, whatever the plan; 0 when this does not prove that any are lacking."""
    mesh = table.mesh
    in_flight = mesh.n_micro_batches if mesh.schedule == "gpipe" else 1
    accumulates = not table.reduces_per_micro_batch and mesh.n_micro_batches > 1

    def needed(cost: SegmentCost) -> float:
        held = cost.state_bytes + in_flight * cost.saved_bytes
        held += cost.gathered_bytes if table.keeps_gathered else 0
        return held + (cost.gradient_bytes if accumulates else 0)

    needs, alone = _least(table, needed), _least(table, _alone(table))
    largest = max(map(sum, zip(needs, alone, strict=True)))
    average = sum(needs) / mesh.pp + (max(alone) if mesh.pp == 1 else 0)
    reserved = max(average, largest) * table.reserved_ratio + table.reserved_fixed_bytes
    return max(0, math.floor(reserved) - table.memory_limit_bytes)


def _alone(table: CostTable) -> Callable[[SegmentCost], float]:
    """What a segment needs beyond what `shortfall_bytes` adds up, while it runs."""
    accumulates = not table.reduces_per_micro_batch and table.mesh.n_micro_batches > 1

    def value(cost: SegmentCost) -> float:
        held = cost.working_bytes + (0 if table.keeps_gathered else cost.gathered_bytes)
        return held + (0 if accumulates else cost.gradient_bytes)

    return value
