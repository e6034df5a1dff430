"""The page of a plan: nothing runs or loads but its own script and style, and every text in it is text."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser, open_browser
from conftest import make_candidate, make_estimate
from whatif_toys import PARTS

from autoplan.answers.answer import Answer, Request
from autoplan.answers.comparisons import SensitivityRow
from autoplan.cli import run
from autoplan.files import write_folder
from autoplan.html_report import chart_files, plan_page
from autoplan.html_report.plan_charts import plan_charts
from autoplan.html_report.svg import printable
from autoplan.html_report.timeline import MemoryCurve
from autoplan.options import Options
from autoplan.output.folder import report_files
from autoplan.parallel_plan import GroupRanks, Mesh, StagePlan, TimelineEvent
from autoplan.search.result import Rejection
from autoplan.units import GiB

HOSTILE = "</script><img src=x onerror=alert(1)>{{7*7}}\"'`&amp;\x1b[31m\u202e😀</style>{% x %}]]>"
HARMLESS = "h" * len(HOSTILE)
MEMORY: tuple[MemoryCurve, ...] = (((0.0, GiB), (0.4, 4 * GiB)), ((0.4, 7 * GiB), (1.2, 2 * GiB)))
SENSITIVITY = (
    SensitivityRow("as it is", 1.6, 0.0, "same plan"),
    SensitivityRow("1 GiB more", 1.5, 0.0625, "plan changes: ZeRO stage 1 -> none"),
    SensitivityRow("1 GB/s more", None, None, "no time left to search"),
)
VOID = {"meta", "br", "img", "link", "input", "hr"}


class _Page(HTMLParser):
    """Tags in order, attributes, text, and the contents of style and script; every tag must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text, self.open = "", []
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag in self.raw:
            self.raw[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]][-1] += data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def hostile_answer(request: pytest.FixtureRequest) -> Answer:
    """The toy answer with a hostile text wherever a user, a file or a model can put one."""
    from conftest import make_answer

    answer = make_answer()
    estimate = replace(answer.best.estimate, timeline=(*answer.best.estimate.timeline, _event(HOSTILE)))
    best = replace(answer.best, estimate=estimate)
    workload = replace(
        answer.workload,
        model=HOSTILE,
        hardware=HOSTILE,
        device=HOSTILE,
        segment_names=(HOSTILE,) * 4,
        provenance=((HOSTILE, HOSTILE),),
        ops_without_rule=(HOSTILE,),
        limits=(HOSTILE,),
    )
    result = replace(
        answer.result,
        best=best,
        baselines=(make_candidate(baseline=HOSTILE),),
        rejected=(Rejection(Mesh(), "slower", HOSTILE),),
    )
    asked = Request(HOSTILE, (), HOSTILE, 1, Options(fix=(("schedule", HOSTILE),)))
    return Answer(workload, result, (HOSTILE,), asked)


def _event(name: str) -> TimelineEvent:
    return TimelineEvent(rank=0, stage=0, stream=name, name=name, start_s=0.5, stop_s=0.6)


def _benign(answer: Answer, hostile: Answer) -> Answer:
    """The same answer with a harmless text in the place of each hostile one."""
    from autoplan.answers.answer import answer_from_json, answer_to_json

    text = answer_to_json(hostile).replace(json.dumps(HOSTILE)[1:-1], HARMLESS)
    read = answer_from_json(text)
    estimate = replace(read.best.estimate, timeline=(*answer.best.estimate.timeline, _event(HARMLESS)))
    return replace(read, result=replace(read.result, best=replace(read.best, estimate=estimate)))


# ------------------------------------------------------------------------------------------------------------ safety


def test_only_the_style_and_the_script_of_the_page_are_allowed_by_its_policy(answer: Answer) -> None:
    page = _Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "default-src" in v)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert set(rules) == {"default-src", "style-src", "script-src", "base-uri", "form-action"}
    for tag in ("style", "script"):
        (content,) = page.raw[tag]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert set(rules.values()) == {"'none'"}


def test_page_has_nothing_that_its_policy_would_stop_and_requests_nothing(answer: Answer) -> None:
    page = _Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    names = {name for _, name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"style", "src", "srcset", "action", "ping"}
    assert not {"img", "link", "iframe", "object", "embed", "base", "form", "use", "image"} & set(page.tags)
    assert all(value.startswith("#") for value in page.values("href"))
    addresses = re.findall(r"[a-z]+://[^\s\"'<]*", plan_page(answer))
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nothing loads
    assert "@import" not in page.raw["style"][0] and "url(" not in page.raw["style"][0]


