"""Price: OpGraph x Mesh x HardwareProfile -> CostTable.

Memory of one parameter element under mixed precision, after `fully_shard` with a float32 master copy:

                      always (per shard degree d)                gathered    gradient before reduction
    bf16 / fp16       4 master + 4 gradient + 8 Adam, all / d    2           2 + 4, or 4 while micro-batches accumulate
    fp32              4 + 4 + 8, all / d                         4           4 + 4, or 4
    fp64              8 + 8 + 16, all / d                        8           8 + 8, or 8

Gathered parameters are copied out of the communication buffer and gradients into it, on the compute stream: per
micro-batch where the stage gathers or reduces that often, else once per step (counted with the optimizer).

ZeRO 0 is a shard degree of 1. The optimizer moves every byte of master, gradient and state once (and writes back
master and state), after the gradient norm has read the gradients: that is its time.

Ranks lie on the cluster as rank = (pp * dp + dp_index) * tp + tp_index, so the tensor-parallel axis has stride 1, the
shard axis stride tp, replicas stride tp * shard degree, and neighbouring stages are dp * tp ranks apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from autoplan.cost.collectives import Group, axis_group, collective_s, send_s
from autoplan.cost.measured import Correction
from autoplan.cost.segment_work import LOSS_STATISTIC_BYTES, SegmentWork, WorkContext, conversion_s, segment_work, timed
from autoplan.cost.table import RECOMPUTE_CHOICES, CostTable, SegmentCost
from autoplan.graph import DTYPE_BYTES, GraphFacts, Op, OpGraph, TensorSpec, crossing_values, invariant_values
from autoplan.hardware import HardwareProfile
from autoplan.layout import Layout, can_shard, local_spec, parse_layout
from autoplan.measured_profile import MeasuredProfile
from autoplan.parallel_plan import Mesh, SegmentSharding
from autoplan.rules import OpRule, Strategy
from autoplan.schedules import splits_backward
from autoplan.segment_key import assignment_key, content_key
from autoplan.sharding import ShardingPrices
from autoplan.units import MiB

Shardings = Mapping[tuple[int, str], tuple[SegmentSharding, ...]]  # (tp, boundary layout) -> one per kind

N_ADAM_STATES = 2
# Assumed until measured on the target: device context and communication buffers of one process.
CONTEXT_BYTES = 1024 * MiB
COMMUNICATOR_BYTES = 256 * MiB
# What a plan needs over what it is predicted to allocate. The prediction was up to 9.4 % too low in 14 runs on 4 H200
# (benchmarks/results/predictions_h200_x4_2026-11-20.jsonl), and the caching allocator reserves 5 to 7 % more than is
# allocated where memory is tight (A100 and B200; SimuMax docs/FULL_RESULTS.md).
RESERVED_RATIO = 1.15


# Host time of the gradient of one op's weights in a pass of its own: torch runs the autograd engine once for each.
# 0.4 ms per block with 6 such ops, examples/gpt.py at width 8, torch 2.13, one CPU core.
WEIGHT_OP_HOST_S = 6e-5


@dataclass(frozen=True, slots=True)
class _ElementBytes:
    """Bytes per parameter element; see the table in the module docstring."""

    master: int
    gathered: int
    reduced: int

    @property
    def optimizer(self) -> int:
        return N_ADAM_STATES * self.master


def _element_bytes(precision: str) -> _ElementBytes:
    if precision in ("bf16", "fp16"):
        return _ElementBytes(master=4, gathered=2, reduced=4)
    size = 8 if precision == "fp64" else 4
    return _ElementBytes(master=size, gathered=size, reduced=size)


def make_pricer(
    graph: OpGraph,
    *,
    profile: HardwareProfile,
    precision: str,
    shardings: Shardings,
    rules: Mapping[str, OpRule],
    measured: MeasuredProfile | None = None,
) -> Callable[[Mesh], CostTable]:
    """A function that prices one mesh; what several meshes share is computed once.

    `measured` replaces computed times of segments and of the optimizer; see `cost.measured`.
    """
    contexts = work_contexts(graph, profile, precision, rules)

    @cache
    def computed(tp: int, sharding: str, micro_batch_size: int) -> dict[int, SegmentWork]:
        context = contexts(micro_batch_size, tp)
        by_kind = {assignment.kind: assignment for assignment in shardings.get((tp, sharding), ())}
        return {kind: segment_work(context, s, by_kind.get(kind)) for kind, s in graph.first_of_kind().items()}

    correction = None if measured is None else _correction(graph, shardings, measured, computed)

    @cache
    def works(tp: int, sharding: str, micro_batch_size: int) -> tuple[tuple[SegmentWork, str], ...]:
        found = computed(tp, sharding, micro_batch_size)
        if correction is None:
            return tuple((work, "") for work in found.values())
        return tuple(
            correction.corrected(work, kind=kind, tp=tp, sharding=sharding, micro_batch_size=micro_batch_size)
            for kind, work in found.items()
        )

    optimizer_s = partial(
        _optimizer_s,
        element=_element_bytes(precision),
        profile=profile,
        measured_s=None if measured is None else measured.optimizer_element_s,
    )

    cuts = _cut_values(graph)

    owned = {is_cut: _counted_parameters(graph, is_cut=is_cut) for is_cut in (False, True)}

    def price(mesh: Mesh) -> CostTable:
        """The cost table of one mesh."""
        groups, counted = _Groups.of(profile, mesh), owned[mesh.pp > 1]
        choices = RECOMPUTE_CHOICES[:1] if splits_backward(mesh.schedule) else RECOMPUTE_CHOICES
        segments = graph.first_of_kind().values()
        found = works(mesh.tp, mesh.sharding, mesh.micro_batch_size)
        costs = tuple(
            _segment_costs(
                work, mesh, groups, profile, precision, counted[segment.kind], segment.is_block, optimizer_s
            )[: len(choices)]
            for (work, _), segment in zip(found, segments, strict=True)
        )
        cut_bytes = tuple(
            sum(_boundary_bytes(spec, mesh, precision) for spec in specs) if is_legal else None
            for specs, is_legal in cuts
        )
        return CostTable(
            mesh=mesh,
            kinds=tuple(segment.kind for segment in graph.segments),
            recompute_choices=choices,
            costs=costs,
            cut_s=tuple(
                None if n is None else send_s(n, crosses_hosts=groups.stages_cross_hosts, profile=profile)
                for n in (cut_bytes if mesh.pp > 1 else (None,) * len(cut_bytes))
            ),
            cut_bytes=(0,) * len(cut_bytes),
            gathers_per_micro_batch=mesh.zero_stage == 3,
            reduces_per_micro_batch=mesh.zero_stage >= 2,
            keeps_gathered=mesh.zero_stage < 3,
            overlap_slowdown=profile.overlap_slowdown,
            per_step_s=_per_step_s(graph, mesh, groups, profile, precision),
            reserved_fixed_bytes=_fixed_bytes(mesh, max((n or 0 for n in cut_bytes), default=0)),
            reserved_ratio=RESERVED_RATIO,
            memory_limit_bytes=profile.device.memory_bytes,
            sources=() if measured is None else tuple(source for _, source in found),
        )

    return price


def _correction(
    graph: OpGraph,
    shardings: Shardings,
    measured: MeasuredProfile,
    computed: Callable[[int, str, int], Mapping[int, SegmentWork]],
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
        compute=lambda tp, sharding, size, kind: computed(tp, sharding, size)[kind],
    )


def sharding_prices(
    graph: OpGraph,
    *,
    profile: HardwareProfile,
    precision: str,
    rules: Mapping[str, OpRule],
    degree: int,
    batch_size: int,
) -> ShardingPrices:
    """What `shard_graph` minimizes on this cluster, for one micro-batch of `batch_size`."""
    context = work_contexts(graph, profile, precision, rules)(batch_size, degree)
    gradients = context.facts.gradients
    element = _element_bytes(precision)

    def op_s(op: Op, strategy: Strategy) -> float:
        found = timed(context, op, strategy, gradients)
        n_bytes = strategy.all_reduce_elements * batch_size * LOSS_STATISTIC_BYTES
        return found.forward_s + found.backward_s + context.tp_collective_s("all_reduce", n_bytes)

    def parameter_s(spec: TensorSpec, layout: Layout) -> float:
        return _optimizer_s(local_spec(spec, layout, degree).n_elements(1), element=element, profile=profile)

    return ShardingPrices(
        op_s=op_s,
        conversion_s=lambda spec, step: conversion_s(context, spec.n_bytes(batch_size, precision), step),
        parameter_s=parameter_s,
    )


def work_contexts(
    graph: OpGraph, profile: HardwareProfile, precision: str, rules: Mapping[str, OpRule]
) -> Callable[[int, int], WorkContext]:
    """A function from micro-batch size and tensor-parallel degree to what the sums depend on."""
    facts = GraphFacts.of(graph)

    def context(micro_batch_size: int, degree: int) -> WorkContext:
        group = axis_group(profile, size=degree, stride=1)

        @cache
        def tp_collective_s(kind: str, n_bytes: float) -> float:
            return collective_s(kind, n_bytes, group=group, profile=profile)

        return WorkContext(graph, facts, rules, profile.device, precision, micro_batch_size, degree, tp_collective_s)

    return context


@dataclass(frozen=True, slots=True)
class _Groups:
    """Where the axes of a mesh lie on the cluster."""

    shard: Group
    replicate: Group
    whole_step: Group
    stages_cross_hosts: bool

    @classmethod
    def of(cls, profile: HardwareProfile, mesh: Mesh) -> _Groups:
        n_replicas = mesh.dp // mesh.zero_shard_degree
        return cls(
            shard=axis_group(profile, size=mesh.zero_shard_degree, stride=mesh.tp),
            replicate=axis_group(profile, size=n_replicas, stride=mesh.tp * mesh.zero_shard_degree),
            whole_step=axis_group(profile, size=mesh.n_devices, stride=1),
            stages_cross_hosts=mesh.n_devices > profile.n_devices_per_host,
        )


def _segment_costs(
    work: SegmentWork,
    mesh: Mesh,
    groups: _Groups,
    profile: HardwareProfile,
    precision: str,
    counted: frozenset[str],
    is_block: bool,
    optimizer_s: Callable[[int], float],
) -> tuple[SegmentCost, ...]:
    """The segment without and with recomputation; only blocks can be recomputed."""
    element, degree = _element_bytes(precision), mesh.zero_shard_degree
    n_elements = sum(count for name, count in work.weights if name in counted)
    n_shard_elements = -(-n_elements // degree)
    is_wrapped = mesh.dp > 1 or precision in ("bf16", "fp16")
    gathered_bytes = element.gathered * n_elements if is_wrapped else 0
    accumulates = mesh.n_micro_batches > 1 and mesh.zero_stage < 2
    # `fully_shard` keeps what is outside of blocks gathered for a whole pass, and reduces it last.
    is_held = mesh.zero_stage == 3 and not is_block
    bandwidth = profile.device.memory_bytes_per_s * profile.device.memory_efficiency
    unpack_s = 2 * gathered_bytes / bandwidth if mesh.zero_shard_degree > 1 else 0.0
    pack_s = (element.gathered + element.reduced) * n_elements / bandwidth if is_wrapped else 0.0
    gathers_often, reduces_often = mesh.zero_stage == 3, mesh.zero_stage >= 2
    scatter_s, replicas_s = _reduce_s(element.reduced * n_elements, groups, profile)
    once_s = (0.0 if gathers_often else unpack_s) + (replicas_s if reduces_often else pack_s)
    held_bytes = (gathered_bytes + element.gathered * n_elements) if is_held else 0
    launch_forward_s = max(0.0, work.host_forward_s - work.forward_s)
    launch_weights_s = max(0.0, work.n_weight_ops * WEIGHT_OP_HOST_S - work.weight_backward_s)
    launch_weights_s *= splits_backward(mesh.schedule)
    plain = SegmentCost(
        forward_s=work.forward_s + (unpack_s if gathers_often else 0.0),
        backward_s=work.backward_s + (unpack_s if gathers_often else 0.0) + (pack_s if reduces_often else 0.0),
        recompute_s=0.0,
        launch_forward_s=launch_forward_s,
        launch_backward_s=max(0.0, work.host_backward_s - work.backward_s) + launch_weights_s,
        tp_forward_s=work.tp_forward_s,
        tp_backward_s=work.tp_backward_s,
        gather_s=collective_s("all_gather", element.gathered * n_elements, group=groups.shard, profile=profile),
        reduce_s=scatter_s if reduces_often else scatter_s + replicas_s,
        optimizer_s=optimizer_s(n_shard_elements) + once_s,
        state_bytes=(2 * element.master + element.optimizer) * n_shard_elements + work.fixed_bytes + held_bytes,
        gathered_bytes=0 if is_held else gathered_bytes,
        gradient_bytes=_gradient_bytes(element, accumulates=accumulates, is_held=is_held) * n_elements
        if is_wrapped
        else 0,
        saved_bytes=work.saved_bytes,
        working_bytes=work.working_bytes,
        weight_backward_s=work.weight_backward_s + launch_weights_s,
        pending_bytes=work.pending_bytes,
    )
    if not is_block:
        return plain, plain
    full = replace(
        plain,
        recompute_s=work.forward_s + launch_forward_s + work.tp_forward_s,
        saved_bytes=min(work.input_bytes, work.saved_bytes),
        working_bytes=work.working_bytes + work.saved_bytes,
    )
    return plain, full


def _gradient_bytes(element: _ElementBytes, *, accumulates: bool, is_held: bool) -> int:
    """Per element: accumulated in the dtype of the reduction, else as computed and beside it the reduction's input."""
    if accumulates:
        return element.reduced
    return element.reduced + (0 if is_held else element.gathered)


