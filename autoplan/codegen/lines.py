"""Lines of a function before they are text: who reads what decides names, and what is written inside what.

A value has one name. The name is free again after the last line that reads the value, so `q = q.transpose(1, 2)`
appears exactly where nothing reads the old `q`. A value without a name in the user's source that is read once is
written where it is read: `x = x + F.gelu(up)`.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autoplan.codegen.layout_text import flat, statement
from autoplan.codegen.text import INDENT, LINE_LENGTH

Key = tuple[str, str]  # a value of the graph and the layout it is held in ("" for the one it was made in)
RESERVED = frozenset({"batch", "block", "number", *keyword.kwlist, *dir(builtins)})
LONGEST_NESTED = 100  # characters of a line that holds another
UNKNOWN_LENGTH = 12  # of a name that is not known yet


@dataclass(frozen=True, slots=True)
class Like:
    """Stands for any value that is at hand, of this dtype (None for any)."""

    dtype: str | None


@dataclass(frozen=True, slots=True)
class Wish:
    """How a value would like to be called.

    Attributes:
        names: in order of preference; the first that is free is taken.
        suffix: where `names` is empty, the name of what the line reads first, or that with this suffix.
        may_rebind: whether it may take over the name of a value that nothing reads any more.
    """

    names: tuple[str, ...] = ()
    suffix: str = ""
    may_rebind: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """One statement.

    Attributes:
        template: its expression; `placeholder(i)` stands for what it reads.
        reads: what it reads, in order.
        makes: the values it assigns; none for a statement that is run for its effect.
        wishes: how each of them would like to be called.
        comment: what stands above it; `{value}` is what it reads first.
        loop: `for block in ...` when the statement is repeated, each time on the result of the time before.
        nests: whether it may be written inside the line that reads it: "" for no, "view" for in a view only, "any".
        is_view: whether it only looks at its operand in another way.
        has_effect: whether it does more than make values, so that it stays even if nothing reads them.
        is_joined: whether other lines are written inside it.
    """

    template: str
    reads: tuple[Key | Like, ...] = ()
    makes: tuple[Key, ...] = ()
    wishes: tuple[Wish, ...] = ()
    comment: str = ""
    loop: str = ""
    nests: str = ""
    is_view: bool = False
    has_effect: bool = False
    is_joined: bool = False


def placeholder(index: int) -> str:
    """The name that stands for operand `index` in a template."""
    return f"_{index}_"


def function_lines(
    lines: Sequence[Line],
    *,
    known: Mapping[Key, str],
    arguments: Mapping[Key, str],
    dtypes: Mapping[str, str],
    batch: str,
    results: Sequence[Key],
    indent: int,
) -> list[str]:
    """The body of a function.

    `known` are expressions that never change (weights), `arguments` the parameters of the function, `dtypes` the dtype
    of each value, `batch` the expression of the batch size.
    """
    lengths = {key: len(text) for key, text in {**known, **arguments}.items()}
    kept = _read_ones(lines, results)
    too_long: set[tuple[Key, ...]] = set()
    while True:
        nested = _nested(kept, lengths, results, without=too_long)
        writer = _Writer(nested, known, arguments, dtypes, results)
        texts = [writer.line(index, indent) for index in range(len(nested))]
        broken = {line.makes for line, text in zip(nested, texts, strict=True) if line.is_joined and len(text) > 1}
        if not broken:
            break
        too_long |= broken
    names = ", ".join(writer.text_of(key) for key in results)
    first = [f"batch = {batch}"] if batch and any("batch" in names_in(line.template) for line in nested) else []
    return [*first, *(part for text in texts for part in text), *statement(f"return {names}", indent)]


@cache
def names_in(template: str) -> frozenset[str]:
    """The Python names in an expression."""
    return frozenset(node.id for node in ast.walk(_parsed(template)) if isinstance(node, ast.Name))


def _parsed(template: str) -> ast.expr:
    return ast.parse(template, mode="eval").body


class _Substitute(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self.expressions = expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _parsed(self.expressions[node.id]) if node.id in self.expressions else node


def filled(template: str, expressions: Sequence[str]) -> str:
    """The template with expressions for its placeholders, in the fewest parentheses."""
    table = {placeholder(index): text for index, text in enumerate(expressions)}
    return flat(_Substitute(table).visit(_parsed(template)))


# ---------------------------------------------------------------- what is written inside what


def _read_ones(lines: Sequence[Line], results: Sequence[Key]) -> list[Line]:
    """The lines whose results are read, or that have an effect."""
    read: set[Key | Like] = set(results)
    found = []
    for line in reversed(lines):
        if line.has_effect or not read.isdisjoint(line.makes):
            read.update(line.reads)
            found.append(line)
    return found[::-1]


def _nested(
    lines: Sequence[Line],
    known_lengths: Mapping[Key, int],
    results: Sequence[Key],
    *,
    without: Container[tuple[Key, ...]],
) -> list[Line]:
    """The lines after every value that is read once and has no name of its own went into its reader, if it fits.

    Nothing goes into the lines that make `without`.
    A step of a chain that does not fit is called like what the chain makes: `q = F.linear(...)`, `q = q.reshape(...)`.
    """
    found: list[Line | None] = list(lines)
    readers: dict[Key, list[int]] = {key: [len(lines)] for key in results}
    lengths: dict[Key | Like, int] = dict(known_lengths.items())
    for index, line in enumerate(lines):
        for key in line.reads:
            if not isinstance(key, Like):
                readers.setdefault(key, []).append(index)
        source = lengths.get(line.reads[0], UNKNOWN_LENGTH) if line.reads else UNKNOWN_LENGTH
        for key, wish in zip(line.makes, line.wishes, strict=True):
            lengths[key] = len(wish.names[0]) if wish.names else source
    for index in reversed(range(len(lines))):
        inner = found[index]
        assert inner is not None
        if not inner.nests or len(readers.get(inner.makes[0], ())) != 1:
            continue
        at = readers[inner.makes[0]][0]
        while at < len(lines) and found[at] is None:  # the reader itself went into its own reader
            at = readers[lines[at].makes[0]][0]
        outer = found[at] if at < len(lines) else None
        has_effect_between = any(between.has_effect for between in lines[index + 1 : at])
        if outer is None or outer.comment or outer.loop or has_effect_between:
            continue
        if inner.nests == "view" and not _reads_in_view(inner.makes[0], outer):
            continue
        joined = _joined(inner, outer)
        if outer.makes not in without and _estimated_length(joined, lengths) <= LONGEST_NESTED:
            found[at], found[index] = joined, None
        elif outer.is_view and len(outer.wishes) == 1 and outer.reads[0] == inner.makes[0]:
            wish = replace(outer.wishes[0], names=(*outer.wishes[0].names, *inner.wishes[0].names))
            found[index] = replace(inner, wishes=(wish,))
    return [line for line in found if line is not None]


def _reads_in_view(key: Key, outer: Line) -> bool:
    """Whether the value is what a view, possibly one inside the line, looks at."""
    wanted = placeholder(outer.reads.index(key))
    return outer.is_view and any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == wanted
        for node in ast.walk(_parsed(outer.template))
    )


def _joined(inner: Line, outer: Line) -> Line:
    """`outer` with `inner` written in the place of the value that it makes."""
    position = outer.reads.index(inner.makes[0])
    reads = outer.reads[:position] + inner.reads + outer.reads[position + 1 :]
    shift = len(inner.reads) - 1
    own = [placeholder(i) if i < position else placeholder(i + shift) for i in range(len(outer.reads))]
    own[position] = filled(inner.template, [placeholder(position + i) for i in range(len(inner.reads))])
    return replace(outer, template=filled(outer.template, own), reads=reads, is_joined=True)


def _estimated_length(line: Line, lengths: Mapping[Key | Like, int]) -> int:
    """Its length when values get the names they wish for."""
    operands = sum(lengths.get(key, UNKNOWN_LENGTH) - len(placeholder(index)) for index, key in enumerate(line.reads))
    targets = sum(lengths[key] + len(" = ") for key in line.makes)
    return len(line.template) + operands + targets


# ---------------------------------------------------------------- names


class _Writer:
    """The names in force while the lines become text. Never leaves this module."""

    def __init__(
        self,
        lines: Sequence[Line],
        known: Mapping[Key, str],
        arguments: Mapping[Key, str],
        dtypes: Mapping[str, str],
        results: Sequence[Key],
    ) -> None:
        self.lines, self.known, self.dtypes = lines, known, dtypes
        self.holders = {name: key for key, name in arguments.items()}
        self.names = dict(arguments)
        self.reserved = RESERVED.union(*(names_in(line.template) for line in lines), *map(names_in, known.values()))
        self.last_read: dict[Key, int] = {}
        for index, line in enumerate(lines):
            self.last_read.update({key: index for key in line.reads if not isinstance(key, Like)})
        self.last_read.update(dict.fromkeys(results, len(lines)))

    def text_of(self, key: Key | Like) -> str:
        """The expression of a value that is at hand now."""
        if isinstance(key, Like):
            return self._any_like(key.dtype)
        return self.known[key] if key in self.known else self.names[key]

    def _any_like(self, dtype: str | None) -> str:
        candidates = [(name, key) for name, key in self.holders.items() if self.names.get(key) == name]
        candidates += [(text, key) for key, text in self.known.items()]
        fitting = [text for text, (value, _) in candidates if dtype is None or self.dtypes.get(value) == dtype]
        assert fitting, f"no value of dtype {dtype} is at hand"
        return fitting[0]

    def line(self, index: int, indent: int) -> list[str]:
        """The text of one line, on several where it is long; from then on its results have their names."""
        line = self.lines[index]
        operands = [self.text_of(key) for key in line.reads]
        comment = (
            _comment_lines(line.comment.format(value=operands[0].removeprefix("self.")), indent) if line.comment else []
        )
        if line.loop:
            return [*comment, *self._loop(line, index, operands)]
        expression = filled(line.template, operands)
        targets = [
            self._take(key, wish, index, source=operands[0] if operands else "value", others=line.makes)
            for key, wish in zip(line.makes, line.wishes, strict=True)
        ]
        text = f"{', '.join(targets)} = {expression}" if targets else expression
        return [*comment, *statement(text, indent)]

    def _loop(self, line: Line, index: int, operands: list[str]) -> list[str]:
        """The carried value keeps its name when nothing else reads it; what is read each time keeps its own."""
        (made,), (wish,) = line.makes, line.wishes
        carried = line.reads[0]
        kept = [key for key in line.reads[1:] if not isinstance(key, Like)]
        wish = replace(wish, names=(operands[0], *wish.names)) if carried in self.names else wish
        target = self._take(made, wish, index, source=operands[0], kept=kept)
        call = filled(line.template, [target, *operands[1:]])
        start = [] if target == operands[0] else [f"{target} = {operands[0]}"]
        return [*start, f"{line.loop}:", f"{INDENT}{target} = {call}"]

    def _take(
        self,
        key: Key,
        wish: Wish,
        index: int,
        *,
        source: str,
        kept: Iterable[Key] = (),
        others: Iterable[Key] = (),
    ) -> str:
        base = _identifier(source)
        candidates = wish.names or (base, f"{base}_{wish.suffix}")
        untouchable = {self.names.get(other) for other in (*kept, *others)}
        name = next((c for c in candidates if self._is_free(c, index, wish.may_rebind, untouchable)), "")
        number = 1
        while not name:
            number += 1
            numbered = f"{candidates[-1]}_{number}"
            name = numbered if self._is_free(numbered, index, wish.may_rebind, untouchable) else ""
        self.holders[name], self.names[key] = key, name
        return name

    def _is_free(self, name: str, index: int, may_rebind: bool, untouchable: set[str | None]) -> bool:
        if name in self.reserved or name in untouchable or not name.isidentifier():
            return False
        if name not in self.holders:
            return True
        return may_rebind and self.last_read.get(self.holders[name], -1) <= index


def _identifier(expression: str) -> str:
    """A name for what an expression stands for: `norm_1_weight` for `self.norm_1.weight`."""
    words = "".join(char if char.isalnum() or char == "_" else " " for char in expression).split()
    words = [word for word in words if word != "self"][-2:]
    text = "_".join(words) if "." in expression or "[" in expression else expression
    return text if text.isidentifier() else f"value_{text}"


def _comment_lines(text: str, indent: int) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, LINE_LENGTH - len(INDENT) * indent - len("# "))]
