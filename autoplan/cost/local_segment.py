"""One kind of segment as a tensor-parallel rank sees it: all that does not depend on the micro-batch.

Segment + layouts of its values --> local ops, conversions, what autograd keeps --segment_work--> seconds and bytes
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoplan.analysis.chunked_loss import ChunkedHead, is_sliceable
from autoplan.analysis.float32_buffers import float32_buffers
from autoplan.cost.handed_on import handed_on
from autoplan.cost.kept_tensors import KeptTensor, kept_tensors, n_kept_tensors, n_repeated_ops
from autoplan.cost.work_context import WorkContext
from autoplan.equations import argument
from autoplan.graph import LOSS_PATH, Argument, Op, OpGraph, PerSample, Ref, Segment, TensorSpec
from autoplan.layout import EXCHANGE, Conversion, Layout, R, V, conversion, local_spec
from autoplan.rules import OpRule, Specs, Strategy, exchanged_specs, operand_names
from autoplan.tensor_parallel.narrow_loss import SPLIT_LOSS, is_narrow_loss
from autoplan.tensor_parallel.sharding import SegmentLayouts

PERMUTATIONS = ("aten.transpose.int", "aten.permute.default")
_CUTS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One op in one strategy.

    Attributes:
        whole_operands: its operands before they are split.
        operands, results: what a rank holds of each.
        temporaries: what is alive around it: its results, and gradients of operands with the batch in their shape.
        precision: what it computes in.
        given_precision: what its operands are in.
        is_strided: it reads a tensor whose dims are permuted in memory.
        pieces: which of its operands are pieces of a larger tensor, whose rows lie apart, if it is not strided.
        gradients: which of its operands have one.
        scattered, own: as in `LocalCall`.
        is_idle: it runs nothing.
        all_reduce_elements: per sample; see `Strategy`.
    """

    op: Op
    rule: OpRule | None
    whole_operands: Specs
    operands: Specs
    results: Specs
    temporaries: Specs
    precision: str
    given_precision: str
    has_gradient: bool
    gradients: tuple[bool, ...]
    scattered: tuple[bool, ...]
    own: tuple[bool, ...]
    is_idle: bool
    is_strided: bool
    pieces: tuple[bool, ...]
    all_reduce_elements: int


@dataclass(frozen=True, slots=True)
class SlicedOps:
    """What of a segment a chunked loss computes slice by slice; see `analysis.chunked_loss`.

    Attributes:
        indices: of the ops, the product first and the loss last.
        kept: as in `LocalSegment`, without them.
        head: what they are in the graph.
    """

    indices: tuple[int, ...]
    kept: tuple[KeptTensor, ...]
    head: ChunkedHead


