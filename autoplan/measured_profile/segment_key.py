"""Keys of what is measured: equal keys mean that the same thing is computed, whatever the values are called.

    content key       the ops of a segment, its parameters, inputs and outputs; equal for models that differ in depth
    assignment key    the layout of each of its values; "whole" without tensor parallelism
    code key          the generated code that runs; that of the same content changes with the generator only

Names are replaced by positions: inputs, then parameters, then results of ops. Module paths and labels are left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import Any

from autoplan.graph import LOSS_PATH, GraphFacts, OpGraph, Ref, Segment
from autoplan.parallel_plan import SegmentSharding

WHOLE = "whole"
_RUN = ("forward", "loss_fn")  # functions of generated code that a measurement runs


def content_key(graph: OpGraph, facts: GraphFacts, segment: Segment) -> str:
    """What a segment computes, as a short text."""
    places = _places(graph, segment)
    trained = {parameter.name for parameter in graph.parameters if parameter.is_trainable}
    rows: list[Any] = [
        [_plain(facts.specs[name]), name in facts.gradients, name in facts.invariant, name in trained]
        for name in _read(graph, segment)
    ]
    for op in graph.ops_of(segment):
        arguments = _numbered(op.args, places), [(key, _numbered(value, places)) for key, value in op.kwargs]
        rows.append([op.target, *arguments, _plain(op.outputs), op.module_path == LOSS_PATH])
    return _digest([rows, [places[name] for name in segment.outputs]])


def assignment_key(graph: OpGraph, segment: Segment, assignment: SegmentSharding | None) -> str:
    """How a segment is split, as a short text; `segment` is the first of its kind."""
    if assignment is None:
        return WHOLE
    places = _places(graph, segment)
    values = sorted((places[name], layout) for name, layout in assignment.values if name in places)
    uses = sorted((places.get(op, -1), str(places.get(where, where)), layout) for op, where, layout in assignment.uses)
    return _digest([values, uses])


def code_key(text: str) -> str:
    """What generated code runs, as a short text: its functions, without comments, whatever their values are called."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name in _RUN]
    return _digest([ast.unparse(_Numbered(function).whole()) for function in functions])


class _Numbered(ast.NodeTransformer):
    """A function whose arguments and local values have numbers for names; weights keep theirs."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
        stored = (node.id for node in names if isinstance(node.ctx, ast.Store))
        self._local = {*(argument.arg for argument in function.args.args), *stored} - {"self"}
        self._numbers: dict[str, int] = {}

    def whole(self) -> ast.AST:
        """The function, without its docstring."""
        if ast.get_docstring(self._function) is not None:
            del self._function.body[0]
        return ast.fix_missing_locations(self.visit(self._function))

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._name(node.arg))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._name(node.id), node.ctx)

    def _name(self, name: str) -> str:
        return f"value_{self._numbers.setdefault(name, len(self._numbers))}" if name in self._local else name


def _read(graph: OpGraph, segment: Segment) -> tuple[str, ...]:
    """The inputs and parameters that its ops read: the last segment may only hand on some, which takes nothing."""
    read = {name for op in graph.ops_of(segment) for name in op.input_names()}
    return tuple(name for name in (*segment.inputs, *segment.parameters) if name in read)


def _places(graph: OpGraph, segment: Segment) -> dict[str, int]:
    names = (*_read(graph, segment), *(op.name for op in graph.ops_of(segment)))
    return {name: place for place, name in enumerate(names)}


def _numbered(argument: Any, places: dict[str, int]) -> Any:
    if isinstance(argument, Ref):
        return {"value": places[argument.name]}
    if isinstance(argument, tuple):
        return [_numbered(item, places) for item in argument]
    return _plain(argument)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {type(value).__name__: [_plain(getattr(value, field.name)) for field in fields(value)]}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:20]