def test_links_lead_to_places_in_the_page_and_names_of_places_are_unique(answer: Answer) -> None:
    page = _Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values("href")} <= set(ids)
    assert {one for value in page.values("aria-labelledby") for one in value.split()} <= set(ids)


def test_hostile_texts_are_shown_as_they_are_and_add_no_element(answer: Answer, hostile_answer: Answer) -> None:
    hostile = plan_page(hostile_answer, memory=MEMORY)
    page, other = _Page(hostile), _Page(plan_page(_benign(answer, hostile_answer), memory=MEMORY))
    assert page.tags == other.tags
    assert page.text.count(printable(HOSTILE)) > 10
    assert "\x1b" not in hostile and "\u202e" not in hostile
    assert "49" not in page.text.replace(printable(HOSTILE), "") or "49" in other.text  # {{7*7}} is not computed


def test_hostile_texts_leave_each_chart_well_formed(hostile_answer: Answer) -> None:
    for name, text in chart_files(hostile_answer, memory=MEMORY).items():
        if name.endswith(".svg"):
            root = ElementTree.fromstring(text)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert not root.findall(".//{*}script") and not root.findall(".//{*}image")


def test_hostile_texts_come_back_from_csv_and_no_cell_is_a_formula(hostile_answer: Answer) -> None:
    formula = replace(hostile_answer.result, baselines=(make_candidate(baseline="=1+1"),))
    for hostile, shown in ((hostile_answer, HOSTILE), (replace(hostile_answer, result=formula), "'=1+1")):
        rows = list(csv.DictReader(io.StringIO(chart_files(hostile)["candidates.csv"])))
        assert rows[-1]["name"] == shown


# -------------------------------------------------------------------------------------------------------- what it says


def test_page_shows_the_figures_of_the_plan(answer: Answer) -> None:
    text = _Page(plan_page(answer)).text
    # 1.6 s; 8 samples x 100 tokens / 1.6 s = 500 tokens/s; MFU 12.5 %; 8 of 10 GiB on pipeline rank 1
    for figure in ("1.6 s", "500 tokens/s", "12%", "8.0 GiB", "pipeline rank 1; 2.0 GiB left of 10.0"):
        assert figure in text
    # a billion tokens: 1e9 / 500 = 2e6 s = 555.6 h on 4 devices at 2 USD
    assert "4,444 USD" in text


def test_every_headline_and_every_chart_says_what_its_numbers_rest_on(answer: Answer) -> None:
    page = plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY)
    cards = re.findall(r'<div class="card">.*?</div>', page, re.DOTALL)
    assert len(cards) == 6
    assert all('class="kind ' in card for card in cards)
    for name in ("step", "time", "memory", "candidates", "sensitivity"):
        heading = re.search(rf'<h2 id="{name}">.*?</h2>', page)
        assert heading is not None and 'class="kind computed"' in heading[0]
    measured = make_estimate()
    measured = replace(measured, segment_sources=("measured",) * 4)
    page = plan_page(replace(answer, result=replace(answer.result, best=make_candidate(estimate=measured))))
    assert '<h2 id="time">Where the step goes <span class="kind measured"' in page


def test_page_without_a_plan_gives_the_shortage_and_the_remedies(infeasible: Answer) -> None:
    text = _Page(plan_page(infeasible)).text
    assert "86.20 GiB short" in text
    assert text.index("zero=3 instead of zero=1") < text.index("2 hosts instead of 1")
    assert plan_charts(infeasible) == () and chart_files(infeasible) == {}


def test_page_has_charts_for_what_it_was_given(answer: Answer) -> None:
    bare = replace(answer.best, estimate=replace(answer.best.estimate, timeline=()))
    without = replace(answer, result=replace(answer.result, best=bare))
    names = ["mesh", "breakdown", "memory_parts", "candidates"]
    assert [chart.name for chart in plan_charts(without)] == names
    every = [chart.name for chart in plan_charts(answer, memory=MEMORY, sensitivity=SENSITIVITY)]
    assert every == ["mesh", "timeline", "memory", *names[1:], "sensitivity"]
    assert _Page(plan_page(without)).tags.count("svg") == 4
    assert "no time left to search" in _Page(plan_page(answer, sensitivity=SENSITIVITY)).text


def test_mesh_names_the_hosts_of_one_kind(answer: Answer) -> None:
    # 4 devices on 2 hosts: ranks 2 and 3 are on the second
    two = replace(answer, workload=replace(answer.workload, n_hosts=2))
    assert "rank 1: pipeline rank 0, data 1, tensor 0, host 0" in plan_charts(two)[0].body
    assert "rank 2: pipeline rank 1, data 0, tensor 0, host 1" in plan_charts(two)[0].body
    mixed = replace(two.best, plan=replace(two.best.plan, groups=(GroupRanks(0, 2, "toy_x4"),)))
    assert "host" not in plan_charts(replace(two, result=replace(two.result, best=mixed)))[0].body


