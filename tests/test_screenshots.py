"""What the pages look like in a browser, against golden pictures, in light, dark and on a phone.

Fonts differ between machines, so nothing that hangs on them is compared: charts, whose size is fixed, one by one, as
mean colours of squares; of the page, where its boxes start and how wide they are, and their colours.

To renew the golden files, delete them and run the tests twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser, open_browser
from page_toys import MEMORY, SENSITIVITY
from pictures import SIGNATURE, blurred, read_png
from test_sweep_page import ROWS, sweep_page

from autoplan.answers.answer import Answer
from autoplan.html_report import plan_page

GOLDEN = Path(__file__).parent / "golden" / "screenshots"
SCALE = 0.25  # of the pictures kept: a few KB each
CELL = 4  # pixels of these: 16 of the page, a line of text
NEAR = 40.0  # of 255: a square may be as far off, since letters are darker or lighter in another font
MOST_FAR = 0.06  # share of squares that may be further off, since letters stand elsewhere
LOOKS = {
    "light": {"width": 1100},
    "dark": {"width": 1100, "dark": True},
    "phone": {"width": 375},
}
BOXES = "h1, h2, nav, .cards, .card, figure, svg, .scroll, details"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterable[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def pages(answer: Answer, tmp_path: Path) -> dict[str, Path]:
    """A page of each kind, as files."""
    rows = (*ROWS[:3], replace(ROWS[3], n_hosts=2, n_devices=16), ROWS[4])
    texts = {"plan": plan_page(answer, memory=MEMORY, sensitivity=SENSITIVITY), "sweep": sweep_page(rows, title="toy")}
    for name, text in texts.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: tmp_path / f"{name}.html" for name in texts}


def _chart_pictures(browser: Browser) -> dict[str, bytes]:
    """Each chart of the open page, small."""
    find = (
        "[...document.querySelectorAll('svg')].map(item => [item.querySelector('title').id.slice(0, -6),"
        " ...(box => [box.x + scrollX, box.y + scrollY, box.width, box.height])(item.getBoundingClientRect())])"
    )
    found = {}
    for name, x, y, width, height in browser.run(find):
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": SCALE}
        found[name] = browser.screenshot_of(clip)
    return found


def _boxes(browser: Browser) -> list[list]:
    """Of each box: what it is, where it starts, how wide it is, and its colours; heights hang on fonts."""
    return browser.run(
        f"[...document.querySelectorAll('{BOXES}')].map(item => {{ const box = item.getBoundingClientRect();"
        " const style = getComputedStyle(item);"
        " return [item.tagName + (item.className.baseVal ?? '.' + item.className), Math.round(box.x),"
        " Math.round(box.width), style.backgroundColor, style.color]; })"
    )


def _differs(picture: bytes, golden: bytes) -> str:
    """How a picture differs from the golden one; empty where it does not, but for letters."""
    one, other = read_png(picture).astype(float), read_png(golden).astype(float)
    if any(abs(a - b) > 1 for a, b in zip(one.shape, other.shape, strict=True)):
        return f"size {one.shape} instead of {other.shape}"
    height, width = (min(sizes) for sizes in zip(one.shape[:2], other.shape[:2], strict=True))
    far = np.abs(blurred(one[:height, :width], cell=CELL) - blurred(other[:height, :width], cell=CELL)).max(axis=2)
    share = float((far > NEAR).mean())
    return f"{share:.1%} of the picture differ" if share > MOST_FAR else ""


@pytest.mark.parametrize("look", ["light", "dark"])  # on a phone they scroll, at the size of a narrow window
@pytest.mark.parametrize("page", ["plan", "sweep"])
def test_charts_look_as_they_did(browser: Browser, pages: dict[str, Path], page: str, look: str) -> None:
    browser.open(pages[page], **LOOKS[look])
    found = _chart_pictures(browser)
    assert len(found) >= 4
    wrong = {}
    for name, picture in found.items():
        golden = GOLDEN / f"{page}_{name}_{look}.png"
        if not golden.exists():  # pragma: no cover
            golden.write_bytes(picture)
            wrong[name] = "made: run the test again"
        elif said := _differs(picture, golden.read_bytes()):
            wrong[name] = said
    assert wrong == {}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("page", ["plan", "sweep"])
def test_boxes_stand_where_they_stood(browser: Browser, pages: dict[str, Path], page: str, look: str) -> None:
    browser.open(pages[page], **LOOKS[look])
    found, golden = _boxes(browser), GOLDEN / f"{page}_boxes_{look}.json"
    if not golden.exists():  # pragma: no cover
        golden.write_text("[\n" + ",\n".join(json.dumps(box) for box in found) + "\n]\n")
        pytest.fail("made: run the test again")
    kept = json.loads(golden.read_text())
    assert [box[0] for box in found] == [box[0] for box in kept]
    for box, other in zip(found, kept, strict=True):
        assert box[3:] == other[3:], (box, other)
        assert np.allclose(box[1:3], other[1:3], atol=2), (box, other)


@pytest.mark.parametrize("font", ["serif", "monospace"])
def test_another_font_is_no_difference(browser: Browser, pages: dict[str, Path], font: str) -> None:
    browser.open(pages["plan"], width=1100)
    browser.run(f"document.styleSheets[0].insertRule('svg text {{ font-family: {font} !important }}')")
    for name, picture in _chart_pictures(browser).items():
        assert _differs(picture, (GOLDEN / f"plan_{name}_light.png").read_bytes()) == "", name


def test_a_changed_colour_a_moved_and_a_missing_bar_are_seen(browser: Browser, pages: dict[str, Path]) -> None:
    # the same page, with what a mistake would do to one chart
    kept = (GOLDEN / "plan_memory_parts_light.png").read_bytes()
    for mistake in (
        "item.setAttribute('class', 'f3')",
        "item.setAttribute('x', '700')",
        "item.remove()",
    ):
        browser.open(pages["plan"], width=1100)
        bars = "document.querySelector('svg:has(#memory_parts-title)').querySelectorAll('rect[class^=f]')"
        browser.run(f"[...{bars}].forEach(item => {mistake})")
        assert _differs(_chart_pictures(browser)["memory_parts"], kept)


def test_pictures_are_read_as_they_were_drawn(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "colours.html"
    page.write_text("<style>body{margin:0;background:linear-gradient(90deg,#f00 50%,#00f 50%)}</style>")
    browser.open(page, width=700)
    body = browser.screenshot_of({"x": 0, "y": 0, "width": 700, "height": 40, "scale": 0.1})
    picture = read_png(body)
    assert body.startswith(SIGNATURE) and picture.shape == (4, 70, 3)
    assert picture[2, 10].tolist() == [255, 0, 0] and picture[2, 60].tolist() == [0, 0, 255]
