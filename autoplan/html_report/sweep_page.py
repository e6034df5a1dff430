"""A sweep as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.html_report.page import render
from autoplan.html_report.provenance import provenance_kind
from autoplan.html_report.sweep_charts import sweep_charts
from autoplan.html_report.table import Card, Cell, Table
from autoplan.plain_text import rate_text
from autoplan.units import GiB, format_seconds, format_share, format_usd
from autoplan.what_if.rows import AXES, Axis, WhatIfRow, fastest, pace, point_name, rate_unit, varying

if TYPE_CHECKING:
    from autoplan.what_if.question import Question

NOT_KNOWN = "n/a"
COMPUTED = "computed"
MAX_ROWS = 400  # of a table


def sweep_page(rows: Sequence[WhatIfRow], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page; `notes` are sentences on what the rows rest on."""
    planned = [row for row in rows if row.step_s is not None]
    shown, axes = rows[:MAX_ROWS], varying(rows) or AXES[:1]
    warnings = dict.fromkeys(text for row in rows for text in row.warnings)
    return render(
        "sweep.html.jinja",
        title=title,
        n_points=len(rows),
        n_planned=len(planned),
        cards=_cards(planned) if planned else (),
        charts={chart.name: chart for chart in sweep_charts(rows)},
        speeds=_speeds_table(shown, axes),
        totals=_totals_table(shown, axes),
        losses=_losses_table(shown, axes),
        plans=_plans_table(shown, axes),
        n_rows_hidden=len(rows) - len(shown),
        prices=_prices_table(planned),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def sweep_title(question: Question) -> str:
    """`llama.py size=8b: 1e+12 tokens`: what was compared."""
    name = " ".join([Path(question.model).name, *(f"{key}={value}" for key, value in question.overrides)])
    amounts = ((question.n_tokens, "tokens"), (question.n_samples, "samples"))
    return ": ".join([name, *(f"{amount:g} {unit}" for amount, unit in amounts if amount is not None)])


def _cards(rows: Sequence[WhatIfRow]) -> tuple[Card, ...]:
    axes, unit = varying(rows) or AXES[:1], rate_unit(rows)
    known = [(per_s, row) for row in rows if (per_s := pace(row)) is not None]
    cards, quick = [], fastest(rows)
    if quick is not None:
        cards.append(Card(f"{rate_text(pace(quick) or 0.0)} {unit}", "fastest", "computed", point_name(quick, axes)))
        share, row = max(((per_s / row.n_devices, row) for per_s, row in known), key=lambda item: item[0])
        each = f"{rate_text(share)} {unit} a device"
        cards.append(Card(each, "best use of devices", "computed", point_name(row, axes)))
    priced = [(row.cost_usd, row) for row in rows if row.cost_usd is not None]
    if priced:
        cost_usd, row = min(priced, key=lambda item: item[0])
        time = "" if row.train_s is None else f", {format_seconds(row.train_s)}"
        kind = provenance_kind(row.price_source or "")
        cards.append(Card(format_usd(cost_usd), "cheapest", kind, point_name(row, axes) + time))
    return tuple(cards)


def _speeds_table(rows: Sequence[WhatIfRow], axes: Sequence[Axis]) -> Table:
    """Speed and memory of every point; a point without a plan says why."""
    unit = rate_unit(rows)
    header = (
        *_point_header(axes),
        "devices",
        "step",
        "from",
        "to",
        unit,
        "MFU",
        "goodput",
        "memory left",
        "idle",
        "gap",
    )
    body = []
    for row in rows:
        low_s, high_s = row.step_s_interval or (None, None)
        left_bytes = row.memory_headroom_bytes
        figures = (
            Cell(row.status) if row.step_s is None else _cell(row.step_s, format_seconds),
            _cell(low_s, format_seconds),
            _cell(high_s, format_seconds),
            _cell(pace(row), rate_text),
            _cell(row.mfu, format_share),
            _cell(row.goodput, "{:.1%}".format),
            _cell(None if left_bytes is None else left_bytes / GiB, "{:.1f} GiB".format),
            _cell(row.n_idle_devices, "{:.0f}".format),
            _cell(row.gap, "{:.1%}".format),
        )
        body.append((*_point_cells(row, axes), Cell(str(row.n_devices), row.n_devices), *figures))
    return _table(header, body, axes)


def _totals_table(rows: Sequence[WhatIfRow], axes: Sequence[Axis]) -> Table | None:
    """Time, money and energy of the whole run; None when no amount was asked for."""
    known = [row for row in rows if row.train_s is not None]
    if not known:
        return None
    totals = ("time to train", "device-hours of whole hosts", "cost of these", "from", "to", "per 1e9 tokens", "energy")
    header = (*_point_header(axes), *totals)
    body = []
    for row in known:
        low_usd, high_usd = row.cost_usd_interval or (None, None)
        figures = (
            _cell(row.train_s, format_seconds),
            _cell(row.device_hours, "{:,.0f}".format),
            *(_cell(usd, format_usd, kind=_price_kind(row)) for usd in (row.cost_usd, low_usd, high_usd)),
            _cell(row.usd_per_billion_tokens, format_usd, kind=_price_kind(row)),
            _cell(row.energy_kwh, "{:,.0f} kWh".format),
        )
        body.append((*_point_cells(row, axes), *figures))
    return _table(header, body, axes)


def _losses_table(rows: Sequence[WhatIfRow], axes: Sequence[Axis]) -> Table | None:
    """Shares of wall time, those that are not zero everywhere."""
    known = [row for row in rows if row.shares]
    names = [name for name in dict(known[0].shares) if any(dict(row.shares)[name] for row in known)] if known else []
    body = [
        (*_point_cells(row, axes), *(_cell(dict(row.shares)[name], "{:.1%}".format) for name in names)) for row in known
    ]
    header = (*_point_header(axes), *(name.replace("_", " ") for name in names))
    return _table(header, body, axes) if known else None


def _plans_table(rows: Sequence[WhatIfRow], axes: Sequence[Axis]) -> Table:
    body = [(*_point_cells(row, axes), Cell(row.plan or row.detail or row.status), Cell(row.fix or "")) for row in rows]
    return Table((*_point_header(axes), "plan, or why there is none", "--fix"), tuple(body))


def _prices_table(rows: Sequence[WhatIfRow]) -> Table | None:
    known = {
        (row.device, row.usd_per_device_hour, row.price_source or "", row.price_date or NOT_KNOWN)
        for row in rows
        if row.usd_per_device_hour is not None
    }
    body = []
    for device, usd, source, day in sorted(known):
        kind = provenance_kind(source)
        body.append((Cell(device), _cell(usd, format_usd, kind=kind), Cell(kind), Cell(day), Cell(source)))
    header = ("device", "a device-hour", "kind", "date", "source")
    return Table(header, tuple(body), frozenset({1}), COMPUTED) if known else None


def _point_header(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def _point_cells(row: WhatIfRow, axes: Sequence[Axis]) -> tuple[Cell, ...]:
    """What tells the point apart, one cell for each axis."""
    found = []
    for axis in axes:
        value = getattr(row, axis.field)
        found.append(Cell(axis.text(row), value if isinstance(value, int | float) else None))
    return tuple(found)


def _table(header: tuple[str, ...], body: list[tuple[Cell, ...]], axes: Sequence[Axis]) -> Table:
    """A table whose columns after those of the point are numbers, all computed but for prices."""
    return Table(header, tuple(body), frozenset(range(len(_point_header(axes)), len(header))), COMPUTED)


def _cell(value: float | None, text: Callable[[float], str], *, kind: str = "") -> Cell:
    return Cell(NOT_KNOWN) if value is None else Cell(text(value), value, kind)


def _price_kind(row: WhatIfRow) -> str:
    """What a sum of money rests on: its price, since all else is computed."""
    return provenance_kind(row.price_source or "")
