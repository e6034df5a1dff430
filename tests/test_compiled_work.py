"""What torch.compile makes of a segment: which ops are one kernel, what it moves and keeps, and what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from distributed.programs import graph_of

from autoplan import api
from autoplan.api import trace_model
from autoplan.cost.compiled_work import FUSED_FRACTION, as_compiled, compiled_passes, compiled_segment
from autoplan.cost.fusions import FusedSegment, fused_segment
from autoplan.cost.local_segment import LocalSegment, local_segment
from autoplan.cost.segment_work import SegmentWork, segment_work, timed, times_of
from autoplan.cost.work_context import WorkContext, work_contexts
from autoplan.graph import OWN_GRADIENTS, OpGraph, Segment, TensorSpec
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Execution
from autoplan.planning.untried import COMPUTED_COMPILE
from autoplan.report.plan import plan_table
from autoplan.rules import load_rules
from autoplan.space.choices import executions
from autoplan.tensor_parallel.sharding import read_sharding

CHECKOUT = Path(__file__).parent.parent
LLAMA = CHECKOUT / "examples" / "llama.py"
sys.path.insert(0, str(CHECKOUT / "benchmarks"))

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down({body})

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build_model(**_): return Model()
def make_batch(n): return (torch.randn(n, 16, 64),), torch.randn(n, 16, 64)
def loss_fn(y, target): return F.mse_loss(y, target)
"""


def block_of(graph: OpGraph) -> tuple[WorkContext, Segment, LocalSegment]:
    """The first block on one H200."""
    segment = next(segment for segment in graph.segments if segment.is_block)
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", load_rules())(1)
    layouts = read_sharding(graph, segment, None, degree=1, rules=context.rules, facts=context.facts)
    return context, segment, local_segment(context, segment, layouts)


def fused(graph: OpGraph) -> tuple[FusedSegment, list[tuple[str, ...]]]:
    """The block as it is fused, and the names of the ops of each fusion."""
    context, segment, local = block_of(graph)
    found = fused_segment(context, segment, local)
    return found, [tuple(local.ops[index].op.name for index in fusion.ops) for fusion in found.fusions]


def compiled_work(context: WorkContext, local: LocalSegment, fused: FusedSegment, batch_size: int) -> SegmentWork:
    """The work of a segment that is fused so, and compiled."""
    passes = compiled_passes(context, compiled_segment(context, local, fused), batch_size)
    return as_compiled(segment_work(context, local, batch_size), passes)


def widths(specs: tuple[TensorSpec, ...]) -> list[int]:
    return sorted(spec.shape[-1] for spec in specs if len(spec.shape) == 3)


@pytest.fixture(scope="module")
def llama() -> OpGraph:
    return trace_model(LLAMA, overrides={"size": "1b"})


def test_ops_that_read_each_other_are_one_kernel_and_products_part_them(llama) -> None:
    _, names = fused(llama)
    assert names == [
        ("rms_norm",),
        ("mul", "neg_1", "cat_1", "mul_1", "add"),
        ("mul_2", "neg_2", "cat_2", "mul_3", "add_1"),
        ("add_2", "rms_norm_1"),
        ("silu", "mul_4"),
        ("add_3",),
    ]


def test_a_fusion_moves_what_is_at_its_ends(llama) -> None:
    found, names = fused(llama)
    gate = found.fusions[names.index(("silu", "mul_4"))]
    assert (widths(gate.reads), widths(gate.writes)) == ([8192, 8192], [8192])
    assert widths(gate.reads_gradients) == [8192]
    assert widths(gate.reads_again) == [8192, 8192]
    assert widths(gate.writes_gradients) == [8192, 8192]


def test_a_sum_hands_its_gradient_on(llama) -> None:
    found, names = fused(llama)
    last = found.fusions[names.index(("add_3",))]
    assert len(last.reads) == 2
    assert (last.reads_gradients, last.writes_gradients) == ((), ())
    middle = found.fusions[names.index(("add_2", "rms_norm_1"))]
    assert widths(middle.writes_gradients) == [2048]  # one tensor, of both that were added


