"""Ops of a segment -> the statements of a forward function, with the conversions between layouts in their place."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.codegen.expressions import Call, expression
from autoplan.graph import COMPUTE, GraphFacts, Op, OpGraph, PerSample, Ref
from autoplan.layout import Layout, R, conversion, local_spec
from autoplan.rules import OpRule, operand_names
from autoplan.sharding import SegmentLayouts

RESERVED = frozenset({"torch", "nn", "F", "self", "batch", "tp", "block", "shard", "x", *keyword.kwlist})
_SUFFIX = {"R": "whole", "V": "copied", "S": "part", "P": "partial"}
_PURPOSE = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


@dataclass(slots=True)
class Names:
    """The Python names of a function's values. Grows while the function is written."""

    expressions: dict[str, str] = field(default_factory=dict)
    converted: dict[tuple[str, Layout], str] = field(default_factory=dict)
    used: set[str] = field(default_factory=lambda: set(RESERVED))

    def unique(self, wanted: str) -> str:
        """A new Python name, as near to `wanted` as possible."""
        base = wanted if wanted.isidentifier() else "value"
        name, number = base, 1
        while name in self.used:
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        return name


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What stays the same over all functions of a program.

    Attributes:
        facts: of the graph.
        imports: functions of `runtime.collectives` that were used; grows while the functions are written.
    """

    graph: OpGraph
    rules: Mapping[str, OpRule]
    degree: int
    precision: str
    facts: GraphFacts
    imports: set[str]

    @classmethod
    def of(cls, graph: OpGraph, *, rules: Mapping[str, OpRule], degree: int, precision: str) -> ForwardContext:
        """The context of one program."""
        return cls(graph, rules, degree, precision, GraphFacts.of(graph), set())


def statements(
    context: ForwardContext,
    ops: tuple[Op, ...],
    *,
    layouts: SegmentLayouts,
    names: Names,
    tp: str,
    leaving: Mapping[str, Layout],
) -> list[str]:
    """The lines that compute `ops`; `names` knows the inputs and learns the results.

    `leaving` maps values to the layout they must have at the end; their expressions are updated to it.
    """
    lines: list[str] = []
    pieces = _pieces(ops)
    for op in ops:
        if op.target == "getitem" and op.args[0].name in pieces:
            continue
        operands = tuple(
            _as_layout(context, name, layout, layouts=layouts, names=names, tp=tp, lines=lines)
            for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True)
        )
        if op.target == "aten.dropout.default" and not op.args[1]:
            names.expressions[op.name] = operands[0]
            continue
        text = _op_text(context, op, operands=operands, layouts=layouts, names=names, tp=tp)
        if op.name in pieces:
            targets = [names.unique(_readable(item)) for item in pieces[op.name]]
            names.expressions.update(zip((item.name for item in pieces[op.name]), targets, strict=True))
            lines.append(f"{', '.join(targets)} = {text}")
        else:
            names.expressions[op.name] = names.unique(_readable(op))
            lines.append(f"{names.expressions[op.name]} = {text}")
    for name, layout in leaving.items():
        names.expressions[name] = _as_layout(context, name, layout, layouts=layouts, names=names, tp=tp, lines=lines)
    return lines


def _pieces(ops: tuple[Op, ...]) -> dict[str, list[Op]]:
    """Ops with several results whose every piece is read exactly once: they unpack into names."""
    found = {}
    for op in ops:
        readers = [r for r in ops if r.target == "getitem" and r.args[0] == Ref(op.name)]
        if len(op.outputs) > 1 and sorted(r.args[1] for r in readers) == list(range(len(op.outputs))):
            found[op.name] = sorted(readers, key=lambda r: r.args[1])
    return found


def _readable(op: Op) -> str:
    """The name of the leaf module that made the value (`qkv`, `norm_1`), else of the operator."""
    last = op.module_path.split(".")[-1]
    kind = op.target.split(".")[1] if "." in op.target else "piece"
    is_leaf = kind in ("linear", "layer_norm", "rms_norm", "embedding", "addmm")
    name = last if is_leaf and last.isidentifier() and not last.isdigit() else kind
    return {"scaled_dot_product_attention": "attended", "cross_entropy_loss": "loss", "mse_loss": "loss"}.get(
        name, name.strip("_")
    )


def _op_text(
    context: ForwardContext,
    op: Op,
    *,
    operands: tuple[str, ...],
    layouts: SegmentLayouts,
    names: Names,
    tp: str,
) -> str:
    strategy = layouts.strategies[op.name]
    if strategy.function:
        context.imports.add(strategy.function)
        if strategy.function == "vocab_parallel_embedding":
            return f"vocab_parallel_embedding({operands[1]}, {operands[0]}, {tp})"
        keywords = _loss_keywords(op)
        return f"{strategy.function}({', '.join([*operands, tp, *keywords])})"
    return expression(
        Call(
            op=op,
            operands=operands,
            result=local_spec(op.outputs[0], strategy.result, context.degree),
            dtype_like=_like(context, names, wanted=COMPUTE) or "self",
            device_like=_like(context, names, wanted=None) or "self",
        )
    )


def _loss_keywords(op: Op) -> list[str]:
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    values = dict(zip(names, op.args[2:], strict=False)) | dict(op.kwargs)
    texts = []
    if values.get("reduction", 1) != 1:
        texts.append(f"reduction={('none', 'mean', 'sum')[values['reduction']]!r}")
    texts += [
        f"{key}={values[key]!r}"
        for key, default in (("ignore_index", -100), ("label_smoothing", 0.0))
        if values.get(key, default) != default
    ]
    return texts


def _like(context: ForwardContext, names: Names, *, wanted: str | None) -> str | None:
    """The expression of some value that is already there, in the wanted dtype."""
    for name, text in names.expressions.items():
        spec = context.facts.specs.get(name)
        if spec is not None and (wanted is None or spec.dtype == wanted):
            return text
    return None


def _as_layout(
    context: ForwardContext,
    name: str,
    layout: Layout,
    *,
    layouts: SegmentLayouts,
    names: Names,
    tp: str,
    lines: list[str],
) -> str:
    """The expression of a value in a layout; writes the conversion the first time it is needed."""
    source = layouts.produced.get(name, R)
    step = conversion(source, layout, has_gradient=name in context.facts.gradients)
    assert step is not None, (name, source, layout)
    plain = names.expressions[name]
    if not step.function:
        return plain
    if (name, layout) not in names.converted:
        context.imports.add(step.function)
        result = names.unique("_".join([*plain.split(".")[-2:], _SUFFIX[layout.kind]]))
        arguments = [plain, *_dims(source, layout), tp, *_blocks(source, layout)]
        for line in _comment(context, name, step.forward, step.backward):
            lines.append(line)
        lines.append(f"{result} = {step.function}({', '.join(arguments)})")
        names.converted[name, layout] = result
    return names.converted[name, layout]


def _dims(source: Layout, target: Layout) -> list[str]:
    return [str(layout.dim) for layout in (source, target) if layout.kind == "S"]


def _blocks(source: Layout, target: Layout) -> list[str]:
    blocks = max(source.blocks, target.blocks)
    return [f"blocks={blocks}"] if blocks > 1 else []


def _comment(context: ForwardContext, name: str, forward: str, backward: str) -> list[str]:
    """What the conversion communicates, and how much of it per sample (or in all, for a parameter)."""
    spec = context.facts.specs[name]
    is_per_sample = any(isinstance(extent, PerSample) for extent in spec.shape)
    size = f"{spec.n_bytes(1, context.precision):,} bytes{' per sample' if is_per_sample else ''}"
    directions = [
        f"{direction}: {_PURPOSE[kind]}" for direction, kind in (("forward", forward), ("backward", backward)) if kind
    ]
    return [f"# {', '.join(directions)} of {size}"] if directions else []


def input_names(segment_inputs: tuple[str, ...], context: ForwardContext, names: Names) -> list[str]:
    """Python names for the inputs of a function: `x` for the one that carries the gradient."""
    with_gradient = [name for name in segment_inputs if name in context.facts.gradients]
    found = []
    for name in segment_inputs:
        if [name] == with_gradient:
            text = "x"
        else:
            text = names.unique(name if name.isidentifier() else "value")
        names.expressions[name] = text
        found.append(text)
    return found


def batch_statement(values: tuple[str, ...], context: ForwardContext, names: Names) -> str:
    """`batch = x.shape[0]`, from the first value that has the batch as a dim; "" when none has."""
    for wanted_exactly in (True, False):
        for name in values:
            for dim, extent in enumerate(context.facts.specs[name].shape):
                if isinstance(extent, PerSample) and (extent.count == 1 or not wanted_exactly):
                    divided = f" // {extent.count}" if extent.count > 1 else ""
                    return f"batch = {names.expressions[name]}.shape[{dim}]{divided}"
    return ""
