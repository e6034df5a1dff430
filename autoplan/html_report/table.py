"""Cards and tables: cells with a text to read and a value to sort by; as HTML rows, as CSV, as JSON records."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Card:
    """A figure at a glance; `kind` is one of `provenance.KINDS`."""

    value: str
    name: str
    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what rows are sorted by: a number, or the text itself where `value` is None."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table to be shown; `numeric` are the columns that stand to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()


def cells(*items: str | tuple[str, float | None]) -> tuple[Cell, ...]:
    """A row: texts, and (text, value) pairs."""
    return tuple(Cell(item) if isinstance(item, str) else Cell(*item) for item in items)


def records_csv(records: Sequence[dict[str, Value]]) -> str:
    """Records of equal keys as CSV text; an unknown value is empty.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if records:
        writer.writerow(records[0])
    writer.writerows([_inert(value) for value in record.values()] for record in records)
    return text.getvalue()


def _inert(value: Value) -> Value:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
