"""Mixtures of experts: whole experts on each rank, found by the program that picks layouts and exact in float64."""

import dataclasses
import types
from functools import partial

import pytest
import torch
from distributed.families import FEATURES, family_plan
from distributed.launch import run_ranks
from distributed.programs import check_programs, graph_of, prices, write_programs
from torch import nn
from torch.nn import functional as F

from autoplan.graph import GraphFacts, Op, Ref
from autoplan.layout import E, parse_layout, sharded
from autoplan.measuring_program.values import fill_module
from autoplan.rules import load_rules
from autoplan.runtime.tensor_parallel.experts import (
    own_experts_mm,
    own_rows,
    own_rows_sum,
    use_float64_grouped_products,
)
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.expert_rows import GROUPED_PRODUCT, with_ends_first
from autoplan.tensor_parallel.op_strategies import legal_strategies
from autoplan.tensor_parallel.sharding import shard_graph
from autoplan.tensor_parallel.split_names import splits
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model

ATTENTION = "aten.scaled_dot_product_attention.default"
DEAR_S = 1.0  # beside prices of microseconds


def expert_parallel_plan(model, feature, *, is_split_by_context=False):
    """The plan when splitting an expert's weights otherwise is dear, and attention that is not split along its rows."""
    graph, mesh = graph_of(model), FEATURES[feature]
    plain = prices(graph, mesh["tp"])

    def is_expert_weight(spec):
        return spec.at(1) == spec.at(2) and len(spec.shape) == 3

    def op_s(op, strategy):
        is_dear = is_split_by_context and op.target == ATTENTION and strategy.result != sharded(2)
        return plain.op_s(op, strategy) + DEAR_S * is_dear

    split_by_expert = dataclasses.replace(
        plain,
        op_s=op_s,
        parameter_s=lambda spec, layout: DEAR_S * (is_expert_weight(spec) and layout != sharded(0)),
        conversion_s=lambda spec, step: DEAR_S if is_expert_weight(spec) else plain.conversion_s(spec, step),
    )
    found = shard_graph(
        graph,
        degree=mesh["tp"],
        rules=load_rules(),
        prices=split_by_expert,
        solve=partial(minimize, time_limit_s=None),
    )
    return dataclasses.replace(family_plan(model, feature), shardings=found[mesh["sharding"]])


def layouts_of(plan):
    return {name: parse_layout(text) for sharding in plan.shardings for name, text in sharding.values}


def assert_exact(folder, plans):
    """Trains each model under its plan; all take the same number of ranks. Returns the text of each program.

    Models of Hugging Face compute their routing in float32.
    """
    rows = write_programs(folder, {model: (model, plan) for model, plan in plans.items()})
    for differences in run_ranks(check_programs, *{plan.mesh.tp for plan in plans.values()}, str(folder), rows):
        for model, steps in differences.items():
            assert max(max(step) for step in steps) <= (1e-5 if model.endswith("_hf") else 1e-9), model
    return {model: (folder / f"parallel_{model}.py").read_text() for model in plans}


@pytest.mark.nightly
def test_expert_parallelism_equals_one_process_on_four_ranks(tmp_path):
    """Each rank picks the rows of its experts from all tokens, whether the model counts them first or afterwards."""
    plans = {model: expert_parallel_plan(model, "TP 4") for model in ("mixture", "mixtral_hf")}
    layouts = layouts_of(plans["mixture"])
    assert layouts["blocks.0.experts.up"] == layouts["blocks.0.experts.down"] == sharded(0)
    for text in assert_exact(tmp_path, plans).values():
        assert "own_rows(" in text and "own_experts_mm(" in text and "own_rows_sum(" in text


def test_experts_and_sequence_split_over_the_same_ranks_equal_one_process(tmp_path):
    """Each rank has a part of the tokens for attention, and some whole experts: tokens go to experts and come back."""
    plans = {
        model: expert_parallel_plan(model, "TP 2, split sequence", is_split_by_context=True)
        for model in ("mixture", "capacity_mixture")
    }
    for plan in plans.values():
        layouts = layouts_of(plan)
        assert layouts["blocks.0.experts.up"] == layouts["blocks.0.experts.down"] == sharded(0)
        assert layouts["scaled_dot_product_attention"] == sharded(2)
    said = {model: splits(graph_of(model), plan) for model, plan in plans.items()}
    assert "whole experts (expert parallelism, priced as equally busy)" in said["mixture"]
    assert "stacks of weights matrix by matrix (of experts: expert parallelism)" in said["capacity_mixture"]
    texts = assert_exact(tmp_path, plans)
    # sorted by expert, tokens are gathered; with slots for them they are sent: [experts, batch, groups, slots, width]
    assert "own_experts_mm(" in texts["mixture"]
    assert "all_to_all(rows, 2, 0, self.tp)" in texts["capacity_mixture"]
    assert "all_to_all(rows, 0, 2, self.tp)" in texts["capacity_mixture"]