def _fixed_bytes(mesh: Mesh, boundary_bytes: int) -> int:
    """Context, communicators, and the pipeline's receive buffers.

    torch's `PipelineStage` holds one for every micro-batch of the step, for the input and for the output's gradient.
    """
    n_communicators = sum(n > 1 for n in (mesh.pp, mesh.dp, mesh.tp))
    n_buffers = 2 * mesh.n_chunks * mesh.n_micro_batches if mesh.pp > 1 else 0
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * n_communicators + n_buffers * boundary_bytes


def _reduce_s(n_bytes: int, groups: _Groups, profile: HardwareProfile) -> tuple[float, float]:
    """Reduce-scatter inside the shard group, and all-reduce of the shards between replicas (once per step)."""
    scatter_s = collective_s("reduce_scatter", n_bytes, group=groups.shard, profile=profile)
    share = n_bytes / groups.shard.n_devices
    return scatter_s, collective_s("all_reduce", share, group=groups.replicate, profile=profile)


def _optimizer_s(
    n_elements: int, *, element: _ElementBytes, profile: HardwareProfile, measured_s: float | None = None
) -> float:
    """Read the gradient for the norm; read master, gradient and state; write master and state.

    `measured_s` is the measured time of one element.
    """
    if measured_s is not None:
        return n_elements * measured_s
    n_bytes = n_elements * (4 * element.master + 2 * element.optimizer)
    return n_bytes / (profile.device.memory_bytes_per_s * profile.device.memory_efficiency)


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


