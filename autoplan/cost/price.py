"""Price: OpGraph x Mesh x HardwareProfile -> CostTable.

    works(how segments run, layouts, micro-batch)  --+
    parameter_cost(layouts, placement)             --+--> SegmentCost of each kind --+
    send_s(layouts, micro-batch, schedule) ------------------------------------------+--> CostTable of one mesh

`cost.launch` says what waiting for the host adds to a segment, `cost.batch` what bringing batches to the device takes.
Meshes by the ten thousand share these parts, so each part is computed once for all that have the same arguments, and
meshes with equal costs hold the same objects.

Ranks lie on the cluster as rank = (pp * dp + dp_index) * tp + tp_index, so the tensor-parallel axis has stride 1, the
shard axis stride tp, replicas stride tp * shard degree, and neighbouring stages are dp * tp ranks apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol

from autoplan.analysis.captured import may_recompute_captured
from autoplan.analysis.chunked_loss import is_in_compiled
from autoplan.cost.batch import BatchPricer, make_batch_pricer
from autoplan.cost.between import Exchange
from autoplan.cost.boundaries import (
    Cuts,
    CutsPricer,
    Sent,
    legal_cuts,
    make_cuts_pricer,
    tied_elements,
    tied_weight_bytes,
)
from autoplan.cost.calls import Calls, calls_of
from autoplan.cost.collective_time import Group, axis_group, collective_s, pair_group
from autoplan.cost.grad_compression import NO_COMPRESSION, Compression, Matrix
from autoplan.cost.local_segment import LocalSegment
from autoplan.cost.outside_allocator import outside_allocator_bytes
from autoplan.cost.parameters import (
    HOLDING_CALLS,
    ParameterContext,
    ParameterCost,
    Placement,
    element_bytes,
    parameter_cost,
)
from autoplan.cost.rank_segments import rank_segments
from autoplan.cost.segment_cost import segment_costs, with_late_optimizer
from autoplan.cost.table import CostTable, SegmentCost
from autoplan.cost.waits import start_s
from autoplan.cost.work_context import ContextOf, work_contexts
from autoplan.cost.works import Shardings, WorkKey, Works, make_running_works, make_works_pricer
from autoplan.graph import DTYPE_BYTES, OpGraph
from autoplan.hardware import Device, HardwareProfile
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Mesh
from autoplan.rules import OpRule
from autoplan.schedules import receives_ahead, splits_backward
from autoplan.units import MiB

# cuBLAS takes 32 MiB per handle on compute capability 9.0 (8 MiB before), and the threads of forward and of backward
# have one each. The rest of 14 runs on 4 H200 once all else was counted
# (benchmarks/results/predictions_h200_x4_2026-11-20.jsonl) was 64 to 68 MiB.
WORKSPACE_BYTES = 64 * MiB
# What a plan needs over what it is predicted to allocate. What ran nearest to the limit had 129.8 GiB allocated at
# once, and 6.5 % of that left (benchmarks/results/hand_tuned_h200_x2_2026-11-22.jsonl); SimuMax, docs/FULL_RESULTS.md,
# has 5 to 7 % on A100 and B200. The rest is for what the prediction lacks. Where there is room, the allocator keeps up
# to 42 % more than is allocated, which it gives back when it is short.
RESERVED_RATIO = 1.10
# The same of a CUDA graph: while it is captured nothing is given back. Of 17 programs 16 held 1.01 to 1.17 times what
# they had allocated at once, and an interleaved pipeline 1.23 times
# (benchmarks/results/graph_memory_h200_2026-11-28.jsonl, graph_memory_h200_x2_2026-11-29.jsonl).
GRAPH_RESERVED_RATIO = 1.25
GRADIENT_NORM_BYTES = DTYPE_BYTES["float32"]  # one small all-reduce over all ranks

Costs = tuple[tuple[SegmentCost, ...], ...]  # as in `CostTable`
LocalPricer = Callable[[int, str], Mapping[int, LocalSegment]]  # from tp and boundary layout
MarginOf = Callable[[tuple[str, ...]], float]  # `memory_margin` of a table, by its `sources`


class Pricer(Protocol):
    """Prices one mesh, whose ranks are all on this cluster unless more is said.

    With `n_ranks`, only so many of its pipeline ranks are here. With an exchange, there are further data-parallel ranks
    elsewhere, which the mesh leaves out. The table is that of a rank here; its `per_step_s` leaves out what passes
    between the clusters.
    """

    def __call__(self, mesh: Mesh, n_ranks: int | None = None, exchange: Exchange | None = None) -> CostTable: ...

    def with_margin(self, memory_margin: MarginOf) -> Pricer:
        """The same with another margin of memory; what several meshes share is not computed again."""
        ...


def make_pricer(
    graph: OpGraph,
    *,
    hardware: HardwareProfile,
    precision: str,
    shardings: Shardings,
    rules: Mapping[str, OpRule],
    measured: MeasuredProfile | None = None,
    loss: str | None = None,
    compression: Compression = NO_COMPRESSION,
    memory_margin: MarginOf = lambda sources: 0.0,
) -> Pricer:
    """A function that prices one mesh; what several meshes share is computed once.

    `measured` replaces computed times of segments and of the optimizer; see `cost.measured`. `loss` is "whole",
    "chunked", or None for either: then the last segment is chunked where it is chosen to be "recomputed". Gradients are
    compressed on meshes on which they can be.
    """
    collective = cache(lambda kind, n_bytes, group: collective_s(kind, n_bytes, group=group, hardware=hardware))
    element_s = None if measured is None else measured.optimizer_element_s
    contexts = work_contexts(graph, hardware, precision, rules)
    local = _local_pricer(contexts, shardings)
    works = make_works_pricer(graph, contexts, shardings=shardings, measured=measured)
    of_parameters = ParameterContext(
        hardware.device, precision, collective, element_s, compression, graph.n_optimizer_states
    )
    calls = {is_cut: calls_of(graph, is_cut=is_cut) for is_cut in (False, True)}
    return _Pricer(
        graph,
        hardware,
        precision,
        loss,
        calls=calls,
        blocks=Counter(segment.kind for segment in graph.segments if segment.is_block),
        tied=tied_elements(graph),
        unsent=tuple(0.0 if is_legal else None for is_legal in legal_cuts(graph)),
        contexts=contexts,
        shared_elements=cache(partial(_shared_elements, calls, local)),
        collective=collective,
        groups_of=cache(partial(_Groups.of, hardware)),
        has_all_to_alls=cache(lambda tp, sharding: _has_all_to_alls(local(tp, sharding).values())),
        works=None if measured is None else works,
        costs=_costs_pricer(
            graph, calls, works, local=local, parameters=_parameters_pricer(graph, calls, of_parameters, local=local)
        ),
        cuts=make_cuts_pricer(graph, hardware, precision),
        batch=make_batch_pricer(graph, hardware.device, precision),
        margin_of=cache(memory_margin),
    )


@dataclass(frozen=True, slots=True, eq=False)  # hashed as the function that it is
class _Pricer:
    """A `Pricer`: what all meshes share, and functions that compute once what several do.

    Attributes:
        calls: of segments, by whether there are stages.
        tied: the elements of each tied weight.
        blocks: how many blocks there are of each kind.
        unsent: the cuts of a mesh of one stage.
        works: with the sources of their times; None without a measured profile.
        shared_elements: of gradients that tensor-parallel ranks sum, by tp, layout and whether there are stages.
    """

    graph: OpGraph
    hardware: HardwareProfile
    precision: str
    loss: str | None
    calls: Mapping[bool, Calls]
    blocks: Mapping[int, int]
    tied: tuple[int, ...]
    unsent: Cuts
    contexts: ContextOf
    shared_elements: Callable[[int, str, bool], int]
    collective: Callable[[str, float, Group], float]
    groups_of: Callable[[int, int, int, int], _Groups]
    has_all_to_alls: Callable[[int, str], bool]
    works: Callable[[WorkKey], Works] | None
    costs: Callable[[_Way, int], Costs]
    cuts: CutsPricer
    batch: BatchPricer
    margin_of: MarginOf

    def __call__(self, mesh: Mesh, n_ranks: int | None = None, exchange: Exchange | None = None) -> CostTable:
        device = self.hardware.device
        n_here = n_ranks or mesh.pp
        groups = self.groups_of(mesh.dp * mesh.tp * n_here, mesh.dp, mesh.tp, mesh.zero_shard_degree)
        tied_bytes = tied_weight_bytes(self.tied, mesh, self.precision) if n_here == mesh.pp else 0
        way = self._way(mesh, groups, exchange)
        costs, zero_stage = self.costs(way, mesh.n_micro_batches), way.held.placement.zero_stage
        calls = self.calls[mesh.pp > 1]
        works = () if self.works is None else self.works(way.work_key)
        sources = tuple(works[kind][1] for kind, _ in calls.of_kinds) if works else ()
        copy_s, batch_bytes = self.batch(mesh)
        cut_s, sendrecv_s, message_bytes = self._sent(mesh, groups)
        n_groups = 1 if exchange is None else exchange.n_groups
        begins_s = start_s(device, n_devices=mesh.n_devices * n_groups)
        of_graph = GRAPH_RESERVED_RATIO - RESERVED_RATIO if mesh.cuda_graph else 0.0
        lead_s = sum(n_blocks * costs[kind][0].lead_s for kind, n_blocks in self.blocks.items())
        return CostTable(
            mesh=mesh,
            kinds=calls.kinds,
            costs=costs,
            cut_s=cut_s,
            gathers_per_micro_batch=zero_stage == 3,
            reduces_per_micro_batch=zero_stage >= 2,
            overlap=self.hardware.overlap if mesh.zero_shard_degree == 1 else self.hardware.overlap_of_shards,
            per_step_s=self._per_step_s(mesh, groups, tied_bytes=tied_bytes) + begins_s,
            start_s=begins_s,
            reserved_fixed_bytes=outside_allocator_bytes(
                mesh,
                has_tied_weights=bool(self.tied),
                has_all_to_alls=self.has_all_to_alls(mesh.tp, mesh.sharding),
                n_groups=n_groups,
            ),
            workspace_bytes=WORKSPACE_BYTES,
            message_bytes=message_bytes,
            sendrecv_s=sendrecv_s,
            action_s=_action_s(mesh, device, lead_s=lead_s),
            batch_copy_s=copy_s,
            batch_bytes=batch_bytes,
            reserved_ratio=RESERVED_RATIO,
            memory_limit_bytes=device.memory_bytes,
            memory_margin=max(self.margin_of(sources), of_graph),
            drift=max((link.drift for link in self.hardware.links), default=0.0),
            sources=sources,
            graph_kinds=calls.graph_kinds,
        )

    def with_margin(self, memory_margin: MarginOf) -> Pricer:
        return replace(self, margin_of=cache(memory_margin))

    def _way(self, mesh: Mesh, groups: _Groups, exchange: Exchange | None) -> _Way:
        repeats = mesh.n_micro_batches > 1
        zero_stage = mesh.zero_stage if repeats or mesh.zero_stage != 2 else 1  # one micro-batch is reduced at its end
        placement = Placement(groups.shard, groups.replicate, zero_stage, repeats, exchange)
        loss = "whole" if is_in_compiled(self.graph, mesh) else self.loss
        is_slowed = _receives_ahead(mesh) and not self.hardware.device.is_cpu
        return _Way.of(mesh, placement, loss=loss, is_slowed=is_slowed)

    def _sent(self, mesh: Mesh, groups: _Groups) -> Sent:
        """What passes between stages, as in `CostTable`: `cut_s`, `sendrecv_s` and `message_bytes`."""
        if mesh.pp == 1:
            return self.unsent, (), ()
        return self.cuts(mesh.tp, mesh.sharding, mesh.micro_batch_size, _receives_ahead(mesh), groups.stages)

    def _per_step_s(self, mesh: Mesh, groups: _Groups, *, tied_bytes: int) -> float:
        """Collectives once a step: of the norm of all gradients, of tied weights, and of gradients that ranks share."""
        n_shared = self.shared_elements(mesh.tp, mesh.sharding, mesh.pp > 1)
        shared_bytes = _shared_bytes(n_shared, mesh, precision=self.precision)
        return (
            self.collective("all_reduce", GRADIENT_NORM_BYTES, groups.whole_step)
            + self.collective("all_reduce", tied_bytes, groups.stages)
            + self.contexts(mesh.tp).tp_collective_s("all_reduce", shared_bytes)
        )


def _receives_ahead(mesh: Mesh) -> bool:
    return mesh.pp > 1 and receives_ahead(mesh.schedule)


class _Held(NamedTuple):
    """What the cost of parameters depends on. `is_cut`: whether there are stages; `wraps_head`: as in `Mesh`."""

    tp: int
    sharding: str
    placement: Placement
    is_cut: bool
    wraps_head: bool


class _Way(NamedTuple):
    """What the costs of segments depend on.

    `splits`: whether the backward pass is split; `loss`: as for `make_pricer`; `keeps_attention`, `cuda_graph`: as in
    `Mesh`; `is_slowed`: whether receives wait beside what the device computes.
    """

    work_key: WorkKey
    held: _Held
    splits: bool
    loss: str | None
    keeps_attention: bool
    cuda_graph: bool
    is_slowed: bool

    @classmethod
    def of(cls, mesh: Mesh, placement: Placement, *, loss: str | None, is_slowed: bool) -> _Way:
        """That of a mesh."""
        held = _Held(mesh.tp, mesh.sharding, placement, is_cut=mesh.pp > 1, wraps_head=mesh.wraps_head)
        splits = splits_backward(mesh.schedule)
        return cls(WorkKey.of(mesh), held, splits, loss, mesh.keeps_attention, mesh.cuda_graph, is_slowed)


def _local_pricer(contexts: ContextOf, shardings: Shardings) -> LocalPricer:
    """(tp, sharding) -> each kind of segment as a rank sees it."""

    @cache
    def local(tp: int, sharding: str) -> Mapping[int, LocalSegment]:
        return rank_segments(contexts(tp)).local(shardings.get((tp, sharding), ()))

    return local


def _shared_elements(calls: Mapping[bool, Calls], local: LocalPricer, tp: int, sharding: str, is_cut: bool) -> int:
    """The elements of all gradients of which tensor-parallel ranks have shares."""
    found = local(tp, sharding)
    return sum(found[kind].n_shared for kind in calls[is_cut].holders())


def _parameters_pricer(
    graph: OpGraph, calls: Mapping[bool, Calls], context: ParameterContext, *, local: LocalPricer
) -> Callable[[_Held], tuple[ParameterCost, ...]]:
    """The cost of the parameters of each kind of segment."""
    first = graph.first_of_kind()
    owned = {is_cut: _counted_parameters(graph, is_cut=is_cut) for is_cut in (False, True)}

    @cache
    def parameters(held: _Held) -> tuple[ParameterCost, ...]:
        head = graph.segments[-1].kind if held.wraps_head else None
        found = local(held.tp, held.sharding)
        return tuple(
            parameter_cost(
                context,
                _matrices(found[kind], owned[held.is_cut][kind]),
                held.placement,
                is_group=first[kind].is_block or kind == head,
                is_kept=not first[kind].is_block,
                call=call,
            )
            for kind, call in calls[held.is_cut].of_kinds
        )

    return parameters


def _costs_pricer(
    graph: OpGraph,
    calls: Mapping[bool, Calls],
    works: Callable[[WorkKey], Works],
    *,
    local: LocalPricer,
    parameters: Callable[[_Held], tuple[ParameterCost, ...]],
) -> Callable[[_Way, int], Costs]:
    """(way, micro-batches) -> the costs of each kind of segment."""
    first, recomputes_captured, running = (
        graph.first_of_kind(),
        may_recompute_captured(graph),
        make_running_works(works),
    )
    counted = {is_cut: Counter(own.kinds) for is_cut, own in calls.items()}
    equal: dict[Costs, Costs] = {}

    @cache
    def costs(way: _Way, n_micro_batches: int) -> Costs:
        found = without_waits(way)
        if way.cuda_graph:
            of_parameters = parameters(way.held)
            n_segments = [counted[way.held.is_cut][kind] for kind in range(len(found))]
            found = with_late_optimizer(found, of_parameters, n_segments, n_micro_batches=n_micro_batches)
        return equal.setdefault(found, found)

    @cache
    def without_waits(way: _Way) -> Costs:
        held = way.held
        found, of_works = local(held.tp, held.sharding), running(way.work_key, way.cuda_graph, way.is_slowed)
        of_kinds = calls[held.is_cut].of_kinds
        return tuple(
            segment_costs(
                of_works[kind],
                cost,
                fixed_bytes=found[kind].fixed_bytes if call in HOLDING_CALLS else 0,
                is_block=first[kind].is_block,
                splits=way.splits,
                repeats=held.placement.repeats,
                may_recompute=not way.splits and (recomputes_captured or not way.cuda_graph),
                loss=way.loss,
                keeps_attention=way.keeps_attention,
                is_captured=way.cuda_graph,
            )
            for (kind, call), cost in zip(of_kinds, parameters(held), strict=True)
        )

    return costs


@dataclass(frozen=True, slots=True)
class _Groups:
    """Where the axes of a mesh lie on the cluster."""

    shard: Group
    replicate: Group
    whole_step: Group
    stages: Group

    @classmethod
    def of(cls, hardware: HardwareProfile, n_devices: int, dp: int, tp: int, shard_degree: int) -> _Groups:
        """Those of a mesh with these degrees."""
        group = partial(axis_group, hardware, n_devices=n_devices)
        return cls(
            shard=group(size=shard_degree, stride=tp),
            replicate=group(size=dp // shard_degree, stride=tp * shard_degree),
            whole_step=group(size=n_devices, stride=1),
            stages=pair_group(hardware, n_devices=n_devices),
        )


def _action_s(mesh: Mesh, device: Device, *, lead_s: float) -> float:
    """What an action waits for the host beside its segments, where the lead that this wins in the blocks is too short.

    `lead_s` is that of all blocks in one micro-batch; stages are taken to have equal shares of it. A stage in the
    middle receives and sends in each of two actions, one at an end does one of both.
    """
    if mesh.pp == 1 or mesh.cuda_graph:
        return 0.0
    n_actions = 3 if splits_backward(mesh.schedule) else 2
    n_transfers = 2 * (1 if mesh.n_stages == 2 else 2)
    host_s = n_actions * device.pipeline_action_s + n_transfers * device.pipeline_transfer_s
    return max(0.0, host_s - lead_s / mesh.n_stages) / n_actions


def _has_all_to_alls(segments: Iterable[LocalSegment]) -> bool:
    conversions = (found for segment in segments for _, found in segment.conversions)
    return any("all_to_all" in (found.forward, found.backward) for found in conversions)


def _shared_bytes(n_elements: int, mesh: Mesh, *, precision: str) -> float:
    """Gradients that the tensor-parallel ranks of a stage sum once per step, where stages have equal shares."""
    return n_elements / (mesh.pp * mesh.zero_shard_degree) * element_bytes(precision).reduced


def _matrices(segment: LocalSegment, owned: frozenset[str]) -> tuple[Matrix, ...]:
    """(first dim, elements behind it) of its parameters that are among `owned`."""
    pairs = zip(segment.weights, segment.first_dims, strict=True)
    return tuple((first_dim, count // first_dim) for (name, count), first_dim in pairs if name in owned)


def _counted_parameters(graph: OpGraph, *, is_cut: bool) -> dict[int, frozenset[str]]:
    """Per kind, the parameters whose state its segments pay for.

    On one stage a tied weight belongs to its first reader; in a pipeline both ends hold it.
    """
    seen: set[str] = set()
    found = {}
    for kind, segment in graph.first_of_kind().items():
        found[kind] = frozenset(segment.parameters) - (frozenset() if is_cut else seen)
        seen.update(segment.parameters)
    return found
