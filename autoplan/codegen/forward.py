"""Ops of a segment -> the lines of a forward function, with the conversions between layouts in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.analysis.attention_kernel import scattered_masks
from autoplan.analysis.float32_buffers import float32_values
from autoplan.analysis.memory_order import scattered_outputs
from autoplan.analysis.random_numbers import drop_probability
from autoplan.codegen.call import Call
from autoplan.codegen.expressions import FUNCTION_MODULES, FUNCTIONS, expression
from autoplan.codegen.float64_products import rounded_operands
from autoplan.codegen.lines import Key, Like, Line, Wish, function_lines, names_in, placeholder
from autoplan.codegen.value_names import ValueNames, operator_name
from autoplan.graph import (
    COMPUTE,
    PADDED_LINEAR,
    WRITES,
    Extent,
    GraphFacts,
    Op,
    OpGraph,
    PerSample,
    Symbol,
    TensorSpec,
)
from autoplan.layout import Conversion, D, E, Layout, R, conversion, local_spec
from autoplan.rules import OpRule, Strategy, exchanged_specs, operand_names
from autoplan.tensor_parallel.expert_rows import OWN_ROWS_SUM, ends_of_rows, rows_put_back
from autoplan.tensor_parallel.sharding import SegmentLayouts

_SUFFIX = {"R": "whole", "V": "copied", "S": "part", "E": "own", "P": "partial"}
_FORWARD = {
    "all_reduce": "all-reduce of the partial sums of {what}",
    "all_gather": "all-gather of the parts of {what}",
    "reduce_scatter": "reduce-scatter of the partial sums of {what}",
    "all_to_all": "all-to-all of {what} to a split along another dim",
}
_BACKWARD = {
    "all_reduce": ("all-reduce of", "to which every rank has a share"),
    "all_gather": ("all-gather of", "of which every rank has a part"),
    "reduce_scatter": ("reduce-scatter of", "to which every rank has a share"),
    "all_to_all": ("all-to-all of", "split along another dim"),
}
_LIKE_DTYPE, _LIKE_DEVICE = "dtype_like", "device_like"  # stand-ins in a template until the line is whole
_DRAWS = frozenset({"bernoulli", "rand_like", "randn_like", "rrelu"})  # beside dropout
_GROUP_NAMES = "tp", "tp_group", "tensor_parallel_group"
_ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What stays the same over all functions of a program.

    Attributes:
        facts: of the graph.
        names: what values would like to be called.
        read: values that some op reads, or that leave the graph.
        scattered: values that are made dense as soon as they are there, see `memory_order`.
        deferred: (product of a chunked loss, keywords of its call), if the plan has one.
        group: the attribute that holds the tensor-parallel group, which no module or weight of the user has for a name.
        imports: (module of the runtime, name) of what was used; grows while the functions are written.
    """

    graph: OpGraph
    rules: Mapping[str, OpRule]
    degree: int
    precision: str
    facts: GraphFacts
    names: ValueNames
    read: frozenset[str]
    buffers: frozenset[str]
    imports: set[tuple[str, str]]
    scattered: frozenset[str] = frozenset()
    deferred: tuple[str, str] | None = None
    group: str = "tp"

    @classmethod
    def of(
        cls,
        graph: OpGraph,
        *,
        rules: Mapping[str, OpRule],
        degree: int,
        precision: str,
        deferred: tuple[str, str] | None = None,
    ) -> ForwardContext:
        """The context of one program."""
        read = frozenset(name for op in graph.ops for name in op.input_names()) | {*graph.model_outputs, graph.loss}
        buffers = frozenset(parameter.name for parameter in graph.parameters if parameter.is_buffer)
        facts, names = GraphFacts.of(graph), ValueNames.of(graph)
        leaving = scattered_outputs(graph)
        scattered = leaving | scattered_masks(graph, dense=leaving)
        taken = {part for parameter in graph.parameters for part in parameter.name.split(".")}
        group = next(name for name in _GROUP_NAMES if name not in taken)
        return cls(graph, rules, degree, precision, facts, names, read, buffers, set(), scattered, deferred, group)


