"""Mixtures of experts: whole experts on each rank, found by the program that picks layouts and exact in float64."""

import dataclasses
from functools import partial

import pytest
import torch
from distributed.families import family_plan
from distributed.launch import run_ranks
from distributed.programs import check_programs, graph_of, prices, write_programs
from torch.nn import functional as F

from autoplan.layout import parse_layout, sharded
from autoplan.runtime.experts import use_float64_grouped_products
from autoplan.search.solve import solve
from autoplan.sharding import shard_graph
from autoplan.space import load_rules


def expert_parallel_plan(degree):
    """The plan when splitting an expert's weights otherwise is dear."""
    graph = graph_of("mixture")
    plain = prices(graph, degree)

    def is_expert_weight(spec):
        return spec.at(1) == spec.at(2) and len(spec.shape) == 3

    split_by_expert = dataclasses.replace(
        plain,
        parameter_s=lambda spec, layout: float(is_expert_weight(spec) and layout != sharded(0)),
        conversion_s=lambda spec, step: float(is_expert_weight(spec)),
    )
    found = shard_graph(
        graph,
        degree=degree,
        rules=load_rules(),
        prices=split_by_expert,
        solve=partial(solve, time_limit_s=None),
    )
    return dataclasses.replace(family_plan("mixture", f"TP {degree}"), shardings=found["R"])


@pytest.mark.parametrize("degree", [2, 4])
def test_expert_parallelism_equals_one_process(tmp_path, degree):
    plan = expert_parallel_plan(degree)
    layouts = {name: parse_layout(text) for sharding in plan.shardings for name, text in sharding.values}
    assert layouts["blocks.0.experts.up"] == layouts["blocks.0.experts.down"] == sharded(0)
    rows = write_programs(tmp_path, {"case": ("mixture", plan)})
    assert "own_experts_mm(" in (tmp_path / "parallel_case.py").read_text()
    for differences in run_ranks(check_programs, degree, str(tmp_path), rows, 3):
        assert max(max(step) for step in differences["case"]) <= 1e-9


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
