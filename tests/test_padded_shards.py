"""Padded shards: a dim that does not divide is split all the same, and its padding never reaches a number."""

import pytest
from distributed.programs import graph_of, shardings_of
from rule_calls import CALLS
from test_rules import RULES, check_strategy, traced, whole_values

from autoplan.graph import GraphFacts, PerSample, TensorSpec
from autoplan.layout import P, R, V, can_shard, conversion, local_spec, padded, parse_layout, sharded
from autoplan.rules import all_strategies, operand_names
from autoplan.tensor_parallel.sharding import read_sharding

N_PARTS = 8  # of all calls, tested together
FILLER = 3.0  # what the padding of a value holds here: any finite number must do


def padded_strategies(op, specs, degree):
    """The strategies of an op that pad something, when every extent may be padded."""
    operands = tuple(specs[name] for name in operand_names(op))
    extents = frozenset(x for spec in (*operands, *op.outputs) for x in spec.shape)
    found = all_strategies(RULES.get(op.target), op, operands=operands, degree=degree, padded_extents=extents)
    return [s for s in found if any(layout.is_padded for layout in (*s.operands, s.result))]


def paddable_ops(name, degree):
    """(op, strategy) of every padded strategy of a call."""
    graph = traced(name)
    for op in graph.ops:
        if op.target != "getitem":
            for strategy in padded_strategies(op, graph.specs(), degree):
                yield op, strategy


@pytest.mark.parametrize("degree", [3, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("part", range(N_PARTS))
@pytest.mark.filterwarnings("ignore")
def test_whatever_the_padding_holds_a_padded_strategy_equals_the_whole_op(part, degree, monkeypatch):
    n_checked = 0
    for name in list(CALLS)[part::N_PARTS]:
        graph, found = traced(name), list(paddable_ops(name, degree))
        facts, values = GraphFacts.of(graph), whole_values(graph) if found else {}
        for op, strategy in found:
            try:
                check_strategy(op, strategy, values, facts, degree, monkeypatch, filler=FILLER)
            except Exception as error:
                layouts = ", ".join(map(str, strategy.operands))
                error.add_note(f"{name}: {op.target} {op.args}: {layouts} -> {strategy.result} on {degree}")
                raise
            n_checked += 1
    assert n_checked > 20


def calls_of(target):
    """(op, specs of its graph) of every call of one operator."""
    graphs = [traced(name) for name in CALLS]
    return [(op, graph.specs()) for graph in graphs for op in graph.ops if op.target == target]


def test_what_leads_from_a_vocabulary_to_its_loss_may_be_padded():
    for name in ("embedding", "linear", "add.Tensor", "mul.Tensor", "tanh", "view", "transpose.int", "slice.Tensor"):
        target = f"aten.{name}" if "." in name else f"aten.{name}.default"
        found = [s for op, specs in calls_of(target) for s in padded_strategies(op, specs, 5)]
        assert found, target


def test_a_contracted_dim_is_never_padded():
    calls = calls_of("aten.linear.default")
    for op, specs in calls:
        for strategy in padded_strategies(op, specs, 5):
            assert strategy.result in (padded(1), padded(2))  # rows of x, or rows of the weight
            assert strategy.operands[0] != padded(2)  # its columns are summed over
    assert calls


def test_what_may_divide_by_zero_is_never_padded():
    for target in ("log", "rsqrt", "sqrt", "reciprocal"):
        calls = calls_of(f"aten.{target}.default")
        assert calls and not any(padded_strategies(op, specs, 5) for op, specs in calls)
    for op, specs in calls_of("aten.div.Tensor"):
        for strategy in padded_strategies(op, specs, 5):
            assert not any(layout.is_padded for layout in strategy.operands[1:])  # the divisor


def test_each_rank_holds_the_extent_over_the_ranks_rounded_up():
    spec = TensorSpec((PerSample(1), 50257), "compute")
    # 50257 / 4 = 12564.25
    assert can_shard(spec, padded(1), 4) and not can_shard(spec, sharded(1), 4)
    assert local_spec(spec, padded(1), 4).shape == (PerSample(1), 12565)
    assert not can_shard(spec, padded(0), 4)  # the batch belongs to data parallelism
    assert not can_shard(TensorSpec((3,), "compute"), padded(0), 4)  # a rank would hold at most one


def test_padded_layouts_convert_as_the_others_do_but_not_by_all_to_all():
    assert parse_layout("S(1+)") == padded(1) and str(padded(1)) == "S(1+)"
    for other in (R, V, P):
        for source, target in ((padded(1), other), (other, padded(1))):
            found = conversion(source, target, has_gradient=True)
            expected = conversion(*(sharded(1) if x == padded(1) else x for x in (source, target)), has_gradient=True)
            assert found == expected is not None
    assert conversion(padded(1), sharded(0), has_gradient=True) is None
    assert conversion(sharded(0), padded(1), has_gradient=True) is None


@pytest.mark.parametrize("degree", [2, 4])
def test_a_vocabulary_that_does_not_divide_is_split_over_weight_logits_and_loss(degree):
    graph, facts = graph_of("llama_odd"), GraphFacts.of(graph_of("llama_odd"))
    assignments = {a.kind: a for a in shardings_of("llama_odd", degree)["R"]}
    last = graph.segments[-1]
    layouts = read_sharding(graph, last, assignments[last.kind], degree=degree, rules=RULES, facts=facts)
    assert layouts.produced["head.weight"] == padded(0)
    assert layouts.strategies["cross_entropy_loss"].operands[0] == padded(1)
    # 65 rows of 30 on 2 ranks are 33 each, on 4 ranks 17 each
    local = local_spec(facts.specs["head.weight"], layouts.produced["head.weight"], degree)
    assert local.n_elements(1) == {2: 33, 4: 17}[degree] * 30


def test_only_the_extents_of_a_vocabulary_are_padded():
    # llama_odd: heads, width and sequence do not divide by 4 either, and stay whole
    for assignment in shardings_of("llama_odd", 4)["R"]:
        layouts = [parse_layout(text) for _, text in assignment.values]
        specs = graph_of("llama_odd").specs()
        for (name, _), layout in zip(assignment.values, layouts, strict=True):
            if layout.is_padded:
                assert specs[name].shape[layout.dim] == 65


def test_a_sequence_that_does_not_divide_leaves_the_boundary_whole():
    assert list(shardings_of("llama_odd", 4)) == ["R"]  # 15 tokens on 4 ranks
    assert list(shardings_of("llama_odd", 3)) == ["R", "S(1)"]