@dataclass(slots=True)
class Body:
    """The lines of one function while it is written.

    Attributes:
        tp: the expression of the tensor-parallel group; "" for the attribute that holds it.
        held: the key under which a value is known now, where that is not the one it was made with.
        ends: number of rows -> the value that says where those of each expert end; see `expert_rows`.
    """

    context: ForwardContext
    tp: str = ""
    lines: list[Line] = field(default_factory=list)
    held: dict[str, Key] = field(default_factory=dict)
    made: set[Key] = field(default_factory=set)
    ends: dict[Extent, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tp = self.tp or f"self.{self.context.group}"

    def key(self, name: str) -> Key:
        """The key of a value as it is now."""
        return self.held.get(name, (name, ""))

    def text(
        self,
        *,
        arguments: Mapping[str, str],
        known: Mapping[str, str],
        results: Sequence[str],
        indent: int,
        sized: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The function's body; `arguments` names its parameters, `known` has the expressions of weights.

        `sized` are expressions of further values that may tell the batch size, before the first line.
        """
        specs = self.context.facts.specs
        return function_lines(
            self.lines,
            known={(name, ""): text for name, text in known.items()},
            arguments={(name, ""): text for name, text in arguments.items()},
            dtypes={name: spec.dtype for name, spec in specs.items()}
            | dict.fromkeys(float32_values(self.context.graph), "float32"),
            batch=_batch_expression({**arguments, **known, **(sized or {})}, specs),
            results=[self.key(name) for name in results],
            indent=indent,
        )


def add_ops(body: Body, ops: tuple[Op, ...], *, layouts: SegmentLayouts, leaving: Mapping[str, Layout]) -> None:
    """Append the lines that compute `ops`; `leaving` maps values to the layout they have from there on."""
    pieces = _pieces(ops)
    specs, degree = body.context.facts.specs, body.context.degree
    body.ends = ends_of_rows(ops, specs, degree)
    put_back = {rows.sum.name: rows for rows in rows_put_back(ops, specs, degree)}
    for op in ops:
        if op.target == "getitem" and op.args[0].name in pieces:
            continue
        strategy = layouts.strategies[op.name]
        operands = tuple(
            _as_layout(body, name, layout, layouts=layouts)
            for name, layout in zip(operand_names(op), strategy.operands, strict=True)
        )
        if strategy.function == OWN_ROWS_SUM:
            _, index = operand_names(put_back[op.name].index)
            operands = (*operands, _as_layout(body, index, R, layouts=layouts), _ends(body, index, layouts))
        is_nothing = _is_nothing(body.context, op) and op.name not in body.context.scattered
        if is_nothing or strategy.result == D:
            body.held[op.name] = operands[0]
            continue
        results = pieces.get(op.name, [op])
        is_read = op.name in body.context.read
        body.lines.append(_op_line(body.context, op, operands, strategy, results if is_read else [], body.tp))
        if op.target in WRITES:
            body.lines += _written_back(body, op, operands, strategy)
    for name, layout in leaving.items():
        body.held[name] = _as_layout(body, name, layout, layouts=layouts)


def _is_nothing(context: ForwardContext, op: Op) -> bool:
    """Whether the result is the operand; a copy is, unless what it copies is a buffer, which may be written."""
    is_copy = op.target == "aten.clone.default" and op.args[0].name not in context.facts.parameters
    return is_copy or op.target == "aten.alias.default" or (op.target == "aten.dropout.default" and not op.args[1])


def _pieces(ops: tuple[Op, ...]) -> dict[str, list[Op]]:
    """Ops with several results whose every piece is read exactly once: they unpack into names."""
    readers: dict[str, list[Op]] = {}
    for op in ops:
        if op.target == "getitem":
            readers.setdefault(op.args[0].name, []).append(op)
    return {
        op.name: sorted(readers[op.name], key=lambda r: r.args[1])
        for op in ops
        if op.name in readers and sorted(r.args[1] for r in readers[op.name]) == list(range(len(op.outputs)))
    }


# ---------------------------------------------------------------- one op


def _op_line(
    context: ForwardContext, op: Op, operands: tuple[Key, ...], strategy: Strategy, results: list[Op], tp: str
) -> Line:
    template = _template(context, op, strategy, tp)
    reads: list[Key | Like] = [*operands]
    for stand_in, like in ((_LIKE_DTYPE, Like(COMPUTE)), (_LIKE_DEVICE, Like(None))):
        if stand_in in names_in(template):
            template = template.replace(f"{stand_in}.", f"{placeholder(len(reads))}.")
            reads.append(like)
    rule, is_dense = context.rules.get(op.target), op.name in context.scattered
    is_view = rule is not None and rule.is_view and not is_dense
    return Line(
        template=f"{template}.contiguous()" if is_dense else template,
        reads=tuple(reads),
        makes=tuple((result.name, "") for result in results),
        wishes=_wishes(context.names, results),
        comment=_inner_comment(context, op, strategy),
        nests=_nests(context, op, rule, strategy, len(results)),
        is_view=is_view,
        has_effect=_has_effect(op),
    )


def _wishes(names: ValueNames, results: list[Op]) -> tuple[Wish, ...]:
    """A piece without a name of its own is called after what it is a piece of, with a number."""
    if len(results) == 1:
        return (names.wish(results[0]),)
    return tuple(
        Wish((piece.label,)) if piece.label else Wish(suffix=str(number), may_rebind=False)
        for number, piece in enumerate(results, 1)
    )


def _nests(context: ForwardContext, op: Op, rule: OpRule | None, strategy: Strategy, n_results: int) -> str:
    """What has a name, has an effect or communicates is a statement of its own."""
    if n_results != 1 or op.label or strategy.function or _has_effect(op):
        return ""
    return "view" if context.names.is_module_result(op) or (rule and rule.efficiency == "matmul") else "any"


def _has_effect(op: Op) -> bool:
    """Whether an op draws random numbers or writes a buffer."""
    return operator_name(op) in _DRAWS or op.target in WRITES or drop_probability(op) > 0


def _template(context: ForwardContext, op: Op, strategy: Strategy, tp: str) -> str:
    rounded = rounded_operands(context.graph, op)
    operands = tuple(
        placeholder(index) + (".to(torch.float32)" if index in rounded else "")
        for index in range(len(operand_names(op)))
    )
    if strategy.function == OWN_ROWS_SUM:
        context.imports.add(("experts", OWN_ROWS_SUM))
        n = context.facts.specs[op.args[0].name].shape[1]
        return f"{OWN_ROWS_SUM}({placeholder(0)}, {placeholder(1)}, {n}, {placeholder(2)}, {tp})"
    if op.target == "aten.dropout.default" and strategy.result.kind == "S":
        context.imports.add(("random", "rank_dropout"))
        return f"rank_dropout({operands[0]}, {op.args[1]!r}, self.training, {tp})"
    call = Call(
        op=op,
        operands=operands,
        result=printed_spec(op.outputs[0], strategy.result, context.degree),
        dtype_like=_LIKE_DTYPE,
        device_like=_LIKE_DEVICE,
        tp=tp,
        is_16_bit=context.precision in ("bf16", "fp16"),
        n_unpadded=_n_unpadded(context, op, strategy),
    )
    if strategy.function:
        context.imports.add((FUNCTION_MODULES.get(strategy.function, "collectives"), strategy.function))
        return FUNCTIONS[strategy.function](call)
    text = expression(call)
    if context.deferred is not None and op.name == context.deferred[0]:
        context.imports.add(("chunked_loss", "deferred_linear"))
        return f"deferred_linear({text.partition('(')[2].removesuffix(')')}, {context.deferred[1]})"
    if op.target == PADDED_LINEAR:
        context.imports.add(("padded_head", "padded_linear"))
    if op.target == _ATTENTION and drop_probability(op) > 0 and strategy.result.kind == "S":
        context.imports.add(("attention", "rank_attention"))
        text = text.replace("F.scaled_dot_product_attention(", "rank_attention(").removesuffix(")") + f", tp={tp})"
    return text


def printed_spec(spec: TensorSpec, layout: Layout, degree: int) -> TensorSpec:
    """What one rank holds; -1 stands for a number of rows that only the running program knows."""
    if layout != E:
        return local_spec(spec, layout, degree)
    shape: tuple[Any, ...] = (Symbol("-1"), *spec.shape[1:])
    return replace(spec, shape=shape)


def _n_unpadded(context: ForwardContext, op: Op, strategy: Strategy) -> int | None:
    """The true extent of the dim of an operand that is padded."""
    for name, layout in zip(operand_names(op), strategy.operands, strict=True):
        if layout.is_padded:
            extent = context.facts.specs[name].shape[layout.dim]
            assert isinstance(extent, int)
            return extent
    return None


def _inner_comment(context: ForwardContext, op: Op, strategy: Strategy) -> str:
    """What the function of a strategy communicates."""
    exchanged = exchanged_specs(op, strategy, context.facts.specs)
    if exchanged:
        n_bytes = sum(spec.n_bytes(1, context.precision) for spec in exchanged)
        return f"all-to-all of rows there and back, so that all ranks do as much: {n_bytes:,} bytes per sample each way"
    if not strategy.all_reduce_elements:
        return ""
    n_bytes = strategy.all_reduce_elements * (8 if context.precision == "fp64" else 4)
    return f"all-reduce of the statistics of {{value}}: {n_bytes:,} bytes per sample forward"


def _written_back(body: Body, op: Op, operands: tuple[Key, ...], strategy: Strategy) -> list[Line]:
    """Lines that put the parts of buffers that an op has written together again: buffers are whole on every rank."""
    lines = []
    for name, key, layout in zip(operand_names(op), operands, strategy.operands, strict=True):
        if name in body.context.buffers and layout.kind == "S":
            body.context.imports.add(("collectives", "all_gather"))
            spec = body.context.facts.specs[name]
            arguments = [placeholder(1), *_dims(layout, R), body.tp, *_blocks(layout, R)]
            arguments += _true_extent("size", spec, layout)
            n_bytes = spec.n_bytes(1, body.context.precision)
            lines.append(
                Line(
                    template=f"{placeholder(0)}.copy_(all_gather({', '.join(arguments)}))",
                    reads=(body.key(name), key),
                    comment=f"all-gather of the parts of {{value}}, which are written: {n_bytes:,} bytes forward",
                    has_effect=True,
                )
            )
    return lines


# ---------------------------------------------------------------- conversions


def _as_layout(body: Body, name: str, layout: Layout, *, layouts: SegmentLayouts) -> Key:
    """The key of a value in a layout; adds the conversion the first time it is needed."""
    source = layouts.produced.get(name, R)
    step = conversion(source, layout, has_gradient=name in body.context.facts.gradients)
    assert step is not None, (name, source, layout)
    if not step.function:
        return body.key(name)
    key = (name, str(layout))
    if key not in body.made:
        body.made.add(key)
        further = (_ends(body, name, layouts),) if layout == E else ()
        body.lines.append(_conversion_line(body, name, source, layout, step, further))
    return key


def _ends(body: Body, name: str, layouts: SegmentLayouts) -> Key:
    """The key of the value that says where, of the rows of `name`, those of each expert end."""
    context = body.context
    ends = body.ends[context.facts.specs[name].shape[0]]
    return _as_layout(body, ends, R, layouts=layouts)


def _conversion_line(
    body: Body, name: str, source: Layout, target: Layout, step: Conversion, further: tuple[Key, ...]
) -> Line:
    """`further` are operands of the function besides the value itself."""
    context = body.context
    context.imports.add((FUNCTION_MODULES.get(step.function, "collectives"), step.function))
    operands = [placeholder(index) for index in range(1 + len(further))]
    arguments = [*operands, *_dims(source, target), body.tp, *_blocks(source, target)]
    for side in (source, target):
        arguments += _true_extent("size", context.facts.specs[name], side)
    is_communication = step.forward or step.backward
    return Line(
        template=f"{step.function}({', '.join(arguments)})",
        reads=(body.key(name), *further),
        makes=((name, str(target)),),
        wishes=(Wish(suffix=_SUFFIX[target.kind]),),
        comment=_comment(context, name, step) if is_communication else "",
        nests="" if is_communication else "any",
    )


def _dims(source: Layout, target: Layout) -> list[str]:
    return [str(layout.dim) for layout in (source, target) if layout.kind == "S"]


def _blocks(source: Layout, target: Layout) -> list[str]:
    blocks = max(source.blocks, target.blocks)
    return [f"blocks={blocks}"] if blocks > 1 else []


def _true_extent(keyword: str, spec: TensorSpec, layout: Layout) -> list[str]:
    """The argument that says where the padding of a padded dim begins."""
    return [f"{keyword}={spec.shape[layout.dim]}"] if layout.is_padded else []


def _comment(context: ForwardContext, name: str, step: Conversion) -> str:
    """Why the conversion communicates, and how much of it per sample (or in all, for a parameter)."""
    spec = context.facts.specs[name]
    is_per_sample = any(isinstance(extent, PerSample) for extent in spec.shape)
    size = f"{spec.n_bytes(1, context.precision):,} bytes{' per sample' if is_per_sample else ''}"
    what = context.names.module_of(name) or "{value}"
    forward = _FORWARD[step.forward].format(what=what) if step.forward else ""
    if not step.backward:
        return f"{forward}: {size} forward"
    action, share = _BACKWARD[step.backward]
    if not forward:
        return f"{action} the gradient of {what}, {share}: {size} backward"
    return f"{forward}, {action} its gradient: {size} each way"


def _batch_expression(values: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> str:
    """`x.shape[0]`, from the first value that has the batch as a dim; "" when none has."""
    for wanted_exactly in (True, False):
        for name, text in values.items():
            for dim, extent in enumerate(specs[name].shape):
                if isinstance(extent, PerSample) and (extent.count == 1 or not wanted_exactly):
                    divided = f" // {extent.count}" if extent.count > 1 else ""
                    return f"{text}.shape[{dim}]{divided}"
    return ""
