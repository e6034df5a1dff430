"""Validation: the tables of predicted against measured runs that are shown are those of today's prices and programs.

Measured blocks are found by the code that is generated for them, so that a change of a price, of the generator or of a
layout moves these tables. Where it does, print them again (benchmarks/README.md has the commands), and say so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import predictions

CHECKOUT = Path(__file__).parent.parent
RESULTS = CHECKOUT / "benchmarks" / "results"
RUNS = ("predictions_h200_x4_2026-11-21.jsonl", "predictions_h200_x2_2026-11-22.jsonl")
LAST = ("predictions_h200_x2_2026-11-22_second_run.jsonl", "predictions_h200_x4_2026-11-22.jsonl")
FIVE = ("profile_h200_2026-11-22.jsonl", "links_h200_2026-11-21")
FIVE_DATA_SHEET = ("-", FIVE[1])
ONE_RUNS = "predictions_h200_x2_2026-11-22_one_machine.jsonl"
ONE = (ONE_RUNS, "profile_h200_x2_2026-11-22_one_machine.jsonl", "links_h200_x2_2026-11-22")
ONE_DATA_SHEET = (ONE_RUNS, "-", ONE[2])
SIX = "predictions_h200_six_machines_2026-11-22"
TABLES = {
    "predictions_h200_x2_2026-11-22_one_machine_profile.txt": ONE,
    "predictions_h200_x2_2026-11-22_one_machine_data_sheet.txt": ONE_DATA_SHEET,
    "predictions_h200_2026-11-22_profile.txt": (*RUNS, *LAST, *FIVE),
    "predictions_h200_2026-11-22_data_sheet.txt": (*RUNS, *LAST, *FIVE_DATA_SHEET),
    "predictions_h200_2026-11-22_last_programs_profile.txt": (*LAST, *FIVE),
    "predictions_h200_2026-11-22_last_programs_data_sheet.txt": (*LAST, *FIVE_DATA_SHEET),
    f"{SIX}_profile.txt": (*RUNS, *LAST, *FIVE, "--", *ONE),
    f"{SIX}_data_sheet.txt": (*RUNS, *LAST, *FIVE_DATA_SHEET, "--", *ONE_DATA_SHEET),
    f"{SIX}_last_programs_profile.txt": (*LAST, *FIVE, "--", *ONE),
}
H100_RUNS = "predictions_h100_2026-11-23.jsonl"
TABLES |= {
    "predictions_h100_2026-11-23_profile.txt": (H100_RUNS, "profile_h100_2026-11-23.jsonl", "dgx_h100_x8"),
    "predictions_h100_2026-11-23_data_sheet.txt": (H100_RUNS, "-", "dgx_h100_x8"),
    "predictions_h100_2026-11-23_measured_rates.txt": (H100_RUNS, "-", "links_h100_2026-11-23"),
}
TWO_H100_RUNS = ("predictions_h100_x2_2026-11-24.jsonl", "predictions_h100_x2_2026-11-24_second_run.jsonl")
TWO_H100_LINKS = "links_h100_x2_2026-11-24"
TABLES |= {
    "predictions_h100_x2_2026-11-24_profile.txt": (*TWO_H100_RUNS, "profile_h100_x2_2026-11-24.jsonl", TWO_H100_LINKS),
    "predictions_h100_x2_2026-11-24_data_sheet.txt": (*TWO_H100_RUNS, "-", "dgx_h100_x8"),
    "predictions_h100_x2_2026-11-24_measured_rates.txt": (*TWO_H100_RUNS, "-", TWO_H100_LINKS),
}
COMPILED = tuple("compiled" if name == "-" else name for name in TABLES[f"{SIX}_data_sheet.txt"])
TABLES |= {
    "predictions_compiled_h200_2026-11-25_data_sheet.txt": COMPILED,
    "predictions_compiled_h100_x2_2026-11-25_data_sheet.txt": (*TWO_H100_RUNS, "compiled", "dgx_h100_x8"),
}
SLOW_LINKS = "predictions_h200_x2_2026-11-24"
TABLES |= {
    f"predictions_slow_links_h200_x2_2026-11-24_{name}.txt": (
        *(f"{SLOW_LINKS}_links.jsonl", profile, "links_h200_x2_2026-11-24", "--"),
        *(f"{SLOW_LINKS}_sockets.jsonl", profile, ONE[2]),
    )
    for name, profile in (("profile", ONE[1]), ("data_sheet", "-"))
}
GRAPHS, GRAPHS_LINKS = "predictions_h200_x2_2026-11-25_graphs", "links_h200_x2_2026-11-25_third_machine"
TABLES[f"{GRAPHS}_compiled_measured_rates.txt"] = (f"{GRAPHS}_compiled.jsonl", "compiled", GRAPHS_LINKS)
QUICK_MODELS = ("vit_large", "mixture")


def _at_results(given: tuple[str, ...]) -> list[str]:
    return [
        name if name in ("-", "--", "compiled") or not (RESULTS / name).exists() else str(RESULTS / name)
        for name in given
    ]


@pytest.mark.nightly
def test_rows_of_the_table_of_one_machine_come_again(tmp_path: Path) -> None:
    models = {(case.links, case.name): case.model for case in predictions.cases()}
    rows = [row for row in predictions.read(RESULTS / ONE_RUNS) if models[row["links"], row["case"]] in QUICK_MODELS]
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [
        predictions.line(row, best) for row, best in predictions.all_predictions([str(runs), *_at_results(ONE[1:])])
    ]
    shown = (RESULTS / "predictions_h200_x2_2026-11-22_one_machine_profile.txt").read_text().splitlines()
    assert len(lines) == 14
    assert lines == [line for line in shown if line in lines]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_again(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    predictions.table(*_at_results(TABLES[name]))
    assert capsys.readouterr().out == (RESULTS / name).read_text()


def _groups(name: str) -> dict[str, str]:
    """Group of runs -> their mean absolute error and number, as READMEs write them."""
    found = re.findall(r"^([\w, -]+): (\d+) runs, mean absolute error ([\d.]+)%", (RESULTS / name).read_text(), re.M)
    return {group: f"{error} % ({n_runs})" for group, n_runs, error in found}


@pytest.mark.parametrize(
    ("table", "links", "readmes"),
    [
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h200_x2_2026-11-22_one_machine_profile.txt", "socket,", ("benchmarks/README.md",)),
        ("predictions_h200_x2_2026-11-22_one_machine_data_sheet.txt", "nvlink,", ("benchmarks/README.md",)),
        ("predictions_h200_x2_2026-11-22_one_machine_data_sheet.txt", "memory", ("benchmarks/README.md",)),
        ("predictions_h200_2026-11-22_profile.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h200_2026-11-22_profile.txt", "socket,", ("benchmarks/README.md",)),
        ("predictions_h200_2026-11-22_profile.txt", "host_memory,", ("benchmarks/README.md",)),
        ("predictions_h200_2026-11-22_data_sheet.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h200_2026-11-22_data_sheet.txt", "socket,", ("benchmarks/README.md",)),
        ("predictions_h200_2026-11-22_data_sheet.txt", "host_memory,", ("benchmarks/README.md",)),
        ("predictions_h200_2026-11-22_last_programs_profile.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h200_2026-11-22_last_programs_data_sheet.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_2026-11-23_profile.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_2026-11-23_profile.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_2026-11-23_data_sheet.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_2026-11-23_data_sheet.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_2026-11-23_measured_rates.txt", "nvlink,", ("benchmarks/README.md",)),
        ("predictions_h100_x2_2026-11-24_profile.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_x2_2026-11-24_profile.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_x2_2026-11-24_data_sheet.txt", "nvlink,", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_x2_2026-11-24_data_sheet.txt", "memory", ("README.md", "benchmarks/README.md")),
        ("predictions_h100_x2_2026-11-24_measured_rates.txt", "nvlink,", ("benchmarks/README.md",)),
    ],
)
def test_readmes_say_what_the_tables_print(table: str, links: str, readmes: tuple[str, ...]) -> None:
    said = {group: text for group, text in _groups(table).items() if group.startswith(links)}
    assert said
    for readme in readmes:
        text = (CHECKOUT / readme).read_text()
        assert {group: cell for group, cell in said.items() if cell not in text} == {}
