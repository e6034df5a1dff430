"""Price: OpGraph x Mesh x HardwareProfile -> CostTable.

    segment_work(tp, layouts, micro-batch)  --+
    parameter_cost(tp, layouts, placement)  --+--> SegmentCost of each kind --+
    send_s(tp, layouts, micro-batch, stages) ---------------------------------+--> CostTable of one mesh

`cost.launch` says what waiting for the host adds to a segment, `cost.batch` what bringing batches to the device takes.
Meshes by the ten thousand share these parts, so each part is computed once for all that have the same arguments, and
meshes with equal costs hold the same objects.

Ranks lie on the cluster as rank = (pp * dp + dp_index) * tp + tp_index, so the tensor-parallel axis has stride 1, the
shard axis stride tp, replicas stride tp * shard degree, and neighbouring stages are dp * tp ranks apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol

from autoplan.analysis.captured import may_recompute_captured
from autoplan.analysis.chunked_loss import is_in_compiled
from autoplan.cost.batch import make_batch_pricer
from autoplan.cost.between import Exchange
from autoplan.cost.boundaries import (
    Cuts,
    legal_cuts,
    make_cuts_pricer,
    tied_elements,
    tied_weight_bytes,
)
from autoplan.cost.collective_time import Group, axis_group, collective_s, pair_group
from autoplan.cost.compiled_work import CompiledPasses, CompiledSegment, as_compiled, compiled_passes, compiled_segment
from autoplan.cost.fusions import fused_segment
from autoplan.cost.grad_compression import NO_COMPRESSION, Compression, Matrix
from autoplan.cost.local_segment import LocalSegment
from autoplan.cost.measured import Correction, compiled_kinds, execution_of, image_kinds
from autoplan.cost.outside_allocator import outside_allocator_bytes
from autoplan.cost.parameters import (
    ParameterContext,
    ParameterCost,
    Placement,
    element_bytes,
    parameter_cost,
)
from autoplan.cost.rank_segments import rank_segments
from autoplan.cost.segment_cost import segment_costs
from autoplan.cost.segment_work import SegmentWork
from autoplan.cost.table import CostTable, SegmentCost
from autoplan.cost.work_context import CONTIGUOUS, ContextOf, work_contexts
from autoplan.graph import DTYPE_BYTES, GraphFacts, OpGraph
from autoplan.hardware import Device, HardwareProfile
from autoplan.measured_profile.segment_key import assignment_key, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Execution, Mesh, SegmentSharding
from autoplan.rules import OpRule
from autoplan.schedules import splits_backward
from autoplan.units import MiB

Shardings = Mapping[tuple[int, str], tuple[SegmentSharding, ...]]  # (tp, boundary layout) -> one per kind

# cuBLAS takes 32 MiB per handle on compute capability 9.0 (8 MiB before), and the threads of forward and of backward
# have one each. The rest of 14 runs on 4 H200 once all else was counted
# (benchmarks/results/predictions_h200_x4_2026-11-20.jsonl) was 64 to 68 MiB.
WORKSPACE_BYTES = 64 * MiB
# What a plan needs over what it is predicted to allocate. What ran nearest to the limit had 129.8 GiB allocated at
# once, and 6.5 % of that left (benchmarks/results/hand_tuned_h200_x2_2026-11-22.jsonl); SimuMax, docs/FULL_RESULTS.md,
# has 5 to 7 % on A100 and B200. The rest is for what the prediction lacks. Where there is room, the allocator keeps up
# to 42 % more than is allocated, which it gives back when it is short.
RESERVED_RATIO = 1.10
GRADIENT_NORM_BYTES = DTYPE_BYTES["float32"]  # one small all-reduce over all ranks

LocalPricer = Callable[[int, str], Mapping[int, LocalSegment]]
Works = tuple[tuple[SegmentWork, str], ...]  # per kind, with the source of its times (see `cost.measured`)
Costs = tuple[tuple[SegmentCost, ...], ...]  # as in `CostTable`


class Pricer(Protocol):
    """Prices one mesh, whose ranks are all on this cluster unless more is said.

    With `n_ranks`, only so many of its pipeline ranks are here. With an exchange, there are further data-parallel ranks
    elsewhere, which the mesh leaves out. The table is that of a rank here; its `per_step_s` leaves out what passes
    between the clusters.
    """

    def __call__(self, mesh: Mesh, n_ranks: int | None = None, exchange: Exchange | None = None) -> CostTable: ...


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
    memory_margin: Callable[[tuple[str, ...]], float] = lambda sources: 0.0,
) -> Pricer:
    """A function that prices one mesh; what several meshes share is computed once.

    `measured` replaces computed times of segments and of the optimizer; see `cost.measured`. `loss` is "whole",
    "chunked", or None for either: then the last segment is chunked where it is chosen to be "recomputed". Gradients are
    compressed on meshes on which they can be. `memory_margin` is that of the table, by its `sources`.
    """
    margin_of = cache(memory_margin)
    collective = cache(lambda kind, n_bytes, group: collective_s(kind, n_bytes, group=group, hardware=hardware))
    element_s = None if measured is None else measured.optimizer_element_s
    contexts = work_contexts(graph, hardware, precision, rules)
    local = _local_pricer(contexts, shardings)
    segments = _segments_pricer(
        graph,
        contexts,
        local,
        ParameterContext(hardware.device, precision, collective, element_s, compression),
        shardings=shardings,
        measured=measured,
        loss=loss,
    )
    cuts = make_cuts_pricer(graph, hardware, precision)
    batch = make_batch_pricer(graph, hardware.device, precision)
    groups_of = cache(partial(_Groups.of, hardware))
    kinds, tied = tuple(segment.kind for segment in graph.segments), tied_elements(graph)
    blocks = Counter(segment.kind for segment in graph.segments if segment.is_block)
    unsent: Cuts = tuple(0.0 if is_legal else None for is_legal in legal_cuts(graph))

    @cache
    def has_all_to_alls(tp: int, sharding: str) -> bool:
        conversions = (c for segment in local(tp, sharding).values() for _, c in segment.conversions)
        return any("all_to_all" in (c.forward, c.backward) for c in conversions)

    def shared_bytes(mesh: Mesh) -> float:
        """Gradients that the tensor-parallel ranks of a stage sum once per step, where stages have equal shares."""
        found = local(mesh.tp, mesh.sharding)
        n_elements = sum(found[kind].n_shared for kind in kinds) / (mesh.pp * mesh.zero_shard_degree)
        return n_elements * element_bytes(precision).reduced

    def price(mesh: Mesh, n_ranks: int | None = None, exchange: Exchange | None = None) -> CostTable:
        n_here = n_ranks or mesh.pp
        groups = groups_of(mesh.dp * mesh.tp * n_here, mesh.dp, mesh.tp, mesh.zero_shard_degree)
        tied_bytes = tied_weight_bytes(tied, mesh, precision) if n_here == mesh.pp else 0
        placement = Placement(groups.shard, groups.replicate, mesh.zero_stage, mesh.n_micro_batches > 1, exchange)
        found, sources = segments(mesh, placement)
        copy_s, batch_bytes = batch(mesh)
        cut_s, messages = cuts(mesh.tp, mesh.sharding, mesh.micro_batch_size, groups.stages)
        lead_s = sum(n_blocks * found[kind][0].lead_s for kind, n_blocks in blocks.items())
        return CostTable(
            mesh=mesh,
            kinds=kinds,
            costs=found,
            cut_s=cut_s if mesh.pp > 1 else unsent,
            gathers_per_micro_batch=mesh.zero_stage == 3,
            reduces_per_micro_batch=mesh.zero_stage >= 2,
            keeps_gathered=mesh.zero_stage < 3,
            overlap_slowdown=hardware.overlap_slowdown,
            per_step_s=collective("all_reduce", GRADIENT_NORM_BYTES, groups.whole_step)
            + collective("all_reduce", tied_bytes, groups.stages)
            + contexts(mesh.tp).tp_collective_s("all_reduce", shared_bytes(mesh)),
            reserved_fixed_bytes=outside_allocator_bytes(
                mesh,
                has_tied_weights=bool(tied),
                has_all_to_alls=has_all_to_alls(mesh.tp, mesh.sharding),
                n_groups=1 if exchange is None else exchange.n_groups,
            ),
            workspace_bytes=WORKSPACE_BYTES,
            message_bytes=messages if mesh.pp > 1 else (),
            action_s=_action_s(mesh, hardware.device, lead_s=lead_s),
            batch_copy_s=copy_s,
            batch_bytes=batch_bytes,
            reserved_ratio=RESERVED_RATIO,
            memory_limit_bytes=hardware.device.memory_bytes,
            memory_margin=margin_of(sources),
            sources=sources,
        )

    return price


class _Run(NamedTuple):
    """What the work of segments depends on; meshes share it.

    `keeps_modules`: blocks are the user's own modules.
    """

    tp: int
    sharding: str
    micro_batch_size: int
    execution: Execution
    keeps_modules: bool


def _segments_pricer(
    graph: OpGraph,
    contexts: ContextOf,
    local: LocalPricer,
    of_parameters: ParameterContext,
    *,
    shardings: Shardings,
    measured: MeasuredProfile | None,
    loss: str | None,
) -> Callable[[Mesh, Placement], tuple[Costs, tuple[str, ...]]]:
    """The costs of each kind of segment, and, with a measured profile, where its times come from."""
    works = _works_pricer(graph, contexts, local, shardings, measured)
    costs = _costs_pricer(graph, of_parameters, local, works)

    def segments(mesh: Mesh, placement: Placement) -> tuple[Costs, tuple[str, ...]]:
        """Those of one mesh."""
        run = _Run(mesh.tp, mesh.sharding, mesh.micro_batch_size, mesh.execution, not mesh.needs_generated_model)
        loss_here = "whole" if is_in_compiled(graph, mesh) else loss
        splits = splits_backward(mesh.schedule)
        found = costs(
            run, placement, mesh.pp > 1, mesh.wraps_head, splits, loss_here, mesh.keeps_attention, mesh.cuda_graph
        )
        return found, () if measured is None else tuple(source for _, source in works(run))

    return segments


def _local_pricer(contexts: ContextOf, shardings: Shardings) -> LocalPricer:
    """(tp, sharding) -> each kind of segment as a rank sees it."""

    @cache
    def local(tp: int, sharding: str) -> Mapping[int, LocalSegment]:
        return rank_segments(contexts(tp)).local(shardings.get((tp, sharding), ()))

    return local


def _works_pricer(
    graph: OpGraph,
    contexts: ContextOf,
    local: LocalPricer,
    shardings: Shardings,
    measured: MeasuredProfile | None,
) -> Callable[[_Run], Works]:
    """The work of each kind of segment, as measured where it was."""
    images = image_kinds(graph)

    @cache
    def in_format(tp: int, sharding: str, micro_batch_size: int, memory_format: str) -> Mapping[int, SegmentWork]:
        return rank_segments(contexts(tp, memory_format)).work(shardings.get((tp, sharding), ()), micro_batch_size)

    @cache
    def computed(tp: int, sharding: str, micro_batch_size: int, memory_format: str) -> Mapping[int, SegmentWork]:
        """Only segments that read images read them in this format."""
        found = in_format(tp, sharding, micro_batch_size, CONTIGUOUS)
        if memory_format == CONTIGUOUS:
            return found
        of_images = in_format(tp, sharding, micro_batch_size, memory_format)
        return {kind: of_images[kind] if kind in images else work for kind, work in found.items()}

    @cache
    def fused(tp: int, sharding: str) -> Mapping[int, CompiledSegment]:
        context, first, found = contexts(tp), graph.first_of_kind(), local(tp, sharding)
        return {
            kind: compiled_segment(context, found[kind], fused_segment(context, first[kind], found[kind]))
            for kind in compiled_kinds(graph)
        }

    @cache
    def passes(tp: int, sharding: str, micro_batch_size: int) -> Mapping[int, CompiledPasses]:
        """Of what is compiled, which reads images in the order that it wants."""
        return {
            kind: compiled_passes(contexts(tp), segment, micro_batch_size)
            for kind, segment in fused(tp, sharding).items()
        }

    @cache
    def compiled(tp: int, sharding: str, micro_batch_size: int, memory_format: str) -> Mapping[int, SegmentWork]:
        """With what is compiled as it runs then, without any measurement."""
        eager = computed(tp, sharding, micro_batch_size, memory_format)
        found = passes(tp, sharding, micro_batch_size)
        return {**eager} | {kind: as_compiled(eager[kind], own) for kind, own in found.items()}

    @cache
    def correction(execution: Execution, keeps_modules: bool) -> Correction | None:
        if measured is None:
            return None
        return _correction(graph, shardings, measured, computed, execution, keeps_modules=keeps_modules)

    @cache
    def works(run: _Run) -> Works:
        as_measured = correction(run.execution, run.keeps_modules)
        work_of = compiled if as_measured is None and run.execution.compile else computed
        found = work_of(run.tp, run.sharding, run.micro_batch_size, run.execution.memory_format)
        if as_measured is None:
            return tuple((work, "") for work in found.values())
        return tuple(
            as_measured.corrected(
                work, kind=kind, tp=run.tp, sharding=run.sharding, micro_batch_size=run.micro_batch_size
            )
            for kind, work in found.items()
        )

    return works


def _costs_pricer(
    graph: OpGraph,
    context: ParameterContext,
    local: LocalPricer,
    works: Callable[[_Run], Works],
) -> Callable[[_Run, Placement, bool, bool, bool, str | None, bool, bool], Costs]:
    """The costs of (run, placement, is_cut, wraps_head, splits, loss, keeps_attention, is_captured).

    `is_cut`: whether there are stages; `splits`: whether the backward pass is split; `loss`: how it is computed;
    `keeps_attention`, and whether passes are captured (`cuda_graph`): as in `Mesh`.
    """
    first, recomputes_captured = graph.first_of_kind(), may_recompute_captured(graph)
    owned = {is_cut: _counted_parameters(graph, is_cut=is_cut) for is_cut in (False, True)}
    equal: dict[Costs, Costs] = {}

    @cache
    def parameters(
        tp: int, sharding: str, placement: Placement, is_cut: bool, wraps_head: bool
    ) -> tuple[ParameterCost, ...]:
        head = graph.segments[-1].kind if wraps_head else None
        return tuple(
            parameter_cost(
                context,
                _matrices(found, owned[is_cut][kind]),
                placement,
                is_group=first[kind].is_block or kind == head,
                is_kept=not first[kind].is_block,
            )
            for kind, found in local(tp, sharding).items()
        )

    @cache
    def costs(
        run: _Run,
        placement: Placement,
        is_cut: bool,
        wraps_head: bool,
        splits: bool,
        loss: str | None,
        keeps_attention: bool,
        is_captured: bool,
    ) -> Costs:
        pairs = zip(
            first.values(),
            local(run.tp, run.sharding).values(),
            works(run),
            parameters(run.tp, run.sharding, placement, is_cut, wraps_head),
            strict=True,
        )
        found = tuple(
            segment_costs(
                work,
                cost,
                fixed_bytes=here.fixed_bytes,
                is_block=segment.is_block,
                splits=splits,
                repeats=placement.repeats,
                may_recompute=not splits and (recomputes_captured or not is_captured),
                loss=loss,
                keeps_attention=keeps_attention,
                is_captured=is_captured,
            )
            for segment, here, (work, _), cost in pairs
        )
        return equal.setdefault(found, found)

    return costs


def _correction(
    graph: OpGraph,
    shardings: Shardings,
    measured: MeasuredProfile,
    computed: Callable[[int, str, int, str], Mapping[int, SegmentWork]],
    execution: Execution,
    *,
    keeps_modules: bool,
) -> Correction:
    first, facts = graph.first_of_kind(), GraphFacts.of(graph)
    assignments = {}
    for split, found in {(1, ""): (), **shardings}.items():
        by_kind = {assignment.kind: assignment for assignment in found}
        assignments[split] = {kind: assignment_key(graph, s, by_kind.get(kind)) for kind, s in first.items()}
    return Correction.of(
        measured,
        contents={kind: content_key(graph, facts, segment) for kind, segment in first.items()},
        assignments=assignments,
        compute=lambda tp, sharding, size, kind: computed(tp, sharding, size, execution.memory_format)[kind],
        executions={kind: execution_of(graph, kind, execution) for kind in first},
        keeps_modules=keeps_modules,
    )


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
