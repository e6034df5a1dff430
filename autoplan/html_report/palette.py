"""Colours of the pages and charts, in light and dark.

Eight colours tell series apart. Each stands out from the paper (contrast 3 or more, WCAG 1.4.11), and any two of them
from each other (CIE76 distance 25 or more) for normal sight and for protan, deutan and tritan sight; found by random
search, held by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Theme:
    """One set of colours.

    Attributes:
        paper: the background; `band` is a background that stands off a little.
        ink: text; `soft` is text of less weight.
        line: rules between rows, grids of charts.
        limit: what must not be passed.
        series: what tells series apart.
    """

    paper: str
    band: str
    ink: str
    soft: str
    line: str
    limit: str
    series: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    band="#f3f5f8",
    ink="#1d2733",
    soft="#566473",
    line="#d5dbe3",
    limit="#b3261e",
    series=("#5892f2", "#140644", "#763902", "#e66960", "#bf8808", "#8891a1", "#16493b", "#724899"),
)
DARK = Theme(
    paper="#161b21",
    band="#1f262e",
    ink="#e4e9ef",
    soft="#a3b2c1",
    line="#38434f",
    limit="#ff8a80",
    series=("#81b7fb", "#7846df", "#fecfa6", "#dc2f04", "#fea301", "#a9b1b6", "#217757", "#ba1e99"),
)

# What is drawn, and the number of its colour. Waiting is gray everywhere.
BREAKDOWN_SERIES: Mapping[str, int] = {
    "compute_s": 0,
    "recompute_s": 1,
    "exposed_tp_s": 2,
    "exposed_dp_s": 3,
    "exposed_pp_s": 4,
    "bubble_s": 5,
    "launch_s": 6,
    "optimizer_s": 7,
    "exposed_batch_copy_s": 5,
}
WAITING = 5


def chart_css() -> str:
    """The rules that charts need: those of the light theme, and of the dark one where that is asked for."""
    dark = "\n".join(f"  {line}" for line in _chart_rules(DARK).splitlines())
    return f"{_FIXED}{_chart_rules(LIGHT)}@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


_FIXED = """\
svg text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg .small { font-size: 10px; }
svg .strong { font-weight: 600; }
svg .grid, svg .axis, svg .curve, svg .limit { fill: none; } svg .curve { stroke-width: 2; stroke-linejoin: round; }
svg .limit { stroke-width: 1.5; } svg .thin { stroke-width: 0.6; } svg .dashed { stroke-dasharray: 5 4; }
"""


def _chart_rules(theme: Theme) -> str:
    """Literal colours, no variables: drawing programs that open a chart know no variables."""
    lines = [
        f"svg text {{ fill: {theme.ink}; }} svg text.soft {{ fill: {theme.soft}; }}",
        f"svg .paper {{ fill: {theme.paper}; }} svg .band {{ fill: {theme.band}; }}",
        f"svg .grid {{ stroke: {theme.line}; }} svg .axis {{ stroke: {theme.soft}; }}",
        f"svg .limit {{ stroke: {theme.limit}; }}",
        f"svg .outline {{ stroke: {theme.paper}; stroke-width: 1; }} svg .frame {{ stroke: {theme.ink}; fill: none; }}",
    ]
    for number, colour in enumerate(theme.series):
        inside = readable_on(colour)
        lines.append(
            f"svg .f{number} {{ fill: {colour}; }} svg .l{number} {{ stroke: {colour}; fill: none; }} "
            f"svg text.t{number} {{ fill: {inside}; }}"
        )
    return "\n".join(lines) + "\n"


def readable_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21.

        (L1 + 0.05) / (L2 + 0.05),   L1 the larger relative luminance

    Source: Web Content Accessibility Guidelines 2.2, W3C, "contrast ratio".
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def linear_rgb(colour: str) -> tuple[float, float, float]:
    """Red, green and blue of `#rrggbb` from 0 to 1, proportional to light (sRGB, IEC 61966-2-1)."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(value: float) -> float:
    # factor, limit, offset and exponent of the sRGB curve
    return float(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)


def _luminance(colour: str) -> float:
    red, green, blue = linear_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