def test_of_a_chain_the_ends_are_kept(tmp_path) -> None:
    kept = {}
    for name, body in {
        "gelu": "F.gelu(self.up(self.norm(x)))",
        "long": "F.gelu(F.gelu(self.up(self.norm(x))))",
    }.items():
        file = tmp_path / f"{name}.py"
        file.write_text(MODEL.replace("{body}", body))
        graph = trace_model(file)
        context, segment, local = block_of(graph)
        eager = segment_work(context, local, 4)
        work = compiled_work(context, local, fused_segment(context, segment, local), 4)
        kept[name] = work.saved_bytes, eager.saved_bytes
    one = 4 * 16 * 64 * 2
    # x, the norm, what `up` and the last element-wise op give: the same however many are between
    assert kept["gelu"][0] == kept["long"][0] == one + one + 4 * one + 4 * one
    assert kept["long"][1] > kept["gelu"][1]  # op by op


@pytest.mark.parametrize(
    ("body", "n_bytes"),
    [
        ("F.relu(self.down(self.up(x)))", 1),
        ("F.relu(x + self.down(self.up(x)))", 1),
        ("F.leaky_relu(self.down(self.up(x)))", 1),
        ("torch.clamp(x + self.down(self.up(x)), -1, 1)", 1),
        ("torch.sigmoid(self.down(self.up(x)))", 2),
        ("torch.tanh(x + self.down(self.up(x)))", 2),
        ("F.gelu(self.down(self.up(x)))", 2),
    ],
)
def test_of_a_result_the_compiler_keeps_a_mask_or_what_its_derivative_is_computed_from(
    tmp_path, body: str, n_bytes: int
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("x + self.down({body})", body))
    context, segment, local = block_of(trace_model(file))
    fused = fused_segment(context, segment, local)
    work = compiled_work(context, local, fused, 4)
    one = 4 * 16 * 64
    # bf16: x and what `up` gives, then of each element of the result; as the graphs that torch 2.13 compiles have it
    assert work.saved_bytes == 2 * one + 4 * 2 * one + n_bytes * one
    last = fused.fusions[-1]
    assert sum(spec.n_bytes(4, "bf16") for spec in last.reads_again) == n_bytes * one


def test_a_fusion_takes_its_bytes_at_its_part_of_the_rate_of_a_copy(llama) -> None:
    context, segment, local = block_of(llama)
    found = fused_segment(context, segment, local)
    works = [compiled_work(context, local, found, n) for n in (2, 4)]
    slower = replace(context, device=replace(context.device, memory_bytes_per_s=context.device.memory_bytes_per_s / 2))
    halved = compiled_work(slower, local, found, 4)
    width, tokens, rate = 2048, 4 * 4096 * 2, context.device.copy_bytes_per_s
    # q and k in and out of rotary embedding, two norms and sums, silu; what it reads of tables is small
    n_passes = 2 * (width + 512) + 2 * width + 4 * width + 3 * 8192 + 3 * width
    added_s = halved.forward_s - works[1].forward_s
    assert added_s == pytest.approx(n_passes * tokens / rate / FUSED_FRACTION, rel=0.02)
    assert works[1].saved_bytes == 2 * works[0].saved_bytes


