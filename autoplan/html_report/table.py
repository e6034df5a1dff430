"""Cards and tables: cells with a text to read and a value to sort by; as HTML rows, as CSV, as JSON records."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from autoplan.html_report.provenance import KINDS

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
    """What is shown, and what rows are sorted by: a number, or the text itself where `value` is None.

    `kind` is one of `provenance.KINDS`; "" where it is that of the table.
    """

    text: str
    value: float | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table to be shown; `numeric` are the columns that stand to the right.

    `kind` is what the figures of these columns rest on (one of `provenance.KINDS`) unless a cell says another.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    kind: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that a reader meets in it."""
        own = {cell.kind for row in self.rows for cell in row}
        return tuple(kind for kind in KINDS if kind in own | {self.kind})


def cells(*items: str | tuple[str, float | None], kind: str = "") -> tuple[Cell, ...]:
    """A row: texts, and (text, value) pairs of this kind."""
    return tuple(Cell(item) if isinstance(item, str) else Cell(*item, kind) for item in items)


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
