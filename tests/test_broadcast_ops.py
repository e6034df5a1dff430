"""Element-wise ops that broadcast an operand: priced by elements, beside what they took."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from autoplan.cost.op_time import BROADCAST_ELEMENT_BYTES, op_time
from autoplan.graph import COMPUTE, Op, Ref, TensorSpec
from autoplan.hardware import load_hardware_profile
from autoplan.rules import LocalCall, load_rules

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
DEVICE = load_hardware_profile("h200_x4").device
RULES = load_rules()


def seconds(target, shapes, *, result, is_strided=False):
    """Forward time of one call in bf16."""
    specs = tuple(TensorSpec(tuple(shape), COMPUTE) for shape in shapes)
    out = TensorSpec(tuple(result), COMPUTE)
    op = Op("y", target, tuple(Ref(f"x{i}") for i in range(len(shapes))), (), (out,), "", "")
    call = LocalCall(op, specs, specs, (out,), 1, "bf16")
    return op_time(RULES[target], call, device=DEVICE, has_gradient=True, is_strided=is_strided).forward_s


def test_they_take_what_they_took_in_t5() -> None:
    targets = {"aten::mul": "aten.mul.Tensor", "aten::where": "aten.where.self"}
    n_found = 0
    for line in (RESULTS / "profile_h200_x2_2026-11-25_compiled.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["what"] != "ops" or row["segment"] != "encoder.block.0":
            continue
        for measured in row["ops"]:
            shapes = [shape for shape in measured["shapes"] if shape]
            n_dims = max(map(len, shapes), default=0)
            whole = [[1] * (n_dims - len(shape)) + shape for shape in shapes]
            result = [max(extents) for extents in zip(*whole, strict=True)]
            if measured["op"] in targets and math.prod(result) > 2**24 and any(shape != result for shape in whole):
                found_s = seconds(targets[measured["op"]], shapes, result=result)
                assert found_s == pytest.approx(measured["forward_s"] / measured["n_calls"], rel=0.5)
                n_found += 1
    assert n_found == 3


def test_dense_ops_and_numbers_are_priced_by_their_bytes() -> None:
    shape = (64, 512, 1024)
    dense_s = seconds("aten.mul.Tensor", (shape, shape), result=shape)
    broadcast_s = seconds("aten.mul.Tensor", (shape, (1024,)), result=shape)
    number_s = seconds("aten.mul.Tensor", (shape, (1,)), result=shape)
    n_elements = math.prod(shape)
    assert dense_s == pytest.approx(6 * n_elements / DEVICE.copy_bytes_per_s + DEVICE.kernel_s)
    assert broadcast_s == pytest.approx(
        BROADCAST_ELEMENT_BYTES * n_elements / DEVICE.copy_bytes_per_s + DEVICE.kernel_s
    )
    assert number_s < dense_s


def test_what_is_slow_for_its_order_already_is_not_slowed_down_twice() -> None:
    shape = (64, 512, 1024)
    assert seconds("aten.mul.Tensor", (shape, (1024,)), result=shape, is_strided=True) == pytest.approx(
        (4 * math.prod(shape) + 2 * 1024) / (0.33 * DEVICE.copy_bytes_per_s) + DEVICE.kernel_s
    )
