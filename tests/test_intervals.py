"""Intervals of predictions: Student's quantile, the entry that runs give, and the share of runs inside."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest

from autoplan.answers.answer import trust
from autoplan.answers.intervals import (
    AHEAD,
    COMPUTED,
    GRAPH,
    MEMORY_ERRORS,
    STEP_ERRORS,
    WAITED_FOR,
    Errors,
    chance_above,
    coverage,
    errors_of,
    interval,
    student_t_quantile,
)
from autoplan.cost.table import SOURCES

CHECKOUT = Path(__file__).parent.parent


@pytest.mark.parametrize(("n_degrees", "expected"), [(5, 2.015), (14, 1.761), (60, 1.671), (0, 1.645)])
def test_student_t_quantile_equals_printed_tables(n_degrees: int, expected: float) -> None:
    assert student_t_quantile(0.95, n_degrees=n_degrees) == pytest.approx(expected, rel=5e-3)


def test_interval_has_the_prediction_in_its_middle_and_widens_with_fewer_runs() -> None:
    low, high = interval(2.0, Errors(0.1, 0, "given"))
    assert low * high == pytest.approx(4.0)
    assert high == pytest.approx(2.0 * math.exp(0.1645), rel=1e-3)
    widths = [interval(2.0, Errors(0.1, n_runs, "runs"))[1] for n_runs in (5, 14, 60, 0)]
    assert widths == sorted(widths, reverse=True)


def test_drift_of_links_widens_an_interval_as_an_error_of_its_own() -> None:
    alone, both = Errors(0.03, 0, "toy"), Errors(0.05, 0, "toy")
    assert interval(2.0, alone, drift=0.04) == pytest.approx(interval(2.0, both))
    assert interval(2.0, alone, drift=0.0) == interval(2.0, alone)


def test_one_run_in_twenty_is_above_the_upper_end_of_an_interval_of_known_errors() -> None:
    errors = Errors(0.1, 0, "given")
    assert chance_above(interval(2.0, errors)[1], 2.0, errors) == pytest.approx(0.05)
    assert chance_above(2.0, 2.0, errors) == pytest.approx(0.5)


def test_errors_of_runs_are_the_same_for_too_slow_and_too_fast() -> None:
    # ln(1.1) twice, once with each sign
    found = errors_of([(1.0, 1.1), (1.1, 1.0)], source="runs.jsonl")
    assert found == Errors(pytest.approx(math.log(1.1)), 2, "runs.jsonl")


def test_nine_of_ten_new_runs_fall_into_the_interval_that_ten_known_runs_give() -> None:
    draw = random.Random(0)

    def run() -> tuple[float, float]:
        return 1.0, math.exp(draw.gauss(0.0, 0.1))

    cases = []
    for _ in range(4000):
        known = errors_of([run() for _ in range(10)], source="known")
        predicted, measured = run()
        cases.append((interval(predicted, known), measured))
    # 3 deviations of sqrt(0.9 x 0.1 / 4000) = 0.005
    assert coverage(cases) == pytest.approx(0.9, abs=0.015)


def test_coverage_counts_the_ends_and_is_unknown_without_runs() -> None:
    assert coverage([((1.0, 2.0), 1.0), ((1.0, 2.0), 2.0), ((1.0, 2.0), 2.1), ((1.0, 2.0), 0.9)]) == 0.5
    assert coverage([]) is None


def test_every_provenance_has_errors_and_the_less_is_known_the_larger_they_are(answer) -> None:
    of_steps = (
        {source: STEP_ERRORS[source, role] for source in (*SOURCES, COMPUTED)} for role in (WAITED_FOR, AHEAD, GRAPH)
    )
    for errors in (*of_steps, MEMORY_ERRORS):
        assert tuple(errors) == (*SOURCES, COMPUTED)
        ratios = [interval(1.0, errors[source])[1] for source in errors]
        assert ratios == sorted(ratios) and ratios[0] > 1.0
    assert trust(answer.best.estimate) == COMPUTED


def test_errors_of_runs_name_a_file_that_exists() -> None:
    for errors in (*STEP_ERRORS.values(), *MEMORY_ERRORS.values()):
        if errors.n_runs:
            rows = (CHECKOUT / errors.source).read_text().splitlines()
            assert len(rows) >= errors.n_runs


def test_errors_are_those_that_the_benchmark_printed() -> None:
    for errors in (*STEP_ERRORS.values(), *MEMORY_ERRORS.values()):
        assert f"Errors({errors.rms:.2g}, {errors.n_runs})" in (CHECKOUT / errors.source).read_text()


DATA_SHEET_ALONE = {
    "predictions_h100_2026-11-23": (AHEAD, WAITED_FOR),
    "predictions_h100_x2_2026-11-24": (AHEAD, WAITED_FOR),
    "predictions_h200_x2_2026-11-28": (AHEAD, WAITED_FOR),
    "predictions_h100_x4_2026-11-27_nvlink": (GRAPH, None),
}


@pytest.mark.parametrize("role", [AHEAD, WAITED_FOR, GRAPH])
def test_steps_from_a_data_sheet_alone_were_off_by_no_more_than_those_with_measured_links(role: str) -> None:
    runs = []
    for name, (busy, waiting) in DATA_SHEET_ALONE.items():
        text = (CHECKOUT / "benchmarks" / "results" / f"{name}_data_sheet.txt").read_text()
        for kind, of in (("device", busy), ("host", waiting)):
            found = re.search(rf"step, uncalibrated, {kind}-bound: Errors\((.*), (.*)\)", text)
            runs += [(float(found[1]), int(found[2]))] if found and of == role else []
    rms = math.sqrt(sum(rms**2 * n_runs for rms, n_runs in runs) / sum(n_runs for _, n_runs in runs))
    assert rms == pytest.approx({AHEAD: 0.050, WAITED_FOR: 0.18, GRAPH: 0.088}[role], rel=0.03)
    assert rms <= 1.05 * STEP_ERRORS[COMPUTED, role].rms
