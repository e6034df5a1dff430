"""Losses that compute in float32 from outputs in 16 bits: which they are, what they are given, and what they keep."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from distributed.programs import prices
from torch.nn import functional as F

from autoplan.api import trace_model
from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import inside_bytes
from autoplan.cost.work_context import work_contexts
from autoplan.graph import OpGraph
from autoplan.hardware import load_hardware_profile
from autoplan.rules import load_rules
from autoplan.runtime.input_pipeline.model_calls import generated_loss
from autoplan.runtime.tensor_parallel.vocabulary import takes_16_bits, vocab_parallel_cross_entropy
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.narrow_loss import is_narrow_loss
from autoplan.tensor_parallel.sharding import SegmentLayouts, read_sharding, shard_graph

ROWS, CLASSES, BATCH = 16, 256, 4
PLAIN = "F.cross_entropy(outputs.flatten(0, 1), targets.flatten())"
MASKED = "F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction='none').sum()"
MODEL = f"""
import torch
from torch import nn
from torch.nn import functional as F

def build_model(**_):
    return nn.Sequential(nn.Embedding({CLASSES}, 64), nn.Linear(64, {CLASSES}))

def make_batch(n):
    return torch.randint({CLASSES}, (n, {ROWS})), torch.randint({CLASSES}, (n, {ROWS}))

def loss_fn(outputs, targets):
    return {{loss}}
"""


def _split(tmp_path: Path, loss: str) -> tuple[OpGraph, SegmentLayouts]:
    """The graph of the model with this loss, and how its last segment lies on two ranks."""
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(loss=loss))
    graph = trace_model(file)
    last, rules = graph.segments[-1], load_rules()
    solve = partial(minimize, time_limit_s=None)
    found = shard_graph(graph, degree=2, rules=rules, prices=prices(graph, 2), solve=solve)["R"]
    assignment = {sharding.kind: sharding for sharding in found}
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", rules)(2)
    layouts = read_sharding(graph, last, assignment[last.kind], degree=2, rules=rules, facts=context.facts)
    return graph, layouts


@pytest.mark.parametrize(
    ("loss", "is_narrow"),
    [
        (PLAIN, True),
        ("F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())", True),
        (f"{PLAIN} + 1e-4 * outputs.logsumexp(-1).square().mean()", False),
        ("F.cross_entropy(outputs.transpose(1, 2), targets)", False),
        (f"{MASKED} / (targets != 0).to(outputs.dtype).sum()", False),
        (f"{MASKED} / (targets != 0).float().sum()", True),
        ("F.cross_entropy(2 * outputs.flatten(0, 1), targets.flatten())", False),
        ("F.mse_loss(outputs.softmax(-1), F.one_hot(targets, 256).float())", False),
    ],
)
def test_it_is_narrow_where_only_the_split_loss_reads_the_outputs(tmp_path: Path, loss: str, is_narrow: bool) -> None:
    graph, layouts = _split(tmp_path, loss)
    ops = graph.ops_of(graph.segments[-1])
    assert is_narrow_loss(graph, ops, layouts.strategies, load_rules()) == is_narrow
    whole = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", load_rules())(1)
    unsplit = read_sharding(graph, graph.segments[-1], None, degree=1, rules=whole.rules, facts=whole.facts)
    assert not is_narrow_loss(graph, ops, unsplit.strategies, load_rules())


@pytest.mark.parametrize(("precision", "item_bytes"), [("bf16", 2), ("fp16", 2), ("tf32", 4), ("fp32", 4), ("fp64", 8)])
def test_it_keeps_its_logits_and_is_given_no_others(tmp_path: Path, precision: str, item_bytes: int) -> None:
    graph, layouts = _split(tmp_path, PLAIN)
    last = graph.segments[-1]
    context = work_contexts(graph, load_hardware_profile("h200_x4"), precision, load_rules())(2)
    local = local_segment(context, last, layouts)
    assert local.loss_outputs == ()
    loss = next(item for item in local.ops if item.op.target == "aten.cross_entropy_loss.default")
    assert inside_bytes(context, loss, BATCH) == BATCH * ROWS * CLASSES // 2 * item_bytes


@pytest.mark.parametrize(
    "loss",
    [
        f"{PLAIN} + 1e-4 * outputs.logsumexp(-1).square().mean()",
        "F.cross_entropy(outputs.transpose(1, 2), targets, reduction='sum')",
    ],
)
def test_others_keep_float32(tmp_path: Path, loss: str) -> None:
    graph, layouts = _split(tmp_path, loss)
    context = work_contexts(graph, load_hardware_profile("h200_x4"), "bf16", load_rules())(2)
    local = local_segment(context, graph.segments[-1], layouts)
    assert local.loss_outputs
    found = next(item for item in local.ops if item.op.target == "aten.cross_entropy_loss.default")
    assert inside_bytes(context, found, BATCH) == 4 * found.operands[0].n_elements(BATCH)
    assert found.operands[0].n_elements(BATCH) < BATCH * ROWS * CLASSES  # split, over classes or rows


def test_a_program_gives_it_outputs_as_they_are_and_others_in_float32() -> None:
    given: list[torch.dtype] = []

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor, tp: object) -> torch.Tensor:
        given.append(outputs.dtype)
        return vocab_parallel_cross_entropy(outputs, targets, None)

    logits, targets = torch.randn(ROWS, CLASSES).bfloat16(), torch.randint(CLASSES, (ROWS,))
    wide = generated_loss(loss_fn, None)(logits, targets)
    narrow = generated_loss(takes_16_bits(loss_fn), None)(logits, targets)
    assert given == [torch.float32, torch.bfloat16]
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, wide)
    assert narrow == pytest.approx(F.cross_entropy(logits.float(), targets).item(), rel=1e-6)
