"""What one kind of segment does on one tensor-parallel rank, for one micro-batch: the sum over its ops.

    forward_s  = sum of op_time.forward_s                    tp_forward_s  = collectives of conversions and split losses
    saved      = distinct tensors that some op keeps          working       = largest set of temporaries of one op

A tensor is counted once however many ops keep it, and a view counts as the tensor it looks into. Parameters are not
activations. What depends on no input (rotary tables) is kept once for all micro-batches, and left out.

Autograd adds up the gradients of a value that several ops read: one addition per further reader. The runtime computes
the loss in float32 at least, so under 16 bits the loss function sees tensors of twice the size, after a cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoplan.cost.op_time import OpTime, op_time
from autoplan.graph import LOSS_PATH, GraphFacts, Op, OpGraph, PerSample, Segment
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
        host_forward_s, host_backward_s: what the host takes to launch it.
        weights: (parameter name, local elements) of the trainable parameters it reads.
        fixed_bytes: buffers and frozen parameters.
        input_bytes: what recomputation keeps: its inputs that carry a gradient.
        n_weight_ops, weight_backward_s, pending_bytes: see `_weight_gradients`.
    """

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float
    tp_forward_s: float
    tp_backward_s: float
    weights: tuple[tuple[str, int], ...]
    fixed_bytes: int
    saved_bytes: int
    input_bytes: int
    working_bytes: int
    n_weight_ops: int
    weight_backward_s: float
    pending_bytes: int


@dataclass(frozen=True, slots=True)
class WorkContext:
    """Everything the sums depend on besides the segment.

    Attributes:
        tp_collective_s: (kind, full bytes) -> seconds on the tensor-parallel axis.
    """

    graph: OpGraph
    facts: GraphFacts
    rules: Mapping[str, OpRule]
    device: Device
    precision: str
    batch_size: int
    degree: int
    tp_collective_s: Callable[[str, float], float]


def segment_work(context: WorkContext, segment: Segment, assignment: SegmentSharding | None) -> SegmentWork:
    """The sums of one kind of segment; `segment` is the first of its kind."""
    graph = context.graph
    layouts = read_sharding(
        graph,
        segment,
        assignment,
        degree=context.degree,
        rules=context.rules,
        facts=context.facts,
    )
    gradients = context.facts.gradients
    strided = strided_values(graph, segment, context.rules)
    times = [
        timed(context, op, layouts.strategies[op.name], gradients, is_strided=not strided.isdisjoint(operand_names(op)))
        for op in graph.ops_of(segment)
    ]
    steps = conversions(graph, segment, layouts, gradients)
    weights, fixed_bytes = _parameters(context, segment, layouts)
    n_additions, additions_s = _gradient_additions(context, segment, layouts, gradients)
    cast_s = _loss_cast_s(context, segment, layouts)
    n_weight_ops, weight_backward_s, pending_bytes = _weight_gradients(context, segment, layouts, times)
    return SegmentWork(
        forward_s=sum(t.forward_s for t in times) + sum(_local_s(context.device, step) for _, step in steps) + cast_s,
        backward_s=sum(t.backward_s for t in times) + additions_s + cast_s,
        host_forward_s=context.device.launch_s * sum(t.n_launches for t in times),
        host_backward_s=context.device.launch_s * (sum(t.n_backward_launches for t in times) + n_additions),
        tp_forward_s=_communication_s(context, segment, layouts, steps, backward=False),
        tp_backward_s=_communication_s(context, segment, layouts, steps, backward=True),
        weights=weights,
        fixed_bytes=fixed_bytes,
        saved_bytes=_saved_bytes(context, segment, layouts, gradients),
        input_bytes=sum(
            local_spec(context.facts.specs[name], layouts.produced[name], context.degree).n_bytes(
                context.batch_size, context.precision
            )
            for name in segment.inputs
            if name in gradients
        ),
        working_bytes=max(_working_bytes(context, op, layouts, gradients) for op in graph.ops_of(segment)),
        n_weight_ops=n_weight_ops,
        weight_backward_s=weight_backward_s,
        pending_bytes=pending_bytes,
    )


def timed(
    context: WorkContext, op: Op, strategy: Strategy, gradients: frozenset[str], *, is_strided: bool = False
) -> OpTime:
    """Time of one op in one strategy; `is_strided` when it reads a tensor whose dims are permuted in memory."""
    if _is_nothing(op):
        return OpTime(0.0, 0.0, 0, 0)
    return op_time(
        context.rules.get(op.target),
        op,
        operands=local_operands(context, op, strategy),
        results=tuple(local_spec(spec, strategy.result, context.degree) for spec in op.outputs),
        batch_size=context.batch_size,
        precision=precision_of(context, op),
        device=context.device,
        has_gradient=op.name in gradients,
        is_strided=is_strided,
    )


def strided_values(graph: OpGraph, segment: Segment, rules: Mapping[str, OpRule]) -> frozenset[str]:
    """Values whose dims lie permuted in memory: from a transpose up to the product that reads them.

    A second transpose undoes the first. Attention writes its result as it reads its query.
    """
    strided: set[str] = set()
    for op in graph.ops_of(segment):
        rule = rules.get(op.target, OpRule())
        is_read_strided = not strided.isdisjoint(op.input_names())
        if op.target in ("aten.transpose.int", "aten.permute.default"):
            is_strided = not is_read_strided
        elif rule.efficiency == "matmul":
            is_strided = is_read_strided and len(op.outputs[0].shape) == 4
        else:
            is_strided = is_read_strided
        if is_strided:
            strided.add(op.name)
    return frozenset(strided)


