"""The user's own names for the values of a graph, from the source lines that computed them.

`torch.export` records for each op the stack of `forward` calls. A statement that is on the stack of consecutive ops
made all of them; those of its values that are read outside of it are what its targets name:

    q, k, v = self.qkv(x).split(width, dim=2)       linear, split, getitem, getitem, getitem
                                                    read outside: the getitems, so they are q, k and v
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from autoplan.graph import Op

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a source file; `targets` are the names it assigns."""

    file: str
    line: int
    targets: tuple[str, ...] = ()


Stack = tuple[_Statement, ...]


def with_labels(ops: tuple[Op, ...], stack_traces: Mapping[str, str]) -> tuple[Op, ...]:
    """The ops with `label` set where the user's source names their result; `stack_traces` are by op name."""
    files: dict[str, dict[int, _Statement]] = {}
    stacks = [_stack(stack_traces.get(op.name, ""), files) for op in ops]
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for name in op.input_names():
            readers.setdefault(name, []).append(index)
    labels: dict[str, str] = {}
    for depth in range(max(map(len, stacks), default=0), 0, -1):  # the innermost statement names best
        for statement, group in _statement_groups(ops, stacks, depth):
            inside = set(group)
            escaping = [ops[i].name for i in group if not inside.issuperset(readers.get(ops[i].name, (len(ops),)))]
            if len(escaping) == len(statement.targets):
                for name, target in zip(escaping, statement.targets, strict=True):
                    labels.setdefault(name, target)
    return tuple(replace(op, label=labels.get(op.name, "")) for op in ops)


def place_of(stack_trace: str) -> str:
    """` at FILE:LINE: TEXT`, the innermost line of a recorded stack; empty where nothing was recorded."""
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    file, line = frames[-1].groups()
    text = linecache.getline(file, int(line)).strip()
    return f" at {file}:{line}" + (f": {text}" if text else "")


def _statement_groups(ops: tuple[Op, ...], stacks: list[Stack], depth: int) -> Iterator[tuple[_Statement, list[int]]]:
    """Statements at one depth of the stack with the ops that each execution of them made."""
    for stack, indices in groupby(range(len(ops)), key=lambda i: stacks[i][:depth]):
        if len(stack) == depth and stack[-1].targets:
            for _, group in groupby(indices, key=lambda i: _element(ops[i].module_path)):
                yield stack[-1], list(group)


def _element(module_path: str) -> str:
    """The innermost container element around a module: a loop over a container repeats its statements for each."""
    parts = module_path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _stack(stack_trace: str, files: dict[str, dict[int, _Statement]]) -> Stack:
    """The statements on a stack, outermost first; `files` remembers what was parsed."""
    found = []
    for file, line in _FRAME.findall(stack_trace):
        if file not in files:
            files[file] = _statements(file)
        found.append(files[file].get(int(line), _Statement(file, int(line))))
    return tuple(found)


def _statements(file: str) -> dict[int, _Statement]:
    """The innermost statement on each line of a file; nothing for code that has no file, or that is torch's own."""
    if file.startswith("<") or "/torch/nn/" in file:
        return {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    table: dict[int, _Statement] = {}
    for node in ast.walk(tree):  # outer statements come first
        if isinstance(node, ast.stmt):
            statement = _Statement(file, node.lineno, _targets(node))
            table.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), statement))
    return table


def _targets(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement assigns, without `_`; none where a target is no plain name or attribute."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    else:
        return ()
    items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = [item.id if isinstance(item, ast.Name) else getattr(item, "attr", "") for item in items]
    return tuple(name for name in names if name != "_") if all(names) else ()
