"""Charts and rows as files beside a result: SVG always, PNG where its library is, rows as they are printed."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_sweep_page import ROWS

from autoplan.answers.answer import Answer
from autoplan.cli import run
from autoplan.files import write_folder
from autoplan.html_report import png
from autoplan.html_report.svg import HEAD
from autoplan.html_report.sweep_charts import sweep_charts
from autoplan.output.folder import report_files

GPT = str(Path(__file__).parent.parent / "examples" / "gpt.py")
ASKED = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1,2", "--samples", "1e6"]
ASKED += ["--fix", "tp=1,pp=1", "--jobs", "1", "--format", "json"]
needs_library = pytest.mark.skipif(importlib.util.find_spec(png.LIBRARY) is None, reason="resvg_py is not installed")


def _size(body: bytes) -> tuple[int, ...]:
    """Width and height, as the header of a PNG has them."""
    assert body.startswith(b"\x89PNG\r\n\x1a\n") and body[12:16] == b"IHDR"
    return struct.unpack(">II", body[16:24])


@needs_library
def test_png_has_two_pixels_for_each_unit_of_the_drawing() -> None:
    charts = sweep_charts(ROWS)
    files = png.chart_texts(charts, has_png=True)
    assert len(charts) == 4
    for chart in charts:
        assert _size(files[f"{chart.name}.png"]) == (2 * chart.width, 2 * (chart.height + HEAD))


@needs_library
def test_png_shows_what_the_drawing_has() -> None:
    bare = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8">{}</svg>'
    drawn = bare.format('<rect width="4" height="8" fill="#f00"/>')
    assert png.png(drawn) == png.png(drawn) != png.png(bare.format(""))


def test_charts_and_rows_of_a_whatif_are_what_it_prints(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "charts"
    assert run([*ASKED, "--charts", str(folder)]) == 0
    assert json.loads((folder / "rows.json").read_text()) == json.loads(capsys.readouterr().out)
    assert (folder / "rows.csv").read_text().startswith("hardware,")
    for name in ("scaling", "losses"):
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    assert run([*ASKED, "--charts", str(folder)]) == 9
    assert "--charts" in capsys.readouterr().err


def test_charts_of_a_plan_are_those_of_its_folder(tmp_path: Path, answer: Answer, capsys) -> None:
    write_folder(tmp_path / "plan", report_files(answer))
    assert run(["explain", str(tmp_path / "plan"), "--charts", str(tmp_path / "charts")]) == 0
    names = {path.name for path in (tmp_path / "charts").iterdir()} - {"MANIFEST.json"}
    assert {"mesh.svg", "breakdown.svg", "candidates.csv", "rows.json"} <= names
    for name in names:
        assert (tmp_path / "charts" / name).read_bytes() == (tmp_path / "plan" / "report" / name).read_bytes()


def test_png_is_refused_before_anything_is_searched(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run([*ASKED, "--png"]) == 2
    assert "--charts DIR" in capsys.readouterr().err
    monkeypatch.setattr(png, "LIBRARY", "no_such_library")
    assert run([*ASKED, "--charts", str(tmp_path / "charts"), "--png"]) == 2
    assert "pip install 'autoplan[png]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@needs_library
def test_a_machine_without_fonts_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(png, "png", lambda svg: b"nothing to see")
    assert run([*ASKED, "--charts", "charts", "--png"]) == 2
    assert "no fonts" in capsys.readouterr().err
