"""Small pieces of Python text that every part of a generated file is made of."""

from __future__ import annotations

import keyword
from collections.abc import Container, Iterable, Sequence

from autoplan.graph import TensorSpec
from autoplan.layout import Layout

INDENT = "    "
LINE_LENGTH = 120


def is_name(text: str) -> bool:
    """Whether Python takes the text as a name: not `0`, `down-1` or `in`."""
    return text.isidentifier() and not keyword.iskeyword(text)


def access(path: str, classes: Container[str] = ()) -> str:
    """`self.mlp["0"].weight` for `mlp.0.weight`; what is no name is `getattr(self, "0")` in a generated class.

    `classes` are the paths of such below `self`, which is one itself.
    """
    text, parts = "self", path.split(".")
    for index, part in enumerate(parts):
        if is_name(part):
            text += f".{part}"
        elif index == 0 or ".".join(parts[:index]) in classes:
            text = f"getattr({text}, {quoted(part)})"
        else:
            text += f"[{quoted(part)}]"
    return text


def assigned(path: str, value: str, classes: Container[str] = ()) -> str:
    """The statement that makes `value` the submodule `path`; what is no name cannot be an attribute of a class."""
    parent, _, last = path.rpartition(".")
    if is_name(last) or (parent and parent not in classes):
        return f"{access(path, classes)} = {value}"
    return f"{access(parent, classes) if parent else 'self'}.add_module({quoted(last)}, {value})"


def range_text(start: int, stop: int) -> str:
    """`range(4)`, or `range(2, 4)`."""
    return f"range({start}, {stop})" if start else f"range({stop})"


def import_lines(module: str, names: Sequence[str]) -> list[str]:
    """`from module import ...`, over several lines when one is too short; nothing for no names."""
    if not names:
        return []
    line = f"from {module} import {', '.join(names)}"
    return [line] if len(line) <= LINE_LENGTH else [f"from {module} import (", *(f"{INDENT}{n}," for n in names), ")"]


def names_text(names: Iterable[str]) -> str:
    """A tuple of string literals, each once."""
    return tuple_text([quoted(name) for name in dict.fromkeys(names)])


def tuple_text(items: list[str]) -> str:
    """A tuple of expressions."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def shard_text(layout: Layout, spec: TensorSpec) -> str:
    """A sharded layout of a tensor as the runtime writes it."""
    blocks = f", blocks={layout.blocks}" if layout.blocks > 1 else ""
    padded_from = f", padded_from={spec.shape[layout.dim]}" if layout.is_padded else ""
    return f"Shard({layout.dim}{blocks}{padded_from})"


def quoted(text: str) -> str:
    """A Python string literal in double quotes."""
    return '"' + repr("'" + text)[2:-1].replace('"', '\\"') + '"'


def indented(lines: Iterable[str], level: int) -> list[str]:
    """The lines `level` levels deeper; empty lines stay empty."""
    return [INDENT * level + line if line else "" for line in lines]
