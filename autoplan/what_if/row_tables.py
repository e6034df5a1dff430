"""Rows as CSV and JSON, and the schema of that JSON."""

from __future__ import annotations

import csv
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from typing import Any

from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.report_text import assumption_texts
from autoplan.what_if.rows import SHARES, WhatIfRow

_OF_WHOLE_HOSTS = ("device_hours", "cost_usd", "cost_usd_interval", "usd_per_billion_tokens", "own_cost_usd")


def row_to_dict(row: WhatIfRow) -> dict[str, Any]:
    """A row as JSON values; shares as an object."""
    return {**asdict(row), "shares": dict(row.shares)}


def whatif_to_dict(answer: WhatIf) -> dict[str, Any]:
    """The answer as JSON values; `whatif_schema` says which."""
    sweep = answer.sweep
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": [row_to_dict(row) for row in answer.rows],
        "is_interrupted": sweep.is_interrupted,
        "n_known_before": sweep.n_kept,
        "processor_s": sweep.processor_s,
        "wall_s": sweep.wall_s,
        "assumptions": list(assumption_texts(answer.assumptions)),
    }


def whatif_csv(rows: Sequence[WhatIfRow]) -> str:
    """One line per row: plain fields, intervals as `_low` and `_high`, and a column per share of wall time."""
    out = StringIO()
    names = [field.name for field in fields(WhatIfRow) if field.name != "shares"]
    header = [f"{name}{end}" for name in names for end in _ends(name)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, *(f"share_{name}" for name in SHARES)])
    for row in rows:
        shares = dict(row.shares)
        cells = [cell for name in names for cell in _csv_cells(name, getattr(row, name))]
        writer.writerow([*cells, *(shares.get(name, "") for name in SHARES)])
    return out.getvalue()


def _ends(name: str) -> tuple[str, ...]:
    return ("_low", "_high") if name.endswith("_interval") else ("",)


def _csv_cells(name: str, value: Any) -> list[Any]:
    if name.endswith("_interval"):
        return ["", ""] if value is None else list(value)
    return ["; ".join(value) if isinstance(value, tuple) else "" if value is None else value]


def whatif_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `autoplan whatif --format json`."""
    hints = typing.get_type_hints(WhatIfRow)
    row = {name: _schema(hint) for name, hint in hints.items()}
    for name in _OF_WHOLE_HOSTS:
        row[name]["description"] = "of whole hosts: of devices that the plan leaves idle and of spare hosts too"
    row["shares"] = {
        "type": "object",
        "description": "share of wall time by what it is spent on; the shares sum to 1, or there is none",
        "properties": {name: {"type": "number"} for name in SHARES},
        "additionalProperties": False,
    }
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "rows": {"type": "array", "items": _object(row)},
        "is_interrupted": {"type": "boolean"},
        "n_known_before": {"type": "integer"},
        "processor_s": {"type": "number"},
        "wall_s": {"type": "number"},
        "assumptions": {"type": "array", "items": {"type": "string"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autoplan whatif",
        **_object(properties),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _schema(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(item) for item in typing.get_args(hint)]}
    if hint is type(None):
        return {"type": "null"}
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _schema(items[0])}
        return {"type": "array", "prefixItems": [_schema(item) for item in items], "minItems": len(items)}
    return {"type": _NAMES[hint]}
