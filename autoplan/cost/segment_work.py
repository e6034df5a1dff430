"""What one kind of segment does on one tensor-parallel rank, for one micro-batch: the sum over its ops.

    forward_s  = sum of op_time.forward_s                     tp_forward_s  = collectives of conversions and split losses
    saved      = distinct tensors that some op keeps          working       = largest set of temporaries of one op

A tensor is counted once however many ops keep it, and a view counts as the tensor it looks into. Parameters are not
activations. What depends on no input (rotary tables) is kept once for all micro-batches, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoplan.cost.op_time import OpTime, op_time
from autoplan.graph import Op, OpGraph, PerSample, Segment, gradient_values, invariant_values
from autoplan.hardware import Device
from autoplan.layout import Conversion, Layout, R, V, conversion, local_spec
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import OpRule, Specs, Strategy, operand_names
from autoplan.sharding import SegmentLayouts, read_sharding

LOSS_STATISTIC_BYTES = 4

# Kernels that a conversion runs besides its collective, forward and backward together.
CONVERSION_KERNELS = {
    "copy_to_tp": 0,
    "keep_first_rank_grad": 1,
    "first_rank_only": 1,
    "first_rank_only_both": 2,
    "shard": 1,
    "shard_partial_grad": 2,
    "pad_to_partial": 2,
}


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """One segment, one micro-batch, one rank; see `cost.table.SegmentCost` for the fields they share.

    Attributes:
        weights: (parameter name, local elements) of the trainable parameters it reads.
        fixed_bytes: buffers and frozen parameters.
        input_bytes: what recomputation keeps: its inputs that carry a gradient.
    """

    forward_s: float
    backward_s: float
    n_launches: int
    n_backward_launches: int
    tp_forward_s: float
    tp_backward_s: float
    weights: tuple[tuple[str, int], ...]
    fixed_bytes: int
    saved_bytes: int
    input_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class WorkContext:
    """Everything the sums depend on besides the segment.

    Attributes:
        tp_collective_s: (kind, full bytes) -> seconds on the tensor-parallel axis.
    """

    graph: OpGraph
    rules: Mapping[str, OpRule]
    device: Device
    precision: str
    batch_size: int
    degree: int
    tp_collective_s: Callable[[str, float], float]


def segment_work(context: WorkContext, segment: Segment, assignment: SegmentSharding | None) -> SegmentWork:
    """The sums of one kind of segment; `segment` is the first of its kind."""
    graph = context.graph
    layouts = read_sharding(graph, segment, assignment, degree=context.degree, rules=context.rules)
    gradients = gradient_values(graph)
    times = [timed(context, op, layouts.strategies[op.name], gradients) for op in graph.ops_of(segment)]
    steps = conversions(graph, segment, layouts, gradients)
    weights, fixed_bytes = _parameters(context, segment, layouts)
    return SegmentWork(
        forward_s=sum(t.forward_s for t in times) + sum(_local_s(context.device, step) for _, step in steps),
        backward_s=sum(t.backward_s for t in times),
        n_launches=sum(t.n_launches for t in times),
        n_backward_launches=sum(t.n_backward_launches for t in times),
        tp_forward_s=_communication_s(context, segment, layouts, steps, backward=False),
        tp_backward_s=_communication_s(context, segment, layouts, steps, backward=True),
        weights=weights,
        fixed_bytes=fixed_bytes,
        saved_bytes=_saved_bytes(context, segment, layouts, gradients),
        input_bytes=sum(
            local_spec(graph.specs()[name], layouts.produced[name], context.degree).n_bytes(
                context.batch_size, context.precision
            )
            for name in segment.inputs
            if name in gradients
        ),
        working_bytes=max(_working_bytes(context, op, layouts, gradients) for op in graph.ops_of(segment)),
    )


def timed(context: WorkContext, op: Op, strategy: Strategy, gradients: frozenset[str]) -> OpTime:
    """Time of one op in one strategy."""
    return op_time(
        context.rules.get(op.target),
        op,
        operands=local_operands(context, op, strategy),
        results=tuple(local_spec(spec, strategy.result, context.degree) for spec in op.outputs),
        batch_size=context.batch_size,
        precision=context.precision,
        device=context.device,
        has_gradient=op.name in gradients,
    )


def local_operands(context: WorkContext, op: Op, strategy: Strategy) -> Specs:
    """What a rank holds of each operand."""
    specs = context.graph.specs()
    pairs = zip(operand_names(op), strategy.operands, strict=True)
    return tuple(local_spec(specs[name], layout, context.degree) for name, layout in pairs)


def conversions(
    graph: OpGraph, segment: Segment, layouts: SegmentLayouts, gradients: frozenset[str]
) -> tuple[tuple[str, Conversion], ...]:
    """(value, conversion) for every value that some use reads in another layout; each once."""
    needed: dict[tuple[str, Layout], None] = {}
    for op in graph.ops_of(segment):
        for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True):
            needed[name, layout] = None
    needed.update(dict.fromkeys(layouts.leaves_as.items()))
    found = []
    for name, layout in needed:
        step = conversion(layouts.produced[name], layout, has_gradient=name in gradients)
        assert step is not None, (name, layouts.produced[name], layout)
        if step.function:
            found.append((name, step))
    return tuple(found)


def conversion_s(context: WorkContext, n_bytes: float, step: Conversion) -> float:
    """Forward and backward time of one conversion of a value of `n_bytes` (the global tensor)."""
    collectives = [kind for kind in (step.forward, step.backward) if kind]
    return _local_s(context.device, step) + sum(context.tp_collective_s(kind, n_bytes) for kind in collectives)


def _local_s(device: Device, step: Conversion) -> float:
    return device.kernel_s * CONVERSION_KERNELS.get(step.function, 1)


def _communication_s(
    context: WorkContext,
    segment: Segment,
    layouts: SegmentLayouts,
    steps: tuple[tuple[str, Conversion], ...],
    *,
    backward: bool,
) -> float:
    specs = context.graph.specs()
    total_s = 0.0
    for name, step in steps:
        kind = step.backward if backward else step.forward
        if kind:
            total_s += context.tp_collective_s(kind, specs[name].n_bytes(context.batch_size, context.precision))
    if not backward:
        for op in context.graph.ops_of(segment):
            n_elements = layouts.strategies[op.name].all_reduce_elements * context.batch_size
            total_s += context.tp_collective_s("all_reduce", n_elements * LOSS_STATISTIC_BYTES)
    return total_s


def _parameters(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts
) -> tuple[tuple[tuple[str, int], ...], int]:
    table = {parameter.name: parameter for parameter in context.graph.parameters}
    weights, fixed_bytes = [], 0
    for name in segment.parameters:
        spec = local_spec(table[name].spec, layouts.produced[name], context.degree)
        if table[name].is_trainable:
            weights.append((name, spec.n_elements(1)))
        else:
            fixed_bytes += spec.n_bytes(1, context.precision)
    return tuple(weights), fixed_bytes


def storage_roots(graph: OpGraph, segment: Segment, rules: Mapping[str, OpRule]) -> dict[str, str]:
    """For every value of a segment the value whose memory it looks into (itself, unless it is a view)."""
    roots: dict[str, str] = {}
    for op in graph.ops_of(segment):
        rule = rules.get(op.target)
        names = operand_names(op)
        is_alias = (rule is not None and rule.is_view) or _is_nothing(op)
        roots[op.name] = roots.get(names[0], names[0]) if is_alias and names else op.name
    return roots


def _is_nothing(op: Op) -> bool:
    """A dropout with probability zero hands its operand through."""
    return op.target == "aten.dropout.default" and not op.args[1]


def _saved_bytes(context: WorkContext, segment: Segment, layouts: SegmentLayouts, gradients: frozenset[str]) -> int:
    graph, specs = context.graph, context.graph.specs()
    roots = storage_roots(graph, segment, context.rules)
    left_out = invariant_values(graph) | {parameter.name for parameter in graph.parameters}
    saved: dict[tuple[str, Layout], int] = {}
    extra_bytes = 0
    for op in graph.ops_of(segment):
        rule = context.rules.get(op.target)
        if rule is None or op.name not in gradients:
            continue
        strategy = layouts.strategies[op.name]
        for name, layout in _kept(op, rule, strategy, gradients):
            root = roots.get(name, name)
            if root not in left_out:
                spec = local_spec(specs[name], layout, context.degree)
                saved[root, R if layout == V else layout] = spec.n_bytes(context.batch_size, context.precision)
        if rule.extra_saved_bytes is not None:
            operands = local_operands(context, op, strategy)
            extra_bytes += rule.extra_saved_bytes(op, operands, context.batch_size, context.precision)
    return _per_root(saved) + extra_bytes


def _per_root(saved: dict[tuple[str, Layout], int]) -> int:
    """Views of one tensor have layouts of different dims but are the same memory: the largest per root counts,
    unless a gathered and a sharded copy of it are both kept.
    """
    whole: dict[str, int] = {}
    parts: dict[str, int] = {}
    for (root, layout), n_bytes in saved.items():
        table = parts if layout.kind == "S" else whole
        table[root] = max(table.get(root, 0), n_bytes)
    return sum(whole.values()) + sum(parts.values())


def _kept(op: Op, rule: OpRule, strategy: Strategy, gradients: frozenset[str]) -> list[tuple[str, Layout]]:
    """The tensors autograd keeps for this call. A product keeps a factor only for the gradient of the other one."""
    names = operand_names(op)
    kept = []
    for index in rule.saves:
        if index < 0:
            kept.append((op.name, strategy.result))
        elif index < len(names):
            others = [name for i, name in enumerate(names) if i != index]
            if not rule.is_product or any(name in gradients for name in others):
                kept.append((names[index], strategy.operands[index]))
    return kept


def _working_bytes(context: WorkContext, op: Op, layouts: SegmentLayouts, gradients: frozenset[str]) -> int:
    """Temporaries around one op: gradients of its operands and result, and what it keeps only inside itself."""
    strategy = layouts.strategies[op.name]
    rule = context.rules.get(op.target) or OpRule()
    if rule.is_view:
        return 0
    names = operand_names(op)
    operands = local_operands(context, op, strategy)
    parameters = {parameter.name for parameter in context.graph.parameters}
    total = sum(
        local_spec(spec, strategy.result, context.degree).n_bytes(context.batch_size, context.precision)
        for spec in op.outputs
    )
    for name, spec in zip(names, operands, strict=True):
        if name not in parameters and name in gradients and _depends_on_batch(spec.shape):
            total += spec.n_bytes(context.batch_size, context.precision)
    if rule.extra_saved_bytes is not None:
        total += rule.extra_saved_bytes(op, operands, context.batch_size, context.precision)
    return total


def _depends_on_batch(shape: tuple[object, ...]) -> bool:
    return any(isinstance(extent, PerSample) for extent in shape)
