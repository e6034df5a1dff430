"""Heads with padded classes: found where they gain, priced by pencil, and exact in float64 as programs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distributed.launch import run_ranks
from distributed.programs import check_programs, graph_of, make_plan, write_programs
from torch import nn
from torch.nn import functional as F

from autoplan import codegen
from autoplan.analysis.chunked_loss import ChunkedHead, chunked_head
from autoplan.analysis.padded_head import with_padded_head
from autoplan.codegen import config_values
from autoplan.cost.op_time import op_time
from autoplan.cost.price import make_pricer
from autoplan.graph import PADDED_LINEAR, Op, Ref, TensorSpec
from autoplan.hardware import load_hardware_profile
from autoplan.parallel_plan import Mesh
from autoplan.rules import LocalCall, load_rules
from autoplan.runtime.stages.chunked_loss import defer_products
from autoplan.runtime.stages.padded_head import CLASSES_OF_PADDED_ROWS, pad_classes, padded_linear
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.trace import trace_model

TOLERANCE = 1e-9
N_STEPS = 2
RULES = load_rules()


def head_of(n_classes, *, width=64, make_batch=None, loss_fn=None, name="head"):
    """The graph of a block and a head, of 7 rows a sample."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
            self.head = nn.Linear(width, n_classes)

        def forward(self, x):
            for block in self.blocks:
                x = block(x).relu()
            return self.head(x)

    def rows_of_7(n):
        return torch.randn(n, 7, width), torch.zeros(n, 7, dtype=torch.int64)

    def plain_loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return trace_model(ModelSource(name, name, Model, make_batch or rows_of_7, loss_fn or plain_loss))


@pytest.mark.parametrize(
    ("n_classes", "width", "is_padded"),
    [(50257, 96, True), (50256, 96, False), (50258, 96, True), (50257, 64, False)],
    ids=["odd", "multiple of 8", "even", "small"],
)
def test_heads_of_odd_rows_that_are_large_are_padded(n_classes, width, is_padded):
    graph = head_of(n_classes, width=width)
    found = with_padded_head(graph)
    assert (chunked_head(found).ops[0].target == PADDED_LINEAR) == is_padded
    assert (found is graph) != is_padded
    assert with_padded_head(found) is found


def test_logits_that_are_read_otherwise_stay_as_they_are():
    """One dim of all numbers cannot be a view of rows that lie further apart than they are long."""
    graph = head_of(134, loss_fn=lambda logits, targets: logits.view(-1).square().mean())
    assert with_padded_head(graph, smallest_weight_elements=0) is graph


class Similarity(nn.Module):
    def forward(self, a, b):
        return F.linear(a, b)


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.similarity = nn.Linear(16, 24), nn.Linear(16, 24), Similarity()

    def forward(self, x):
        return self.similarity(self.left(x), self.right(x))


def test_samples_of_a_batch_as_classes_are_not_padded():
    batch = lambda n: (torch.randn(n, 16), torch.arange(n))
    graph = trace_model(ModelSource("contrastive", "contrastive", Contrastive, batch, F.cross_entropy))
    assert chunked_head(graph) is not None
    assert with_padded_head(graph, smallest_weight_elements=0) is graph


class TwoProducts(nn.Module):
    """The hidden states of the first are read as one dim, which rows that lie apart do not allow."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(33, 16)), nn.Parameter(torch.ones(131, 33))

    def forward(self, x):
        hidden = F.linear(x, self.first)
        return F.linear(hidden.view(-1).relu().view(hidden.shape), self.second)


def test_a_module_with_another_product_stays_as_it_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = TwoProducts()

        def forward(self, x):
            return self.head(x)

    batch = lambda n: (torch.randn(n, 16), torch.zeros(n, dtype=torch.int64))
    graph = trace_model(ModelSource("two products", "two products", Model, batch, F.cross_entropy))
    assert chunked_head(graph).ops[0].module_path == "head"
    assert with_padded_head(graph, smallest_weight_elements=0) is graph


def test_what_is_padded_has_the_rates_of_a_whole_product_and_the_bytes_of_its_copies():
    """16,384 rows of GPT-2 XL's head on an H200."""
    device, rows, width, n_classes = load_hardware_profile("h200_x4").device, 16384, 1600, 50257
    x, weight, logits = (TensorSpec(s, "compute") for s in ((rows, width), (n_classes, width), (rows, n_classes)))

    def time_of(target):
        op = Op("logits", target, (Ref("x"), Ref("weight")), (), (logits,), "head")
        call = LocalCall(op, (x, weight), (x, weight), (logits,), batch_size=1, precision="bf16")
        return op_time(RULES[target], call, device=device, has_gradient=True)

    plain, padded = time_of("aten.linear.default"), time_of(PADDED_LINEAR)
    rate = dict(device.peak_flops_per_s)["bf16"] * device.matmul_efficiency
    product_s = 2 * rows * width * n_classes / rate
    bandwidth = device.memory_bytes_per_s * device.memory_efficiency
    weight_s, gradient_s = 2 * 2 * n_classes * width / bandwidth, 7.5 * 2 * rows * n_classes / bandwidth
    assert padded.forward_s == pytest.approx(product_s + weight_s + 3 * device.kernel_s, rel=1e-9)
    assert padded.backward_s == pytest.approx(2 * product_s + gradient_s + 4 * device.kernel_s, rel=1e-9)
    assert plain.forward_s + plain.backward_s > 3 * (padded.forward_s + padded.backward_s)