def test_rows_beside_the_page_are_the_figures_of_the_answer(answer: Answer) -> None:
    files = chart_files(answer, memory=MEMORY)
    content = json.loads(files["rows.json"])
    for name in ("candidates", "memory"):
        rows = list(csv.DictReader(io.StringIO(files[f"{name}.csv"])))
        assert [set(row) for row in rows] == [set(record) for record in content[name]]
    chosen = content["candidates"][0]
    assert (chosen["name"], chosen["pp"], chosen["step_s"], chosen["fits"]) == ("chosen", 2, 1.6, True)
    assert sum(chosen[f"{part}_s"] for part in PARTS) == pytest.approx(chosen["step_s"])
    assert [row["needed_bytes"] for row in content["memory"]] == [5 * GiB, 8 * GiB]
    moments = list(csv.DictReader(io.StringIO(files["memory_over_time.csv"])))
    assert [int(row["allocated_bytes"]) for row in moments] == [GiB, 4 * GiB, 7 * GiB, 2 * GiB]


def test_explain_writes_the_page_and_replaces_none_unless_forced(tmp_path: Path, answer: Answer, capsys) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    page = tmp_path / "page.html"
    asked = ["explain", str(tmp_path / "out"), "--html", str(page)]
    assert run(asked) == 0
    assert "Why this plan" in capsys.readouterr().out
    assert "1.6 s" in _Page(page.read_text()).text
    page.write_text("mine")
    assert run(asked) == 9
    assert "--force" in capsys.readouterr().err and page.read_text() == "mine"
    assert run([*asked, "--force"]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "page.html"]


@pytest.mark.parametrize("target", ["missing/page.html", "."])
def test_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path, target: str, capsys) -> None:
    assert run(["explain", str(tmp_path / "no.json"), "--force", "--html", str(tmp_path / target)]) == 9
    assert "no.json" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- size


def _large(answer: Answer, *, n_ranks: int, n_micro_batches: int, n_spans: int) -> tuple[Answer, list[MemoryCurve]]:
    """A pipeline whose ranks each do a forward and a backward per micro-batch, with `n_spans` gathers in each."""
    slot_s = 1.0 / (2 * n_micro_batches + n_ranks)
    events: list[TimelineEvent] = []
    curves = []
    for rank in range(n_ranks):
        curve = []
        for place in range(2 * n_micro_batches):
            kind = "F" if place % 2 == 0 else "B"
            start_s = (place + rank) * slot_s
            name = f"{rank}{kind}{place // 2}"
            events.append(TimelineEvent(rank, rank, "compute", name, start_s, start_s + 0.9 * slot_s))
            for span in range(n_spans):
                at_s = start_s + span * slot_s / n_spans
                events.append(TimelineEvent(rank, rank, "communication", "gather", at_s, at_s + 0.2 * slot_s / n_spans))
            curve += [(start_s, (place % 7 + 1) * GiB), (start_s + 0.9 * slot_s, (place % 5 + 1) * GiB)]
        curves.append(tuple(curve))
    small = make_estimate()
    estimate = replace(
        small,
        step_s=1.0,
        allocated_bytes=(7 * GiB,) * n_ranks,
        needed_bytes=(8 * GiB,) * n_ranks,
        memory_parts_bytes=(small.memory_parts_bytes[1],) * n_ranks,
        timeline=tuple(events),
    )
    stages = tuple(StagePlan(index, index + 1) for index in range(n_ranks))
    best = make_candidate(estimate=estimate, mesh=Mesh(pp=n_ranks, n_micro_batches=n_micro_batches))
    best = replace(best, plan=replace(best.plan, stages=stages))
    rejected = tuple(Rejection(Mesh(dp=index), "bound", "cannot beat the best plan " * 4) for index in range(1, 2000))
    return replace(answer, result=replace(answer.result, best=best, rejected=rejected)), curves


@pytest.mark.parametrize(("n_ranks", "n_micro_batches", "n_spans"), [(64, 32, 4), (64, 128, 3), (8, 1024, 2)])
def test_page_stays_below_a_megabyte(answer: Answer, n_ranks: int, n_micro_batches: int, n_spans: int) -> None:
    # 64 x 2 x 32 = 4,096 actions with 16,384 gathers; then four times as many actions; then 8 long rows
    large, curves = _large(answer, n_ranks=n_ranks, n_micro_batches=n_micro_batches, n_spans=n_spans)
    text = plan_page(large, memory=curves)
    assert len(text.encode()) < 1_000_000
    assert "1799 more in rejected.csv" in _Page(text).text


