"""What pages in tests are made of, and a reader of them."""

from __future__ import annotations

from html.parser import HTMLParser

from autoplan.answers.comparisons import SensitivityRow
from autoplan.html_report.timeline import MemoryCurve
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


class Page(HTMLParser):
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
