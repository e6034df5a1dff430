"""What measuring keeps from run to run, and what it tells: no region is measured twice, and nothing else is reused."""

from __future__ import annotations

import json
import sqlite3

import pytest

from autoplan.errors import MeasureError
from autoplan.measure_model.run import run_measurements
from autoplan.measuring_program.progress import Progress
from autoplan.measuring_program.results import ResultCache, key_of, read_results

TASK = {
    "what": "segment", "content": "c", "assignment": "a", "tp": 1, "micro_batch_size": 2, "precision": "bf16",
    "device": "GPU", "torch": "2.11", "driver": "580", "compiled": False, "memory_format": "contiguous",
    "module": "generated", "segment": "blocks.0", "boundary": "", "model": "mine.py", "schema_version": 1,
}  # fmt: skip
FIGURES = {"status": "measured", "forward_s": 1.0, "backward_s": 2.0}
ROW = TASK | FIGURES


def cache_at(path, *, seconds=0.35, model_text="", has_own_ops=False):
    return ResultCache(path, measured_with={"seconds": seconds}, model_text=model_text, has_own_ops=has_own_ops)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_measurement_that_fails_tells_of_its_results_where_there_are_any(tmp_path, is_begun: bool) -> None:
    out = tmp_path / "measured.json"
    if is_begun:
        out.write_text("{}\n")
    with pytest.raises(MeasureError, match="measuring ended with exit code 3") as caught:
        run_measurements({"measure.py": ""}, out=out, device="cuda", start=lambda command: 3)
    assert str(caught.value).endswith("profile again" + f": what is in {out} is not measured again" * is_begun)


def test_figures_come_back_for_the_same_region_of_another_model(tmp_path) -> None:
    cache_at(tmp_path / "deep" / "c.sqlite").keep(ROW)
    other = cache_at(tmp_path / "deep" / "c.sqlite", model_text="another file")
    assert other.find(TASK | {"model": "other.py", "segment": "layers.7"}) == FIGURES


@pytest.mark.parametrize(
    "change",
    [
        {"content": "d"}, {"assignment": "b"}, {"tp": 2}, {"micro_batch_size": 4}, {"precision": "fp32"},
        {"device": "other GPU"}, {"torch": "2.13"}, {"driver": "590"}, {"compiled": True},
        {"memory_format": "channels_last"}, {"module": "own"},
    ],
)  # fmt: skip
def test_nothing_is_taken_for_another_region_or_machine(tmp_path, change) -> None:
    cache = cache_at(tmp_path / "c.sqlite")
    cache.keep(ROW)
    assert cache.find(TASK | change) is None


def test_results_of_shorter_measurements_are_not_taken(tmp_path) -> None:
    cache_at(tmp_path / "c.sqlite", seconds=0.01).keep(ROW)
    assert cache_at(tmp_path / "c.sqlite").find(TASK) is None


@pytest.mark.parametrize(("module", "has_own_ops"), [("own", False), ("generated", True)])
def test_code_of_the_model_file_counts_where_it_runs(tmp_path, module, has_own_ops) -> None:
    path, task = tmp_path / "c.sqlite", TASK | {"module": module}
    cache_at(path, model_text="one", has_own_ops=has_own_ops).keep(task | FIGURES)
    assert cache_at(path, model_text="one", has_own_ops=has_own_ops).find(task) == FIGURES
    assert cache_at(path, model_text="two", has_own_ops=has_own_ops).find(task) is None


@pytest.mark.parametrize("status", ["noisy", "out of memory", "not run", "not compiled"])
def test_only_good_results_are_kept(tmp_path, status) -> None:
    cache = cache_at(tmp_path / "c.sqlite")
    cache.keep(ROW | {"status": status})
    assert cache.find(TASK) is None


def test_a_file_that_is_no_database_is_left_alone_and_said(tmp_path) -> None:
    path = tmp_path / "c.sqlite"
    path.write_text("my notes, which are longer than the head of a database file " * 20)
    cache = cache_at(path)
    cache.keep(ROW)
    assert cache.find(TASK) is None and "without a cache" in cache.trouble
    assert path.read_text().startswith("my notes")


def test_a_table_that_is_missing_costs_only_time(tmp_path) -> None:
    cache = cache_at(tmp_path / "c.sqlite")
    with sqlite3.connect(tmp_path / "c.sqlite") as database:
        database.execute("DROP TABLE results")
    assert cache.find(TASK) is None and "no such table" in cache.trouble
    cache.keep(ROW)


def test_time_left_is_that_of_the_cases_to_be_measured() -> None:
    # two eager ones of 10 s on average, of which one is left, and two compiled ones of 60 s, of which one is left
    eager, compiled = TASK, TASK | {"compiled": True}
    progress = Progress(6, [eager, eager, eager, compiled, compiled])
    assert progress.known(ROW, "known") == "[1/6] blocks.0, tp 1, micro-batch 2: known"
    assert progress.bar(TASK) == f"[{'#' * 5}{'-' * 25}] measuring blocks.0, tp 1, micro-batch 2"
    assert progress.measured(ROW, seconds=8.0).endswith("backward 2000.000 ms; about 32 s left")  # 4 x 8
    progress.measured(ROW, seconds=12.0)
    assert progress.measured(compiled | FIGURES, seconds=110.0).endswith("about 2 min left")  # 10 + 110
    assert progress.measured(ROW, seconds=10.0).startswith("[5/6]")
    assert "left" not in progress.measured(compiled | FIGURES, seconds=1.0)


def test_what_was_measured_before_blocks_were_replayed_is_measured_again(tmp_path) -> None:
    path, other = tmp_path / "measured.json", TASK | {"content": "other"}
    failed = TASK | {"content": "failed", "status": "not run"}
    rows = [ROW, other | FIGURES | {"graph_forward_s": None}, failed, {"what": "optimizer", "per_element_s": 1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_results(path) == {key_of(row) for row in rows[1:]}
