"""Mixtures of experts: whole experts on each rank, found by the program that picks layouts and exact in float64."""

import dataclasses
import types
from functools import partial

import torch
from distributed.families import FEATURES, family_plan
from distributed.launch import run_ranks
from distributed.programs import check_programs, graph_of, prices, write_programs
from torch.nn import functional as F

from autoplan.layout import parse_layout, sharded
from autoplan.rules import load_rules
from autoplan.runtime.experts import own_experts_mm, own_rows, own_rows_sum, use_float64_grouped_products
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.sharding import shard_graph
from autoplan.tensor_parallel.split_names import splits

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
        found.append(own_rows_sum(rows, order.argsort(), 2, ends, tp))
        found[-1].sum().backward()
        assert own.grad.any() == (rank == 0)
    torch.testing.assert_close(found[0] + found[1], whole, rtol=0, atol=1e-12)


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
