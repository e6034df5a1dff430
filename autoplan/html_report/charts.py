"""Charts of plain numbers: stacked bars, points with a Pareto front, a tornado, curves.

Each is a pure function: rows in, `Chart` out. A row that says what a point means is shown when the pointer rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.html_report.scales import Axis, log_ticks, ticks, x_axis, y_axis
from autoplan.html_report.svg import (
    CHARACTER_WIDTH,
    LEGEND_ROW,
    Chart,
    element,
    escape_text,
    label,
    legend,
    line,
    number,
    shortened,
    title,
)

WIDTH = 960
BAR_LEFT, BAR_RIGHT, BAR_ROW, BAR_HEIGHT = 280, 136, 30, 20
POINT_LEFT, POINT_RIGHT, POINT_TOP, POINT_BOTTOM = 84, 24, 34, 48
POINT_WIDTH, POINT_HEIGHT = 640, 380
INSIDE_WIDTH = 44  # a part of a bar has its figure written in it from here on
MAX_NAME_WIDTH = 260
MAX_NAMES = 60
MAX_POINTS = 400  # that are not on the front
LINE_HEIGHT = 12
BELOW = 44  # the axis of bars, and its name
MARGIN = 1.08  # axes end a little beyond the largest value

Text = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar made of (series, amount, what it is); `total` is written behind it, `told` shown on hover of its name."""

    name: str
    parts: tuple[tuple[int, float, str], ...]
    total: str
    told: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a scatter; `is_chosen` is drawn larger; `told` is shown on hover."""

    name: str
    x: float
    y: float
    told: str
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Swing:
    """How far a change moves a result, as shares of it: to `low` at one end, to `high` at the other."""

    name: str
    low: float
    high: float
    told: str


@dataclass(frozen=True, slots=True)
class Curve:
    """(x, y, what it is) of one series, with `bounds` (x, low, high) drawn as a band where they are known."""

    name: str
    points: tuple[tuple[float, float, str], ...]
    bounds: tuple[tuple[float, float, float], ...] = ()


# ------------------------------------------------------------------------------------------------------------- bars


def stacked_bars(
    bars: Sequence[Bar],
    *,
    name: str,
    title_text: str,
    series: Sequence[tuple[int, str]],
    text: Text,
    x_name: str,
    limits: Sequence[float] = (),
    unit: float = 1.0,
    note: str = "",
) -> Chart:
    """Bars of equal scale, their parts in order; `limits`, one for each bar, are what it should not pass.

    Round numbers on the axis are round in `unit`.
    """
    most = max((*(sum(amount for _, amount, _ in bar.parts) for bar in bars), *limits), default=0.0)
    axis = Axis(0.0, most, BAR_LEFT, WIDTH - BAR_RIGHT)
    at = tuple(unit * value for value in ticks(0.0, most / unit, n_most=7))
    keys, top = legend(series, x=BAR_LEFT, y=2, width=WIDTH - BAR_LEFT)
    top += 6
    bottom = top + BAR_ROW * len(bars)
    parts = [keys, x_axis(axis, at, top=top, bottom=bottom, text=text, name=x_name)]
    for row, bar in enumerate(bars):
        limit = limits[row] if limits else None
        parts.append(_bar(bar, axis, top=top + BAR_ROW * row + (BAR_ROW - BAR_HEIGHT) / 2, limit=limit))
    return Chart(
        name=name,
        title=title_text,
        summary="; ".join(f"{bar.name}: {bar.total}" for bar in bars[:MAX_TOLD]),
        width=WIDTH,
        height=int(bottom + BELOW),
        body="".join(parts),
        note=note,
    )


MAX_TOLD = 20  # rows that a summary names


def _bar(bar: Bar, axis: Axis, *, top: float, limit: float | None) -> str:
    shown = shortened(bar.name, width=BAR_LEFT - 10)
    drawn = [element("text", title(bar.told or bar.name), shown_text(shown), css="end", x=BAR_LEFT - 8, y=top + 14)]
    done = 0.0
    for series, amount, told in bar.parts:
        x, width = axis.at(done), axis.at(done + amount) - axis.at(done)
        box = {"x": x, "y": top, "width": max(width, 0.0), "height": BAR_HEIGHT}
        drawn.append(element("rect", title(told), css=f"f{series} outline", **box))
        if width >= INSIDE_WIDTH and bar.parts:
            share = amount / sum(size for _, size, _ in bar.parts)
            drawn.append(label(x + width / 2, top + 14, f"{share:.0%}", css=f"t{series} middle small"))
        done += amount
    end = done if limit is None else max(done, limit)
    if limit is not None:
        drawn.append(line(axis.at(limit), top - 3, axis.at(limit), top + BAR_HEIGHT + 3, css="limit"))
    drawn.append(label(axis.at(end) + 6, top + 14, bar.total, css="strong"))
    return "".join(drawn)


def shown_text(text: str) -> str:
    """Text as a child of an element that has other children."""
    return element("tspan", escape_text(text))


# ------------------------------------------------------------------------------------------------------------ points


def pareto_chart(
    points: Sequence[Point],
    *,
    name: str,
    title_text: str,
    x_name: str,
    y_name: str,
    x_text: Text,
    y_text: Text,
    x_unit: float = 1.0,
) -> Chart:
    """Points of two costs, both the less the better; those than which none is better in both are joined.

    Round numbers on the axis of `x` are round in `x_unit`.
    """
    x = _spread([point.x for point in points], POINT_LEFT, POINT_WIDTH - POINT_RIGHT)
    y = _spread([point.y for point in points], POINT_HEIGHT - POINT_BOTTOM, POINT_TOP)
    front = pareto_front([(point.x, point.y) for point in points])
    parts = [
        x_axis(x, _ticks(x, 7, unit=x_unit), top=y.stop, bottom=y.start, text=x_text, name=x_name),
        y_axis(y, _ticks(y, 6), left=x.start, right=x.stop, text=y_text, name=y_name),
    ]
    ordered = sorted(front, key=lambda index: (points[index].x, -points[index].y))
    if ordered:
        corners = [f"M{number(x.at(points[ordered[0]].x))} {number(y.at(points[ordered[0]].y))}"]
        corners += [f"H{number(x.at(points[i].x))}V{number(y.at(points[i].y))}" for i in ordered[1:]]
        parts.append(element("path", css="l0 curve", d="".join(corners)))
    behind = [index for index in range(len(points)) if index not in front]
    for index in (*behind[:MAX_POINTS], *sorted(front)):
        point, series = points[index], 0 if index in front else 5
        size = 7 if point.is_chosen else 5
        spot = {"cx": x.at(point.x), "cy": y.at(point.y), "r": size}
        parts.append(element("circle", title(point.told), css=f"f{series}", **spot))
    parts += _names(points, x, y, front=front)
    parts.append(label(POINT_LEFT, POINT_HEIGHT + 12, "Blue: no other is better in both. Gray: another one is."))
    return Chart(
        name=name,
        title=title_text,
        summary="; ".join(point.told for point in points[:MAX_TOLD]),
        width=POINT_WIDTH,
        height=POINT_HEIGHT + LEGEND_ROW + 2,
        body="".join(parts),
        note=f"{len(behind) - MAX_POINTS} more gray points are not drawn." if len(behind) > MAX_POINTS else "",
    )


def pareto_front(points: Sequence[tuple[float, ...]]) -> frozenset[int]:
    """The places of the points that no other equals or betters in everything and betters in something."""
    front: dict[tuple[float, ...], None] = {}
    for point in sorted(set(points)):  # what betters a point comes before it
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in front):
            front[point] = None
    return frozenset(index for index, point in enumerate(points) if point in front)


def _names(points: Sequence[Point], x: Axis, y: Axis, *, front: frozenset[int]) -> list[str]:
    """The name beside each point, as long as there is room; the chosen first, then those of the front."""
    taken = [(x.at(point.x) - 6, x.at(point.x) + 6, y.at(point.y)) for point in points]
    parts = []
    ordered = sorted(range(len(points)), key=lambda index: (not points[index].is_chosen, index not in front))
    for index in ordered[:MAX_NAMES]:
        point = points[index]
        name = shortened(point.name, width=MAX_NAME_WIDTH)
        at_x, at_y, width = x.at(point.x), y.at(point.y), CHARACTER_WIDTH * len(name)
        weight = "strong" if point.is_chosen else ""
        for css, at, down in (("", 9, 0), ("end", -9, 0), ("", 4, -14), ("", 4, 14)):
            left = at_x + at - (width if css else 0)
            spot = (left, left + width, at_y + down)
            if left >= x.start and left + width <= POINT_WIDTH and not any(_overlap(spot, other) for other in taken):
                taken.append(spot)
                parts.append(label(at_x + at, at_y + down + 4, name, css=f"{weight} {css}".strip()))
                break
    return parts


def _overlap(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Whether two (left, right, middle) of lines of text touch each other."""
    return one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < LINE_HEIGHT


