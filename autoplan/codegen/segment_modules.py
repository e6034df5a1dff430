"""One class per kind of segment, alone: what `autoplan profile` measures.

class Block              as in parallel_model.py
class Outer0, Outer1     what stands between blocks, with the weights it reads
Stage0                   all of them as one stage, which shows what blocks are called with
loss_fn                  as in parallel_model.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from autoplan.codegen.blocks import block_class
from autoplan.codegen.containers import weights_tree
from autoplan.codegen.forward import Body
from autoplan.codegen.loss import loss_function
from autoplan.codegen.parallel_model import opening
from autoplan.codegen.stages import add_outer, stage_class
from autoplan.codegen.text import INDENT, access, indented
from autoplan.codegen.writer import Writer, different_names, foreign_parameters, forward_head, writer_of
from autoplan.graph import LOSS_PATH, OpGraph, Segment
from autoplan.layout import Layout, R
from autoplan.parallel_plan import Plan
from autoplan.rules import OpRule

_SCRIPT = '''"""Measure what measurement.json lists, on one device: see measuring_program/__init__.py."""

import sys
from pathlib import Path

from measuring_program.program import main

main(Path(__file__).resolve().parent, sys.argv[1:])
'''


@dataclass(frozen=True, slots=True)
class SegmentClass:
    """How to call the class of one kind of segment.

    Attributes:
        arguments: (value, its layout) of each parameter of `forward`.
        results: the values it returns.
        has_loss: whether `loss_fn` belongs to it, on its results.
        text: the class, and `loss_fn` where it has one.
    """

    name: str
    arguments: tuple[tuple[str, Layout], ...]
    results: tuple[str, ...]
    has_loss: bool
    text: str = ""


def segment_modules(graph: OpGraph, plan: Plan, *, rules: Mapping[str, OpRule]) -> tuple[str, dict[int, SegmentClass]]:
    """The text of the classes, and per kind how to call its class; `plan` has one stage."""
    writer = writer_of(graph, plan, rules)
    first = graph.first_of_kind()
    described = {kind: _described(writer, segment) for kind, segment in first.items()}
    texts = {
        kind: block_class(writer, segment) if segment.is_block else _outer_class(writer, segment, described[kind])
        for kind, segment in first.items()
    }
    stage = [stage_class(writer, 0)] if any(segment.is_block for segment in graph.segments) else []
    loss = [loss_function(writer)] if any(found.has_loss for found in described.values()) else []
    body = "\n\n\n".join([*texts.values(), *stage, *loss])
    classes = {
        kind: replace(found, text="\n".join([texts[kind], *(loss if found.has_loss else [])]))
        for kind, found in described.items()
    }
    return f"{opening(writer, body)}\n\n\n{body}\n", classes


def measuring_files() -> dict[str, str]:
    """The program that measures the classes, by relative path; it stands beside them."""
    paths = sorted(files("autoplan.measuring_program").iterdir(), key=lambda item: item.name)
    package = {f"measuring_program/{path.name}": path.read_text() for path in paths if path.name.endswith(".py")}
    return {"measure.py": _SCRIPT, **package}


def _described(writer: Writer, segment: Segment) -> SegmentClass:
    graph, layouts = writer.graph, writer.layouts_of(segment).produced
    ops = graph.ops_of(segment)
    own = [op for op in ops if op.module_path != LOSS_PATH]
    has_loss = len(own) < len(ops)
    results = graph.model_outputs if has_loss else segment.outputs
    read = {name for op in own for name in op.input_names()}
    handed_on = set(results) - {op.name for op in own}  # the loss takes outputs of earlier segments too
    arguments = tuple(name for name in dict.fromkeys((*segment.inputs, *results)) if name in read | handed_on)
    if segment.is_block:
        name, arguments = writer.class_names[segment.kind], (*segment.inputs, *foreign_parameters(segment))
    else:
        name = f"Outer{segment.kind}"
    return SegmentClass(name, tuple((value, layouts.get(value, R)) for value in arguments), results, has_loss)


def _outer_class(writer: Writer, segment: Segment, described: SegmentClass) -> str:
    values = [name for name, _ in described.arguments]
    names = different_names([writer.context.names.argument([name]) for name in values])
    arguments = dict(zip(values, names, strict=True))
    held = {name: name for name in segment.parameters}
    body = Body(writer.context)
    add_outer(writer, segment, body)
    known = {name: access(name) for name in held}
    return "\n".join(
        [
            f"class {described.name}(nn.Module):",
            f'{INDENT}"""`{segment.name}`."""',
            "",
            f"{INDENT}def __init__(self, tp: ProcessGroup | None) -> None:",
            f"{INDENT * 2}super().__init__()",
            f"{INDENT * 2}self.{writer.context.group} = tp",
            *indented(weights_tree(held, writer, writer.layouts_of(segment)), 2),
            "",
            *indented(forward_head(arguments.values(), len(described.results)), 1),
            *indented(body.text(arguments=arguments, known=known, results=described.results, indent=2), 2),
        ]
    )
