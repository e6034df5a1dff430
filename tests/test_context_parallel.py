"""Context parallelism: each rank has some rows of the query and all keys; exact in float64, and found by the search."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed.families import FEATURES, family_plan, tolerance
from distributed.launch import run_ranks
from distributed.programs import EXAMPLES, check_programs, graph_of, prices, write_programs
from torch.nn import functional as F

from autoplan import api
from autoplan.cost.layout_prices import sharding_prices
from autoplan.cost.segment_work import MOVED_FRACTION
from autoplan.cost.work_context import work_contexts
from autoplan.hardware import load_hardware_profile
from autoplan.layout import parse_layout, sharded
from autoplan.options import Options
from autoplan.rules import all_strategies, load_rules, operand_names
from autoplan.runtime.tensor_parallel.attention import causal_attention_of_rows
from autoplan.solver.solve import minimize
from autoplan.tensor_parallel.sharding import shard_graph
from autoplan.tensor_parallel.split_names import splits

ATTENTION = "aten.scaled_dot_product_attention.default"
ROWS = sharded(2)
DEAR_S = 1.0  # beside prices of microseconds


def context_parallel_plan(model, feature):
    """The plan when attention is dear that is not split along its rows."""
    graph, mesh = graph_of(model), FEATURES[feature]
    plain = prices(graph, mesh["tp"])

    def op_s(op, strategy):
        return plain.op_s(op, strategy) + DEAR_S * (op.target == ATTENTION and strategy.result != ROWS)

    found = shard_graph(
        graph,
        degree=mesh["tp"],
        rules=load_rules(),
        prices=dataclasses.replace(plain, op_s=op_s),
        solve=partial(minimize, time_limit_s=None),
    )
    return dataclasses.replace(family_plan(model, feature), shardings=found[mesh["sharding"]])


def assert_exact(folder, features):
    """Trains each model under its feature; all take the same number of ranks. Returns the text of each program."""
    cases = {}
    for model, feature in features.items():
        plan = cases[model] = context_parallel_plan(model, feature)
        attentions = {op.name for op in graph_of(model).ops if op.target == ATTENTION}
        layouts = {name: layout for sharding in plan.shardings for name, layout in sharding.values}
        split = {name: parse_layout(layout) for name, layout in layouts.items() if name in attentions}
        assert split and set(split.values()) == {ROWS}
        assert "attention by rows of the query (context parallelism)" in splits(graph_of(model), plan)
    n_ranks = {plan.mesh.tp for plan in cases.values()}
    rows = write_programs(folder, {model: (model, plan) for model, plan in cases.items()})
    for differences in run_ranks(check_programs, *n_ranks, str(folder), rows, timeout_s=200.0):
        for model, steps in differences.items():
            assert max(max(step) for step in steps) <= tolerance(model), (model, steps)
    return {model: (folder / f"parallel_{model}.py").read_text() for model in cases}


def test_attention_split_by_context_equals_one_process_on_two_ranks(tmp_path):
    sequence = "TP 2, split sequence"
    texts = assert_exact(tmp_path, {"gpt": sequence, "llama": sequence, "diffusion_transformer": "TP 2"})
    assert "causal_attention_of_rows(" in texts["gpt"] and "causal_attention_of_rows(" in texts["llama"]
    assert "causal_attention_of_rows(" not in texts["diffusion_transformer"]  # it sees all keys: nothing to count


@pytest.mark.nightly
def test_attention_split_by_context_equals_one_process_on_four_ranks(tmp_path):
    assert_exact(tmp_path, {"gpt": "TP 4", "llama": "TP 4"})


def test_what_ranks_exchange_for_equal_shares_is_priced():
    graph, rules, hardware = graph_of("gpt"), load_rules(), load_hardware_profile("dgx_a100_x8")
    op = next(op for op in graph.ops if op.target == ATTENTION)
    operands = tuple(graph.specs()[name] for name in operand_names(op))
    price = partial(sharding_prices, graph, hardware=hardware, precision="bf16", rules=rules, degree=2, batch_size=3)
    with_it, without = (price(communication=share).op_s for share in (1.0, 0.0))
    (rows,) = [s for s in all_strategies(rules[ATTENTION], op, operands=operands, degree=2) if s.result == ROWS]
    # query and result, [3, 4 heads, 16 rows, 8] of 2 bytes each, forward and backward; each is packed by one kernel
    # before it, and put in order after it, which reads and writes a rank's half both times
    n_bytes = 3 * 4 * 16 * 8 * 2
    each_s = work_contexts(graph, hardware, "bf16", rules)(2).tp_collective_s("all_to_all", n_bytes)
    each_s += 2 * 2 * (n_bytes / 2) / (MOVED_FRACTION * hardware.device.copy_bytes_per_s)
    assert with_it(op, rows) - without(op, rows) == pytest.approx(4 * each_s + 2 * hardware.device.kernel_s)


@pytest.mark.nightly
def test_masked_attention_split_by_context_equals_one_process(tmp_path):
    # a constant mask of the sequence's size, and a bias that is learned
    assert_exact(tmp_path, {"mistral_hf": "TP 2", "t5_hf": "TP 2"})


def check_compiled_rows():
    """On one rank: compiled without a break, result and gradients against the whole attention."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.rand(1, 2, 8, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    q, k, v = (x.detach().requires_grad_() for x in whole)
    own = q.detach().chunk(n_ranks, dim=2)[rank].requires_grad_()
    rows = partial(causal_attention_of_rows, tp=dist.group.WORLD)
    found = torch.compile(rows, backend="aot_eager", fullgraph=True)(own, k, v)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    found.square().sum().backward()
    expected.square().sum().backward()
    dist.all_reduce(k.grad)
    dist.all_reduce(v.grad)
    pairs = ((found, expected), (own.grad, whole[0].grad))
    of_rank = [(a - b.chunk(n_ranks, dim=2)[rank]).abs().max() for a, b in pairs]
    return float(max(*of_rank, (k.grad - whole[1].grad).abs().max(), (v.grad - whole[2].grad).abs().max()))


@pytest.mark.nightly
def test_rows_of_a_rank_compile_without_a_break():
    assert max(run_ranks(check_compiled_rows, 2)) < 1e-12


def test_the_search_splits_by_context_where_heads_cannot_be():
    # 3 heads on 2 devices and one sequence: without it every rank computes all of the attention
    model = {"n_layers": 2, "n_heads": 3, "n_kv_heads": 3, "width": 384, "hidden": 1024, "context": 32768}
    problem = api.make_problem(
        EXAMPLES / "llama.py",
        hw="dgx_a100_x8/2",
        overrides={**model, "vocabulary": 8192},
        options=Options(global_batch=1),
    )
    found = api.decide(problem)
    assert found.best.plan.mesh.tp == 2
    assert "attention by rows of the query (context parallelism)" in found.splits
    one_device = api.decide(
        dataclasses.replace(problem, options=Options(global_batch=1, fix=(("tp", "1"), ("pp", "1"))))
    )
    assert 0.5 < found.best.estimate.step_s / one_device.best.estimate.step_s < 0.6  # half, and communication
