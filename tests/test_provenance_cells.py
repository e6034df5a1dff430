"""Every figure of a table says what it rests on, in the page itself."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from test_sweep_page import ROWS

from autoplan.html_report.answer_page import plan_page
from autoplan.html_report.provenance import KINDS
from autoplan.html_report.sweep_page import sweep_page


class _Tables(HTMLParser):
    """(header, kind, text) of every figure: a cell that stands to the right, and is no number of a row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.figures: list[tuple[str, str, str]] = []
        self.legends: list[set[str]] = []
        self._table_kind, self._header, self._column = "", [], -1
        self._open: str | None = None
        self._kind: str | None = None
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        given = dict(attrs)
        css = (given.get("class") or "").split()
        if tag == "table":
            self._table_kind, self._header = given.get("data-kind") or "", []
        elif tag == "tr":
            self._column = -1
        elif tag in ("td", "th"):
            self._column += 1
            self._open = tag
            is_figure = tag == "td" and "right" in css and "data-value" in given
            self._kind = (given.get("data-kind") or self._table_kind) if is_figure else None
        elif tag == "p" and "kinds" in css:
            self.legends.append(set())
        elif tag == "span" and "kind" in css and self.legends:
            self.legends[-1].add(css[1].replace("-", " "))

    def handle_endtag(self, tag) -> None:
        if tag in ("td", "th"):
            self._open = self._kind = None

    def handle_data(self, text) -> None:
        if self._open == "th":
            self._header.append(text)
        elif self._kind is not None:
            self.figures.append((self._header[self._column], self._kind, text))


def test_every_figure_of_a_sweep_has_a_kind_and_money_that_of_its_price() -> None:
    found = _Tables(sweep_page(ROWS, title="toy"))
    assert len(found.figures) > 50 and {kind for _, kind, _ in found.figures} <= set(KINDS)
    money = {kind for name, kind, text in found.figures if "USD" in text}
    # "median of 5 clouds" was published by those who sell it
    assert money == {"data sheet"}
    assert {kind for name, kind, _ in found.figures if name in ("step", "goodput", "time to train")} == {"computed"}
    assert {"computed", "data sheet"} in found.legends


def test_every_figure_of_a_plan_has_a_kind(answer) -> None:
    found = _Tables(plan_page(answer))
    assert found.figures and {kind for _, kind, _ in found.figures} <= set(KINDS)
    assert {kind for name, kind, _ in found.figures if name == "memory"} == {"computed"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "computed"])
def test_a_kind_that_is_not_the_usual_one_looks_different(kind: str) -> None:
    css = sweep_page(ROWS, title="toy").partition("</style>")[0]
    assert f'td.right[data-kind="{kind}"]' in css
