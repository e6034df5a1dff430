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
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser, open_browser
from conftest import make_candidate
from page_toys import HARMLESS, HOSTILE, MEMORY, SENSITIVITY, Page

from autoplan.answers.answer import Answer, Request
from autoplan.html_report import chart_files, plan_page
from autoplan.html_report.svg import printable
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, TimelineEvent
from autoplan.search.result import Rejection


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


def test_only_the_style_and_the_script_of_the_page_are_allowed_by_its_policy(answer: Answer) -> None:
    page = Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "default-src" in v)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert set(rules) == {"default-src", "style-src", "script-src", "base-uri", "form-action"}
    for tag in ("style", "script"):
        (content,) = page.raw[tag]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert set(rules.values()) == {"'none'"}


def test_page_has_nothing_that_its_policy_would_stop_and_requests_nothing(answer: Answer) -> None:
    page = Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    names = {name for _, name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"style", "src", "srcset", "action", "ping"}
    assert not {"img", "link", "iframe", "object", "embed", "base", "form", "use", "image"} & set(page.tags)
    assert all(value.startswith("#") for value in page.values("href"))
    addresses = re.findall(r"[a-z]+://[^\s\"'<]*", plan_page(answer))
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nothing loads
    assert "@import" not in page.raw["style"][0] and "url(" not in page.raw["style"][0]


def test_links_lead_to_places_in_the_page_and_names_of_places_are_unique(answer: Answer) -> None:
    page = Page(plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values("href")} <= set(ids)
    assert {one for value in page.values("aria-labelledby") for one in value.split()} <= set(ids)


def test_hostile_texts_are_shown_as_they_are_and_add_no_element(answer: Answer, hostile_answer: Answer) -> None:
    hostile = plan_page(hostile_answer, memory=MEMORY)
    page, other = Page(hostile), Page(plan_page(_benign(answer, hostile_answer), memory=MEMORY))
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


# ------------------------------------------------------------------------------------------ in a browser

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
