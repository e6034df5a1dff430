"""What a browser relies on in the pages, checked without one: targets, headings, scrolling parts, colours of themes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from test_sweep_page import ROWS

from autoplan.html_report.answer_page import plan_page
from autoplan.html_report.sweep_page import sweep_page

VOID = frozenset({"meta", "link", "br", "img", "input", "hr", "use"})


class _Dom(HTMLParser):
    """Every element with its attributes and the elements that it lies in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[tuple[str, str], ...]]] = []
        self._open: list[tuple[str, str]] = []
        self.feed(page)
        self.unclosed = [tag for tag, _ in self._open]

    def handle_starttag(self, tag, attrs) -> None:
        given = dict(attrs)
        self.elements.append((tag, given, tuple(self._open)))
        if tag not in VOID:
            self._open.append((tag, given.get("class") or ""))

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag) -> None:
        assert self._open and self._open[-1][0] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def all(self, *tags: str) -> list[tuple[str, dict[str, str | None], tuple[tuple[str, str], ...]]]:
        return [element for element in self.elements if element[0] in tags]


@pytest.fixture(params=["plan", "sweep"])
def page(request, answer) -> str:
    return plan_page(answer) if request.param == "plan" else sweep_page(ROWS, title="toy")


def test_elements_nest_and_ids_are_unique_and_reached(page: str) -> None:
    dom = _Dom(page)
    assert not dom.unclosed
    ids = [given["id"] for _, given, _ in dom.elements if "id" in given]
    assert len(ids) == len(set(ids))
    targets = {href[1:] for _, given, _ in dom.elements if (href := given.get("href") or "").startswith("#")}
    assert targets <= set(ids)
    labels = [given["aria-labelledby"] for _, given, _ in dom.elements if given.get("aria-labelledby")]
    assert {name for label in labels for name in (label or "").split()} <= set(ids)


def test_headings_leave_no_level_out(page: str) -> None:
    levels = [int(tag[1]) for tag, _, _ in _Dom(page).all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))


def test_what_is_wider_than_a_phone_scrolls_by_itself_and_has_a_name(page: str) -> None:
    dom = _Dom(page)
    wide = [inside for tag, given, inside in dom.all("table", "svg") if given.get("class") != "facts"]
    assert wide and all(any("scroll" in css.split() for _, css in inside) for inside in wide)
    regions = [given for _, given, _ in dom.all("div") if "scroll" in (given.get("class") or "").split()]
    assert all(given.get("tabindex") == "0" and given.get("aria-label") for given in regions)
    assert any(given.get("name") == "viewport" for _, given, _ in dom.all("meta"))


def test_every_colour_is_defined_and_dark_has_one_for_each(page: str) -> None:
    css = page.partition("<style>")[2].partition("</style>")[0]
    used = set(re.findall(r"var\((--[a-z0-9-]+)", css))
    light = set(re.findall(r"(--[a-z0-9-]+):", css.partition("prefers-color-scheme: dark")[0]))
    dark = set(re.findall(r"(--[a-z0-9-]+):", css.partition("prefers-color-scheme: dark")[2].partition("}")[0]))
    assert used and used <= light | dark and dark <= light | dark
    assert {"--paper", "--ink", "--soft", "--line", "--band"} <= light & dark


def test_every_class_of_a_part_that_is_styled_is_in_the_style(page: str) -> None:
    css = page.partition("<style>")[2].partition("</style>")[0]
    styled = set(re.findall(r"\.([a-z][a-z0-9-]*)", css))
    used = {
        name
        for tag, given, _ in _Dom(page).all("div", "span", "table", "p")
        for name in (given.get("class") or "").split()
    }
    assert used - {"sortable"} <= styled | {"kind", "data-sheet", "calibrated"}
