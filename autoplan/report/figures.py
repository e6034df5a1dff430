"""Figures of hardware with their values, and under those that share it where they come from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from autoplan.plain_text import WIDTH, text_table

_INDENT = "    "


def figures_text(sources: Sequence[tuple[str, str]], values: Mapping[str, str]) -> str:
    """A line per figure, and below each group of one source that source.

    `sources` are (figure, source) pairs; `values` are texts with a unit, "9 us", by figure; one may be missing.
    """
    if not sources:
        return ""
    split = {name: values.get(name, "").partition(" ") for name, _ in sources}
    rows = [(name, number, unit) for name, (number, _, unit) in split.items()]
    head, rule, *lines = text_table(("figure", "value", "unit"), rows, right=frozenset({1})).splitlines()
    line_of = dict(zip(split, lines, strict=True))
    names_of: dict[str, list[str]] = {}
    for name, source in sources:
        names_of.setdefault(source, []).append(name)
    text = [head, rule]
    for source, names in names_of.items():
        text += [line_of[name] for name in names]
        text.append(
            textwrap.fill(source, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
        )
    return "\n".join(text)
