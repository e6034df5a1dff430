"""SVG elements as text, everything in them escaped, and the chart: it stands inside a page or alone in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from autoplan.html_report.palette import chart_css

NAMESPACE = "http://www.w3.org/2000/svg"
HEAD = 30  # height of the title of a file of its own
CHARACTER_WIDTH = 7.3  # of 12 px text in a wide font


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing.

    Attributes:
        name: of its file, without a suffix.
        summary: what there is to see, for who cannot see it.
        body: the elements.
        note: what a reader must know beside it, or "".
        reading: what to read from it, in a sentence.
    """

    name: str
    title: str
    summary: str
    width: int
    height: int
    body: str
    note: str = ""
    reading: str = ""

    @property
    def inline(self) -> str:
        """As part of a page that has `palette.chart_css`, and the title and the reading beside it."""
        return self._element("")

    @property
    def stand_alone(self) -> str:
        """As a file of its own, below its title."""
        head = element("rect", width=self.width, height=self.height + HEAD, y=-HEAD, css="paper")
        head += label(8, 20 - HEAD, self.title, css="strong")
        first = f"<style>{chart_css()}</style>{head}"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{self._element(first, head=HEAD)}\n'

    def _element(self, first: str, *, head: int = 0) -> str:
        ids = f"{self.name}-title {self.name}-summary"
        title = f'<title id="{self.name}-title">{escape_text(self.title)}</title>'
        told = " ".join(filter(None, [self.reading, self.summary]))
        summary = f'<desc id="{self.name}-summary">{escape_text(told)}</desc>'
        height = self.height + head
        return (
            f'<svg xmlns="{NAMESPACE}" viewBox="0 {-head} {self.width} {height}" width="{self.width}" '
            f'height="{height}" role="img" aria-labelledby="{ids}">{title}{summary}{first}{self.body}</svg>'
        )


def element(name: str, *children: str, css: str = "", **attributes: float | str) -> str:
    """One element; `css` is its class, in attribute names `_` stands for `-`, `children` are elements already."""
    named = {"class": css, **attributes} if css else attributes
    text = "".join(f' {key.replace("_", "-")}="{_value(value)}"' for key, value in named.items())
    return f"<{name}{text}>{''.join(children)}</{name}>" if children else f"<{name}{text}/>"


def title(content: str) -> str:
    """What is shown on hover."""
    return f"<title>{escape_text(content)}</title>"


def label(x: float, y: float, content: str, *, css: str = "") -> str:
    """Text that starts at `x`, or ends or is centred there with the classes `end` and `middle`."""
    return element("text", escape_text(content), css=css, x=x, y=y)


def line(x1: float, y1: float, x2: float, y2: float, *, css: str) -> str:
    """A straight line."""
    return element("line", css=css, x1=x1, y1=y1, x2=x2, y2=y2)


def legend(items: Iterable[tuple[int, str]], *, x: float, y: float, width: float) -> tuple[str, float]:
    """A square and a name for each (series, name), in as many rows as it takes; and the height of these rows."""
    parts, left, row = [], x, 0
    for number, name in items:
        needed = 16 + CHARACTER_WIDTH * len(name) + 14
        if left > x and left + needed > x + width:
            left, row = x, row + 1
        top = y + LEGEND_ROW * row
        parts.append(element("rect", css=f"f{number}", x=left, y=top, width=11, height=11))
        parts.append(label(left + 16, top + 10, name))
        left += needed
    return "".join(parts), LEGEND_ROW * (row + 1)


LEGEND_ROW = 18


def number(value: float) -> str:
    """A coordinate, to a hundredth."""
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shortened(text: str, *, width: float) -> str:
    """A text that takes at most `width` pixels, with an ellipsis where it was cut."""
    n_most = max(1, int(width / CHARACTER_WIDTH))
    return text if len(text) <= n_most else text[: n_most - 1] + "…"


def escape_text(text: str) -> str:
    """A text as content or attribute of HTML and XML."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Every character that cannot be seen becomes a space: XML forbids some, others turn the text around."""
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


def _value(value: float | str) -> str:
    return escape_text(value) if isinstance(value, str) else number(value)
