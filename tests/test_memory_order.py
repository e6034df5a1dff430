"""How values lie in memory: masks of attention whose rows lie apart, and copies that copy nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autoplan import api
from autoplan.analysis.attention_kernel import ATTENTION, scattered_masks
from autoplan.analysis.idle_ops import idle_ops
from autoplan.codegen.forward import ForwardContext
from autoplan.cost.rank_segments import rank_segments
from autoplan.cost.segment_work import times_of
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.rules import load_rules

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

HEADS, TOKENS, WIDTH = 4, 64, 64


class Block(nn.Module):
    def __init__(self, has_bias):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(TOKENS, HEADS) if has_bias else None

    def forward(self, x, bias):
        if bias is None:
            places = torch.arange(TOKENS, device=x.device)
            bias = self.bias((places[:, None] - places[None, :]).abs())
            bias = MAKE
        parts = self.qkv(x).view(-1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=bias)
        return x + self.out(y.transpose(1, 2).reshape(-1, TOKENS, WIDTH)), bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(i == 0) for i in range(3))

    def forward(self, x):
        x, bias = self.first(x), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def build_model():
    return Model()


def make_batch(batch_size):
    return torch.randn(batch_size, TOKENS, WIDTH), torch.randn(batch_size, TOKENS, WIDTH)


def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""
APART = {
    "permute": "bias.permute(2, 0, 1)[None]",
    "transpose": "bias.transpose(0, 2)[None]",
    "movedim": "bias.movedim(2, 0)[None]",
    "movedim of several": "bias.movedim((0, 1), (1, 2))[None]",
    "a sum after it": "bias.permute(2, 0, 1)[None] + bias.new_zeros(TOKENS, TOKENS)",
    "a sum with a dense one": "bias.permute(2, 0, 1)[None] + bias.new_zeros(1, HEADS, TOKENS, TOKENS)",
    "a choice after it": "torch.where(bias[..., 0].detach() < 9, bias.permute(2, 0, 1)[None], 0.0)",
    "a clone": "bias.permute(2, 0, 1)[None].clone()",
    "negative": "-bias.permute(2, 0, 1)[None]",
    "a slice": "bias.permute(2, 0, 1)[None][:, :, -TOKENS:]",
}
DENSE = {
    "contiguous": "bias.permute(2, 0, 1)[None].contiguous()",
    "rows stay": "bias.permute(2, 0, 1).contiguous().transpose(0, 1).transpose(0, 1)[None]",
    "and back": "bias.permute(2, 0, 1).contiguous().transpose(-1, -2).transpose(-1, -2)[None]",
    "a dense sum": "bias.new_zeros(1, HEADS, TOKENS, TOKENS) + bias.permute(2, 0, 1)[None]",
}


def model_file(tmp_path, made):
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("MAKE", made))
    return path


def problem(path, hw="dgx_h100_x8/1", global_batch=8, **fix):
    options = Options(global_batch=global_batch, precision="bf16", fix=tuple(fix.items()))
    return api.make_problem(path, hw=hw, options=options)


@pytest.mark.parametrize("made", APART.values(), ids=APART)
def test_rows_that_lie_apart_are_found(tmp_path, made: str) -> None:
    assert scattered_masks(api.trace_model(model_file(tmp_path, made)))


@pytest.mark.parametrize("made", DENSE.values(), ids=DENSE)
def test_dense_rows_are_not(tmp_path, made: str) -> None:
    assert scattered_masks(api.trace_model(model_file(tmp_path, made))) == frozenset()


@pytest.mark.parametrize("made", [*APART.values(), *DENSE.values()])
def test_they_lie_as_torch_puts_them(tmp_path, made: str) -> None:
    """Strides of what the model really hands to attention."""
    path, strides = model_file(tmp_path, made), []
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    attention = F.scaled_dot_product_attention

    def seen(*parts, attn_mask):
        strides.append(attn_mask.stride(-1))
        return attention(*parts, attn_mask=attn_mask)

    namespace["F"] = type("F", (), {"scaled_dot_product_attention": staticmethod(seen)})
    namespace["build_model"]()(torch.randn(2, 64, 64))
    is_apart = bool(scattered_masks(api.trace_model(path)))
    assert {stride != 1 for stride in strides} == {is_apart}


def test_own_classes_beside_them_cost_scores_and_generated_code_does_not(tmp_path) -> None:
    path = model_file(tmp_path, APART["permute"])
    asked = problem(path, compile="off", recompute="none", micro_batch="8", cuda_graph="off", generated="off")
    own = api.solve(asked).best
    generated = api.score(asked, replace(own.plan, mesh=replace(own.plan.mesh, generated=True))).best
    scores_bytes = 3 * 8 * 4 * 64 * 64 * 4  # of 3 blocks, 8 samples, 4 heads, in float32; and some temporaries
    difference = own.estimate.allocated_bytes[0] - generated.estimate.allocated_bytes[0]
    assert scores_bytes < difference < 2 * scores_bytes
    assert own.estimate.breakdown.compute_s > generated.estimate.breakdown.compute_s


def test_without_a_profile_generated_code_is_tried_beside_them_only(tmp_path) -> None:
    apart, dense = tmp_path / "apart", tmp_path / "dense"
    for folder in (apart, dense):
        folder.mkdir()
    for folder, made, is_generated in ((apart, APART["permute"], True), (dense, DENSE["contiguous"], False)):
        asked = problem(model_file(folder, made), global_batch=2048)  # the device has more to do than the host
        assert api.solve(asked).best.plan.mesh.generated == is_generated


@pytest.mark.parametrize(
    ("made", "is_in_every_block"),
    [*((made, False) for made in APART.values()), (APART["permute"], True), (APART["a clone"], True)],
)
def test_generated_code_hands_dense_masks_to_attention(tmp_path, made: str, is_in_every_block: bool) -> None:
    """What it is priced as."""
    path = model_file(tmp_path, made)
    if is_in_every_block:
        path.write_text(
            path.read_text().replace("if bias is None:", "if True:").replace("Block(i == 0)", "Block(True)")
        )
    asked = problem(path, generated="on", compile="off", recompute="none", micro_batch="8", cuda_graph="off")
    context = ForwardContext.of(asked.graph, rules=load_rules(), degree=1, precision="bf16")
    assert scattered_masks(asked.graph)
    assert scattered_masks(asked.graph, dense=context.scattered) == frozenset()
    assert ".contiguous()" in api.program_files(asked, api.solve(asked))["parallel_model.py"]


def test_attention_beside_both_kinds_of_mask_has_two_prices(tmp_path) -> None:
    path = model_file(tmp_path, APART["permute"])
    both = "F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=bias)"
    path.write_text(path.read_text().replace(both, f"{both} + {both.replace('bias)', 'bias.contiguous())')}"))
    graph = api.trace_model(path)
    context = work_contexts(graph, load_hardware_profile("dgx_h100_x8"), "bf16", load_rules())(1, keeps_modules=True)
    local = rank_segments(context).local(())
    kind = next(kind for kind, segment in graph.first_of_kind().items() if segment.is_block)
    times = times_of(context, local[kind].ops, local[kind].alike, 8)
    forward_s = [time.forward_s for op, time in zip(local[kind].ops, times, strict=True) if op.op.target == ATTENTION]
    assert forward_s[0] > 2 * forward_s[1]


IDLE = {
    "plain": ("self.qkv(x)", "y.transpose(1, 2)"),
    "a clone": ("self.qkv(x.clone())", "y.transpose(1, 2)"),
    "a dropout that drops nothing": ("nn.Dropout(0.0)(self.qkv(x))", "y.transpose(1, 2)"),
    "heads put back": ("self.qkv(x)", "y.transpose(1, 2).contiguous()"),
    "heads put back by others": (
        "self.qkv(x)",
        "y.reshape(-1, HEADS, TOKENS, WIDTH // HEADS).permute(0, 2, 1, 3).contiguous()",
    ),
}


def test_ops_that_run_nothing_take_and_keep_nothing(tmp_path) -> None:
    """Generated code leaves them out, and fused attention writes its result so that it need not be copied."""
    fix = {"compile": "off", "recompute": "none", "micro_batch": "8", "cuda_graph": "off"}
    estimates = []
    for number, (made, put_back) in enumerate(IDLE.values()):
        (tmp_path / str(number)).mkdir()
        path = model_file(tmp_path / str(number), DENSE["contiguous"])
        path.write_text(path.read_text().replace("self.qkv(x)", made).replace("y.transpose(1, 2)", put_back))
        assert bool(idle_ops(api.trace_model(path))) == (number > 0)
        estimates.append(api.solve(problem(path, **fix)).best.estimate)
    assert {estimate.allocated_bytes for estimate in estimates} == {estimates[0].allocated_bytes}
    for estimate in estimates:
        assert estimate.breakdown.compute_s == pytest.approx(estimates[0].breakdown.compute_s, rel=1e-9)


def test_a_copy_of_something_else_is_one(tmp_path) -> None:
    path = model_file(tmp_path, DENSE["contiguous"])
    path.write_text(path.read_text().replace("self.qkv(x)", "self.qkv(x.transpose(1, 2).contiguous().transpose(1, 2))"))
    assert idle_ops(api.trace_model(path)) == frozenset()
