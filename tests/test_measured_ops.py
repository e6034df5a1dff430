"""Times of single ops: which op has which part of a profiled pass, what files hold, what stands beside them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoplan import api
from autoplan.answers.answer import Answer, answer_from_json, answer_to_json
from autoplan.errors import InputError
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measure_model.op_comparison import compare_ops
from autoplan.measured_profile.op_times import (
    OpComparison,
    OpMeasurement,
    OpTotals,
    SegmentComparison,
    SegmentOps,
    check_ops,
    segment_ops,
)
from autoplan.measured_profile.segment_key import WHOLE, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.measuring_program.copies import without_copies
from autoplan.measuring_program.ops import ENGINE_MARK, N_PASSES, _by_op, kernels_s, op_times
from autoplan.measuring_program.timing import MIN_ROUNDS, Call, Clock, Round, _ahead, is_held_up
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.report.explain import explain_report
from autoplan.report.ops import beside_ops_text, ops_text
from autoplan.rules import load_rules
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model


def event(name: str, number: int, device_us: float, *shapes: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, sequence_nr=number, device_time_total=device_us, cpu_time_total=1e6, input_shapes=list(shapes)
    )


def test_what_autograd_does_belongs_to_the_op_that_made_its_node() -> None:
    # a mask without a gradient comes before the product that makes nodes 5 (its transpose) and 6; gelu makes node 7
    events = [
        event("aten::ones", 5, 3.0, [4]),
        event("aten::linear", 5, 30.0, [4, 8], [8, 8], []),
        event("aten::gelu", 7, 6.0, [4, 8]),
        event(ENGINE_MARK + "GeluBackward0", 7, 9.0),
        event(ENGINE_MARK + "AddmmBackward0", 6, 60.0),
        event(ENGINE_MARK + "TBackward0", 5, 0.0),
        event(ENGINE_MARK + "torch::autograd::AccumulateGrad", -1, 1.5),
    ]
    found = {row["op"]: (row["shapes"], row["forward_s"], row["backward_s"]) for row in _by_op(events, is_cuda=True)}
    us = 1e-6 / N_PASSES
    assert found["aten::linear"] == ([[4, 8], [8, 8]], pytest.approx(30 * us), pytest.approx(60 * us))
    assert found["aten::gelu"] == ([[4, 8]], pytest.approx(6 * us), pytest.approx(9 * us))
    assert found["aten::ones"] == ([[4]], pytest.approx(3 * us), 0.0)
    assert found["torch::autograd::AccumulateGrad"][1:] == (0.0, pytest.approx(1.5 * us))
    assert list(found) == ["aten::linear", "aten::gelu", "aten::ones", "torch::autograd::AccumulateGrad"]


def test_equal_calls_are_one_row_and_every_op_of_a_pass_has_one() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2))
    call = Call(module, [torch.randn(4, 8, requires_grad=True)], {})
    rows = {(row["op"], tuple(map(tuple, row["shapes"]))): row for row in op_times(call, Clock(torch.device("cpu"), 0))}
    square, narrow = (rows["aten::linear", ((4, 8), (n, 8), (n,))] for n in (8, 2))
    assert (square["n_calls"], narrow["n_calls"], rows["aten::gelu", ((4, 8),)]["n_calls"]) == (2, 1, 1)
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in (square, narrow))


ROW = {
    "content": "c", "assignment": WHOLE, "tp": 1, "boundary": "", "micro_batch_size": 2,
    "ops": [{"op": "aten::mm", "shapes": [[2, 3], [3, 4]], "n_calls": 1.0, "forward_s": 1e-6, "backward_s": 2e-6}],
}  # fmt: skip


def test_a_line_of_ops_is_read_as_it_is_written() -> None:
    check_ops(ROW, "m.json:3")
    assert segment_ops(ROW).ops == (OpMeasurement("aten::mm", ((2, 3), (3, 4)), 1.0, 1e-6, 2e-6),)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"op": 3}, "ops[0]"),
        ({"shapes": [[-1]]}, "ops[0].shapes"),
        ({"forward_s": -1.0}, "ops[0].forward_s"),
        ({"n_calls": True}, "ops[0].n_calls"),
    ],
)
def test_a_wrong_line_of_ops_is_refused_by_field(change, field) -> None:
    with pytest.raises(InputError, match="profile again") as caught:
        check_ops(ROW | {"ops": [ROW["ops"][0] | change]}, "m.json:3")
    assert str(caught.value).startswith(f"m.json:3: {field}")


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

build_model = Net

def make_batch(batch_size):
    return torch.zeros(batch_size, 8), torch.zeros(batch_size, 8)

def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return trace_model(model_source(path, {}))


def compared(graph, *ops: OpMeasurement) -> SegmentComparison:
    """The segment with the products, of which these were measured at micro-batch 2."""
    products = [op.name for op in graph.ops if op.target == "aten.linear.default"]
    (segment,) = (s for s in graph.segments if {op.name for op in graph.ops_of(s)} >= set(products))
    content = content_key(graph, GraphFacts.of(graph), segment)
    measured = MeasuredProfile((), None, "", ops=(SegmentOps(content, WHOLE, 1, "", 2, ops),))
    plan = Plan(Mesh(), (StagePlan(0, len(graph.segments)),), precision="fp32")
    (found,) = compare_ops(graph, load_hardware_profile("h200_x4"), plan, measured, rules=load_rules())
    return found


def test_measured_ops_stand_beside_the_ops_of_the_graph_with_the_same_shapes(graph) -> None:
    wide = OpMeasurement("aten::linear", ((2, 8), (16, 8), (16,)), 1.0, 3e-6, 5e-6)
    odd = OpMeasurement("aten::linear", ((2, 99), (16, 99)), 1.0, 1e-6, 1e-6)
    other = OpMeasurement("aten::reshape", ((2, 8),), 1.0, 9e-6, 0.0)
    rows = {(row.op, row.shapes): row for row in compared(graph, wide, odd, other).ops}
    assert rows["aten::linear", wide.shapes].measured == OpTotals(3e-6, 5e-6)
    assert rows["aten::linear", wide.shapes].computed.total_s > 0
    # the second product was measured in other shapes: what is left of a name is compared as a whole
    assert rows["aten::linear", ()].measured == OpTotals(1e-6, 1e-6)
    assert rows["aten::linear", ()].computed.total_s > 0
    assert rows["aten::reshape", ()].computed is None
    assert rows["aten::gelu", ()].measured is None and rows["aten::gelu", ()].computed.total_s > 0
    totals = [row.measured.total_s for row in rows.values() if row.measured is not None]
    assert totals == sorted(totals, reverse=True)


def test_ops_of_another_model_say_nothing(graph) -> None:
    measured = MeasuredProfile((), None, "", ops=(replace(segment_ops(ROW)),))
    plan = Plan(Mesh(), (StagePlan(0, len(graph.segments)),), precision="fp32")
    assert compare_ops(graph, load_hardware_profile("h200_x4"), plan, measured, rules=load_rules()) == ()


BLOCK = SegmentComparison(
    "blocks.0",
    n_segments=4,
    tp=2,
    micro_batch_size=1,
    ops=(
        OpComparison("aten::linear", ((4, 8), (8, 8), (8,)), OpTotals(20e-6, 40e-6), OpTotals(10e-6, 20e-6)),
        OpComparison("aten::gelu", (), OpTotals(20e-6, 0.0), None),
        OpComparison("aten::add", (), None, OpTotals(10e-6, 0.0)),
    ),
)


def test_explain_shows_the_longest_ops_with_their_share_and_ratio(answer: Answer) -> None:
    # 60 of 80 us measured, 30 computed: ratio 2; all: 80 against 40, with an addition that was not measured
    text = ops_text((BLOCK,))
    assert ops_text((BLOCK,), {"blocks.0": "blocks.0 (norm)"}).startswith("Ops of blocks.0 (norm), 1 of 4 alike")
    assert text.startswith("Ops of blocks.0, 1 of 4 alike: micro-batch 1, tp 2, forward and backward")
    lines = [line.split() for line in text.splitlines()]
    assert ["linear", "60", "us", "30", "us", "2.00", "75%", "4x8,", "8x8"] in lines
    assert ["gelu", "20", "us", "-", "-", "25%"] in lines
    assert ["all", "80", "us", "40", "us", "2.00", "100%"] in lines
    with_ops = replace(answer, ops=(BLOCK,))
    assert text in explain_report(with_ops) and "Ops of" not in explain_report(answer)
    assert answer_from_json(answer_to_json(with_ops)).ops == (BLOCK,)


EAGER = ("compile", "off")


@pytest.mark.parametrize(("devices", "fix"), [(1, (EAGER, ("micro_batch", "8"))), (2, (EAGER, ("tp", "2")))])
def test_computed_ops_add_up_to_the_computing_of_the_step(tmp_path, devices, fix) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = Options(global_batch=8, fix=fix)
    found = api.solve(api.make_problem(str(path), hw=f"dgx_a100_x8/{devices}", options=options))
    of_micro_batch_s = sum(
        item.n_segments * sum(row.computed.total_s for row in item.ops if row.computed) for item in found.ops
    )
    of_step_s = of_micro_batch_s * found.best.plan.mesh.n_micro_batches
    assert of_step_s == pytest.approx(found.best.estimate.breakdown.compute_s, rel=1e-9)
    assert answer_from_json(answer_to_json(found)).ops == found.ops


def test_explain_shows_computed_ops_with_the_rates_that_they_run_at() -> None:
    # 3 GFLOP and 60 MB in 30 us are 100 TFLOP/s and 2 TB/s; with the additions 75 and 2
    product = OpTotals(10e-6, 20e-6, 2, 3e9, 60e6)
    sums = OpTotals(0.0, 10e-6, 3, 0.0, 20e6)
    ops = (OpComparison("aten::linear", ((4, 8), (8, 8)), None, product), OpComparison("sums", (), None, sums))
    text = ops_text((replace(BLOCK, ops=ops),))
    assert text.startswith("Ops of blocks.0, 1 of 4 alike: micro-batch 1, tp 2, forward and backward, computed")
    lines = [line.split() for line in text.splitlines()]
    assert ["linear", "x", "2", "30", "us", "75%", "100.0", "2,000", "4x8,", "8x8"] in lines
    assert ["sums", "x", "3", "10", "us", "25%", "0.0", "2,000"] in lines
    assert ["all", "40", "us", "100%", "75.0", "2,000"] in lines


def test_a_plan_of_before_ops_were_kept_is_read(answer: Answer) -> None:
    content = json.loads(answer_to_json(answer))
    del content["ops"]
    assert answer_from_json(json.dumps(content)).ops == ()


def test_explain_says_what_computing_is_not_in_the_ops() -> None:
    # 4 segments of 30 us, 8 times: 960 us; 40 us more are those of parameters
    blocks = (replace(BLOCK, ops=(OpComparison("aten::linear", (), None, OpTotals(10e-6, 20e-6)),)),)
    text = beside_ops_text(blocks, n_micro_batches=8, compute_s=1e-3)
    assert text.startswith("Compute of 1 ms is 8 x 120 us for the ops of all segments, and 40 us to cast")
    assert beside_ops_text(blocks, n_micro_batches=8, compute_s=960e-6) == ""
    assert beside_ops_text((BLOCK,), n_micro_batches=8, compute_s=1.0) == ""  # measured ops say nothing of it


class QueueOf:
    """A clock whose device takes `n` launches ahead: a host with more waits until it goes on."""

    device, is_cuda = torch.device("cpu"), True

    def __init__(self, n: int) -> None:
        self.n, self.held_s = n, 0.0

    def wait(self) -> None:
        self.held_s = 0.0

    def hold(self, seconds: float) -> None:
        self.held_s = seconds


class Launches:
    """A round of so many launches, of 20 us each on the host."""

    def __init__(self, count: int, clock: QueueOf) -> None:
        self.count, self.clock = count, clock

    def forward(self) -> None:
        time.sleep(2e-5 * self.count)

    def backward(self) -> None:
        time.sleep(self.clock.held_s if self.count > self.clock.n else 0.0)


@pytest.mark.parametrize(("n_launches", "is_seen"), [(100, False), (2000, True)])
def test_a_round_with_more_launches_than_the_device_takes_ahead_is_noticed(n_launches: int, is_seen: bool) -> None:
    clock = QueueOf(1000)
    assert is_held_up(Launches(n_launches, clock), clock, ahead_s=0.3) is is_seen


@pytest.mark.parametrize(("seen", "found"), [((1e-3, 2e-3), [(1e-3, 2e-3)] * MIN_ROUNDS), ((0.0, 2e-3), [])])
def test_a_round_that_is_held_up_takes_what_its_kernels_take_if_they_are_seen(monkeypatch, seen, found) -> None:
    monkeypatch.setattr("autoplan.measuring_program.timing.is_held_up", lambda *_, **__: True)
    added_up = _ahead(Round([None, None]), None, lambda call: seen, host_s=(1.0, 1.0), loaded=[(1.0, 1.0)] * 3)
    assert added_up == (found, 1)


def test_copies_that_take_longer_than_the_pass_they_are_in_are_no_part_of_it() -> None:
    assert without_copies(1e-3, 2e-4) == pytest.approx(8e-4)
    assert without_copies(1e-3, 1e-3 + 1e-6) == 0.0  # no clock tells
    assert without_copies(1e-3, 2e-3) is None


def test_kernels_of_a_call_are_added_up_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"forward_s": 2.0, "backward_s": 3.0}, {"forward_s": 0.5, "backward_s": 0.0}]
    monkeypatch.setattr("autoplan.measuring_program.ops.op_times", lambda call, clock: rows)
    assert kernels_s(None, None) == (2.5, 3.0)