# -------------------------------------------------------------------------------------------------------- in a browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterable[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, hostile_answer: Answer) -> Path:
    """A page with every section and hostile texts."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(plan_page(hostile_answer, memory=MEMORY, sensitivity=SENSITIVITY), encoding="utf-8")
    return path


@in_browser
def test_browser_requests_the_file_alone_and_logs_nothing(browser: Browser, page_file: Path) -> None:
    browser.open(page_file)
    assert browser.run("document.querySelectorAll('svg').length") == 7
    assert browser.requests == [page_file.as_uri()]
    assert browser.problems == []


@in_browser
@pytest.mark.parametrize("width", [320, 375, 768, 1400])
def test_browser_never_scrolls_the_page_sideways(browser: Browser, page_file: Path, width: int) -> None:
    browser.open(page_file, width=width)
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@in_browser
def test_browser_runs_no_other_script_and_loads_no_picture(browser: Browser, page_file: Path) -> None:
    browser.open(page_file)
    browser.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'ran = 1'}))")
    assert browser.run("typeof ran") == "undefined"
    browser.run("document.body.append(Object.assign(new Image(), {src: 'data:image/gif;base64,R0lGODlhAQABAAAAACw='}))")
    browser.run("new Promise(done => setTimeout(done, 50))", wait=True)
    assert len([text for text in browser.problems if "Content Security Policy" in text]) == 2


@in_browser
def test_browser_sorts_by_numbers_and_keeps_what_does_not_fit_last(
    browser: Browser, answer: Answer, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(plan_page(answer), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    table = "document.querySelector('#candidates ~ div.scroll table')"
    shown = f"[...{table}.tBodies[0].rows].map(row => row.cells[3].textContent)"
    head = f"{table}.tHead.rows[0].cells[3]"
    assert browser.run(shown) == ["1.6 s", "2 s", "does not fit", "3.2 s"]
    browser.run(f"{head}.querySelector('button').click()")
    assert browser.run(shown) == ["1.6 s", "2 s", "3.2 s", "does not fit"]
    browser.run(f"{head}.querySelector('button').click()")
    assert browser.run(shown) == ["3.2 s", "2 s", "1.6 s", "does not fit"]
    assert browser.run(f"{head}.getAttribute('aria-sort')") == "descending"


@in_browser
def test_browser_without_script_shows_the_same_text(browser: Browser, page_file: Path) -> None:
    texts = []
    for script in (True, False):
        browser.open(page_file, script=script)
        browser.send("DOM.enable")
        root = browser.send("DOM.getDocument", depth=-1)["root"]
        texts.append(Counter(_text_nodes(root)))
    assert texts[0] == texts[1]


def _text_nodes(node: dict) -> Iterable[str]:
    if node["nodeName"] == "#text" and node["nodeValue"].strip():
        yield node["nodeValue"].strip()
    for child in node.get("children", ()):
        yield from _text_nodes(child)


@in_browser
def test_browser_follows_the_light_and_the_dark_theme(browser: Browser, page_file: Path, tmp_path: Path) -> None:
    seen = []
    for dark in (False, True):
        browser.open(page_file, dark=dark)
        seen.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        assert browser.screenshot(tmp_path / f"{dark}.png").startswith(b"\x89PNG")
    assert seen == ["rgb(255, 255, 255)", "rgb(22, 27, 33)"]


@in_browser
def test_browser_prints_every_chart_within_the_paper(browser: Browser, page_file: Path) -> None:
    browser.open(page_file, width=700, dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    widths = browser.run("[...document.querySelectorAll('svg')].map(item => item.getBoundingClientRect().width)")
    assert max(widths) <= 700
    shown = "[...document.querySelectorAll('details.printed table')].map(item => item.checkVisibility())"
    assert browser.run(shown) == [True, True]
    assert base64.b64decode(browser.send("Page.printToPDF")["data"]).startswith(b"%PDF")
    browser.send("Emulation.setEmulatedMedia", media="")


def test_a_cost_says_that_whole_hosts_are_paid_for_where_a_plan_leaves_devices_idle(answer: Answer) -> None:
    # 2 USD x 4 devices, of which the plan uses 2
    mesh = Mesh(pp=2, micro_batch_size=2, n_micro_batches=4)
    idle = replace(answer, result=replace(answer.result, best=make_candidate(mesh=mesh)))
    said = "per device-hour; whole hosts are paid for, 2 devices of them idle"
    assert said in plan_page(idle) and "whole hosts are paid for" not in plan_page(answer)
    assert "cost of a billion tokens, whole hosts" in plan_page(answer)
    assert "whole hosts are paid for, 2 devices of them idle" in chart_files(idle)["candidates.svg"]
