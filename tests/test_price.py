"""The pricer: what meshes share is computed once, and sharing never changes a price."""

import pytest
from distributed.programs import graph_of, shardings_of

from autoplan.cost.local_segment import local_op
from autoplan.cost.price import legal_cuts, make_pricer, work_contexts
from autoplan.cost.segment_work import timed
from autoplan.graph import GraphFacts
from autoplan.hardware import load_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh
from autoplan.search.meshes import SearchSpace, enumerate_meshes
from autoplan.sharding import legal_strategies
from autoplan.space import load_rules

RULES = load_rules()
PROFILE = load_profile("dgx_a100_x8", n_hosts=2)


def pricer_of(model, degrees=(2, 4), precision="bf16"):
    """A new pricer, and the meshes of two batches, which differ in how many micro-batches are accumulated."""
    shardings = {(tp, key): found for tp in degrees for key, found in shardings_of(model, tp).items()}
    graph = graph_of(model)
    price = make_pricer(graph, profile=PROFILE, precision=precision, shardings=shardings, rules=RULES)
    keys = {1: [""]}
    for tp, key in shardings:
        keys.setdefault(tp, []).append(key)
    spaces = [
        SearchSpace(
            n_devices=PROFILE.n_devices,
            n_devices_per_host=PROFILE.n_devices_per_host,
            global_batch=global_batch,
            kinds=tuple(segment.kind for segment in graph.segments),
            cuts=legal_cuts(graph),
            shardings=tuple((tp, tuple(names)) for tp, names in keys.items()),
        )
        for global_batch in (16, 48)
    ]
    return price, [mesh for space in spaces for mesh in enumerate_meshes(space, Options())]


@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("llama", "fp32"), ("crossing", "bf16")])
def test_a_price_does_not_depend_on_the_meshes_priced_before(model, precision):
    (price, meshes), (other, _) = (pricer_of(model, precision=precision) for _ in range(2))
    found = {mesh: price(mesh) for mesh in meshes}
    assert {mesh: other(mesh) for mesh in reversed(meshes)} == found


def test_meshes_with_equal_costs_hold_the_same_objects():
    price, meshes = pricer_of("llama")
    tables = [price(mesh) for mesh in meshes]
    assert len({id(table.costs) for table in tables}) == len({table.costs for table in tables}) < len(tables) / 2
    assert len({id(table.cut_s) for table in tables}) < len(tables) / 2


def test_a_tied_weight_is_paid_once_on_one_stage_and_twice_in_a_pipeline():
    # examples/gpt.py ties the embedding to the head: the first and the last kind read it
    price, _ = pricer_of("gpt")
    single, piped = (price(Mesh(pp=pp, n_micro_batches=4)).costs for pp in (1, 2))
    table = next(p for p in graph_of("gpt").parameters if len(p.aliases) > 1)
    # bf16: 4 master + 4 gradient + 8 Adam bytes per element
    assert piped[-1][0].state_bytes - single[-1][0].state_bytes == 16 * table.spec.n_elements(1)
    assert piped[0][0].state_bytes == single[0][0].state_bytes


def test_cuts_are_priced_at_what_a_rank_sends():
    price, _ = pricer_of("llama")
    whole, split = (price(Mesh(tp=2, pp=2, n_micro_batches=4, sharding=key)).cut_s for key in ("R", "S(1)"))
    one_stage = price(Mesh(tp=2, n_micro_batches=4, sharding="R")).cut_s
    assert all(a is None and b is None or a > b > 0 for a, b in zip(whole, split, strict=True))
    assert one_stage == tuple(0.0 if cut_s is not None else None for cut_s in whole)


@pytest.mark.parametrize("model", ["gpt", "llama", "crossing", "unet", "resnet"])
def test_an_op_that_is_split_takes_no_longer_than_the_whole_op(model):
    graph = graph_of(model)
    facts = GraphFacts.of(graph)
    context = work_contexts(graph, PROFILE, "bf16", RULES)(2)
    n_split = 0
    for segment in graph.first_of_kind().values():
        legal = legal_strategies(graph.ops_of(segment), facts.specs, facts.gradients, 2, RULES)
        for op, strategies in legal.items():
            times = [(strategy, timed(context, local_op(context, op, strategy), 4)) for strategy in strategies]
            whole_s = max(found.forward_s + found.backward_s for strategy, found in times if not strategy.is_split)
            n_split += len(times) - 1
            assert all(found.forward_s + found.backward_s <= whole_s * (1 + 1e-12) for _, found in times), op
    assert n_split > 100