def precision_of(context: WorkContext, op: Op) -> str:
    """The precision an op computes in: float32 in the loss function when the plan has 16 bits."""
    is_widened = op.module_path == LOSS_PATH and context.precision in ("bf16", "fp16")
    return "fp32" if is_widened else context.precision


def _gradient_additions(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts, gradients: frozenset[str]
) -> tuple[int, float]:
    """How many gradients are added to others, and the time of it: two reads and one write each."""
    readers: dict[tuple[str, Layout], int] = {}
    for op in context.graph.ops_of(segment):
        if op.name not in gradients or op.target == "getitem":
            continue
        for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True):
            if name in gradients and name not in context.facts.parameters:
                readers[name, layout] = readers.get((name, layout), 0) + 1
    bandwidth = context.device.memory_bytes_per_s * context.device.memory_efficiency
    n_additions, total_s = 0, 0.0
    for (name, layout), count in readers.items():
        spec = local_spec(context.facts.specs[name], layout, context.degree)
        n_bytes = spec.n_bytes(context.batch_size, context.precision)
        n_additions += count - 1
        total_s += (count - 1) * (context.device.kernel_s + 3 * n_bytes / bandwidth)
    return n_additions, total_s


def _weight_gradients(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts, times: Sequence[OpTime]
) -> tuple[int, float, int]:
    """What a split backward pass does apart: for how many ops, its time, and the gradients that it keeps until then.

    Half of the backward pass of a product with a weight is for the weight. Gradients of other parameters (a sum, a
    scale) are counted with those of the inputs. Every op that reads a parameter keeps the gradient of its result.
    """
    facts = context.facts
    trained = facts.parameters & facts.gradients
    roots = storage_roots(context.graph, segment, context.rules)
    n_ops, total_s, pending_bytes = 0, 0.0, 0
    for op, time in zip(context.graph.ops_of(segment), times, strict=True):
        reads = {roots.get(name, name) for name in operand_names(op)}
        if op.name not in facts.gradients or roots[op.name] != op.name or reads.isdisjoint(trained):
            continue
        n_ops += 1
        rule = context.rules.get(op.target)
        total_s += time.backward_s / 2 if rule is not None and rule.efficiency == "matmul" else 0.0
        for spec in op.outputs:
            local = local_spec(spec, layouts.strategies[op.name].result, context.degree)
            pending_bytes += local.n_bytes(context.batch_size, precision_of(context, op))
    return n_ops, total_s, pending_bytes


def _loss_cast_s(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> float:
    """Casting the model's outputs to float32 for the loss; the same time in backward."""
    ops = context.graph.ops_of(segment)
    if not ops or ops[-1].module_path != LOSS_PATH or precision_of(context, ops[-1]) == context.precision:
        return 0.0
    bandwidth = context.device.memory_bytes_per_s * context.device.memory_efficiency
    total_bytes = 0
    for name in context.graph.model_outputs:
        spec = context.facts.specs[name]
        local = local_spec(spec, layouts.produced.get(name, R), context.degree)
        total_bytes += local.n_bytes(context.batch_size, context.precision) + local.n_bytes(context.batch_size, "fp32")
    return total_bytes / bandwidth


def local_operands(context: WorkContext, op: Op, strategy: Strategy) -> Specs:
    """What a rank holds of each operand."""
    specs = context.facts.specs
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
    specs = context.facts.specs
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
    graph, specs = context.graph, context.facts.specs
    roots = storage_roots(graph, segment, context.rules)
    left_out = context.facts.invariant | context.facts.parameters
    saved: dict[tuple[str, Layout], int] = {}
    extra_bytes = 0
    for op in graph.ops_of(segment):
        rule = context.rules.get(op.target)
        if op.name not in gradients:
            continue
        if rule is None:  # what it keeps is not known: everything it touches
            rule = OpRule(saves=(*range(len(operand_names(op))), -1))
        strategy = layouts.strategies[op.name]
        for name, layout in _kept(op, rule, strategy, gradients):
            root = roots.get(name, name)
            if root not in left_out:
                spec = local_spec(specs[name], layout, context.degree)
                saved[root, R if layout == V else layout] = spec.n_bytes(context.batch_size, precision_of(context, op))
        if rule.extra_saved_bytes is not None:
            operands = local_operands(context, op, strategy)
            extra_bytes += rule.extra_saved_bytes(op, operands, context.batch_size, precision_of(context, op))
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
    total = sum(
        local_spec(spec, strategy.result, context.degree).n_bytes(context.batch_size, precision_of(context, op))
        for spec in op.outputs
    )
    for name, spec in zip(names, operands, strict=True):
        if name not in context.facts.parameters and name in gradients and _depends_on_batch(spec.shape):
            total += spec.n_bytes(context.batch_size, precision_of(context, op))
    if rule.extra_saved_bytes is not None:
        total += rule.extra_saved_bytes(op, operands, context.batch_size, precision_of(context, op))
    return total


def _depends_on_batch(shape: tuple[object, ...]) -> bool:
    return any(isinstance(extent, PerSample) for extent in shape)