def _cut_values(graph: OpGraph) -> tuple[tuple[tuple[TensorSpec, ...], bool], ...]:
    """Per boundary: the values that cross it, and whether a cut is possible.

    The model's outputs must come from the last stage, whose rank computes the loss. Whole modules are not cut: what
    passes between them was not traced.
    """
    specs, invariant = graph.specs(), invariant_values(graph)
    own_outputs = set(graph.model_outputs) or {graph.loss}
    found = []
    for index, segment in enumerate(graph.segments[:-1]):
        crossing = tuple(specs[name] for name in crossing_values(graph, index + 1, invariant=invariant))
        is_legal = not graph.is_module_level and own_outputs.isdisjoint(op.name for op in graph.ops[: segment.stop])
        found.append((crossing, is_legal))
    return tuple(found)


def legal_cuts(graph: OpGraph) -> tuple[bool, ...]:
    """Per boundary between neighbouring segments, whether the pipeline may be cut there."""
    return tuple(is_legal for _, is_legal in _cut_values(graph))


def _boundary_bytes(spec: TensorSpec, mesh: Mesh, precision: str) -> int:
    layout = parse_layout(mesh.sharding) if mesh.sharding else parse_layout("R")
    local = local_spec(spec, layout, mesh.tp) if can_shard(spec, layout, mesh.tp) and spec.is_float else spec
    return local.n_bytes(mesh.micro_batch_size, precision)


def _per_step_s(graph: OpGraph, mesh: Mesh, groups: _Groups, profile: HardwareProfile, precision: str) -> float:
    """The gradient norm (one small all-reduce over all ranks), and tied weights summed between two stages."""
    norm_s = collective_s("all_reduce", DTYPE_BYTES["float32"], group=groups.whole_step, profile=profile)
    if mesh.pp == 1:
        return norm_s
    readers: dict[str, int] = {}
    for segment in graph.first_of_kind().values():
        for name in segment.parameters:
            readers[name] = readers.get(name, 0) + 1
    element = _element_bytes(precision)
    tied_bytes = sum(
        p.spec.n_elements(1) * element.master // (mesh.tp * mesh.zero_shard_degree)
        for p in graph.parameters
        if p.is_trainable and readers.get(p.name, 0) > 1
    )
    pair = Group(2, 1 if groups.stages_cross_hosts else 2)
    return norm_s + collective_s("all_reduce", tied_bytes, group=pair, profile=profile)
