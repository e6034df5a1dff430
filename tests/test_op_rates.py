"""Validation: prices of single operators from the data sheet; their error may not grow unnoticed."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from op_rates import compared

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FOUND = compared(BENCHMARKS / "results" / "op_rates_h200_2026-11-23.jsonl", "h200_x4")
TOLERANCE = 0.25


@pytest.mark.parametrize("op", ["conv2d", "batch_norm", "max_pool", "index", "index_select", "embedding"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_operator_is_priced_as_it_was_measured(op, direction):
    alike = [item for item in FOUND if item.kind[0] == op and item.row["dtype"] == "bf16" and not item.is_of_host]
    own = [item for item in alike if item.direction == direction]
    assert own and statistics.mean(item.log_error for item in own) < TOLERANCE


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_slow_gradient_of_a_weight_in_tf32_is_priced(layout):
    path = BENCHMARKS / "results" / "op_rates_convolutions_h200_2026-11-29.jsonl"
    alike = [item for item in compared(path, "h200_x4", host=2.2) if item.kind == ("conv2d", f"{layout} tf32")]
    own = [item for item in alike if item.direction == "backward" and not item.is_of_host]
    assert len(own) >= 4 and statistics.mean(item.log_error for item in own) < 0.13  # 0.24 as fast as the others


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_a_product_is_priced_as_it_was_measured(dtype):
    own = [item for item in FOUND if item.kind == ("linear", dtype)]
    assert len(own) == 4 and max(item.log_error for item in own) < 0.08
