"""Recomputation that keeps attention: it does not run again, what is kept is what is predicted, numbers stay exact."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed.programs import graph_of, shardings_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.analysis.kept_attention import kinds_with_attention
from autoplan.checks.plan import check_plan
from autoplan.cost.price import make_pricer
from autoplan.errors import InputError, UsageError
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.planning.problem import trace_model
from autoplan.rules import load_rules
from autoplan.runtime import Config
from autoplan.runtime.input_pipeline.model_calls import call_model, loss_of
from autoplan.runtime.stages import kept_attention
from autoplan.runtime.stages.compiled import compile_blocks
from autoplan.runtime.stages.recompute import apply_recompute
from autoplan.space.priced import priced_space

EXAMPLES = Path(__file__).parent.parent / "examples"
RULES = load_rules()
PROFILE = load_hardware_profile("dgx_a100_x8")
WAYS = ("eager", "compiled")
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Counted(TorchDispatchMode):
    """Counts fused attention, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.n += op.overloadpacket.__name__ in kept_attention.FUSED
        return op(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention in one of the ways that fused kernels know."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.query, self.keys, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, width = x.shape
        x = self.norm(x.view(n * rows, width)).view(n, rows, width)
        q = self.query(x).view(n, rows, 4, 4).transpose(1, 2)
        k = self.keys(x).view(n, rows, 2, 4).transpose(1, 2)
        options = {"enable_gqa": True} if self.way == "grouped" else {}
        k = k if self.way == "grouped" else k.repeat_interleave(2, dim=1)
        options |= {"is_causal": True} if self.way == "causal" else {}
        options |= {"attn_mask": x.new_ones(rows, rows).tril().log()} if self.way == "mask" else {}
        y = F.scaled_dot_product_attention(q, k, k, **options)
        return x + F.dropout(self.out(y.transpose(1, 2).reshape(n, rows, width)), 0.3)


def trained(blocks: nn.Sequential, *, recomputes: bool, keeps: bool, way: str) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients and statistics after one step of two micro-batches, and how often attention ran in backward passes."""
    names = [str(index) for index in range(len(blocks))]
    if way == "compiled":
        compile_blocks(blocks, names, torch.device("cpu"))
    apply_recompute(blocks, names if recomputes else [], keeps_attention=keeps)
    torch.manual_seed(1)
    n_again = 0
    for _ in range(2):
        loss = blocks(torch.randn(2, 6, 16, dtype=torch.float64)).square().sum()
        with Counted() as counted:
            loss.backward()
        n_again += counted.n
    found = {name: parameter.grad for name, parameter in blocks.named_parameters()}
    return {**found, **{name: buffer.clone() for name, buffer in blocks.named_buffers()}}, n_again


@COMPILES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["plain", "causal", "grouped", "mask"])
def test_kept_attention_does_not_run_again_and_changes_no_number(attention: str, way: str) -> None:
    def blocks() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Block(attention), Block(attention)).double()

    whole, _ = trained(blocks(), recomputes=False, keeps=False, way=way)
    again, n_again = trained(blocks(), recomputes=True, keeps=False, way=way)
    kept, n_kept = trained(blocks(), recomputes=True, keeps=True, way=way)
    assert (n_again, n_kept) == (4, 0)
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(kept[name], value, rtol=1e-12, atol=1e-12)


def test_random_numbers_go_on_behind_what_is_kept_as_if_it_had_run(monkeypatch) -> None:
    # on a CPU fused attention draws none, so another operator that does stands for it
    monkeypatch.setattr(kept_attention, "_FUSED_OPS", frozenset([torch.ops.aten.rand_like.default]))

    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x.sin() * torch.rand_like(x), 0.5).exp()

    gradients = []
    for recomputed in ((), ("0",)):
        model, x = nn.Sequential(Drawing()), torch.linspace(0, 1, 50, requires_grad=True)
        apply_recompute(model, recomputed, keeps_attention=True)
        torch.manual_seed(3)
        model(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_where_random_numbers_are_is_neither_read_nor_set_in_a_cuda_graph(monkeypatch) -> None:
    class Numbers:
        def get_state(self) -> torch.Tensor:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    monkeypatch.setattr(kept_attention, "is_captured", lambda: True)
    monkeypatch.setattr(kept_attention, "_numbers", lambda device: Numbers())
    assert trained(nn.Sequential(Block("plain")).double(), recomputes=True, keeps=True, way="eager")[1] == 0


def test_what_is_kept_may_not_be_written(monkeypatch) -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.scaled_dot_product_attention(x, x, x)
            with torch.no_grad():
                y += 1.0
            return y.exp()

    model = nn.Sequential(Writing())
    apply_recompute(model, ["0"], keeps_attention=True)
    with pytest.raises(RuntimeError, match="written in place"):
        model(torch.ones(1, 1, 3, 4, requires_grad=True)).sum().backward()


# -------------------------------------------------------------------------------------------------------------- prices


def costs(model: str, *, precision: str = "fp32", **fields: object):
    """Of the blocks of a model: plain, recomputed, recomputed with attention kept."""
    graph, tp = graph_of(model), fields.get("tp", 1)
    shardings = {(tp, key): found for key, found in shardings_of(model, tp).items()} if tp != 1 else {}
    price = make_pricer(graph, hardware=PROFILE, precision=precision, shardings=shardings, rules=RULES)
    kind = next(segment.kind for segment in graph.segments if segment.is_block)
    mesh = Mesh(sharding=next((key for _, key in shardings), ""), n_micro_batches=2, **fields)
    (plain, whole), (same, kept) = (price(mesh_).costs[kind] for mesh_ in (mesh, replace(mesh, keeps_attention=True)))
    assert plain == same
    return plain, whole, kept


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_what_is_kept_is_what_is_predicted(model: str, monkeypatch) -> None:
    kept, held = kept_attention._Call, []
    monkeypatch.setattr(kept_attention, "_Call", lambda *fields: held.append(fields[0]) or kept(*fields))
    graph = graph_of(model)
    given = runpy.run_path(str(EXAMPLES / f"{model}.py"))
    from distributed.programs import MODELS

    built = given["build_model"](**MODELS[model][1]).bfloat16()
    inputs, targets = given["make_batch"](2)
    blocks = [segment for segment in graph.segments if segment.is_block]
    apply_recompute(built, [block.module_path for block in blocks], keeps_attention=True)
    loss_of(given.get("loss_fn"), call_model(built, inputs), targets)
    n_bytes = sum(tensor.untyped_storage().nbytes() for results in held for tensor in results)
    *_, cost = costs(model, precision="bf16", micro_batch_size=2)
    assert n_bytes == len(blocks) * cost.kept_bytes


@pytest.mark.parametrize(("model", "fields"), [("gpt", {}), ("llama", {}), ("llama", {"tp": 2}), ("gpt", {"tp": 2})])
def test_keeping_attention_spares_its_time_and_keeps_its_bytes(model: str, fields: dict[str, int]) -> None:
    for compiles in (False, True):
        plain, whole, kept = costs(model, precision="bf16", micro_batch_size=4, compile=compiles, **fields)
        assert kept.kept_bytes > 0 == whole.kept_bytes
        assert kept.saved_bytes == whole.saved_bytes + kept.kept_bytes < plain.saved_bytes
        assert kept.saved_bytes + kept.working_bytes == whole.saved_bytes + whole.working_bytes
        assert (
            replace(
                kept,
                recompute_s=whole.recompute_s,
                saved_bytes=whole.saved_bytes,
                working_bytes=whole.working_bytes,
                kept_bytes=0,
            )
            == whole
        )
    if fields:
        *_, alone = costs(model, precision="bf16", micro_batch_size=4)
        assert 2 * kept.kept_bytes == alone.kept_bytes


def long_llama(context: int = 32768):
    return trace_model(EXAMPLES / "llama.py", overrides={"size": "1b", "n_layers": 4, "context": context})


def test_at_32k_tokens_recomputation_takes_as_much_less_as_attention_takes() -> None:
    graph = long_llama()
    kind = next(segment.kind for segment in graph.segments if segment.is_block)
    price = make_pricer(graph, hardware=PROFILE, precision="bf16", shardings={}, rules=RULES)
    mesh = Mesh(n_micro_batches=2)
    whole, kept = (price(mesh_).costs[kind][1] for mesh_ in (mesh, replace(mesh, keeps_attention=True)))
    # 2 x 2 x 32 heads x 32,768^2 x 64 / 2, at 55 % of the rate of products
    n_flops = 2 * 2 * 32 * 32768**2 * 64 // 2
    attention_s = n_flops / (0.55 * dict(PROFILE.device.peak_flops_per_s)["bf16"])
    assert attention_s < whole.recompute_s - kept.recompute_s < 2 * attention_s  # a product reaches a part of the peak
    assert kept.kept_bytes == 32768 * (2048 * 2 + 32 * 4)


# --------------------------------------------------------------------------------------------------------------- plans


def test_where_torch_computes_attention_op_by_op_nothing_is_kept() -> None:
    graph = graph_of("llama")  # fewer key heads
    found = {
        (precision, attention): bool(kinds_with_attention(graph, precision=precision, attention=attention))
        for precision in ("fp16", "fp32", "fp64")
        for attention in ("cudnn", "flash", "efficient", "cpu")
    }
    assert {key for key, has_any in found.items() if has_any} == {
        ("fp16", "cudnn"),
        ("fp16", "flash"),
        *((precision, "cpu") for precision in ("fp16", "fp32", "fp64")),
    }


def test_a_fix_that_nothing_can_have_is_refused() -> None:
    for model, fix, found in (
        ("mlp", (), "no block with attention"),
        ("gpt", (("recompute", "none"),), "recompute=none"),
        ("gpt", (("schedule", "zero_bubble_v"),), "schedule=zero_bubble_v"),
    ):
        options = Options(fix=(("keep_attention", "on"), *fix))
        with pytest.raises(UsageError, match=found):
            priced_space(trace_model(EXAMPLES / f"{model}.py"), PROFILE, options, global_batch=8)


def test_a_plan_that_recomputes_nothing_keeps_nothing() -> None:
    graph = graph_of("gpt")
    offered = priced_space(graph, PROFILE, Options(), global_batch=8)
    from autoplan.parallel_plan import StagePlan

    block = next(index for index, segment in enumerate(graph.segments) if segment.is_block)
    mesh = Mesh(dp=8, keeps_attention=True)
    for recomputed, keeps in (((), False), ((block,), True)):
        plan = offered.make_plan(mesh, (StagePlan(0, len(graph.segments), recomputed),))
        assert plan.mesh.keeps_attention == keeps
        check_plan(plan, graph, PROFILE)
    with pytest.raises(InputError, match="keeps_attention"):
        check_plan(replace(plan, stages=(StagePlan(0, len(graph.segments)),)), graph, PROFILE)
    with pytest.raises(ValueError, match="keep_attention"):
        Config(keep_attention=True)
