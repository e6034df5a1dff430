"""The charts of a sweep: scaling curves, losses that add up to the wall time, time against cost, what matters most."""

from __future__ import annotations

from collections.abc import Sequence

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
from autoplan.html_report.readings import sweep_readings, with_readings
from autoplan.html_report.scales import time_unit_s
from autoplan.html_report.svg import Chart
from autoplan.plain_text import rate_text
from autoplan.plan_words import BREAKDOWN_LABELS
from autoplan.units import format_seconds, format_usd
from autoplan.what_if.rows import AXES, SHARES, WhatIfRow, fastest, pace, point_name, rate_unit, varying

MAX_CURVES = 8
MAX_BARS = 24
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


def sweep_charts(rows: Sequence[WhatIfRow]) -> tuple[Chart, ...]:
    """Every chart there are figures for."""
    known = [row for row in rows if pace(row) is not None]
    if not known:
        return ()
    charts = [_scaling_chart(known)] if len({row.n_devices for row in known}) > 1 else []
    charts += [_losses_chart(known)] if any(row.shares for row in known) else []
    priced = [row for row in known if row.train_s is not None and row.cost_usd is not None]
    charts += [_cost_chart(priced)] if len(priced) > 1 else []
    base = fastest(known)
    swings = [] if base is None else _swings(known, base)
    if base is not None and swings:
        text = f"Speed, one thing changed at a time from {point_name(base, varying(known))}"
        charts.append(
            tornado_chart(
                swings, name="sensitivity", title_text=text, text=lambda gain: f"{gain:+.0%}", x_name="change of speed"
            )
        )
    return with_readings(charts, sweep_readings(rows))


def _scaling_chart(rows: Sequence[WhatIfRow]) -> Chart:
    axes = [axis for axis in varying(rows) if axis.field not in _SCALED] or AXES[:1]
    by_name: dict[str, list[WhatIfRow]] = {}
    for row in sorted(rows, key=lambda row: (row.n_devices, row.global_batch)):
        by_name.setdefault(point_name(row, axes), []).append(row)
    shown = sorted(by_name, key=lambda name: -max(pace(row) or 0.0 for row in by_name[name]))[:MAX_CURVES]
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
        per_s = pace(row)
        assert per_s is not None
        points.append((float(row.n_devices), per_s, f"{name}, {row.n_devices} devices: {rate_text(per_s)} {unit}"))
        if row.step_s is not None and row.step_s_interval is not None:
            low_s, high_s = row.step_s_interval
            bounds.append((float(row.n_devices), per_s * row.step_s / high_s, per_s * row.step_s / low_s))
    return Curve(name, tuple(points), tuple(bounds))


def _losses_chart(rows: Sequence[WhatIfRow]) -> Chart:
    known = [row for row in rows if row.shares]
    axes = varying(rows) or AXES[:1]
    bars, used, unit = [], set(), rate_unit(known)
    for row in known[:MAX_BARS]:
        parts = [(_SERIES[name], share, f"{_LABELS[name]}: {share:.1%}") for name, share in row.shares if share > 0]
        used |= {name for name, share in row.shares if share > 0}
        per_s = pace(row)
        total = "" if per_s is None else f"{rate_text(per_s)} {unit}"
        bars.append(Bar(point_name(row, axes), tuple(sorted(parts, key=_order)), total))
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
        x_name="share of the wall time",
        note=f"{len(known) - MAX_BARS} more points are in the table." if len(known) > MAX_BARS else "",
    )


def _order(part: tuple[int, float, str]) -> int:
    """Work first, waiting and what lies around the step last."""
    return (0, 1, 6, 2, 3, 4, WAITING, _AROUND).index(part[0])


def _cost_chart(rows: Sequence[WhatIfRow]) -> Chart:
    axes = varying(rows) or AXES[:1]
    points = []
    for row in rows:
        assert row.train_s is not None and row.cost_usd is not None
        name = point_name(row, axes)
        told = f"{name}: {format_seconds(row.train_s)}, {format_usd(row.cost_usd)}; {row.plan}"
        points.append(Point(name, row.train_s, row.cost_usd, told))
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


def _swings(rows: Sequence[WhatIfRow], base: WhatIfRow) -> list[Swing]:
    """How far the speed moves from the fastest point when one field alone takes its other values."""
    axes, base_pace = varying(rows), pace(base)
    assert base_pace is not None
    found = []
    for axis in axes:
        same = [other.field for other in axes if other is not axis]
        alike = [row for row in rows if all(getattr(row, field) == getattr(base, field) for field in same)]
        changed = [row for row in alike if getattr(row, axis.field) != getattr(base, axis.field)]
        if not changed:
            continue
        gains = [(pace(row) or 0.0) / base_pace - 1.0 for row in changed]
        told = ", ".join(f"{axis.text(row)} {gain:+.1%}" for row, gain in zip(changed, gains, strict=True))
        name = f"{axis.name} ({axis.text(base)})"
        found.append(Swing(name, min(0.0, *gains), max(0.0, *gains), f"{axis.name}: {told}"))
    return found
