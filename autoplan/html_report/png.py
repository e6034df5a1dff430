"""Charts as PNG, drawn by `resvg_py`, which is optional: one small library without dependencies of its own.

Texts take the fonts of the machine; where it has none they would be missing, so that is refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from autoplan.errors import UsageError
from autoplan.html_report.svg import NAMESPACE, Chart

LIBRARY = "resvg_py"
ZOOM = 2  # pixels for each of the drawing's units: sharp on screens and slides
_SIZE = f'<svg xmlns="{NAMESPACE}" width="20" height="20">'
_LETTER = f'{_SIZE}<text x="2" y="16" font-size="16" font-family="sans-serif">M</text></svg>'


def chart_texts(charts: Sequence[Chart], *, has_png: bool) -> dict[str, str | bytes]:
    """Each chart as SVG, and as PNG too, by the names of their files."""
    found: dict[str, str | bytes] = {f"{chart.name}.svg": chart.stand_alone for chart in charts}
    if has_png:
        found |= {f"{chart.name}.png": png(chart.stand_alone) for chart in charts}
    return found


def check_png() -> None:
    """Refuse PNG before time is spent on what it shows.

    Raises: UsageError when the library, or any font, is missing.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise UsageError(
            f"--png: {LIBRARY} is not installed\n  fix: pip install 'autoplan[png]', or take the SVG files"
        )
    if png(_LETTER) == png(f"{_SIZE}</svg>"):
        raise UsageError("--png: this machine has no fonts\n  fix: install one, such as DejaVu, or take the SVG files")


def png(svg: str) -> bytes:
    """A drawing as PNG, in the light theme."""
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM))
