"""Pieces of plain text: tables of at most 80 columns, counted nouns, numbers for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
MIN_LAST_WIDTH = 8
COLUMN_GAP, NARROW_GAP = "  ", " "
_KEPT_SPACE = "\0"  # which no cell has


def rate_text(per_s: float) -> str:
    """A rate with thousands separated: `37,112` or `4.56`."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def text_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: frozenset[int] = frozenset(),
    show_header: bool = True,
    width: int | None = WIDTH,
    phrases_of: int | None = None,
) -> str:
    """Rows of text as aligned columns; the last column wraps so that no line passes `width`; None never wraps.

    Cells are shown as they are, but for control characters, which become spaces. With `phrases_of`, cells of the last
    column are phrases with commas between them, which stay whole where they fit; and where less than `phrases_of`
    characters are left for that column, the others stand closer together.
    """
    cells = [[_printable(cell) for cell in row] for row in ([header] if show_header else []) + list(rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    gap, n_gaps = COLUMN_GAP, len(widths) - 1
    if width is not None and width - sum(widths[:-1]) - len(gap) * n_gaps < min(phrases_of or 0, widths[-1]):
        gap = NARROW_GAP
    indent = sum(widths[:-1]) + len(gap) * n_gaps
    lines = []
    for row in cells:
        first = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        is_wide = width is not None and indent + widths[-1] > width
        room = max((width or 0) - indent, MIN_LAST_WIDTH)
        last = _wrapped(row[-1], room, keeps_phrases=phrases_of is not None) if is_wide else [first[-1]]
        lines.append(gap.join([*first[:-1], *last[:1]]).rstrip())
        lines += [(" " * min(indent, (width or 0) - len(rest)) + rest).rstrip() for rest in last[1:]]
    if show_header:
        longest = max(len(line) for line in lines)
        lines.insert(1, "-" * (longest if width is None else min(longest, width)))
    return "\n".join(lines)


def _wrapped(text: str, width: int, *, keeps_phrases: bool = False) -> list[str]:
    """`text` as lines of at most `width`; a word of at most half a page stays whole, on a line below the first."""
    if keeps_phrases:
        phrases = [part if len(part) >= width else part.replace(" ", _KEPT_SPACE) for part in text.split(", ")]
        return [line.replace(_KEPT_SPACE, " ") for line in _wrapped(", ".join(phrases), width)]
    keeps = max(map(len, text.split()), default=0) <= WIDTH // 2
    lines = textwrap.wrap(text, width, break_long_words=not keeps, break_on_hyphens=not keeps)
    return ["", *lines] if lines and len(lines[0]) > width else lines


def page(parts: Iterable[str]) -> str:
    """The parts that hold something, an empty line between them; a line that is too long goes on below, indented."""
    text = "\n\n".join(part for part in parts if part)
    lines = (line if len(line) <= WIDTH else folded(line, indent=_indent(line) + 4) for line in text.split("\n"))
    return "\n".join(lines) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def folded(line: str, *, width: int = WIDTH, indent: int = 0) -> str:
    """A line as several of at most `width` columns, those after the first indented; words stay whole."""
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _printable(cell: str) -> str:
    return "".join(character if character.isprintable() else " " for character in cell)


def percent(share: float) -> str:
    """`95%`, `99.9%`: a share that somebody wrote, in all its digits."""
    return f"{100 * share:g}%"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def si_count(number: float) -> str:
    """A count with a decimal prefix: 124 M."""
    for factor, prefix in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{prefix}"
    return f"{number:.3g}"