class Input(NamedTuple):
    """An input of a segment, as in `KeptTensor`."""

    spec: TensorSpec
    n_holders: int
    is_handed_on: bool


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A segment on one rank.

    Attributes:
        alike: for each op the place of the first that takes as much of everything; see `alike_ops`.
        conversions: (global tensor, conversion) for every value that some use reads in another layout, each once, and
            for what ops exchange inside themselves.
        additions: (how often, tensor) of gradients that are added to others.
        loss_outputs: the model's outputs, where the loss needs them in another precision.
        inputs: its inputs that carry a gradient.
        handed_on: its results that it counts, though others keep them too; see `handed_on`.
        kept: what autograd keeps, apart from what ops keep inside themselves.
        weight_ops: indices of the ops that compute gradients of weights; see `_weight_ops`.
        weights: (parameter name, local elements) of the trainable parameters it reads; `first_dims` of each.
        weight_elements: for each op, of how many elements of weights backward has gradients once it is done with it.
        n_shared: elements of weights that are stored as V: of their gradients every rank has a share.
        fixed_bytes: buffers and frozen parameters.
        n_kept_tensors: how often autograd keeps a tensor, weights and what is inside an op too; see `kept_tensors`.
        n_repeated_ops: how many of its first ops recomputation runs again; see `kept_tensors`.
        repeated_conversions: the `conversions` that these need.
        sliced: the ops of a loss that may be chunked.
    """

    ops: tuple[LocalOp, ...]
    alike: tuple[int, ...]
    conversions: tuple[tuple[TensorSpec, Conversion], ...]
    additions: tuple[tuple[int, TensorSpec], ...]
    loss_outputs: Specs
    inputs: tuple[Input, ...]
    handed_on: Specs
    kept: tuple[KeptTensor, ...]
    weight_ops: tuple[int, ...]
    weights: tuple[tuple[str, int], ...]
    first_dims: tuple[int, ...]
    weight_elements: tuple[int, ...]
    n_shared: int
    fixed_bytes: int
    n_kept_tensors: int
    n_repeated_ops: int
    repeated_conversions: tuple[tuple[TensorSpec, Conversion], ...]
    sliced: SlicedOps | None = None


def local_segment(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> LocalSegment:
    """One kind of segment in these layouts; `segment` is the first of its kind."""
    graph, specs, gradients = context.graph, context.facts.specs, context.facts.gradients
    strided = strided_values(graph, segment, context.rules)
    pieces = piece_values(graph, segment, context.rules)
    roots = storage_roots(context, segment)
    weights, first_dims, fixed_bytes = _parameters(context, segment, layouts)
    handed = handed_on(context)
    common, made = handed.common[segment.kind], handed.inputs[segment.kind]
    n_repeated = n_repeated_ops(context, segment, layouts)
    own = frozenset(op.name for op in graph.ops_of(segment))
    is_narrow = is_narrow_loss(graph, graph.ops_of(segment), layouts.strategies, context.rules)
    ops = tuple(
        local_op(
            context, op, layouts.strategies[op.name], strided=strided, pieces=pieces, own=own, has_narrow_loss=is_narrow
        )
        for op in graph.ops_of(segment)
    )
    return LocalSegment(
        ops=ops,
        alike=alike_ops(ops),
        conversions=_conversions(context, segment, layouts),
        additions=_gradient_additions(context, segment, layouts),
        loss_outputs=() if is_narrow else _loss_outputs(context, segment, layouts),
        inputs=tuple(
            Input(local_spec(specs[name], layouts.produced[name], context.degree), common.get(name, 1), name in made)
            for name in segment.inputs
            if name in gradients
        ),
        handed_on=tuple(
            local_spec(specs[name], layouts.produced[name], context.degree) for name in handed.outputs[segment.kind]
        ),
        kept=kept_tensors(context, segment, layouts),
        weight_ops=_weight_ops(context, segment, roots),
        weights=weights,
        first_dims=first_dims,
        weight_elements=_weight_elements(graph.ops_of(segment), weights),
        n_shared=sum(count for name, count in weights if layouts.produced[name] == V),
        fixed_bytes=fixed_bytes,
        n_kept_tensors=n_kept_tensors(context, segment, layouts),
        n_repeated_ops=n_repeated,
        repeated_conversions=_conversions(context, segment, layouts, n_ops=n_repeated),
        sliced=_sliced_ops(context, segment, layouts),
    )


def local_op(
    context: WorkContext,
    op: Op,
    strategy: Strategy,
    *,
    strided: Collection[str] = (),
    pieces: Collection[str] = (),
    own: Collection[str] = (),
    has_narrow_loss: bool = False,
) -> LocalOp:
    """One op in one strategy; `strided` and `pieces` are the values of `strided_values` and of `piece_values`, `own`
    those that the segment makes; `has_narrow_loss`: see `is_narrow_loss`.
    """
    facts, names, rule = context.facts, operand_names(op), context.rules.get(op.target)
    keeps_more = rule is not None and rule.extra_saved_bytes is not None
    pairs = zip(names, strategy.operands, strict=True)
    operands = tuple(local_spec(facts.specs[name], layout, context.degree) for name, layout in pairs)
    is_strided, is_idle = any(name in strided for name in names), op.name in context.idle
    n_dims = len(op.outputs[0].shape)  # what is returned beside a split result lies like it, or has other dims
    results = tuple(
        local_spec(spec, strategy.result if len(spec.shape) == n_dims else R, context.degree) for spec in op.outputs
    )
    of_gradients = (
        spec
        for name, spec in zip(names, operands, strict=True)
        if name in facts.gradients and name not in facts.parameters and _depends_on_batch(spec.shape)
    )
    return LocalOp(
        op=op,
        rule=rule,
        whole_operands=tuple(facts.specs[name] for name in names),
        operands=operands,
        results=results,
        temporaries=() if is_idle or (rule is not None and rule.is_view) else (*results, *of_gradients),
        precision=context.precision_of(op),
        given_precision=context.precision
        if has_narrow_loss and strategy.function == SPLIT_LOSS
        else context.precision_of(op),
        has_gradient=op.name in facts.gradients,
        gradients=tuple(name in facts.gradients for name in names),
        scattered=tuple(name in context.scattered for name in names) if context.scattered else (),
        own=tuple(name in own for name in names) if keeps_more else (),
        is_idle=is_idle,
        is_strided=is_strided,
        pieces=tuple(name in pieces and not is_strided for name in names),
        all_reduce_elements=strategy.all_reduce_elements,
    )


def alike_ops(ops: Sequence[LocalOp]) -> tuple[int, ...]:
    """For each op the place of the first that differs in names at most: a block repeats itself, a stage even more."""
    first: dict[LocalOp, int] = {}
    return tuple(
        first.setdefault(replace(local, op=_without_names(local.op)), place) for place, local in enumerate(ops)
    )


def _without_names(op: Op) -> Op:
    """The call with its operands numbered, so that one that is read twice still is."""
    numbers = {name: Ref(str(number)) for number, name in enumerate(op.input_names())}

    def numbered(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(numbered, argument))
        return numbers[argument.name] if isinstance(argument, Ref) else argument

    args = tuple(map(numbered, op.args))
    kwargs = tuple((name, numbered(value)) for name, value in op.kwargs)
    return replace(op, name="", args=args, kwargs=kwargs, module_path="", label="")


def strided_values(graph: OpGraph, segment: Segment, rules: Mapping[str, OpRule]) -> frozenset[str]:
    """Values whose dims lie permuted in memory: from a transpose up to the product that reads them.

    A second transpose undoes the first. Attention writes its result as it reads its query.
    """
    strided: set[str] = set()
    for op in graph.ops_of(segment):
        rule = rules.get(op.target, OpRule())
        is_read_strided = not strided.isdisjoint(op.input_names())
        if op.target in PERMUTATIONS:
            is_strided = not is_read_strided
        elif rule.efficiency == "matmul":
            is_strided = is_read_strided and op.target == "aten.scaled_dot_product_attention.default"
        else:
            is_strided = is_read_strided
        if is_strided:
            strided.add(op.name)
    return frozenset(strided)


def piece_values(graph: OpGraph, segment: Segment, rules: Mapping[str, OpRule]) -> frozenset[str]:
    """What a tensor is cut into along another dim than the first, and views of that, until its dims are permuted."""
    cut: set[str] = set()
    pieces: set[str] = set()
    for op in graph.ops_of(segment):
        rule, names = rules.get(op.target, OpRule()), operand_names(op)
        if op.target in _CUTS:
            dim = argument(op, 2, "dim", 0)
            cut |= {op.name} if dim % len(op.outputs[0].shape) else set()
        elif op.target == "getitem":
            pieces |= {op.name} if names[0] in cut else set()
        elif rule.is_view and op.target not in PERMUTATIONS and not pieces.isdisjoint(names):
            pieces.add(op.name)
    return frozenset(pieces)


def storage_roots(context: WorkContext, segment: Segment) -> dict[str, str]:
    """For every value of a segment the value whose memory it looks into (itself, unless it is a view)."""
    roots: dict[str, str] = {}
    for op in context.graph.ops_of(segment):
        rule = context.rules.get(op.target)
        names = operand_names(op)
        is_alias = (rule is not None and rule.is_view) or op.name in context.idle
        roots[op.name] = roots.get(names[0], names[0]) if is_alias and names else op.name
    return roots


def _conversions(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts, *, n_ops: int | None = None
) -> tuple[tuple[TensorSpec, Conversion], ...]:
    """Those of all uses in the segment and of what leaves it, or those that the first `n_ops` ops need."""
    needed: dict[tuple[str, Layout], None] = {}
    for op in context.graph.ops_of(segment)[:n_ops]:
        for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True):
            needed[name, layout] = None
    if n_ops is None:
        needed.update(dict.fromkeys(layouts.leaves_as.items()))
    found = []
    for name, layout in needed:
        step = conversion(layouts.produced[name], layout, has_gradient=name in context.facts.gradients)
        assert step is not None, (name, layouts.produced[name], layout)
        if step.function:
            found.append((context.facts.specs[name], step))
    for op in context.graph.ops_of(segment)[:n_ops]:
        found += [(spec, EXCHANGE) for spec in exchanged_specs(op, layouts.strategies[op.name], context.facts.specs)]
    return tuple(found)


def _gradient_additions(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts
) -> tuple[tuple[int, TensorSpec], ...]:
    """One addition per further reader of a value."""
    facts, readers = context.facts, dict[tuple[str, Layout], int]()
    for op in context.graph.ops_of(segment):
        if op.name not in facts.gradients or op.target == "getitem":
            continue
        for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True):
            if name in facts.gradients and name not in facts.parameters:
                readers[name, layout] = readers.get((name, layout), 0) + 1
    return tuple(
        (count - 1, local_spec(facts.specs[name], layout, context.degree))
        for (name, layout), count in readers.items()
        if count > 1
    )


def _weight_ops(context: WorkContext, segment: Segment, roots: Mapping[str, str]) -> tuple[int, ...]:
    """The ops that read a trained parameter, or a view of one, and have a gradient; views themselves do nothing."""
    facts = context.facts
    trained = facts.parameters & facts.gradients
    return tuple(
        index
        for index, op in enumerate(context.graph.ops_of(segment))
        if op.name in facts.gradients
        and roots[op.name] == op.name
        and not trained.isdisjoint(roots.get(name, name) for name in operand_names(op))
    )


def _weight_elements(ops: Sequence[Op], weights: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Weights that are read through a view count from the start of the backward pass."""
    left = dict(weights)
    read = [{name for name in operand_names(op) if name in left} for op in ops]
    directly = set().union(*read)
    total = sum(count for name, count in weights if name not in directly)
    found = []
    for names in reversed(read):
        total += sum(left.pop(name, 0) for name in names)
        found.append(total)
    return tuple(reversed(found))


