"""The tensor-parallel program: it finds the known recipes by itself, and obeys the rules of layouts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from distributed.programs import graph_of, prices, shardings_of

from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.layout import P, R, V, can_shard, conversion, parse_layout, sharded
from autoplan.options import Options
from autoplan.planning.deciding import solve as solve_problem
from autoplan.planning.problem import make_problem
from autoplan.report.plan import status_text
from autoplan.rules import all_strategies, load_rules, operand_names, parse_equation
from autoplan.solver.solve import minimize
from autoplan.space.layouts import all_shardings, shardings_by_size
from autoplan.tensor_parallel.op_strategies import block_counts, op_calls
from autoplan.tensor_parallel.sharding import read_sharding, shard_graph

RULES = load_rules()
LOOP = """
import torch
from torch import nn

class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = x[:, 0]
        for token in range(1, 200):
            hidden = torch.tanh(self.state(hidden) + x[:, token])
        return self.out(hidden)

build_model = Loop
loss_fn = nn.functional.mse_loss

def make_batch(batch_size):
    return torch.randn(batch_size, 200, 16), torch.randn(batch_size, 16)
"""


def layouts_of(model, degree, boundary):
    graph = graph_of(model)
    assignments = {a.kind: a for a in shardings_of(model, degree)[boundary]}
    return {
        kind: read_sharding(graph, segment, assignments[kind], degree=degree, rules=RULES, facts=GraphFacts.of(graph))
        for kind, segment in graph.first_of_kind().items()
    }


def test_gpt_block_is_column_then_row_parallel_with_the_fused_qkv_in_three_blocks():
    produced = layouts_of("gpt", 2, "R")[1].produced
    assert produced["blocks.0.attention.qkv.weight"] == sharded(0, 3)
    assert produced["blocks.0.attention.out.weight"] == sharded(1)
    assert produced["blocks.0.up.weight"] == sharded(0)
    assert produced["blocks.0.down.weight"] == sharded(1)
    assert produced["scaled_dot_product_attention"] == sharded(1)  # heads


def test_the_assignment_is_the_same_in_every_process():
    # Python orders sets of names by a number that it draws for each process; equal prices must not be decided by it
    code = "from distributed.programs import shardings_of; print(shardings_of('mlp', 2, seed=0))"
    found = {
        subprocess.check_output(
            [sys.executable, "-c", code],
            text=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in "123"
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("fix", "is_said"),
    [
        ({"tp": "2", "micro_batch": "64"}, False),  # solved for these
        ({"tp": "2", "dp": "1", "pp": "1"}, True),  # micro-batches of 64 have the layouts of 8
        ({"tp": "1"}, False),
    ],
)
def test_layouts_that_were_solved_for_much_smaller_micro_batches_are_said_and_bound_what_is_proved(fix, is_said):
    options = Options(global_batch=64, fix=tuple(fix.items()))
    answer = solve_problem(
        make_problem(Path(__file__).parent.parent / "examples" / "mlp.py", hw="dgx_a100_x8/2", options=options)
    )
    assert answer.best.plan.mesh.micro_batch_size == 64 // answer.best.plan.mesh.dp
    assert (
        any(
            "was solved for micro-batches of 8, and the plan has 64: --fix micro_batch=64" in text
            for text in answer.workload.limits
        )
        is is_said
    )
    assert ("of the space with tp=2" in " ".join(status_text(answer).split())) is is_said


def test_a_block_that_loops_over_many_tokens_is_split_only_where_tp_is_fixed(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    solved = []

    def solve(model):
        solved.append(model)
        raise KeyboardInterrupt  # the program is asked for, which is all that is to be seen

    def problem(**options):
        return make_problem(tmp_path / "loop.py", hw="dgx_a100_x8", options=Options(global_batch=8, **options))

    asked = problem()
    assert shardings_by_size(asked.graph, asked.hardware, asked.options, RULES) == {1: {}}
    limits = solve_problem(asked).workload.limits
    assert any(text.startswith("How to split tensors was not looked for, as a block has") for text in limits)
    with (
        mock.patch("autoplan.space.layouts.minimize", lambda model, **_: solve(model)),
        pytest.raises(KeyboardInterrupt),
    ):
        shardings_by_size(asked.graph, asked.hardware, problem(fix=(("tp", "2"),)).options, RULES)
    assert solved


def test_llama_with_grouped_queries_splits_query_and_key_heads_alike():
    produced = layouts_of("llama", 4, "R")[1].produced
    for name in ("q", "k", "v", "gate", "up"):
        expected = "attention." + name if name in "qkv" else name
        assert produced[f"layers.0.{expected}.weight"] == sharded(0)


def test_sequence_parallelism_follows_from_a_boundary_split_along_the_sequence():
    layouts = layouts_of("llama", 2, "S(1)")[1]
    assert layouts.strategies["rms_norm"].result == sharded(1)
    assert layouts.strategies["rms_norm"].operands[1] == V  # its weight sees a share of the rows


def test_vectors_of_which_ranks_see_shares_are_stored_so_and_matrices_are_not():
    # so their gradients are summed once per step; a matrix that is read so would be held whole by every rank
    specs, layouts = graph_of("gpt").specs(), layouts_of("gpt", 2, "S(1)")
    norms = [f"blocks.0.norm_{i}.{name}" for i in (1, 2) for name in ("weight", "bias")]
    assert [layouts[1].produced[name] for name in norms] == [V] * 4
    for found in layouts.values():
        stored = [
            name for name in found.produced if name in {parameter.name for parameter in graph_of("gpt").parameters}
        ]
        assert all(len(specs[name].shape) == 1 for name in stored if found.produced[name] == V)


def test_loss_is_split_over_the_vocabulary_and_the_tied_weight_has_one_layout():
    layouts = layouts_of("gpt", 2, "R")
    assert layouts[2].strategies["cross_entropy_loss"].function == "vocab_parallel_cross_entropy"
    assert layouts[0].produced["tokens.weight"] == layouts[2].produced["tokens.weight"]
    assert layouts[0].produced["tokens.weight"].kind == "S"


def test_attention_with_fewer_key_heads_than_ranks_is_split_over_the_query_heads():
    # llama has 8 heads and 4 key heads: each of 8 ranks reads half of what one key head is for
    attention = layouts_of("llama", 8, "R")[1].strategies["scaled_dot_product_attention"]
    assert attention.function == "grouped_attention_of_rank"
    assert attention.operands == (sharded(1), V, V) and attention.result == sharded(1)


@pytest.mark.parametrize("model", ["gpt", "llama", "mlp"])
@pytest.mark.parametrize("degree", [2, 4])
def test_every_use_has_a_conversion_and_every_split_dim_divides(model, degree):
    graph = graph_of(model)
    gradients, specs = GraphFacts.of(graph).gradients, graph.specs()
    for boundary in shardings_of(model, degree):
        for kind, layouts in layouts_of(model, degree, boundary).items():
            for op in graph.ops_of(graph.first_of_kind()[kind]):
                for name, layout in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True):
                    assert can_shard(specs[name], layout, degree)
                    source = layouts.produced[name]
                    assert conversion(source, layout, has_gradient=name in gradients) is not None


def test_an_op_without_a_rule_is_replicated():
    graph = graph_of("gpt")
    op = graph.ops[5]
    found = all_strategies(None, op, operands=tuple(graph.specs()[n] for n in operand_names(op)), degree=2)
    assert [s.result for s in found] == [R, V]


def test_linear_may_be_split_by_rows_by_columns_and_by_the_reduced_dim():
    graph = graph_of("gpt")
    op = next(op for op in graph.ops if op.target == "aten.linear.default" and len(op.args) == 3)
    operands = tuple(graph.specs()[name] for name in operand_names(op))
    found = {(s.operands, s.result) for s in all_strategies(RULES[op.target], op, operands=operands, degree=2)}
    assert ((V, sharded(0), sharded(0)), sharded(2)) in found
    assert ((sharded(2), sharded(1), P), P) in found
    assert ((sharded(1), V, V), sharded(1)) in found


def test_equations_read_marks_of_contracted_whole_and_added_operands():
    (x, w, b), result = parse_equation("a k+, n k+, ~n -> a n")
    assert x.letters == ("a", "k") and x.contracted == {"k"} and not x.is_added
    assert b.is_added and b.letters == ("n",)
    assert parse_equation("a c^ -> a c^")[0][0].whole == {"c"}
    assert result.letters == ("a", "n") and w.letters == ("n", "k")


def test_only_ops_around_the_fused_projection_may_split_in_blocks():
    graph = graph_of("gpt")
    segment = graph.first_of_kind()[1]
    counts = block_counts(op_calls(graph.ops_of(segment), graph.specs(), 2, RULES))
    assert 3 in counts["linear"]  # qkv
    assert counts["linear_2"] == (1,)  # up


def test_layouts_read_back_as_they_print():
    for layout in (R, V, P, sharded(2), sharded(0, 3)):
        assert parse_layout(str(layout)) == layout


def test_equal_prices_give_equal_assignments():
    graph = graph_of("gpt")
    again = shardings_of.__wrapped__("gpt", 2)
    assert again == shardings_of("gpt", 2)
    assert prices(graph, 2).parameter_s(graph.specs()["tokens.weight"], R) == 2e-6


def test_a_degree_that_is_asked_for_is_split_where_that_does_not_pay():
    hardware = load_hardware_profile("dgx_a100_x8")  # a second to begin a collective: no product takes as long
    slow = replace(hardware, links=tuple(replace(tier, latency_s=1.0) for tier in hardware.links))
    found = [
        all_shardings(graph_of("llama_odd"), slow, Options(fix=fix), RULES, batch_size=1)
        for fix in ((), (("tp", "2"),))
    ]
    assert found[0] == {} and {degree for degree, _ in found[1]} == {2}
    split = [layout for kinds in found[1].values() for kind in kinds for _, layout in kind.values if layout[0] == "S"]
    assert split


def test_kinds_that_read_the_same_weights_are_solved_as_one_program():
    graph, solved = graph_of("two_ways"), []

    def solve(model):
        solved.append(model)
        return minimize(model, time_limit_s=None)

    found = shard_graph(graph, degree=2, rules=RULES, prices=prices(graph, 2, seed=3), solve=solve)
    assert len(solved) <= 2 * len(found) * len(graph.first_of_kind())  # a relaxation, and the program where it must be
    for assignments in found.values():
        layouts = {}
        for assignment in assignments:
            produced, first = dict(assignment.values), graph.first_of_kind()[assignment.kind]
            for segment in (own for own in graph.segments if own.kind == assignment.kind):
                for name, of_first in zip(segment.parameters, first.parameters, strict=True):
                    assert layouts.setdefault(name, produced[of_first]) == produced[of_first]
