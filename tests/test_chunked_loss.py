"""The chunked loss as a choice of the plan: found where it can be, priced, searched, generated, and exact."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from brute_force import Toy, best_by_trying, random_toy, with_space
from brute_force import make_plan as make_toy_plan
from distributed.chunked import check_chunked_programs
from distributed.launch import run_ranks
from distributed.programs import EXAMPLES, MODELS, graph_of, make_plan, write_programs

from autoplan import codegen
from autoplan.analysis.chunked_loss import ChunkedHead, can_chunk, chunked_head, why_whole
from autoplan.checks.plan import check_plan
from autoplan.codegen import config_values
from autoplan.cost.price import make_pricer
from autoplan.errors import InputError, UsageError
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import WHOLE, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.options import Options
from autoplan.parallel_plan import Execution, Mesh, StagePlan
from autoplan.rules import load_rules
from autoplan.runtime.stages.chunked_loss import defer_products
from autoplan.search import search
from autoplan.simulator.simulate import simulate
from autoplan.space.priced import price_plan, priced_space
from autoplan.tracing.model_source import load_model_file, model_source
from autoplan.tracing.trace import trace_model

LLAMA = EXAMPLES / "llama.py"
PROFILE = load_hardware_profile("dgx_a100_x8", n_hosts=1)
TOLERANCE = 1e-9
N_STEPS = 2
ZERO3 = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
ZERO_BUBBLE_V = {"schedule": "zero_bubble_v", "n_chunks": 2, "n_micro_batches": 4}


def chunked(model, **fields):
    plan = make_plan(model, **fields)
    assert can_chunk(graph_of(model), plan.mesh, plan.shardings, rules=load_rules())
    return model, dataclasses.replace(plan, loss="chunked")


def test_logits_that_are_converted_before_the_loss_stay_whole():
    plan = make_plan("gpt", tp=2, sharding="S(1)", micro_batch_size=3, seed=10)
    strategies = {op.name: op for op in graph_of("gpt").ops}
    assert "('linear_16', 'S(1)')" in str(plan.shardings[-1].values) and strategies["linear_16"].module_path == "head"
    assert not can_chunk(graph_of("gpt"), plan.mesh, plan.shardings, rules=load_rules())


def assert_equal_to_one_process(tmp_path, monkeypatch, cases, *, n_ranks, check=check_chunked_programs):
    """With slices of 5 rows, which divide nothing, and with logits that are never whole."""
    monkeypatch.setattr(ChunkedHead, "slice_rows", lambda head, *, is_compiled: 5)
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check, n_ranks, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert set(differences) == set(cases)
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


MORE_ON_TWO_RANKS = ("tied_pp2", "pp2_gpipe", "tp2")


@pytest.mark.parametrize("which", ["by default", pytest.param("others", marks=pytest.mark.nightly)])
def test_chunked_losses_on_two_ranks_equal_one_process(tmp_path, monkeypatch, which):
    cases = {
        "ddp": chunked("gpt", dp=2, micro_batch_size=2, n_micro_batches=2),
        "zero3": chunked("llama", micro_batch_size=2, recompute="full", **ZERO3),
        "tied_bias": chunked("bert", n_micro_batches=2, **ZERO3),
        "tied_pp2": chunked("gpt", pp=2, micro_batch_size=2, n_micro_batches=4),
        "pp2_gpipe": chunked("llama", pp=2, n_micro_batches=2, schedule="gpipe"),
        "pp2_interleaved": chunked("gpt", pp=2, n_micro_batches=4, schedule="interleaved", n_chunks=2),
        "zero_bubble": chunked("llama", pp=2, **ZERO_BUBBLE_V),
        "tp2": chunked("llama", tp=2, sharding="R", n_micro_batches=2),
        "tp2_sequence": chunked("llama", tp=2, sharding="S(1)", micro_batch_size=3),
        "tp2_odd": chunked("llama_odd", tp=2, sharding="R", micro_batch_size=2),
    }
    cases = {name: case for name, case in cases.items() if (name in MORE_ON_TWO_RANKS) == (which == "others")}
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=2)


@pytest.mark.nightly
def test_chunked_losses_on_four_ranks_equal_one_process(tmp_path, monkeypatch):
    cases = {
        "tp2_zero3": chunked("gpt", tp=2, sharding="R", n_micro_batches=2, **ZERO3),
        "tp2_pp2": chunked("llama", tp=2, pp=2, sharding="R", n_micro_batches=3),
        "dp2_zero_bubble": chunked("gpt", pp=2, dp=2, zero_stage=1, zero_shard_degree=2, **ZERO_BUBBLE_V),
    }
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=4)


@pytest.mark.nightly
def test_chunked_and_compiled_losses_that_are_split_equal_one_process(tmp_path, monkeypatch):
    cases = {"tp2_odd": chunked("llama_odd", tp=2, sharding="R", compile=True)}
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=2)


@pytest.mark.nightly
def test_chunked_and_compiled_losses_on_four_ranks_equal_one_process(tmp_path, monkeypatch):
    cases = {
        "tp4": chunked("llama", tp=4, sharding="R", n_micro_batches=2, compile=True),
        "tp4_sequence": chunked("llama", tp=4, sharding="S(1)", micro_batch_size=2, compile=True),
        "tp2_zero3": chunked("gpt", tp=2, sharding="R", n_micro_batches=2, compile=True, **ZERO3),
    }
    assert_equal_to_one_process(tmp_path, monkeypatch, cases, n_ranks=4)


def test_the_generated_product_is_deferred():
    _, plan = chunked("llama", tp=2, sharding="R")
    text = codegen.parallel_model_text(graph_of("llama"), plan, rules=load_rules())
    assert "deferred_linear(" in text and "slice_rows=4096)" in text
    assert "from runtime.stages.chunked_loss import deferred_linear" in text


def test_the_head_is_found_with_all_up_to_the_loss():
    head = chunked_head(graph_of("gpt"))
    assert [op.target for op in head.ops] == [
        "aten.linear.default",
        "aten.flatten.using_ints",
        "aten.cross_entropy_loss.default",
    ]
    assert head.ops[0].module_path == "head"


@pytest.mark.parametrize("model", ["mlp", "unet", "data_dependent"])
def test_a_loss_of_something_else_stays_whole_and_says_why(model):
    assert chunked_head(graph_of(model)) is None
    assert why_whole(graph_of(model))


# ------------------------------------------------------------------------------------------------ what it costs


LARGE = {
    "n_layers": 2, "width": 256, "n_heads": 4, "n_kv_heads": 2, "hidden": 512, "vocabulary": 128_000, "context": 4096,
}  # fmt: skip


DROPPING = {"n_layers": 4, "width": 128, "n_heads": 4, "vocabulary": 64_000, "context": 1024, "dropout": 0.1}


@pytest.fixture(scope="module")
def large():
    return trace_model(model_source(LLAMA, LARGE))


def head_costs(graph, *, precision="bf16", size=1, compiles=False, **options):
    price = make_pricer(graph, hardware=PROFILE, precision=precision, shardings={}, rules=load_rules(), **options)
    return price(Mesh(micro_batch_size=size, compile=compiles)).costs[graph.segments[-1].kind]


def measured_head_costs(graph, whole):
    """Where the whole loss was measured compiled."""
    n_bytes = (whole.saved_bytes, whole.working_bytes)
    content = content_key(graph, GraphFacts.of(graph), graph.segments[-1])
    row = SegmentTime(content, WHOLE, 1, "", 1, 3e-3, 9e-3, 5e-3, 4e-3, *n_bytes, execution=Execution(compile=True))
    return head_costs(graph, compiles=True, measured=MeasuredProfile((row,), None, "toy"))


def test_saved_bytes_are_those_of_the_tensors_that_autograd_keeps():
    """The norm and the head of the small GPT in float32, whole and chunked."""
    for loss in ("whole", "chunked"):
        tensors = kept_by_the_head(chunks=loss == "chunked")
        cost, _ = head_costs(graph_of("gpt"), precision="fp32", size=3, loss=loss)
        assert cost.saved_bytes == sum(tensors.values()), loss


def kept_by_the_head(*, chunks):
    """Bytes of each memory that is kept, but for parameters, targets and single numbers, with 3 samples."""
    overrides = MODELS["gpt"][1]
    model = load_model_file(EXAMPLES / "gpt.py").build_model(**overrides)
    if chunks:
        defer_products(model.head, slice_rows=5, is_compiled=False)
    x = torch.randn(3, overrides["context"], overrides["width"], requires_grad=True)
    targets = torch.zeros(3 * overrides["context"], dtype=torch.int64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(weakref.ref(t)) or t, lambda t: t):
        loss = torch.nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets)
    assert loss.requires_grad
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), targets)}
    alive = [found.untyped_storage() for found in (reference() for reference in saved) if found is not None]
    return {one.data_ptr(): one.nbytes() for one in alive if one.data_ptr() not in left_out and one.nbytes() > 8}


def test_a_chunked_loss_keeps_gradients_in_place_of_logits_and_takes_a_little_longer(large):
    (whole, chunked), rows, width, classes = head_costs(large), 4096, 256, 128_000
    # whole: the norm's input and a number per row; the head's input; log-softmax in float32
    # chunked: the norm's, and the gradients of the head's input and weight in bfloat16
    assert whole.saved_bytes - chunked.saved_bytes == 4 * rows * classes - 2 * width * classes
    # a slice of 2048 of 4096 rows: logits in bfloat16, log-softmax and two gradients in float32
    assert chunked.working_bytes == 2048 * classes * (2 + 3 * 4) < whole.working_bytes
    assert chunked.forward_s == whole.forward_s
    assert whole.backward_s < chunked.backward_s < 1.1 * whole.backward_s
    # compiled: twice the rows, with the logits and their gradient in bfloat16
    assert head_costs(large, compiles=True)[1].working_bytes == 4096 * classes * (2 + 2)
    assert measured_head_costs(large, whole)[1].working_bytes == 4096 * classes * (2 + 2)
    assert head_costs(large, loss="chunked") == (chunked, chunked)
    assert head_costs(large, loss="whole") == (whole, whole)


def test_a_small_head_has_no_second_choice(large):
    """The gradient of its weight would be larger than the logits of a few rows."""
    whole, other = head_costs(graph_of("llama"))
    assert whole == other


def test_the_search_chunks_the_loss_where_it_does_not_fit_whole(large):
    def best(**fix):
        options = Options(
            global_batch=128,
            fix=tuple({"dp": "8", "tp": "1", "pp": "1", "micro_batch": "16", "compile": "off", **fix}.items()),
        )
        offered = priced_space(large, PROFILE, options, global_batch=128)
        return search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)

    assert best(loss="whole").status == "infeasible"
    found = best().best
    assert found.plan.loss == "chunked" and found.plan.recompute == "none"
    assert found.estimate.fits
    assert config_values(large, found.plan)["chunked_head"] == "head"
    again = price_plan(large, PROFILE, found.plan)
    assert simulate(again, found.plan.stages).step_s == pytest.approx(found.estimate.step_s, rel=1e-12)
    check_plan(found.plan, large, PROFILE)


@pytest.mark.parametrize(
    "fix",
    [{"dp": "8", "cuda_graph": "on"}, {"dp": "4", "pp": "2", "schedule": "zero_bubble_v", "cuda_graph": "off"}],
    ids=["dropout in a CUDA graph", "split backward pass"],
)
def test_a_loss_is_chunked_also_where_no_block_may_be_recomputed(fix):
    graph = trace_model(model_source(EXAMPLES / "gpt.py", DROPPING))
    fix = fix | {"micro_batch": "16", "tp": "1", "compile": "off"}
    hardware = dataclasses.replace(PROFILE, device=dataclasses.replace(PROFILE.device, memory_bytes=9 * 10**9))

    def best(**more):
        options = Options(global_batch=512, fix=tuple((fix | more).items()))
        offered = priced_space(graph, hardware, options, global_batch=512)
        return search(offered.space, price=offered.price, options=options, make_plan=offered.make_plan)

    whole, found = best(loss="whole"), best()
    assert whole.status == "infeasible"
    assert found.best.plan.loss == "chunked" and found.best.plan.recompute == "none"
    assert found.best.estimate.fits
    check_plan(found.best.plan, graph, hardware)


def test_a_plan_that_cannot_be_chunked_is_refused():
    graph, (_, plan) = graph_of("mlp"), chunked("llama", dp=2)
    wrong = dataclasses.replace(plan, mesh=Mesh(), stages=(StagePlan(0, len(graph.segments)),))
    with pytest.raises(InputError, match="plan: loss: found 'chunked'"):
        check_plan(wrong, graph, PROFILE)
    with pytest.raises(UsageError, match="--fix loss=chunked"):
        priced_space(graph, PROFILE, Options(fix=(("loss", "chunked"),)), global_batch=8)


class ChunkedToy(Toy):
    """A toy whose kinds keep and need less in their second choice, for a longer backward pass, as a head does."""

    def _cost(self, cost, mesh, again):
        found = Toy._cost(self, cost, mesh, False)
        if not again:
            return found
        return dataclasses.replace(
            found,
            backward_s=found.backward_s + 0.1 * cost.forward_s,
            saved_bytes=found.saved_bytes // 4,
            working_bytes=found.working_bytes // 3,
        )


class SplitToy(ChunkedToy):
    """Likewise, with the gradients of its last kind's weights computed with the loss, where the backward pass is split.

    There no other kind has the choice.
    """

    def _cost(self, cost, mesh, again):
        found = ChunkedToy._cost(self, cost, mesh, again)
        if not again:
            return found
        less = {"weight_backward_s": found.weight_backward_s / 3, "pending_bytes": found.pending_bytes // 3}
        return dataclasses.replace(found, **less)


def test_the_search_equals_brute_force_where_only_a_loss_may_be_chunked():
    fix = (("schedule", "zero_bubble_v"), ("pp", "2"))
    options = Options(max_micro_batch_size=2, top=1, require_optimal=True, fix=fix)
    n_chunked = 0
    for seed in (5008, 5009, 5028, 5032, 5036, 5044):
        plain = random_toy(seed, n_segments=5 + seed % 2, n_devices=2 if seed % 2 else 4, tight=True)
        plain = with_space(dataclasses.replace(plain, chunks_loss=True), cuts=(True,) * (4 + seed % 2))
        toy = SplitToy(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
        want = best_by_trying(toy, options)
        result = search(toy.space, price=toy.price, options=options, make_plan=make_toy_plan)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or result.best.estimate.step_s == pytest.approx(want, rel=1e-6), seed
        n_chunked += want is not None and any(stage.recomputed for stage in result.best.plan.stages)
    assert n_chunked > 1


def test_the_search_equals_brute_force_where_a_choice_needs_less_of_all_memory():
    options = Options(max_micro_batch_size=2, top=1, require_optimal=True)
    for seed in range(5000, 5012):
        plain = random_toy(seed, n_segments=4, n_devices=4 if seed % 4 == 0 else 2, tight=True)
        toy = ChunkedToy(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
        want = best_by_trying(toy, options)
        result = search(toy.space, price=toy.price, options=options, make_plan=make_toy_plan)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or result.best.estimate.step_s == pytest.approx(want, rel=1e-6), seed
