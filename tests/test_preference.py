"""Of plans that are as good as each other the simplest is chosen; and what one device alone would take."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import pytest
from brute_force import make_plan, random_toy, with_space

from autoplan.answers.answer import Answer, Request, answer_from_json, answer_to_json
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.report.explain import explain_report
from autoplan.report.plan import plan_report
from autoplan.search import GOOD_ENOUGH, search
from autoplan.search.preference import Scored, simplest
from autoplan.search.result import OneDevice
from autoplan.units import GiB

QUICK = Options(max_micro_batch_size=2, top=3)
WHOLE, AGAIN = (StagePlan(0, 4),), (StagePlan(0, 4, (1, 2)),)
HALVES = (StagePlan(0, 2), StagePlan(2, 4))
SIMPLEST_FIRST = [
    (Mesh(), WHOLE),  # no axis
    (Mesh(dp=2), WHOLE),  # one
    (Mesh(dp=8), WHOLE),  # more devices
    (Mesh(dp=2, compile=True), WHOLE),
    (Mesh(pp=2, n_micro_batches=2), HALVES),  # more stages
    (Mesh(dp=2), AGAIN),  # recomputation
    (Mesh(dp=2, zero_stage=1, zero_shard_degree=2), WHOLE),
    (Mesh(dp=2, zero_stage=3, zero_shard_degree=2), WHOLE),
    (Mesh(pp=2, n_micro_batches=2, schedule="gpipe"), HALVES),
    (Mesh(pp=2, n_micro_batches=2, schedule="zero_bubble_v", n_chunks=2), HALVES * 2),
    (Mesh(dp=2, tp=2, sharding="R"), WHOLE),  # two axes
]


def chosen(*scored: Scored, bound: float = 0.0, gap: float = 0.0) -> Scored:
    return scored[simplest(scored, bound=bound, gap=gap)]


@pytest.mark.parametrize("simple", range(len(SIMPLEST_FIRST) - 1))
def test_of_equal_plans_the_simpler_is_chosen_in_whatever_order_they_are_found(simple: int) -> None:
    plans = [Scored(1.0, *plan) for plan in SIMPLEST_FIRST[simple : simple + 3]]
    assert {chosen(*found) for found in permutations(plans)} == {plans[0]}


def test_a_group_alone_is_simpler_than_two() -> None:
    both, alone = Scored(1.0, Mesh(dp=4), WHOLE, 2), Scored(1.0, Mesh(dp=4), WHOLE, 1)
    assert chosen(both, alone) == alone


def test_a_simpler_plan_may_be_slower_by_the_gap_and_no_more() -> None:
    # Proved: nothing below 0.9995. What is at most 0.9995 / 0.999 = 1.0005005 is within 0.1 % of that.
    fast = Scored(1.0, Mesh(dp=2, tp=2, sharding="R"), WHOLE)
    near, far = Scored(1.0005, Mesh(dp=4), WHOLE), Scored(1.0006, Mesh(), WHOLE)
    assert chosen(fast, near, far, bound=0.9995, gap=0.001) == near
    assert chosen(fast, near, far, bound=0.9995, gap=0.0) == fast
    assert chosen(fast, far, bound=0.9995, gap=0.001) == fast
    assert chosen(fast, far, bound=0.5, gap=0.001) == far  # stopped before its proof: within 0.1 % of the best found
    assert chosen(fast, replace(far, score=1.0011), bound=0.5, gap=0.001) == fast


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_found_that_is_as_good_is_simpler(seed: int) -> None:
    toy = replace(random_toy(seed, n_segments=4, n_devices=4, tight=False), comm_factor=1e-9)
    result = search(toy.space, price=toy.price, options=QUICK, make_plan=make_plan)
    assert result.best is not None and result.bound_s is not None
    found = [Scored(item.estimate.step_s, item.plan.mesh, item.plan.stages) for item in result.alternatives]
    best = Scored(result.best.estimate.step_s, result.best.plan.mesh, result.best.plan.stages)
    ranking = sorted([best, *found], key=lambda item: item.score)
    assert chosen(*ranking, bound=result.bound_s, gap=GOOD_ENOUGH) == best
    assert result.bound_s <= min(item.score for item in ranking)
    assert result.gap is not None and (result.gap == 0.0) == (result.status == "optimal")


def test_zero_is_left_out_where_it_gains_less_than_the_gap_unless_a_proof_is_demanded() -> None:
    # Sending is free, and ZeRO halves an optimizer step that is about a ten-thousandth of the passes.
    toy = replace(random_toy(2, n_segments=4, n_devices=2, tight=False), comm_factor=0.0)
    costs = tuple(replace(cost, optimizer_s=1e-4 * (cost.forward_s + cost.backward_s)) for cost in toy.kind_costs)
    toy = replace(toy, kind_costs=costs)
    options = replace(QUICK, fix=(("dp", "2"), ("pp", "1"), ("tp", "1")))
    near, exact = (
        search(toy.space, price=toy.price, options=own, make_plan=make_plan)
        for own in (options, replace(options, require_optimal=True))
    )
    assert near.best is not None and exact.best is not None
    assert (near.best.plan.mesh.zero_stage, exact.best.plan.mesh.zero_stage) == (0, 1)
    assert exact.best.estimate.step_s < near.best.estimate.step_s < exact.best.estimate.step_s * (1.0 + GOOD_ENOUGH)
    assert (near.status, exact.status) == ("feasible", "optimal")
    faster = [item for item in near.rejected if "less simple" in item.detail]
    assert faster and all(item.mesh.zero_stage > 0 for item in faster)


# ------------------------------------------------------------------------------------------------------- one device


@pytest.mark.parametrize("seed", range(6))
def test_one_device_takes_what_the_best_plan_on_one_device_takes(seed: int) -> None:
    toy = random_toy(seed, n_segments=4, n_devices=4, tight=False)
    alone = search(toy.space, price=toy.price, options=QUICK, make_plan=make_plan).one_device
    fixed = replace(QUICK, require_optimal=True, fix=(("dp", "1"), ("pp", "1"), ("tp", "1")))
    best = search(toy.space, price=toy.price, options=fixed, make_plan=make_plan)
    assert alone is not None and best.best is not None
    assert alone.step_s == pytest.approx(best.best.estimate.step_s)
    assert alone.needed_bytes <= alone.memory_limit_bytes == toy.memory_limit_bytes
    assert best.one_device == alone  # whatever is fixed


def test_one_device_that_is_too_small_says_how_much_it_lacks_at_the_least() -> None:
    toy = replace(random_toy(2), memory_limit_bytes=2**20)
    alone = search(toy.space, price=toy.price, options=QUICK, make_plan=make_plan).one_device
    assert alone is not None and alone.step_s is None and alone.needed_bytes > alone.memory_limit_bytes == 2**20


def test_one_device_is_no_rival_of_a_cluster_of_one() -> None:
    toy = with_space(random_toy(2, tight=False, n_devices=1), n_devices=1, n_devices_per_host=1)
    assert search(toy.space, price=toy.price, options=QUICK, make_plan=make_plan).one_device is None


def test_reports_say_what_one_device_would_take(answer: Answer) -> None:
    # the chosen plan takes 1.6 s
    def with_one(alone: OneDevice) -> Answer:
        return replace(answer, result=replace(answer.result, one_device=alone))

    fits, small = (with_one(OneDevice(step_s, 12 * GiB, 10 * GiB)) for step_s in (5.6, None))
    assert "\n3.5 x as fast as one device (5.6 s)\n" in plan_report(fits)
    assert "\none device: does not fit: 12.0 GiB or more of 10.0 GiB\n" in plan_report(small)
    assert "\n  it is 3.5 x as fast as one device (5.6 s)\n" in explain_report(fits)
    assert answer_from_json(answer_to_json(small)) == small
    near = with_one(OneDevice(None, 9 * GiB, 10 * GiB))  # within the device, but without the margin
    near = replace(near, result=replace(near.result, memory_confidence=0.95))
    assert "\none device: does not fit with 95% confidence: 9.0 GiB or more of 10.0 GiB\n" in plan_report(near)
    assert "one device" not in plan_report(answer)
    fix = (("tp", "1"), ("compile", "off"), ("loss", "whole"))  # where a device is alone, tp is 1 in any case
    request = Request("toy.py", (), "toy_x4", 1, Options(fix=fix))
    said = "\n3.5 x as fast as one device, with compile=off, loss=whole (5.6 s)\n"
    assert said in plan_report(replace(fits, request=request))


def test_a_faster_plan_that_is_less_simple_is_shown_as_such(answer: Answer) -> None:
    # 1.599 s against 1.6 s
    (next_best,) = answer.result.alternatives
    faster = replace(next_best, estimate=replace(answer.best.estimate, step_s=1.599))
    text = plan_report(replace(answer, result=replace(answer.result, alternatives=(faster,))))
    assert "gpipe, -0.06%, but less simple\n" in text


def test_a_faster_recipe_that_breaks_what_is_fixed_is_shown_as_such(answer: Answer) -> None:
    # 0.8 s against 1.6 s
    ddp = replace(answer.result.alternatives[0], baseline="DDP", estimate=replace(answer.best.estimate, step_s=0.8))
    text = plan_report(replace(answer, result=replace(answer.result, baselines=(ddp,))))
    assert "\nbest plain recipe: DDP, -50.0%, but not what --fix asks for\n" in text


def test_where_cost_is_minimized_rivals_say_what_they_cost_before_their_step(answer: Answer) -> None:
    # twice the devices, 1.0 s against 1.6 s: 2 x 1.0 / 1.6 - 1 = 25 % dearer, and a step of 37.5 % less
    best = answer.best
    mesh = replace(best.plan.mesh, dp=2 * best.plan.mesh.dp)
    plan, estimate = replace(best.plan, mesh=mesh), replace(best.estimate, step_s=1.0)
    ddp = replace(best, baseline="DDP", plan=plan, estimate=estimate)
    cheap = replace(answer, workload=replace(answer.workload, objective="cost"))

    def text_of(step_s: float) -> str:
        recipe = replace(ddp, estimate=replace(estimate, step_s=step_s))
        return plan_report(replace(cheap, result=replace(answer.result, alternatives=(recipe,), baselines=(recipe,))))

    assert "\nbest plain recipe: DDP, cost +25.0%, step -37.5%\n" in text_of(1.0)
    assert re.search(r"\nnext best: .*, cost \+25\.0%, step -37\.5%\n", text_of(1.0))
    # 2 x 0.4 / 1.6 - 1 = -50 %
    assert "\nbest plain recipe: DDP, cost -50.0%, step -75.0%, but not what --fix asks for\n" in text_of(0.4)


def test_a_simpler_mesh_that_the_proof_did_not_ask_for_is_tried_too() -> None:
    # a step takes as long as its batch is copied, 20 s / dp, under ZeRO 0 too
    toy = replace(random_toy(12), overlap_of_shards=None)
    found = search(toy.space, price=toy.price, options=Options(global_batch=4), make_plan=make_plan)
    assert found.best is not None and (found.best.plan.mesh.zero_stage, found.best.estimate.step_s) == (0, 10.0)
    assert (1, 10.0) in [(item.plan.mesh.zero_stage, item.estimate.step_s) for item in found.alternatives]
