"""The page of a sweep: what was compared, drawn and in numbers, under the same policy as the page of a plan."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, open_browser
from hypothesis import given, settings
from hypothesis import strategies as st
from page_toys import HOSTILE, Page

from autoplan.cli import run
from autoplan.html_report.svg import Chart, printable
from autoplan.html_report.sweep_charts import sweep_charts
from autoplan.html_report.sweep_page import sweep_page
from autoplan.units import GiB
from autoplan.what_if import asking
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.prices import read_prices
from autoplan.what_if.report_text import assumption_texts
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import SHARES, Assumptions, WhatIfRow, fastest, pace, varying
from autoplan.what_if.sweep import Sweep

HOUR_S = 3600.0


def _row(hardware: str = "a", n_hosts: int = 1, *, tokens_per_s: float = 1000.0, **given) -> WhatIfRow:
    """A cluster of 8 devices a host that trains on 3.6e9 tokens, at 2 USD per device-hour and half of wall time."""
    train_s = 3.6e9 / tokens_per_s
    device_hours = train_s / HOUR_S * 8 * n_hosts
    shares = dict.fromkeys(SHARES, 0.0) | {"compute": 0.5, "exposed_dp": 0.25, "bubble": 0.125, "failures": 0.125}
    values = {
        "hardware": hardware,
        "n_hosts": n_hosts,
        "n_devices": 8 * n_hosts,
        "global_batch": 64,
        "status": "optimal",
        "device": f"{hardware} device",
        "gap": 0.0,
        "plan": "dp 8, tp 1, pp 1",
        "n_idle_devices": 0,
        "step_s": 1.0,
        "step_s_interval": (0.8, 1.25),
        "samples_per_s": tokens_per_s / 100,
        "tokens_per_s": tokens_per_s,
        "mfu": 0.4,
        "peak_bytes": 6 * GiB,
        "memory_limit_bytes": 8 * GiB,
        "goodput": 0.5,
        "shares": tuple(shares.items()),
        "train_s": train_s,
        "device_hours": device_hours,
        "usd_per_device_hour": 2.0,
        "price_source": "median of 5 clouds",
        "price_date": "2026-11-01",
        "cost_usd": 2.0 * device_hours,
        "cost_usd_interval": (1.5 * device_hours, 3.0 * device_hours),
    }
    return WhatIfRow(**values | given)


ROWS = (
    _row("a", 1, tokens_per_s=1000.0),
    _row("a", 2, tokens_per_s=1800.0),
    _row("a", 4, tokens_per_s=2400.0),
    _row("b", 1, tokens_per_s=500.0),
    WhatIfRow("b", 2, 16, 64, "infeasible", detail="stage 0 needs 96.2 GiB, device has 80.0 GiB"),
)


def _chart(rows, name: str) -> Chart:
    return next(chart for chart in sweep_charts(rows) if chart.name == name)


def _told(chart: Chart, tag: str) -> list[str]:
    """What is shown on hover of the elements of this name."""
    found = ElementTree.fromstring(chart.stand_alone).findall(f".//{{*}}{tag}/{{*}}title")
    return [item.text or "" for item in found]


def test_pace_is_that_of_wall_time_and_unknown_without_it() -> None:
    # 1000 tokens/s while the plan's steps run, half of the time
    assert pace(ROWS[0]) == 500.0
    assert pace(replace(ROWS[0], goodput=None)) is None
    assert pace(ROWS[4]) is None


def test_page_and_table_name_the_same_fastest_point() -> None:
    # no total is known of the point with the quickest steps; of equals the smallest is named
    lost = _row("c", 1, tokens_per_s=9000.0, goodput=None, shares=(), train_s=None, cost_usd=None)
    rows = (lost, *ROWS[:3], _row("b", 2, tokens_per_s=2399.0))
    assert fastest(rows) is rows[4]
    (line,) = (line for line in whatif_table(rows).splitlines() if "fastest" in line)
    assert line.split()[:3] == ["2", "x", "b"]
    assert "1,200 tokens/sfastest computedb, 2 hosts" in " ".join(Page(sweep_page(rows, title="toy")).text.split())


def test_conditions_name_points_and_have_curves_of_their_own() -> None:
    rows = [
        _row("a", n_hosts, tokens_per_s=1000.0 * n_hosts, goodput=goodput, condition=f"device_mtbf {hours} h")
        for hours, goodput in ((50_000, 0.8), (5000, 0.5))
        for n_hosts in (1, 2)
    ]
    assert [text for text in _told(_chart(rows, "scaling"), "path") if re.search(r"\d devices", text)] == [
        "device_mtbf 50000 h, 8 devices: 800 tokens/s",
        "device_mtbf 50000 h, 16 devices: 1,600 tokens/s",
        "device_mtbf 5000 h, 8 devices: 500 tokens/s",
        "device_mtbf 5000 h, 16 devices: 1,000 tokens/s",
    ]
    # from 2 hosts that seldom fail, 1600: one host has half, more failures leave 1000
    told = dict.fromkeys(_told(_chart(rows, "sensitivity"), "rect"))
    assert list(told) == ["hosts: 1 host -50.0%", "condition: device_mtbf 5000 h -37.5%"]
    text = " ".join(Page(sweep_page(rows, title="toy")).text.split())
    assert "fastest computed2 hosts, device_mtbf 50000 h" in text
    assert all(f"device_mtbf {hours} h" in whatif_table(rows) for hours in (50_000, 5000))


def test_page_says_which_point_is_fastest_and_which_is_cheapest() -> None:
    page = Page(sweep_page(ROWS, title="toy", notes=("prices as of today",)))
    # a, 4 hosts: 2400 x 0.5; a, 1 host: 3.6e9 / 1000 s = 1000 h x 8 devices x 2 USD
    for text in ("1,200 tokens/s", "a, 4 hosts", "16,000 USD", "5 points, 4 of them with a plan", "prices as of today"):
        assert text in page.text
    assert "stage 0 needs 96.2 GiB, device has 80.0 GiB" in page.text


def test_curves_hold_every_point_with_a_plan() -> None:
    told = _told(_chart(ROWS, "scaling"), "path")
    assert [text for text in told if re.search(r"\d devices", text)] == [
        "a, 8 devices: 500 tokens/s",
        "a, 16 devices: 900 tokens/s",
        "a, 32 devices: 1,200 tokens/s",
        "b, 8 devices: 250 tokens/s",
    ]


def test_losses_of_a_point_fill_its_bar_and_work_comes_first() -> None:
    chart = _chart(ROWS, "losses")
    told = _told(chart, "rect")[:4]
    assert told == ["compute: 50.0%", "exposed dp comm: 25.0%", "bubble: 12.5%", "failures: 12.5%"]
    boxes = ElementTree.fromstring(chart.stand_alone).findall(".//{*}rect[@y]")
    widths = [float(box.get("width")) for box in boxes if "outline" in box.get("class", "")][:4]
    # 50 %, 25 %, 12.5 % and 12.5 % of a bar as wide as the whole axis
    assert widths == pytest.approx([2 * widths[1], widths[1], widths[1] / 2, widths[1] / 2], abs=0.05)


def test_cheap_and_quick_points_are_joined() -> None:
    chart = _chart(ROWS, "cost")
    spots = ElementTree.fromstring(chart.stand_alone).findall(".//{*}circle")
    kinds = {spot.find("{*}title").text.partition(":")[0]: spot.get("class") for spot in spots}
    # per token: a costs 1, 2/1.8 and 4/2.4, b costs 2; b is slower than a on one host, and dearer
    assert kinds == {"a, 1 host": "f0", "a, 2 hosts": "f0", "a, 4 hosts": "f0", "b, 1 host": "f5"}


def test_swings_change_one_thing_at_a_time() -> None:
    rows = (*ROWS[:3], _row("b", 4, tokens_per_s=1200.0), _row("b", 1, tokens_per_s=1.0))
    told = dict.fromkeys(_told(_chart(rows, "sensitivity"), "rect"))
    # from a on 4 hosts, 2400: b on 4 hosts has half; a on 1 and 2 hosts has 42 % and 75 %; b on 1 host changes both
    assert list(told) == ["hosts: 1 host -58.3%, 2 hosts -25.0%", "hardware: b -50.0%"]


def test_only_what_varies_names_a_point() -> None:
    assert [axis.field for axis in varying(ROWS)] == ["hardware", "n_hosts"]
    assert varying(ROWS[:1]) == ()
    other = replace(ROWS[0], overrides=("size=8b",), network_scale=2.0)
    assert [axis.field for axis in varying((ROWS[0], other))] == ["overrides", "network_scale"]


@pytest.mark.parametrize("rows", [(), ROWS[4:], ROWS[:1], (replace(ROWS[0], shares=(), cost_usd=None, train_s=None),)])
def test_page_of_few_or_poor_rows_is_whole(rows: tuple[WhatIfRow, ...]) -> None:
    text = sweep_page(rows, title="toy")
    assert Page(text).tags[-1] == "script"
    assert "nan" not in Page(text).text and "None" not in Page(text).text


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.floats(1e-3, 1e9), st.floats(0.5, 1.0)), max_size=8)
)
def test_any_rows_give_numbers_that_are_numbers(points) -> None:
    rows = [_row(name, hosts, tokens_per_s=per_s, goodput=share) for name, hosts, per_s, share in points]
    for chart in sweep_charts(rows):
        assert not re.search(r"\b(nan|inf)\b", chart.stand_alone)
        ElementTree.fromstring(chart.stand_alone)


def test_hostile_texts_are_shown_as_they_are_and_add_no_element() -> None:
    names = ("hardware", "status", "device", "plan", "detail", "fix", "price_source", "price_date", "host_link")
    assert set(names) < {field.name for field in fields(WhatIfRow)}

    def page(text: str) -> Page:
        filled = dict.fromkeys(names, text) | {"overrides": (text,), "warnings": (text,)}
        rows = (replace(ROWS[0], **filled), ROWS[1], replace(ROWS[4], detail=text))
        return Page(sweep_page(rows, title=text, notes=(text,)))

    hostile = page(HOSTILE)
    assert hostile.tags == page("h" * len(HOSTILE)).tags
    assert hostile.text.count(printable(HOSTILE)) > 8


def test_page_of_four_thousand_points_stays_below_a_megabyte() -> None:
    rows = [_row(f"hardware_{n % 40}", 1 + n // 40, tokens_per_s=100.0 + n) for n in range(4000)]
    text = sweep_page(rows, title="toy")
    assert len(text.encode()) < 1_000_000
    shown = Page(text).text
    for said in ("3976 more points are in the table.", "leave out the last 3600", "more gray points are not drawn"):
        assert said in shown


def test_whatif_writes_the_page_of_the_rows_it_prints(tmp_path: Path, monkeypatch, capsys) -> None:
    answer = WhatIf(ROWS, Sweep((), 0, False, 0.0, 0.0), Assumptions(shipped=read_prices(), today=date(2026, 11, 21)))
    monkeypatch.setattr(asking, "ask", lambda question, **_: answer)
    page = tmp_path / "sweep.html"
    asked = ["whatif", "toy.py", "--set", "size=8b", "--hw", "l4_x8,l40s_x8", "--tokens", "3.6e9", "--format", "json"]
    assert run([*asked, "--html", str(page)]) == 0
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert page.read_text() == sweep_page(
        ROWS, title="toy.py size=8b: 3.6e+09 tokens", notes=assumption_texts(answer.assumptions)
    )
    text = Page(page.read_text()).text
    assert all((row["plan"] or row["detail"]) in text for row in printed)
    monkeypatch.setattr(asking, "ask", lambda question, **_: pytest.fail("searched although FILE is there"))
    assert run([*asked, "--html", str(page)]) == 9


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_browser_shows_the_page_without_requests_or_problems(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    path.write_text(sweep_page((*ROWS, replace(ROWS[0], hardware=HOSTILE)), title=HOSTILE), encoding="utf-8")
    with open_browser() as browser:
        for width in (320, 1100):
            browser.open(path, width=width)
            assert (browser.requests, browser.problems) == ([path.as_uri()], [])
            assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        title = browser.run("document.querySelector('h1').textContent")
    assert json.dumps(title) == json.dumps(printable(HOSTILE))