def test_a_rank_to_whose_experts_no_token_goes_takes_part_all_the_same():
    use_float64_grouped_products()
    torch.manual_seed(0)
    tokens, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 4, 3, dtype=torch.float64)
    ends = torch.tensor([4, 12, 12, 12], dtype=torch.int32)  # two experts a rank, two rows a token
    order = torch.randperm(12)
    whole = F.grouped_mm(tokens[order // 2], weight, offs=ends)[order.argsort()].reshape(6, 2, 3).sum(1)
    found = []
    for rank in range(2):
        tp = types.SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        own = weight[2 * rank : 2 * rank + 2].clone().requires_grad_()
        rows = own_experts_mm(tokens[own_rows(order, ends, tp) // 2], own, ends, tp)
        index = order.argsort()
        found.append(own_rows_sum(rows, torch.where(index > 6, index - 12, index), 2, ends, tp))  # -1: the last row
        found[-1].sum().backward()
        assert own.grad.any() == (rank == 0)
    torch.testing.assert_close(found[0] + found[1], whole, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, in what lies between
def test_a_compiled_block_is_compiled_once_for_any_number_of_rows():
    tp = types.SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    up, down = (torch.randn(2, 16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    graphs = []

    def block(tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        experts, order = experts.flatten().sort()
        ends = F.one_hot(experts, 4).sum(0).cumsum(0).to(torch.int32)
        rows = torch.relu(own_experts_mm(tokens[own_rows(order, ends, tp) // 2], up, ends, tp))
        return own_rows_sum(own_experts_mm(rows * 2, down, ends, tp), order.argsort(), 2, ends, tp) + tokens

    torch._dynamo.reset()
    compiled = torch.compile(block, dynamic=False, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    n_graphs = []
    for n_own in (9, 13, 4, 22, 24):
        tokens = torch.randn(12, 16, dtype=torch.bfloat16)
        experts = (torch.arange(24) >= n_own).long()[torch.randperm(24)].reshape(12, 2) * 2
        torch.testing.assert_close(compiled(tokens, experts), block(tokens, experts), rtol=0, atol=0)
        n_graphs.append(len(graphs))
    assert n_graphs == [n_graphs[0]] * 5 and n_graphs[0] > 1


def test_the_sum_of_rows_keeps_their_places_and_no_rows():
    rows = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    order, ends = torch.randperm(12), torch.tensor([4, 9, 10, 12], dtype=torch.int32)
    tp, kept = types.SimpleNamespace(rank=lambda: 0, size=lambda: 2), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        total = own_rows_sum(rows, order.argsort(), 2, ends, tp)
    assert kept and not any(tensor.is_floating_point() for tensor in kept)
    gradient = torch.randn_like(total)
    total.backward(gradient)
    torch.testing.assert_close(rows.grad, gradient[order[:9] // 2], rtol=0, atol=0)


def test_while_measured_experts_get_about_as_many_tokens_each():
    torch.manual_seed(0)
    router = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 4))
    fill_module(router, torch.float32, float32_buffers=())
    chosen = router(torch.randn(4096, 256)).argmax(1)
    assert all(900 < n < 1150 for n in chosen.bincount(minlength=4).tolist())


def test_rows_that_no_expert_computes_are_those_of_the_last_rank():
    order, ends = torch.arange(12), torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    ranks = [types.SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in range(2)]
    assert [own_rows(order, ends, tp).tolist() for tp in ranks] == [[*range(5)], [*range(5, 12)]]


class RoutedByToken(nn.Module):
    """Six experts that tokens go to by their numbers: which rows are whose does not depend on blocks before."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 8, 8))

    def forward(self, x, tokens):
        expert = (tokens % 6).reshape(-1)
        order = expert.argsort()
        rows = x.reshape(-1, 8)[order]
        ends = F.one_hot(expert, 6).sum(0).cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, self.weight, offs=ends)[order.argsort()].reshape(x.shape)


def test_each_of_two_mixtures_that_are_interleaved_keeps_all_of_its_ops():
    def op(name, target, *reads):
        return Op(name, target, tuple(map(Ref, reads)), (), (), "")

    picked = op("rows_a", "pick", "x"), op("rows_b", "pick", "x")
    counted = op("ends_a", "count", "x"), op("ends_b", "count", "x")
    products = [op(f"product_{m}", GROUPED_PRODUCT, f"rows_{m}", "weight", f"ends_{m}") for m in "ab"]
    names = [op.name for op in with_ends_first((*picked, *counted, *products))]
    assert sorted(names) == sorted(op.name for op in (*picked, *counted, *products))
    assert all(names.index(f"ends_{m}") < names.index(f"rows_{m}") < names.index(f"product_{m}") for m in "ab")


class TwoMixtures(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(10, 8), nn.ModuleList(RoutedByToken() for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return x.square().mean()


@pytest.fixture(scope="module")
def two_mixtures():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    return trace_model(module_source(TwoMixtures(), (tokens, tokens), lambda loss, _: loss))


def test_blocks_whose_routing_needs_no_block_before_are_of_one_kind(two_mixtures):
    blocks = [segment for segment in two_mixtures.segments if segment.is_block]
    assert [block.name for block in blocks] == ["blocks.0", "blocks.1"]
    assert blocks[0].kind == blocks[1].kind


@pytest.mark.parametrize(("degree", "divides"), [(2, True), (4, False)])
def test_rows_are_divided_by_expert_only_where_all_ranks_have_equally_many(two_mixtures, degree, divides):
    facts, block = GraphFacts.of(two_mixtures), two_mixtures.segments[1]
    legal = legal_strategies(two_mixtures.ops_of(block), facts.specs, facts.gradients, degree, load_rules())
    assert any(E in (*s.operands, s.result) for found in legal.values() for s in found) == divides


def test_grouped_products_in_float64_are_products_group_by_group():
    use_float64_grouped_products()
    torch.manual_seed(0)
    x = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    found = F.grouped_mm(x, weight, offs=torch.tensor([2, 2, 10], dtype=torch.int32))
    expected = torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradient = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
