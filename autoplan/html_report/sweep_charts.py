"""The charts of a sweep: scaling curves, losses that add up to the wall time, time against cost, what matters most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplan.html_report.charts import (
    Bar,
    Curve,
    Point,
    Swing,
    curves_chart,
    pareto_chart,
    stacked_bars,
    tornado_chart,
)
from autoplan.html_report.palette import BREAKDOWN_SERIES, WAITING
from autoplan.html_report.scales import time_unit_s
from autoplan.html_report.svg import Chart
from autoplan.report import BREAKDOWN_LABELS, rate_text
from autoplan.units import format_seconds, format_usd
from autoplan.what_if.rows import SHARES, WhatIfRow

MAX_CURVES = 8
MAX_BARS = 24
# What tells points apart: (field, its name, the value as text)
AXES: tuple[tuple[str, str, Callable[[WhatIfRow], str]], ...] = (
    ("hardware", "hardware", lambda row: row.hardware),
    ("n_hosts", "hosts", lambda row: f"{row.n_hosts} host{'s' if row.n_hosts > 1 else ''}"),
    ("global_batch", "global batch", lambda row: f"batch {row.global_batch}"),
    ("precision", "precision", lambda row: row.precision),
    ("overrides", "model", lambda row: " ".join(row.overrides)),
    ("network_scale", "network", lambda row: f"network x{row.network_scale:g}"),
    ("host_link", "links in a host", lambda row: row.host_link or "own links"),
)
_SCALED = frozenset({"n_hosts", "global_batch"})  # change along a curve
_LABELS = {
    **{name.removesuffix("_s"): label for name, label in BREAKDOWN_LABELS},
    "stragglers": "stragglers",
    "loading": "data loading",
    "checkpoints": "checkpoints",
    "failures": "failures",
    "no_spare": "no spare host",
}
_AROUND = 7  # the colour of all that is lost around the step
_SERIES = {name: BREAKDOWN_SERIES.get(f"{name}_s", _AROUND) for name in SHARES} | {"optimizer": 6}


def rate(row: WhatIfRow) -> float | None:
    """Tokens or samples a second, of wall time where that is known."""
    per_s = row.tokens_per_s if row.tokens_per_s is not None else row.samples_per_s
    return per_s if per_s is None or row.goodput is None else per_s * row.goodput


def rate_unit(rows: Sequence[WhatIfRow]) -> str:
    """What `rate` counts."""
    return "tokens/s" if any(row.tokens_per_s is not None for row in rows) else "samples/s"


def varying(rows: Sequence[WhatIfRow]) -> tuple[str, ...]:
    """The fields in which the points of a sweep differ."""
    return tuple(field for field, _, _ in AXES if len({getattr(row, field) for row in rows}) > 1)


def point_name(row: WhatIfRow, fields: Sequence[str]) -> str:
    """What a point is called by the fields that vary: `dgx_a100_x8, 4 hosts`."""
    return ", ".join(text(row) for field, _, text in AXES if field in fields) or row.hardware


def sweep_charts(rows: Sequence[WhatIfRow]) -> tuple[Chart, ...]:
    """Every chart there are figures for."""
    planned = [row for row in rows if rate(row) is not None]
    if not planned:
        return ()
    charts = [_scaling_chart(planned)] if len({row.n_devices for row in planned}) > 1 else []
    charts += [_losses_chart(planned)] if any(row.shares for row in planned) else []
    priced = [row for row in planned if row.train_s is not None and row.cost_usd is not None]
    charts += [_cost_chart(priced)] if len(priced) > 1 else []
    swings = _swings(planned)
    if swings:
        text = f"Speed, one thing changed at a time from {point_name(fastest(planned), varying(planned))}"
        charts.append(tornado_chart(swings, name="sensitivity", title_text=text, text=lambda gain: f"{gain:+.0%}"))
    return tuple(charts)


def fastest(rows: Sequence[WhatIfRow]) -> WhatIfRow:
    """The point of the highest rate."""
    return max(rows, key=lambda row: rate(row) or 0.0)


def _scaling_chart(rows: Sequence[WhatIfRow]) -> Chart:
    fields = [field for field in varying(rows) if field not in _SCALED]
    by_name: dict[str, list[WhatIfRow]] = {}
    for row in sorted(rows, key=lambda row: (row.n_devices, row.global_batch)):
        by_name.setdefault(point_name(row, fields), []).append(row)
    shown = sorted(by_name, key=lambda name: -(rate(fastest(by_name[name])) or 0.0))[:MAX_CURVES]
    curves = [_curve(name, by_name[name], unit=rate_unit(rows)) for name in shown]
    first = curves[0].points[0]
    most = max(row.n_devices for row in rows)
    ideal = Curve(
        f"as {curves[0].name}, if every device more did its share",
        ((first[0], first[1], ""), (most, first[1] / first[0] * most, "")),
    )
    return curves_chart(
        curves,
        name="scaling",
        title_text="Speed by number of devices",
        x_name="devices (both axes are logarithmic; dashed: in proportion)",
        y_name=rate_unit(rows),
        x_text=lambda count: f"{count:.0f}",
        y_text=rate_text,
        ideal=ideal,
    )


def _curve(name: str, rows: Sequence[WhatIfRow], *, unit: str) -> Curve:
    points, bounds = [], []
    for row in rows:
        per_s = rate(row)
        assert per_s is not None
        points.append((float(row.n_devices), per_s, f"{name}, {row.n_devices} devices: {rate_text(per_s)} {unit}"))
        if row.step_s is not None and row.step_s_interval is not None:
            low_s, high_s = row.step_s_interval
            bounds.append((float(row.n_devices), per_s * row.step_s / high_s, per_s * row.step_s / low_s))
    return Curve(name, tuple(points), tuple(bounds))


def _losses_chart(rows: Sequence[WhatIfRow]) -> Chart:
    known = [row for row in rows if row.shares]
    fields = varying(rows)
    bars, used = [], set()
    for row in known[:MAX_BARS]:
        parts = [(_SERIES[name], share, f"{_LABELS[name]}: {share:.1%}") for name, share in row.shares if share > 0]
        used |= {name for name, share in row.shares if share > 0}
        per_s = rate(row)
        total = "" if per_s is None else f"{rate_text(per_s)}/s"
        bars.append(Bar(point_name(row, fields), tuple(sorted(parts, key=_order)), total))
    names: dict[int, list[str]] = {}
    for name in SHARES:
        if name in used:
            names.setdefault(_SERIES[name], []).append(_LABELS[name])
    return stacked_bars(
        bars,
        name="losses",
        title_text="Where wall time goes",
        series=[(number, ", ".join(labels)) for number, labels in names.items()],
        text=lambda share: f"{share:.0%}",
        note=f"{len(known) - MAX_BARS} more points are in the table." if len(known) > MAX_BARS else "",
    )


def _order(part: tuple[int, float, str]) -> int:
    """Work first, waiting and what lies around the step last."""
    return (0, 1, 6, 2, 3, 4, WAITING, _AROUND).index(part[0])


def _cost_chart(rows: Sequence[WhatIfRow]) -> Chart:
    fields = varying(rows)
    points = []
    for row in rows:
        assert row.train_s is not None and row.cost_usd is not None
        told = f"{point_name(row, fields)}: {format_seconds(row.train_s)}, {format_usd(row.cost_usd)}; {row.plan}"
        points.append(Point(point_name(row, fields), row.train_s, row.cost_usd, told))
    return pareto_chart(
        points,
        name="cost",
        title_text="Time to train against cost",
        x_name="time to train",
        y_name="cost",
        x_text=format_seconds,
        y_text=format_usd,
        x_unit=time_unit_s(max((point.x for point in points), default=0.0)),
    )


def _swings(rows: Sequence[WhatIfRow]) -> list[Swing]:
    """How far the speed moves from the fastest point when one field alone takes its other values."""
    base, fields = fastest(rows), varying(rows)
    base_rate = rate(base)
    assert base_rate is not None
    found = []
    for field, name, text in AXES:
        same = [other for other in fields if other != field]
        alike = [row for row in rows if all(getattr(row, other) == getattr(base, other) for other in same)]
        changed = [(rate(row) or 0.0, row) for row in alike if getattr(row, field) != getattr(base, field)]
        if field not in fields or not changed:
            continue
        rates = [per_s / base_rate - 1.0 for per_s, _ in changed]
        told = ", ".join(f"{text(row)} {per_s / base_rate - 1.0:+.1%}" for per_s, row in changed)
        found.append(Swing(f"{name} ({text(base)})", min(0.0, *rates), max(0.0, *rates), f"{name}: {told}"))
    return found