def _spread(values: Sequence[float], start: float, stop: float) -> Axis:
    """An axis from 0, or from a little below the least value where all are close together or far apart."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high > 20 * low:
        return Axis(low / 1.3, high * 1.3, start, stop, is_log=True)
    if low > 0.5 * high:
        space = max(high - low, 0.1 * high) * 0.12
        return Axis(low - space, high + space, start, stop)
    return Axis(0.0, high * MARGIN, start, stop)


def _ticks(axis: Axis, n_most: int, *, unit: float = 1.0) -> tuple[float, ...]:
    low, high = axis.low / unit, axis.high / unit
    found = log_ticks(low, high) if axis.is_log else ticks(low, high, n_most=n_most)
    return tuple(unit * value for value in found)


# ------------------------------------------------------------------------------------------------------------ tornado


def tornado_chart(swings: Sequence[Swing], *, name: str, title_text: str, text: Text, x_name: str) -> Chart:
    """What moves the result most, the largest first; the line in the middle is the result as it is."""
    ordered = sorted(swings, key=lambda swing: -(max(swing.high, 0.0) - min(swing.low, 0.0)))
    low = min((0.0, *(swing.low for swing in swings)))
    high = max((0.0, *(swing.high for swing in swings)))
    if not high > low:
        high = 0.01  # nothing moves it: an empty axis up to 1 %
    axis = Axis(low, high, BAR_LEFT, WIDTH - BAR_RIGHT)
    bottom = 8 + BAR_ROW * len(ordered)
    parts = [x_axis(axis, ticks(low, high, n_most=7), top=8, bottom=bottom, text=text, name=x_name)]
    for row, swing in enumerate(ordered):
        top = 8 + BAR_ROW * row + (BAR_ROW - BAR_HEIGHT) / 2
        shown = shortened(swing.name, width=BAR_LEFT - 10)
        parts.append(element("text", title(swing.name), shown_text(shown), css="end", x=BAR_LEFT - 8, y=top + 14))
        for series, start, stop in ((3, min(swing.low, 0.0), 0.0), (0, 0.0, max(swing.high, 0.0))):
            box = {"x": axis.at(start), "y": top, "width": axis.at(stop) - axis.at(start), "height": BAR_HEIGHT}
            parts.append(element("rect", title(swing.told), css=f"f{series} outline", **box))
        parts.append(label(axis.at(max(swing.high, 0.0)) + 6, top + 14, _swing_text(swing, text), css="strong"))
    parts.append(line(axis.at(0.0), 4, axis.at(0.0), bottom, css="axis"))
    return Chart(
        name=name,
        title=title_text,
        summary="; ".join(swing.told for swing in ordered[:MAX_TOLD]),
        width=WIDTH,
        height=int(bottom + BELOW),
        body="".join(parts),
    )


def _swing_text(swing: Swing, text: Text) -> str:
    return " to ".join(dict.fromkeys(text(end) for end in (swing.low, swing.high) if end)) or text(0.0)


# ------------------------------------------------------------------------------------------------------------- curves


def curves_chart(
    curves: Sequence[Curve],
    *,
    name: str,
    title_text: str,
    x_name: str,
    y_name: str,
    x_text: Text,
    y_text: Text,
    ideal: Curve | None = None,
) -> Chart:
    """Curves over two logarithmic axes, each with a mark of its own; `ideal` is dashed."""
    drawn = [*curves, *([] if ideal is None else [ideal])]
    xs = [point[0] for curve in drawn for point in curve.points]
    ys = [point[1] for curve in drawn for point in curve.points] + [
        end for curve in curves for bound in curve.bounds for end in bound[1:]
    ]
    keys, taken = legend(
        [(index % N_SERIES, curve.name) for index, curve in enumerate(curves)],
        x=POINT_LEFT,
        y=2,
        width=POINT_WIDTH - 90,
    )
    top = POINT_TOP + taken - LEGEND_ROW + 14
    x = _log_axis(xs, POINT_LEFT, WIDTH - POINT_RIGHT)
    y = _log_axis(ys, POINT_HEIGHT - POINT_BOTTOM + taken, top)
    at_x = tuple(sorted(set(xs))) if len(set(xs)) <= 12 else log_ticks(x.low, x.high)
    parts = [
        keys,
        x_axis(x, at_x, top=y.stop, bottom=y.start, text=x_text, name=x_name),
        y_axis(y, log_ticks(y.low, y.high), left=x.start, right=x.stop, text=y_text, name=y_name),
    ]
    if ideal is not None:
        parts.append(element("path", title(ideal.name), css="l5 curve dashed", d=_path(ideal, x, y)))
    for index, curve in enumerate(curves):
        parts.append(_curve(curve, x, y, number_of=index % N_SERIES))
    return Chart(
        name=name,
        title=title_text,
        summary="; ".join(told for curve in curves for _, _, told in curve.points[:MAX_TOLD]),
        width=WIDTH,
        height=POINT_HEIGHT + int(taken),
        body="".join(parts),
    )


N_SERIES = 8


def _log_axis(values: Sequence[float], start: float, stop: float) -> Axis:
    low, high = min(values, default=1.0), max(values, default=1.0)
    return Axis(low / 1.15, high * 1.15, start, stop, is_log=True)


def _path(curve: Curve, x: Axis, y: Axis) -> str:
    spots = [f"{number(x.at(at_x))} {number(y.at(at_y))}" for at_x, at_y, _ in curve.points]
    return "M" + "L".join(spots) if spots else "M0 0"


def _curve(curve: Curve, x: Axis, y: Axis, *, number_of: int) -> str:
    parts = [
        line(x.at(at_x), y.at(low), x.at(at_x), y.at(high), css=f"l{number_of}") for at_x, low, high in curve.bounds
    ]
    parts.append(element("path", title(curve.name), css=f"l{number_of} curve", d=_path(curve, x, y)))
    for at_x, at_y, told in curve.points:
        place = f"translate({number(x.at(at_x))} {number(y.at(at_y))})"
        parts.append(element("path", title(told), css=f"f{number_of}", d=MARKS[number_of], transform=place))
    return "".join(parts)


# Marks around 0 0, so that series differ in form, too: disc, square, triangles, diamond, bars, cross.
MARKS = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "M-4.5 -4.5h9v9h-9Z",
    "M0 -6L5.5 4.5H-5.5Z",
    "M0 6L5.5 -4.5H-5.5Z",
    "M0 -6.5L6.5 0L0 6.5L-6.5 0Z",
    "M-6 -2.5h12v5h-12Z",
    "M-2.5 -6h5v12h-5Z",
    "M-2 -6h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
)
