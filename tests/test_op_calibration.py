"""The comparison of ways to calibrate what was not measured, on times that are made of known ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from op_calibration import Sample, fitted, kinds_of_ops, predicted_s


def sample(name: str, matmul_s: float, pointwise_s: float) -> Sample:
    """Products take twice as long as computed, element-wise ops three times."""
    parts = {"matmul": matmul_s, "pointwise": pointwise_s}
    return Sample("toy", name, "forward", 2 * matmul_s + 3 * pointwise_s, parts)


OTHERS = [sample("a", 0.9, 0.1), sample("b", 0.1, 0.9), sample("c", 0.5, 0.5), sample("d", 0.7, 0.3)]


def test_ratios_of_ops_are_found_from_the_times_of_whole_segments() -> None:
    # each is pulled a little towards 1
    assert fitted(OTHERS) == {"matmul": pytest.approx(2, rel=0.2), "pointwise": pytest.approx(3, rel=0.2)}


def test_a_segment_of_another_mixture_is_predicted_best_op_by_op() -> None:
    odd = sample("e", 0.0, 1.0)
    errors = {way: abs(predicted_s(way, odd, OTHERS) / odd.measured_s - 1) for way in ("none", "segments", "ops")}
    # ratios of whole segments: 2.1, 2.9, 2.5 and 2.3, their median 2.4 instead of 3
    assert errors["none"] == pytest.approx(2 / 3) and errors["segments"] == pytest.approx(0.2)
    assert errors["ops"] < errors["segments"]


def test_kinds_of_ops_are_the_files_of_their_rules() -> None:
    found = kinds_of_ops()
    assert (found["aten.linear.default"], found["aten.gelu.default"]) == ("matmul", "pointwise")
