"""Validation: the tables of predicted against measured runs that are shown are those of today's prices and programs.

Measured blocks are found by the code that is generated for them, so that a change of a price, of the generator or of a
layout moves these tables. Where it does, print them again (benchmarks/README.md has the commands), and say so.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import predictions

CHECKOUT = Path(__file__).parent.parent
RESULTS, EVIDENCE = CHECKOUT / "benchmarks" / "results", CHECKOUT / "benchmarks" / "evidence"
TABLES = {row["table"]: row for row in predictions.table_rows()}
ONE = "predictions_h200_x2_2026-11-22_one_machine"
# Printed once, to compare with: by earlier prices, or without a part of them.
OF_THEIR_TIME = {
    "predictions_compiled_h100_x2_2026-11-24_data_sheet",
    "predictions_compiled_h200_2026-11-24_data_sheet",
    f"{ONE}_profile_kept_tensors_free",
    "predictions_h200_x2_2026-11-22_repeated",
}
QUICK_MODELS = ("vit_large", "mixture")


def _evidence() -> str:
    return "".join(page.read_text() for page in (CHECKOUT / "benchmarks" / "README.md", *EVIDENCE.glob("*.md")))


@pytest.mark.nightly
def test_rows_of_the_table_of_one_machine_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RESULTS)
    models = {(case.links, case.name): case.model for case in predictions.cases()}
    runs, profile, links = TABLES[f"{ONE}_profile"]["arguments"].split()
    rows = [row for row in predictions.read(Path(runs)) if models[row["links"], row["case"]] in QUICK_MODELS]
    some = tmp_path / "runs.jsonl"
    some.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [predictions.line(row, best) for row, best in predictions.all_predictions([str(some), profile, links])]
    shown = (RESULTS / f"{ONE}_profile.txt").read_text().splitlines()
    assert len(lines) == 14
    assert lines == [line for line in shown if line in lines]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_again(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = TABLES[name]
    if not transformers.__version__.startswith(f"{row['transformers']}."):
        pytest.skip(f"needs transformers {row['transformers']}")
    monkeypatch.chdir(RESULTS)
    predictions.table(*row["arguments"].split())
    assert capsys.readouterr().out == (RESULTS / f"{name}.txt").read_text()


def test_the_worst_rows_are_shown_each_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    predictions.worst()
    found = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^(\|.*% \|) \w.* \|$", (EVIDENCE / "what_is_wrong.md").read_text(), re.M)
    assert len(found) == 20
    assert [line for line in shown if line in found] == found


def test_every_table_of_the_results_can_be_printed_again() -> None:
    assert {path.stem for path in RESULTS.glob("predictions_*.txt")} == {*TABLES, *OF_THEIR_TIME}
    files = {name for row in TABLES.values() for name in re.split(r"[ +]", row["arguments"])}
    missing = {name for name in files if not (RESULTS / name).exists()}
    assert missing == {"-", "--", "compiled", "dgx_h100_x8", "h200_x4"}


def test_several_profiles_are_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}\n")
    with predictions.profile_file(f"{tmp_path / 'a'}+{tmp_path / 'b'}") as both:
        assert both is not None and both.read_text() == "a\nb\n"
    for given, expected in (("-", None), ("compiled", None), ("x.jsonl", Path("x.jsonl"))):
        with predictions.profile_file(given) as file:
            assert file == expected


def _groups(name: str) -> dict[str, str]:
    """Group of runs -> their mean absolute error and number, as READMEs write them."""
    found = re.findall(r"^([\w, -]+): (\d+) runs, mean absolute error ([\d.]+)%", (RESULTS / name).read_text(), re.M)
    return {group: f"{error} % ({n_runs})" for group, n_runs, error in found}


GRAPH_CELLS = {
    "predictions_h200_x2_2026-11-26_graphs_profile": {
        "nvlink": "2.2 % (19)",
        "host_memory": "3.5 % (12)",
        "host_memory|socket": "4.7 % (19)",
    },
    "predictions_h100_x2_2026-11-26_graph_blocks_profile": {"nvlink": "3.1 % (21)"},
    "predictions_h100_x4_2026-11-26_graphs_graph_blocks": {"nvlink": "5.1 % (18)"},
    "predictions_h100_x4_2026-11-27_graphs_profile": {"nvlink": "2.3 % (14)"},
    "predictions_h100_x4_2026-11-27_sixth_machine_profile": {
        "nvlink": "1.8 % (14)",
        "socket": "11.1 % (9)",
    },
    "predictions_h100_x4_2026-11-27_fourth_machine_profile": {
        "nvlink": "2.6 % (20)",
        "host_memory": "8.2 % (4)",
        "socket": "6.2 % (4)",
    },
}


@pytest.mark.parametrize("table", GRAPH_CELLS)
def test_the_evidence_says_how_far_off_all_graphs_over_some_links_are(table: str) -> None:
    rows, text = (RESULTS / f"{table}.txt").read_text(), _evidence()
    for links, cell in GRAPH_CELLS[table].items():
        errors = [abs(float(found)) for found in re.findall(rf"^(?:{links}) .*?([+-][\d.]+)%", rows, re.M)]
        assert f"{statistics.mean(errors):.1f} % ({len(errors)})" == cell
        assert cell in text


RECOMPUTED_CELLS = {  # of programs that recompute all blocks, and of the others
    f"{ONE}_profile": ("5.2 % (13)", "8.0 % (53)"),
    "predictions_h200_six_machines_2026-11-22_profile": ("5.7 % (38)", "10.2 % (175)"),
    "predictions_h100_x2_2026-11-24_profile": ("3.4 % (6)", "8.2 % (32)"),
}


@pytest.mark.parametrize("table", RECOMPUTED_CELLS)
def test_the_evidence_says_how_far_off_programs_are_that_recompute(table: str) -> None:
    fixed = {(case.links, case.name): case.fix for case in predictions.cases()}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for links, name, _, _, error, *_ in predictions.LINE.findall((RESULTS / f"{table}.txt").read_text()):
        if links == "nvlink":
            errors["recompute=full" in fixed[links, name]].append(abs(float(error)))
    cells = tuple(f"{statistics.mean(found):.1f} % ({len(found)})" for found in errors.values())
    assert cells == RECOMPUTED_CELLS[table] and f"{cells[0]} and {cells[1]}" in " ".join(_evidence().split())


def test_programs_in_the_readme_are_measured_and_predicted_as_in_a_printed_table() -> None:
    """Rows with measured steps, predicted steps and errors: `| 0.4388, 0.64 s | 0.4385, 0.63 s | 0, -1 % |`."""
    row = re.compile(r"^(?:nvlink|host_memory|socket) .*? +([\d.]+) +([\d.]+) +[+-][\d.]+% ", re.M)
    printed = {pair for path in RESULTS.glob("predictions_*.txt") for pair in row.findall(path.read_text())}
    cells = re.findall(r"\| ([\d., ]+) s \| ([\d., ]+) s (?=\| [-+\d, ]+ %)", _evidence())
    said = [
        (p, m)
        for measured, predicted in cells
        for m, p in zip(measured.split(", "), predicted.split(", "), strict=True)
    ]
    assert len(said) > 100
    assert [pair for pair in said if pair not in printed] == []


@pytest.mark.parametrize(
    ("table", "links"),
    [
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "nvlink,"),
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "memory"),
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "socket,"),
        ("predictions_h200_x2_2026-11-22_one_machine_data_sheet.txt", "nvlink,"),
        ("predictions_h200_x2_2026-11-22_one_machine_data_sheet.txt", "memory"),
        ("predictions_h200_2026-11-22_profile.txt", "nvlink,"),
        ("predictions_h200_2026-11-22_profile.txt", "socket,"),
        ("predictions_h200_2026-11-22_profile.txt", "host_memory,"),
        ("predictions_h200_2026-11-22_data_sheet.txt", "nvlink,"),
        ("predictions_h200_2026-11-22_data_sheet.txt", "socket,"),
        ("predictions_h200_2026-11-22_data_sheet.txt", "host_memory,"),
        ("predictions_h200_2026-11-22_last_programs_profile.txt", "memory"),
        ("predictions_h200_2026-11-22_last_programs_data_sheet.txt", "memory"),
        ("predictions_h100_2026-11-23_profile.txt", "nvlink,"),
        ("predictions_h100_2026-11-23_profile.txt", "memory"),
        ("predictions_h100_2026-11-23_data_sheet.txt", "nvlink,"),
        ("predictions_h100_2026-11-23_data_sheet.txt", "memory"),
        ("predictions_h100_2026-11-23_measured_rates.txt", "nvlink,"),
        ("predictions_h100_x2_2026-11-24_profile.txt", "nvlink,"),
        ("predictions_h100_x2_2026-11-24_profile.txt", "memory"),
        ("predictions_h100_x2_2026-11-24_data_sheet.txt", "nvlink,"),
        ("predictions_h100_x2_2026-11-24_data_sheet.txt", "memory"),
        ("predictions_h100_x2_2026-11-24_measured_rates.txt", "nvlink,"),
    ],
)
def test_the_evidence_says_what_the_tables_print(table: str, links: str) -> None:
    said = {group: text for group, text in _groups(table).items() if group.startswith(links)}
    assert said
    text = _evidence()
    assert {group: cell for group, cell in said.items() if cell not in text} == {}


def test_the_table_of_the_readme_has_the_ends_of_what_the_evidence_has() -> None:
    short, long = (
        [line for line in (CHECKOUT / readme).read_text().split("| predicted from |")[1].splitlines() if "%" in line]
        for readme in ("README.md", "benchmarks/README.md")
    )
    table = "".join(long[: next(place for place, line in enumerate(long) if not line.startswith("|"))])
    said = [end for line in short[:4] for cell in re.findall(r"\|([^|]+) %", line) for end in cell.split(" to ")]
    assert len(said) > 15
    assert [end for end in said if not re.search(rf"(?<![\d.]){re.escape(end.strip())} (%|to)", table)] == []