def test_a_slice_of_a_padded_head_has_the_padded_weight_beside_it():
    """2,048 of 4,096 rows: logits in bfloat16, log-softmax and two gradients in float32, and a copy of the weight."""
    rows, width, classes = 4096, 64, 70_001

    def batch(n):
        return torch.randn(n, rows, width), torch.zeros(n, rows, dtype=torch.int64)

    graph = with_padded_head(head_of(classes, width=width, make_batch=batch, name="long"))
    assert chunked_head(graph).ops[0].target == PADDED_LINEAR
    hardware = load_hardware_profile("dgx_a100_x8", n_hosts=1)
    price = make_pricer(graph, hardware=hardware, precision="bf16", shardings={}, rules=RULES, loss="chunked")
    cost, _ = price(Mesh(micro_batch_size=1)).costs[graph.segments[-1].kind]
    assert cost.working_bytes == 3584 * classes * (2 + 3 * 4) + 2 * classes * width


# ------------------------------------------------------------------------------------------------ numbers


def example(*, bias):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 7, 5), (131, 5), (131,)][: 2 + bias]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    return tensors, torch.randint(0, 131, (3, 7), generator=generator)


def loss_and_gradients(logits, targets, tensors):
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss.detach(), *torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_gradients_are_those_of_the_product(bias):
    tensors, targets = example(bias=bias)
    logits = padded_linear(*tensors)
    assert logits.shape == (3, 7, 131) and logits.stride(-2) % CLASSES_OF_PADDED_ROWS == 0
    torch.testing.assert_close(logits, F.linear(*tensors), rtol=1e-13, atol=1e-13)
    found = loss_and_gradients(logits, targets, tensors)
    for one, other in zip(found, loss_and_gradients(F.linear(*tensors), targets, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_module_of_the_users_is_padded_and_keeps_its_names(is_chunked):
    (x, weight, bias), targets = example(bias=True)
    head = nn.Linear(5, 131, dtype=torch.float64)
    head.load_state_dict({"weight": weight, "bias": bias})
    expected = loss_and_gradients(head(x), targets, [x, *head.parameters()])
    if is_chunked:
        defer_products(head, slice_rows=4, is_compiled=False, pads_classes=True)
    else:
        pad_classes(head)
        assert head(x).stride(-2) % CLASSES_OF_PADDED_ROWS == 0
    assert list(head.state_dict()) == ["weight", "bias"] and head.weight.shape == (131, 5)
    for one, other in zip(expected, loss_and_gradients(head(x), targets, [x, *head.parameters()]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------------------------------------ programs


def test_programs_say_which_product_is_padded():
    graph = graph_of("llama_padded")
    assert config_values(graph, make_plan("llama_padded", dp=2))["padded_head"] == "head"
    split = make_plan("llama_padded", tp=2, sharding="R")
    assert "padded_head" not in config_values(graph, split)
    text = codegen.parallel_model_text(graph, split, rules=RULES)
    assert (
        "from runtime.stages.padded_head import padded_linear" in text
        and "padded_linear(norm, self.head.weight)" in text
    )
    chunked = codegen.parallel_model_text(graph, dataclasses.replace(split, loss="chunked"), rules=RULES)
    assert "deferred_linear(" in chunked and "pads_classes=True)" in chunked


def test_programs_with_padded_heads_equal_one_process(tmp_path, monkeypatch):
    """Among them a tied weight, and classes that are padded for their shards too."""
    monkeypatch.setattr(ChunkedHead, "slice_rows", lambda head, *, is_compiled: 5)
    zero3 = {"micro_batch_size": 2, "dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
    plans = {
        "zero3": ("gpt_padded", make_plan("gpt_padded", recompute="full", **zero3)),
        "zero3_chunked": ("gpt_padded", chunked(make_plan("gpt_padded", **zero3))),
        "pp2": ("gpt_padded", make_plan("gpt_padded", pp=2, micro_batch_size=2, n_micro_batches=2)),
        "tp2": ("llama_padded", make_plan("llama_padded", tp=2, sharding="R", n_micro_batches=2)),
        "tp2_chunked": ("llama_padded", chunked(make_plan("llama_padded", tp=2, sharding="R"))),
    }
    rows = write_programs(tmp_path, plans)
    for differences in run_ranks(check_programs, 2, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert set(differences) == set(plans)
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


def chunked(plan):
    return dataclasses.replace(plan, loss="chunked")
