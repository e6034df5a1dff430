"""Charts: what is drawn where, with round figures; colours that everyone can tell apart."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from conftest import make_estimate
from hypothesis import given
from hypothesis import strategies as st

from autoplan.answers.intervals import STEP_ERRORS
from autoplan.html_report.charts import (
    Bar,
    Curve,
    Point,
    Swing,
    curves_chart,
    pareto_chart,
    pareto_front,
    stacked_bars,
    tornado_chart,
)
from autoplan.html_report.mesh_chart import mesh_chart
from autoplan.html_report.palette import DARK, LIGHT, Theme, chart_css, contrast, linear_rgb, readable_on
from autoplan.html_report.provenance import KINDS, MEANINGS, provenance_kind, trust_kind
from autoplan.html_report.scales import Axis, log_ticks, ticks
from autoplan.html_report.svg import HEAD, Chart, element, label
from autoplan.html_report.timeline import LEFT, RIGHT, WIDTH, Box, coarse, memory_chart, peaks, timeline_chart
from autoplan.parallel_plan import Mesh, TimelineEvent
from autoplan.units import GiB

PLOT_WIDTH = WIDTH - RIGHT - LEFT


def _root(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.stand_alone)


def _drawn(chart: Chart, tag: str, css: str = "") -> list[ElementTree.Element]:
    return [item for item in _root(chart).findall(f".//{{*}}{tag}") if css in item.get("class", "").split() or not css]


def _texts(chart: Chart) -> list[str]:
    """What is written, without what is shown on hover alone."""
    shown = [[item, *item.findall("{*}tspan")] for item in _drawn(chart, "text")]
    return ["".join(part.text or "" for part in parts) for parts in shown]


def _size(item: ElementTree.Element, *names: str) -> tuple[float, ...]:
    return tuple(float(item.get(name, "nan")) for name in names)


# ---------------------------------------------------------------------------------------------------------- timeline


def _event(rank: int, name: str, start_s: float, stop_s: float, stream: str = "compute") -> TimelineEvent:
    return TimelineEvent(rank, rank, stream, name, start_s, stop_s)


def test_timeline_scales_the_step_to_the_width() -> None:
    # 0.4 s of 1.6 s is a quarter of the width, 0.8 s is half; a gap of 0.75 pixels keeps boxes apart
    chart = timeline_chart([_event(0, "0F0", 0.0, 0.4), _event(1, "1B0", 0.4, 1.2)], step_s=1.6)
    (forward,) = [item for item in _drawn(chart, "rect", "f0") if item.find("{*}title") is not None]
    (backward,) = [item for item in _drawn(chart, "rect", "f6") if item.find("{*}title") is not None]
    assert _size(forward, "x", "width") == pytest.approx((LEFT, PLOT_WIDTH / 4 - 0.75))
    assert _size(backward, "x", "width") == pytest.approx((LEFT + PLOT_WIDTH / 4, PLOT_WIDTH / 2 - 0.75))
    assert forward.find("{*}title").text == "rank 0, stage 0, compute: 0F0, 400 ms from 0 s on"


def test_timeline_gives_each_stream_of_a_rank_a_place_of_its_own() -> None:
    events = [
        _event(0, "0F0", 0.0, 1.0),
        _event(0, "reduce", 0.0, 1.0, "communication"),
        _event(0, "0F0", 0.0, 1.0, "send activations"),
        _event(1, "optimizer", 0.0, 1.0),
    ]
    boxes = [item for item in _drawn(timeline_chart(events, step_s=1.0), "rect") if item.find("{*}title") is not None]
    spans = sorted((y, y + height) for y, height in (_size(item, "y", "height") for item in boxes))
    assert len(boxes) == 4
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_timeline_of_many_boxes_draws_every_one_as_long_as_it_can() -> None:
    events = [_event(0, f"0F{index}", index * 0.001, index * 0.001 + 0.0005) for index in range(1000)]
    chart = timeline_chart(events, step_s=1.0)
    (row,) = _drawn(chart, "path", "l0")
    assert row.get("d", "").count("M") == 1000 and chart.note == ""
    assert "trace.json.gz" in timeline_chart(events * 40, step_s=1.0).note


@given(
    spans=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from("FB")), max_size=30),
    n_buckets=st.integers(1, 40),
)
def test_coarse_boxes_hold_the_time_of_each_kind_and_stay_in_order(spans, n_buckets: int) -> None:
    # boxes of a row do not overlap: they follow one another, each as long as its share of the span
    total = sum(gap + length for gap, length, _ in spans) or 1.0
    boxes, now = [], 0.0
    for gap, length, kind in spans:
        boxes.append(Box((now + gap) / total, (now + gap + length) / total, kind))
        now += gap + length
    drawn = coarse(boxes, span_s=1.0, n_buckets=n_buckets)
    assert len(drawn) <= 2 * n_buckets
    for kind in "FB":
        held_s = sum(box.stop_s - box.start_s for box in boxes if box.kind == kind)
        assert sum(box.stop_s - box.start_s for box in drawn if box.kind == kind) == pytest.approx(held_s)
    assert all(one.stop_s <= other.start_s + 1e-9 for one, other in itertools.pairwise(drawn))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1, max_size=40), st.integers(1, 50))
def test_fewer_points_of_memory_hide_no_peak_and_are_never_below_the_curve(points, n_buckets: int) -> None:
    curve = tuple(sorted(points, key=lambda point: point[0]))
    fewer = peaks(curve, span_s=1.0, n_buckets=n_buckets)
    assert len(fewer) <= n_buckets
    assert max(size for _, size in fewer) == max(size for _, size in curve)

    def level(points, at_s: float) -> int:
        return [size for time_s, size in points if time_s <= at_s][-1]

    for at_s, _ in curve:
        assert level(fewer, at_s) >= level(curve, at_s)


def test_memory_is_drawn_against_the_limit_of_its_rank() -> None:
    # rank 0 offers 10 GiB, rank 1 offers 20: 5 GiB are half of the one lane and a quarter of the other
    estimate = replace(make_estimate(peaks_gib=(8.0, 8.0)), rank_limits_bytes=(10 * GiB, 20 * GiB))
    chart = memory_chart((((0.0, 5 * GiB),), ((0.0, 5 * GiB),)), estimate)
    limits = [_size(item, "y1")[0] for item in _drawn(chart, "line", "limit")]
    shares = []
    for area, limit in zip(_drawn(chart, "path", "f0"), limits, strict=True):
        bottom, level = (float(text) for text in re.findall(r"(?:M[\d.]+ |V)([\d.]+)", area.get("d", ""))[:2])
        shares.append((bottom - level) / (bottom - limit))
    assert shares == pytest.approx([0.5, 0.25], abs=0.01)
    assert {"8.0 of 10.0 GiB", "8.0 of 20.0 GiB"} <= set(_texts(chart))


def test_memory_beyond_the_limit_is_drawn_above_it() -> None:
    estimate = make_estimate(peaks_gib=(12.5, 5.0))
    chart = memory_chart((((0.0, 11 * GiB),), ((0.0, GiB),)), estimate)
    limit, reserved = (_size(_drawn(chart, "line", css)[0], "y1")[0] for css in ("limit", "dashed"))
    assert reserved < limit  # upwards on the page


# --------------------------------------------------------------------------------------------------------------- mesh


def test_mesh_draws_every_rank_once_in_its_place() -> None:
    chart = mesh_chart(Mesh(pp=2, dp=3, tp=2), n_devices_per_host=4)
    told = [item.text or "" for item in _root(chart).findall(".//{*}title")][1:]
    assert [int(re.match(r"rank (\d+)", text)[1]) for text in told] == list(range(12))
    # (1 * 3 + 2) * 2 + 0 = 10, on the third host of four devices
    assert told[10] == "rank 10: pipeline rank 1, data 2, tensor 0, host 2"
    assert "host" not in mesh_chart(Mesh(dp=2), n_devices_per_host=None).body


def test_large_mesh_says_what_it_leaves_out() -> None:
    chart = mesh_chart(Mesh(pp=64, dp=128, tp=8), n_devices_per_host=8)
    # 10 rows: 0 to 7, what is left out, 63; 16 boxes: 0 to 13, what is left out, 127
    assert "55 more pipeline ranks" in _texts(chart) and "… 113" in _texts(chart)
    last = [item.text for item in _root(chart).findall(".//{*}title")][-1]
    assert last == "rank 65535: pipeline rank 63, data 127, tensor 7, host 8191"
    assert len(chart.stand_alone) < 250_000


# --------------------------------------------------------------------------------------------------------------- bars


def test_parts_of_a_bar_are_as_wide_as_their_amounts_and_follow_one_another() -> None:
    bars = [Bar("a", ((0, 3.0, "x"), (5, 1.0, "y")), "4"), Bar("b", ((0, 2.0, "x"),), "2")]
    chart = stacked_bars(bars, name="n", title_text="t", series=[(0, "x"), (5, "y")], text=str, x_name="s")
    first, second, third = (_size(item, "x", "width") for item in _drawn(chart, "rect", "outline"))
    assert first[1] == pytest.approx(3 * second[1], abs=0.02) and second[1] * 2 == pytest.approx(third[1], abs=0.02)
    assert first[0] + first[1] == pytest.approx(second[0], abs=0.02)
    assert {"a", "b", "75%", "25%", "100%", "x", "y"} <= set(_texts(chart))


def test_limit_of_a_bar_is_drawn_even_beyond_all_bars() -> None:
    bars = [Bar("a", ((0, 1.0, "x"),), "1")]
    chart = stacked_bars(bars, name="n", title_text="t", series=[(0, "x")], text=str, x_name="s", limits=[4.0])
    (box,), (limit,) = _drawn(chart, "rect", "outline"), _drawn(chart, "line", "limit")
    x, width = _size(box, "x", "width")
    assert _size(limit, "x1")[0] == pytest.approx(x + 4 * width, abs=0.05)


# ------------------------------------------------------------------------------------------------------------- points

_points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20)


@given(_points)
def test_front_holds_what_nothing_betters_and_nothing_else(points) -> None:
    front = pareto_front(points)

    def betters(one, other) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    for index, point in enumerate(points):
        assert (index in front) == (not any(betters(other, point) for other in points))


def test_points_of_the_front_are_blue_and_the_chosen_one_is_larger() -> None:
    points = [Point("a", 1.0, 3.0, "a", is_chosen=True), Point("b", 2.0, 1.0, "b"), Point("c", 2.0, 4.0, "c")]
    chart = pareto_chart(points, name="n", title_text="t", x_name="x", y_name="y", x_text=str, y_text=str)
    spots = [(item.find("{*}title").text, item.get("class"), item.get("r")) for item in _drawn(chart, "circle")]
    # those of the front are drawn last, above the others
    assert spots == [("c", "f5", "5"), ("a", "f0", "7"), ("b", "f0", "5")]
    a, b = (_size(item, "cx", "cy") for item in _drawn(chart, "circle")[1:])
    assert a[0] < b[0] and a[1] < b[1]  # more to the right, and lower on the page


def test_largest_swing_is_on_top_and_starts_at_the_middle() -> None:
    swings = [Swing("small", -0.05, 0.05, "small"), Swing("large", -0.1, 0.3, "large"), Swing("none", 0.0, 0.0, "none")]
    chart = tornado_chart(swings, name="n", title_text="t", text=lambda share: f"{share:.0%}", x_name="speed")
    names = [text for text in _texts(chart) if text in ("small", "large", "none")]
    assert names == ["large", "small", "none"]
    (middle,) = _drawn(chart, "line", "axis")
    x0 = _size(middle, "x1")[0]
    below, above = (_size(item, "x", "width") for item in _drawn(chart, "rect", "outline")[:2])
    assert below[0] + below[1] == pytest.approx(x0, abs=0.02) and above[0] == pytest.approx(x0, abs=0.02)
    assert above[1] == pytest.approx(3 * below[1], abs=0.05)
    assert "-10% to 30%" in _texts(chart)


def test_curve_of_a_power_is_a_straight_line() -> None:
    curve = Curve("a", tuple((2.0**n, 3.0 * 4.0**n, "") for n in range(4)))
    chart = curves_chart([curve], name="n", title_text="t", x_name="x", y_name="y", x_text=str, y_text=str)
    (path,) = _drawn(chart, "path", "curve")
    spots = [tuple(map(float, pair.split())) for pair in path.get("d", "")[1:].split("L")]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(spots)]
    assert all(step == pytest.approx(steps[0], abs=0.05) for step in steps) and steps[0][1] < 0


@pytest.mark.parametrize("n", [0, 1])
def test_charts_of_nothing_and_of_one_row_are_well_formed(n: int) -> None:
    texts = {"name": "n", "title_text": "t"}
    plane = {**texts, "x_name": "x", "y_name": "y", "x_text": str, "y_text": str}
    charts = [
        stacked_bars([Bar("a", (), "0")] * n, series=[], text=str, x_name="x", **texts),
        pareto_chart([Point("a", 1.0, 1.0, "a")] * n, **plane),
        tornado_chart([Swing("a", 0.0, 0.0, "a")] * n, text=str, x_name="x", **texts),
        curves_chart([Curve("a", ((1.0, 1.0, ""),))] * n, **plane),
        timeline_chart([_event(0, "0F0", 0.0, 1.0)] * n, step_s=1.0),
    ]
    for chart in charts:
        assert "nan" not in chart.stand_alone and "inf" not in chart.stand_alone
        assert _root(chart).get("viewBox") == f"0 -{HEAD} {chart.width} {chart.height + HEAD}"
        assert f'viewBox="0 0 {chart.width} {chart.height}"' in chart.inline


# ------------------------------------------------------------------------------------------------------------- scales


@given(st.floats(0, 1e12), st.floats(1e-9, 1e12), st.integers(2, 9))
def test_ticks_are_few_and_round_and_inside(low: float, extent: float, n_most: int) -> None:
    high = low + extent
    if high <= low * (1 + 1e-6):
        return  # both ends are the same number to the last digits
    found = ticks(low, high, n_most=n_most)
    assert len(found) <= n_most
    assert all(low - 1e-6 * extent <= tick <= high + 1e-6 * extent for tick in found)


def test_ticks_are_one_two_or_five_apart() -> None:
    assert ticks(0.0, 1.0, n_most=6) == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert ticks(0.0, 80.0, n_most=7) == pytest.approx((0, 20, 40, 60, 80))
    assert ticks(9.4, 11.1, n_most=7) == pytest.approx((9.5, 10.0, 10.5, 11.0))
    assert ticks(1.0, 1.0) == (1.0,)
    assert log_ticks(3.0, 300.0) == (5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
    assert log_ticks(0.5, 5e6) == (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)


def test_axis_of_one_value_puts_it_in_the_middle() -> None:
    assert Axis(2.0, 2.0, 0.0, 10.0).at(2.0) == 5.0
    assert Axis(1.0, 100.0, 0.0, 10.0, is_log=True).at(10.0) == pytest.approx(5.0)


def test_elements_escape_what_stands_in_them() -> None:
    assert element("a", css="b", x_y='"<&') == '<a class="b" x-y="&quot;&lt;&amp;"/>'
    assert label(1, 2.504, "<b>") == '<text x="1" y="2.5">&lt;b&gt;</text>'


# ------------------------------------------------------------------------------------------------------------ colours

# Linear RGB as seen with a complete lack of one kind of cone. Source: "A physiologically-based model for simulation
# of color vision deficiency", IEEE TVCG 15(6), 2009, severity 1.0.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as it is seen, D65."""
    rgb = linear_rgb(colour)
    r, g, b = (min(1.0, max(0.0, sum(a * c for a, c in zip(row, rgb, strict=True)))) for row in SIGHT[sight])
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_contrast_is_that_of_the_guidelines() -> None:
    # black on white is the most there is; the gray #767676 is the lightest that reaches 4.5 on white
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#767676", "#ffffff") >= 4.5 > contrast("#777777", "#ffffff")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_series_stand_out_from_their_background(theme: Theme) -> None:
    for background in (theme.paper, theme.band):
        assert contrast(theme.ink, background) >= 7.0
        assert contrast(theme.soft, background) >= 4.5
    assert contrast(theme.limit, theme.paper) >= 3.0
    for colour in theme.series:
        assert contrast(colour, theme.paper) >= 3.0
        assert contrast(readable_on(colour), colour) >= 4.5


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_are_told_apart_with_any_sight(theme: Theme, sight: str) -> None:
    seen = [_lab(colour, sight) for colour in theme.series]
    for one, other in itertools.combinations(seen, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 >= 25.0


def test_charts_have_literal_colours_for_both_themes() -> None:
    css = chart_css()
    assert "var(" not in css
    light, dark = css.split("@media screen and (prefers-color-scheme: dark)")
    assert all(colour in light for colour in LIGHT.series) and all(colour in dark for colour in DARK.series)


# ---------------------------------------------------------------------------------------------------------- provenance


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("nccl-tests, 8 A100, 1000 MiB, VIA-Research/vTrain @f8dda84", "measured"),
        ("2 H200 at 1 GiB, NCCL, torch 2.11, 2026-11-20", "measured"),
        ("measured on 4 H200: 31 % of an overlapped all-reduce is not hidden", "measured"),
        ("fit to the nccl-tests sweeps of 2, 4 and 8 A100", "calibrated"),
        ("5 times launch, as every op of a model; part of the same fit", "calibrated"),
        ("data sheet, io-tech.fi V100 page", "data sheet"),
        ("stas00/ml-engineering @744d01e, compute/accelerator", "data sheet"),
        ("assumed: as 4 H200 at 1 GiB on the same link, NCCL, torch 2.11, 2026-11-20", "assumed"),
        ("as on an H200 host: x.add_(1) 6.1 us, torch 2.11, 2026-11-20", "assumed"),
        ("overlap coefficient 1.126 shipped with Galvatron; not measured on this hardware", "assumed"),
        ("by definition", "computed"),
    ],
)
def test_kind_of_a_source_is_told_from_its_words(source: str, kind: str) -> None:
    assert provenance_kind(source) == kind


def test_every_kind_and_every_trust_has_a_meaning() -> None:
    assert tuple(MEANINGS) == KINDS
    assert {trust_kind(trust) for trust, _ in STEP_ERRORS} == {"measured", "calibrated", "computed"}


def test_time_texts_on_axes_have_units() -> None:
    chart = timeline_chart([_event(0, "0F0", 0.0, 0.001)], step_s=0.001)
    assert _texts(chart)[:4] == ["The predicted step", "0 s", "200 us", "400 us"]