def _loss_outputs(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> Specs:
    ops = context.graph.ops_of(segment)
    if not ops or ops[-1].module_path != LOSS_PATH or context.precision_of(ops[-1]) == context.precision:
        return ()
    return tuple(
        local_spec(context.facts.specs[name], layouts.produced.get(name, R), context.degree)
        for name in context.graph.model_outputs
    )


def _parameters(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...], int]:
    table = {parameter.name: parameter for parameter in context.graph.parameters}
    float32 = float32_buffers(context.graph) if context.precision in ("bf16", "fp16") else frozenset()
    weights, first_dims, fixed_bytes = [], [], 0
    for name in segment.parameters:
        spec = local_spec(table[name].spec, layouts.produced[name], context.degree)
        if table[name].is_trainable:
            weights.append((name, spec.n_elements(1)))
            first_dims.append(max(1, *spec.at(1)[:1]) if spec.shape else 1)
        else:
            kept = replace(spec, dtype="float32") if name in float32 else spec
            fixed_bytes += kept.n_bytes(1, context.precision)
    return tuple(weights), tuple(first_dims), fixed_bytes


def _sliced_ops(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> SlicedOps | None:
    head = context.head
    if head is None or head.kind != segment.kind or not is_sliceable(head, layouts, context.facts):
        return None
    names = head.names
    indices = tuple(index for index, op in enumerate(context.graph.ops_of(segment)) if op.name in names)
    kept = kept_tensors(context, segment, layouts, without=names)
    return SlicedOps(indices, kept, head)


def _depends_on_batch(shape: tuple[object, ...]) -> bool:
    return any(isinstance(extent, PerSample) for extent in shape)
