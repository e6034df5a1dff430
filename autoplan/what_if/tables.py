"""Rows as text, CSV and JSON, and the schema of that JSON."""

from __future__ import annotations

import csv
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from io import StringIO
from typing import Any

from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.plain_text import WIDTH, count, rate_text, text_table
from autoplan.units import GB, MILLION, SECONDS_PER_HOUR, THOUSAND, format_seconds, format_share, format_usd
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.rows import (
    COMMUNICATION,
    SHARES,
    Assumptions,
    Axis,
    WhatIfRow,
    as_fast,
    fastest,
    point_name,
    varying,
)

N_EXPLAINED = 24  # rows whose plans are printed; of more, the plans are in CSV and JSON
LOSS_COLUMNS = (
    ("compute", ("compute",)),
    ("recompute", ("recompute",)),
    ("comm", COMMUNICATION),
    ("bubble", ("bubble",)),
    ("other", ("optimizer", "launch")),
    ("straggle", ("stragglers",)),
    ("loading", ("loading",)),
    ("save", ("checkpoints",)),
    ("failure", ("failures", "no_spare")),
)
ABSENT = "n/a"
KWH_PER_MWH = 1000


def whatif_table(rows: Sequence[WhatIfRow]) -> str:
    """The rows with the fastest (of equal ones the smallest) and the cheapest marked, their losses and their plans."""
    parts = [_main_table(rows), _batch_text(rows)]
    planned = [row for row in rows if row.shares]
    if len(rows) <= N_EXPLAINED:
        parts += [_loss_table(planned, rows)] if planned else []
        parts += [_money_table(rows)] if any(row.train_s is not None for row in rows) else []
        parts.append(_plans_text(rows))
    parts.append(_warnings_text(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def whatif_report(answer: WhatIf, *, search: str) -> str:
    """The table, and what it rests on."""
    sweep = answer.sweep
    searched = "plans under schedule 1f1b; --search full looks at all schedules" if search == "quick" else "all plans"
    gaps = [row.gap for row in answer.rows if row.gap is not None]
    proof = f"; no other of them is faster by more than {max(gaps):.1%}" if gaps else ""
    notes = [
        f"searched: {searched}{proof}",
        f"{count(len(sweep.results), 'point')}, {sweep.n_kept} known before; {sweep.processor_s:.3g} processor seconds",
        *assumption_texts(answer.assumptions),
    ]
    return whatif_table(answer.rows) + "\n" + "\n".join(textwrap.fill(note, WIDTH) for note in notes) + "\n"


def assumption_texts(given: Assumptions) -> tuple[str, ...]:
    """What the totals rest on, with dates."""
    reliability, money = given.reliability, given.money
    spares = f", {count(reliability.n_spare_hosts, 'spare host')}" if reliability.n_spare_hosts else ""
    checkpoint = (
        f"{reliability.checkpoint_bytes_per_s_per_host / GB:.3g} GB/s per host to save"
        if reliability.checkpoint_s is None
        else f"{format_seconds(reliability.checkpoint_s)} for a checkpoint"
    )
    prices = "prices: " + ", ".join(
        [
            *(["--price"] if given.given_usd else []),
            *([given.prices.where] if given.prices is not None else []),
            f"hardware profiles, and {given.shipped.where} (each with its date)",
        ]
    )
    return (
        f"failures: one per device in {reliability.device_mtbf_s / SECONDS_PER_HOUR:,.0f} h, restart "
        f"{format_seconds(reliability.restart_s)}, {checkpoint}{spares}",
        f"{prices}; rent: {money.rent.replace('_', '-')}; totals as of {given.today.isoformat()}",
        f"power: that of the board x load {money.load:.0%} x PUE {money.pue:g}"
        + ("" if money.host_power_w else ", hosts themselves not counted"),
    )


def _main_table(rows: Sequence[WhatIfRow]) -> str:
    cheapest = min((row.cost_usd for row in rows if row.cost_usd is not None), default=None)
    first, equal, axes = fastest(rows), as_fast(rows), _case_axes(rows)
    right = frozenset(range(1, 9))
    header = ["hardware", "hosts", "step", "samples/s", "MFU", "goodput", "time to train", "cost USD", ""]
    cells = []
    for row in rows:
        marks = ["fastest" if row is first else "as fast"] if row in equal else []
        marks += ["cheapest"] if row.cost_usd is not None and row.cost_usd == cheapest else []
        cells.append([row.hardware, str(row.n_hosts), *_figures(row), ", ".join(marks)])
    if axes:
        right = frozenset({1, *range(3, 10)})
        header.insert(2, "case")
        for row, line in zip(rows, cells, strict=True):
            line.insert(2, point_name(row, axes))
    return text_table(header, cells, right=right - {len(header) - 1})


def _figures(row: WhatIfRow) -> tuple[str, ...]:
    if row.step_s is None or row.samples_per_s is None:
        return (row.status, *[ABSENT] * 5)
    return (
        format_seconds(row.step_s),
        rate_text(row.samples_per_s),
        ABSENT if row.mfu is None else format_share(row.mfu),
        ABSENT if row.goodput is None else f"{row.goodput:.1%}",
        ABSENT if row.train_s is None else format_seconds(row.train_s),
        _usd(row.cost_usd) + _range(row),
    )


def _usd(usd: float | None) -> str:
    return ABSENT if usd is None else format_usd(usd).removesuffix(" USD")


def _range(row: WhatIfRow) -> str:
    """` (low to high)` where offers differ."""
    if row.cost_usd_interval is None or row.cost_usd_interval[0] == row.cost_usd_interval[1]:
        return ""
    low, high = row.cost_usd_interval
    unit, factor = next(
        ((unit, factor) for unit, factor in (("M", MILLION), ("k", THOUSAND)) if low >= factor), ("", 1)
    )
    return f" ({low / factor:.3g}{unit} to {high / factor:.3g}{unit})"


def _loss_table(planned: Sequence[WhatIfRow], rows: Sequence[WhatIfRow]) -> str:
    """Shares of wall time; columns that are nothing everywhere are left out."""
    shown = [(name, parts) for name, parts in LOSS_COLUMNS if any(_share(row, parts) >= 5e-4 for row in planned)]
    axes = _case_axes(rows)
    cells = [(_label(row, axes), *(f"{_share(row, parts):.1%}" for _, parts in shown)) for row in planned]
    right = frozenset(range(1, len(shown) + 1))
    return text_table(("share of wall time", *(name for name, _ in shown)), cells, right=right)


def _money_table(rows: Sequence[WhatIfRow]) -> str:
    """What a token costs, what the cluster draws, and owning beside renting."""
    header = ["to pay", "USD per 1e9 tokens", "kW", "MWh", "break-even use", "own USD"]
    axes = _case_axes(rows)
    cells = [
        [
            _label(row, axes),
            _usd(row.usd_per_billion_tokens),
            ABSENT if row.power_kw is None else f"{row.power_kw:,.3g}",
            ABSENT if row.energy_kwh is None else f"{row.energy_kwh / KWH_PER_MWH:,.3g}",
            ABSENT if row.break_even_utilisation is None else f"{row.break_even_utilisation:.0%}",
            _usd(row.own_cost_usd),
        ]
        for row in rows
    ]
    known = [0, *(column for column in range(1, 6) if any(line[column] != ABSENT for line in cells))]
    shown = [[line[column] for column in known] for line in cells]
    return text_table([header[column] for column in known], shown, right=frozenset(range(1, len(known))))


def _share(row: WhatIfRow, parts: Sequence[str]) -> float:
    return sum(dict(row.shares)[part] for part in parts)


def _case_axes(rows: Sequence[WhatIfRow]) -> tuple[Axis, ...]:
    """What else sets rows apart, beside hardware and hosts, which every line names."""
    return tuple(axis for axis in varying(rows) if axis.field not in ("hardware", "n_hosts"))


def _label(row: WhatIfRow, axes: Sequence[Axis]) -> str:
    case = point_name(row, axes)
    return f"{row.hardware} x {row.n_hosts}" + (f" ({case})" if case else "")


def _plans_text(rows: Sequence[WhatIfRow]) -> str:
    """The plan of each point, or why it has none; conditions change no plan."""
    bare = [replace(row, condition="") for row in rows]
    axes = _case_axes(bare)
    lines = [f"{_label(row, axes)}: {row.plan or row.detail or row.status}{_idle(row)}" for row in bare]
    return "\n".join(dict.fromkeys(lines))


def _batch_text(rows: Sequence[WhatIfRow]) -> str:
    batches = {row.global_batch for row in rows}
    return f"global batch: {batches.pop()} samples on every cluster" if len(batches) == 1 else ""


def _idle(row: WhatIfRow) -> str:
    return f"; {row.n_idle_devices} of {row.n_devices} devices idle" if row.n_idle_devices else ""


def _warnings_text(rows: Sequence[WhatIfRow]) -> str:
    return "\n".join(f"! {text}" for text in dict.fromkeys(text for row in rows for text in row.warnings))


# ------------------------------------------------------------------------------------------------------- JSON and CSV


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
