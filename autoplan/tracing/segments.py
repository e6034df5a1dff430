"""Ops -> segments: consecutive ops of one repeated block, folded by proof of equality.

A block is an element of a container: the part of the module path up to its first number (`transformer.h.3`), and on to
the next one where elements are containers themselves (`groups.0.2`). Ops outside any block form segments of their own.
Two segments are of one kind when their ops are equal after names are replaced by positions, parameter names by their
names inside the block, what they read has the same shapes, and gradients flow through the same values. A block that is
called in several ways is one in those calls that are of the kind of the first; what the others run stands outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from autoplan.graph import Argument, Input, Op, Parameter, Ref, Segment, TensorSpec, gradient_values

_Run = tuple[str | None, int, int]  # the path of a block, None outside of blocks, and which ops run one after the other


def block_path(module_path: str, nested: frozenset[str] = frozenset()) -> str | None:
    """The path of the container element around a module; None outside of containers.

    `nested` are elements that are containers themselves (`nested_containers`).
    """
    parts = module_path.split(".")
    for index, part in enumerate(parts):
        path = ".".join(parts[: index + 1])
        if part.isdigit() and path not in nested:
            return path
    return None


def nested_containers(module_paths: Iterable[str]) -> frozenset[str]:
    """Container elements that only run numbered children with modules of their own, such as a Sequential of blocks."""
    children: dict[str, dict[str, bool]] = defaultdict(dict)
    for module_path in set(module_paths):
        parts = [*module_path.split("."), ""]
        for index, part in enumerate(parts[:-1]):
            if part.isdigit():
                path, child, has_modules = ".".join(parts[: index + 1]), parts[index + 1], len(parts) > index + 3
                children[path][child] = children[path].get(child, False) or has_modules
    return frozenset(
        path for path, table in children.items() if all(name.isdigit() and deep for name, deep in table.items())
    )


def split_segments(
    ops: tuple[Op, ...],
    *,
    inputs: tuple[Input, ...],
    parameters: tuple[Parameter, ...],
    kept: tuple[str, ...],
    class_names: Mapping[str, str],
) -> tuple[Segment, ...]:
    """The segments of a graph, in order; `kept` are values that leave the graph.

    `class_names` maps a module path to the name of the module's class.
    """
    parameter_names = {parameter.name for parameter in parameters}
    specs = {item.name: item.spec for item in inputs} | {item.name: item.spec for item in parameters}
    specs |= {op.name: op.outputs[0] for op in ops}
    gradients = gradient_values(ops, parameters)
    last_use = _last_uses(ops, kept)
    kinds: dict[object, int] = {}
    n_calls: dict[str, int] = defaultdict(int)
    segments = []

    def signature_of(path: str | None, start: int, stop: int) -> object:
        written = tuple(op.name for op in ops[start:stop] if last_use[op.name] >= stop)
        return _signature(
            ops[start:stop], path, specs=specs, parameters=parameter_names, gradients=gradients, outputs=written
        )

    for path, start, stop in _of_one_kind(block_runs(ops), signature_of):
        produced = {op.name for op in ops[start:stop]}
        reads = dict.fromkeys(name for op in ops[start:stop] for name in op.input_names() if name not in produced)
        read_values = tuple(name for name in reads if name not in parameter_names)
        written = tuple(op.name for op in ops[start:stop] if last_use[op.name] >= stop)
        signature = signature_of(path, start, stop)
        segments.append(
            Segment(
                name=_segment_name(path, n_calls),
                kind=kinds.setdefault(signature, len(kinds)),
                start=start,
                stop=stop,
                inputs=read_values,
                outputs=written,
                parameters=tuple(name for name in reads if name in parameter_names),
                class_name=class_names[path] if path else "",
            )
        )
    return tuple(segments)


def leaving_from_last(
    segments: tuple[Segment, ...],
    outputs: tuple[str, ...],
    *,
    ops: tuple[Op, ...],
    parameters: tuple[Parameter, ...],
) -> tuple[Segment, ...]:
    """The segments, of which the last one takes every output of the model, though only the user may read it.

    So an output that is made early crosses the boundaries like a value that the loss reads. A block takes nothing
    that it does not read: after it, such a model is not cut (`cost.boundaries.legal_cuts`).
    """
    *others, last = segments
    if last.is_block:
        return segments
    own = {op.name for op in ops[last.start : last.stop]}
    weights = {parameter.name for parameter in parameters}
    handed_on = dict.fromkeys(name for name in outputs if name not in own)
    inputs = dict.fromkeys((*last.inputs, *(name for name in handed_on if name not in weights)))
    read = dict.fromkeys((*last.parameters, *(name for name in handed_on if name in weights)))
    return *others, replace(last, inputs=tuple(inputs), parameters=tuple(read))


def block_runs(ops: tuple[Op, ...]) -> Iterator[_Run]:
    """(path, start, stop) of the ops that belong to one block, or to none (path None), in order."""
    start = 0
    nested = nested_containers(op.module_path for op in ops)
    for path, group in groupby(ops, key=lambda op: block_path(op.module_path, nested)):
        stop = start + sum(1 for _ in group)
        yield path, start, stop
        start = stop


def at_first_paths(ops: tuple[Op, ...], first_paths: Mapping[str, str]) -> tuple[Op, ...]:
    """The ops, with those of a block that containers hold several times at its first path, where its weights are named.

    `first_paths` maps every path of a module to its first.
    """
    nested = nested_containers(op.module_path for op in ops)

    def at_first_path(op: Op) -> Op:
        path = block_path(op.module_path, nested) or ""
        first = first_paths.get(path, path)
        return op if first == path else replace(op, module_path=first + op.module_path.removeprefix(path))

    return tuple(map(at_first_path, ops))


def _of_one_kind(runs: Iterable[_Run], signature_of: Callable[[str | None, int, int], object]) -> Iterator[_Run]:
    """The runs, of which those of a block that compute something else than its first one belong to no block.

    One generated class stands for a block, whose forward is that of its first run.
    """
    first: dict[str, object] = {}
    inside = [
        (path, start, stop)
        if path is not None and first.setdefault(path, made := signature_of(path, start, stop)) == made
        else (None, start, stop)
        for path, start, stop in runs
    ]
    for is_outside, group in groupby(inside, key=lambda run: run[0] is None):
        members = list(group)
        yield from [(None, members[0][1], members[-1][2])] if is_outside else members


def _segment_name(path: str | None, n_calls: dict[str, int]) -> str:
    """`h.3`, `h.3@1` for a second call of the same block, `outer.0`, `outer.1`, ... outside of blocks."""
    key = path or "outer"
    number = n_calls[key]
    n_calls[key] += 1
    if path is None:
        return f"outer.{number}"
    return f"{path}@{number}" if number else path


def _last_uses(ops: tuple[Op, ...], kept: tuple[str, ...]) -> dict[str, int]:
    last = {op.name: index for index, op in enumerate(ops)}
    for index, op in enumerate(ops):
        for name in op.input_names():
            last[name] = index
    last.update(dict.fromkeys(kept, len(ops)))
    return last


def _signature(
    ops: tuple[Op, ...],
    path: str | None,
    *,
    specs: Mapping[str, TensorSpec],
    parameters: set[str],
    gradients: frozenset[str],
    outputs: tuple[str, ...],
) -> object:
    """A value that is equal for two segments exactly when they compute the same."""
    numbers: dict[str, object] = {}

    def canonical(argument: Argument) -> object:
        if isinstance(argument, Ref):
            name = argument.name
            if name not in numbers:
                is_own = name in parameters and path is not None and name.startswith(path + ".")
                numbers[name] = (
                    name.removeprefix(f"{path}.") if is_own else (name if name in parameters else len(numbers))
                )
            return ("value", numbers[name], specs[name], name in gradients)
        if isinstance(argument, tuple):
            return tuple(canonical(item) for item in argument)
        return (type(argument).__name__, argument)

    rows = []
    for op in ops:
        arguments = canonical(op.args), tuple((key, canonical(value)) for key, value in op.kwargs)
        numbers[op.name] = len(numbers)
        rows.append((op.target, arguments, op.outputs, op.module_path.removeprefix(path or "")))
    return (path is None, tuple(rows), tuple(numbers[name] for name in outputs))