def test_batch_norm_of_images_that_come_as_convolutions_want_them_goes_over_them_less_often() -> None:
    graph, device = graph_of("resnet"), load_hardware_profile("h200_x4").device
    contexts = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", load_rules())
    segment = next(segment for segment in graph.segments if segment.name == "groups.0.0")
    layouts = read_sharding(graph, segment, None, degree=1, rules=load_rules(), facts=contexts(1).facts)
    found = []
    for memory_format in ("contiguous", "channels_last"):
        context = contexts(1, memory_format)
        local = local_segment(context, segment, layouts)
        compiled = compiled_segment(context, local, fused_segment(context, segment, local))
        found.append(compiled_passes(context, compiled, 1024))
    norms = [op for op in local.ops if op.op.target == "aten.batch_norm.default"]
    pass_s = sum(op.operands[0].n_bytes(1024, "bf16") for op in norms) / device.copy_bytes_per_s / FUSED_FRACTION
    assert norms and found[0].forward_s - found[1].forward_s == pytest.approx(0.3 * pass_s)
    assert found[0].backward_s - found[1].backward_s == pytest.approx(2.9 * pass_s)


@pytest.mark.nightly
def test_compiled_blocks_of_llama_are_computed_as_they_were_measured() -> None:
    import compiled_blocks

    results = CHECKOUT / "benchmarks" / "results" / "profile_h200_x2_2026-11-22_one_machine.jsonl"
    found = [item for item in compiled_blocks.compared(results, "h200_x4", only="llama") if item.is_block]
    assert len(found) == 4
    for item in found:
        errors = item.errors()
        assert abs(errors["saved"]) < 0.001
        assert abs(errors["forward"]) < 0.06
        assert abs(errors["backward"]) < 0.08
        assert item.eager.forward_s > 1.05 * item.row["forward_s"]  # eager is no price for it


def test_without_a_profile_blocks_are_compiled_where_that_gains_and_the_report_says_that_it_is_computed() -> None:
    found = {}
    for way in (None, "off"):
        options = Options(global_batch=64, fix=(("compile", way),) if way else ())
        answer = api.solve(api.make_problem(str(LLAMA), hw="h200_x4", overrides={"size": "1b"}, options=options))
        found[way] = answer
        assert answer.best.plan.mesh.compile is (way is None)
        assert (COMPUTED_COMPILE in answer.workload.limits) is (way is None)
    assert found[None].best.estimate.step_s < 0.95 * found["off"].best.estimate.step_s
    for answer in found.values():  # a recipe that is no slower for a planner's knowledge of torch.compile
        fsdp = next(item for item in answer.result.baselines if item.baseline == "FSDP")
        assert fsdp.plan.mesh.compile is answer.best.plan.mesh.compile
    assert "\nall of them compiled" in plan_table(found[None])
    assert "compiled" not in plan_table(found["off"])


def test_a_step_of_small_ops_that_waits_for_the_host_stays_eager() -> None:
    options = Options(global_batch=16, fix=(("cuda_graph", "off"),))
    answer = api.solve(api.make_problem(str(LLAMA.parent / "gpt.py"), hw="dgx_a100_x8", options=options))
    assert not answer.best.plan.mesh.compile


def test_on_a_cpu_blocks_are_compiled_where_that_is_asked_for() -> None:
    graph, gpu = graph_of("gpt"), load_hardware_profile("h200_x4").device
    cpu = replace(gpu, name="CPU")
    eager, compiled = Execution(), Execution(compile=True)
    assert executions(graph, Options(), None, device=gpu) == (eager, compiled)
    assert executions(graph, Options(), None, device=cpu) == (eager,)
    assert executions(graph, Options(fix=(("compile", "on"),)), None, device=cpu) == (compiled,)
    hidden = replace(graph, dissolved=(min(OWN_GRADIENTS),))
    assert executions(hidden, Options(), None, device=gpu) == (eager,)


@pytest.mark.nightly
def test_ops_that_differ_in_names_are_looked_at_once_and_cost_the_same() -> None:
    resnet = trace_model(CHECKOUT / "benchmarks" / "models" / "resnet_50.py")
    context, _, local = block_of(resnet)
    looked_at = set(local.alike)
    assert len(looked_at) < len(local.ops) / 2  # three bottlenecks, of which the last two are alike
    times = times_of(context, local.ops, local.alike, 4)
    assert times == [timed(context, op, 4) for op in local.ops]
