"""What would make something fit: each change verified by a search, the smallest first, in bounded time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import Toy, make_plan, random_toy, with_space
from conftest import make_candidate
from test_search import loose_toy

from autoplan import api
from autoplan.errors import InfeasibleError
from autoplan.options import Options
from autoplan.planning.problem import Problem
from autoplan.report.plan import plan_report
from autoplan.search import search
from autoplan.search.remedies import TIME_LIMIT_S, Retry, find_remedies
from autoplan.search.result import SearchResult

NOTHING = SearchResult("infeasible", None, (), (), (), None, 1, 0.0)
SOMETHING = replace(NOTHING, status="optimal", best=make_candidate())
ZERO = (("dp", "4"), ("zero", "0"))
MLP = Path(__file__).parent.parent / "examples" / "mlp.py"
LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"
LONG = {"size": "1b", "context": 32768}  # whose logits, whole, do not fit on a device of 40 GB


def searching(toy: Toy) -> Retry:
    """Searches of a toy that has two devices in a host."""

    def retry(options: Options, n_hosts: int) -> SearchResult:
        larger = with_space(toy, n_devices=2 * n_hosts)
        try:
            return search(larger.space, price=larger.price, options=options, make_plan=make_plan)
        except InfeasibleError:  # not one mesh divides devices and batch
            return NOTHING

    return retry


def heavy_toy() -> Toy:
    """The state of the whole model fills a device, so it fits only when data-parallel ranks or stages share it."""
    toy = loose_toy()
    toy = replace(toy, kind_costs=tuple(replace(cost, state_bytes=20 * cost.state_bytes) for cost in toy.kind_costs))
    return replace(toy, memory_limit_bytes=sum(toy.kind_costs[kind].state_bytes for kind in toy.space.kinds))


def test_each_thing_that_was_fixed_is_given_up_alone_and_the_rest_stays() -> None:
    options = Options(max_micro_batch_size=2, fix=ZERO)
    assert searching(heavy_toy())(options, 2).status == "infeasible"
    found = list(find_remedies(options, n_hosts=2, retry=searching(heavy_toy())))
    first = found[0]
    assert first.change == f"zero={first.mesh.zero_stage} instead of zero=0"
    assert first.fix == (("dp", "4"), ("zero", str(first.mesh.zero_stage)))
    assert (first.mesh.dp, first.n_hosts) == (4, 2) and first.mesh.zero_stage > 0
    assert first.peak_bytes <= heavy_toy().memory_limit_bytes
    # what it says to fix is feasible, with the same step time
    again = searching(heavy_toy())(replace(options, fix=first.fix), first.n_hosts)
    assert again.best is not None and again.best.estimate.step_s <= first.step_s * 1.001


def test_more_hosts_are_the_fewest_that_are_enough() -> None:
    def retry(options: Options, n_hosts: int) -> SearchResult:
        return SOMETHING if n_hosts >= 3 else NOTHING

    (found,) = find_remedies(Options(), n_hosts=1, retry=retry)
    assert (found.change, found.n_hosts) == ("3 hosts instead of 1", 3)


def test_everything_is_given_up_only_where_no_single_thing_is_enough() -> None:
    def needs(n_free: int) -> Retry:
        return lambda options, n_hosts: SOMETHING if len(ZERO) - len(options.fix) >= n_free else NOTHING

    options = Options(fix=ZERO)
    assert [item.change for item in find_remedies(options, n_hosts=64, retry=needs(1))] == [
        "zero=1 instead of zero=0",
        "dp=2 instead of dp=4",
    ]
    (found,) = find_remedies(options, n_hosts=64, retry=needs(2))
    assert (found.change, found.fix) == ("without dp=4, zero=0", ())


def test_a_batch_that_all_devices_share_is_tried_before_everything_is_given_up() -> None:
    def retry(options: Options, n_hosts: int) -> SearchResult:
        return SOMETHING if options.global_batch == 1008 else NOTHING

    options = Options(global_batch=1009, fix=ZERO)
    (found,) = find_remedies(options, n_hosts=1, retry=retry, shared_batch=1008)
    assert (found.change, found.fix) == ("a global batch of 1008 instead of 1009", ZERO)


def test_a_prime_batch_that_does_not_fit_is_told_of_the_nearest_that_does() -> None:
    options = Options(global_batch=10_000_019, fix=(("tp", "1"), ("pp", "1")))
    answer = api.solve(api.make_problem(MLP, hw="dgx_a100_x8", options=options))
    text = " ".join(plan_report(answer).split())
    # 1250002 for each, which is 2 x 13 x 131 x 367: 4771 micro-batches of 262, where 8192 would be of 153
    assert "none has fewer than 10000019 samples. With --global-batch 10000016 they may have 262 samples." in text
    assert "a global batch of 10000016 instead of 10000019: " in text


def test_hosts_and_what_was_fixed_are_given_up_together_as_the_last_resort() -> None:
    def retry(options: Options, n_hosts: int) -> SearchResult:
        return SOMETHING if n_hosts >= 2 and not options.fix else NOTHING

    (found,) = find_remedies(Options(fix=ZERO), n_hosts=1, retry=retry)
    assert (found.change, found.fix) == ("2 hosts instead of 1, without dp=4, zero=0", ())


@pytest.mark.parametrize(
    ("name", "given", "other"),
    [
        ("loss", "whole", "chunked"),
        ("compile", "off", "on"),
        ("memory_format", "contiguous", "channels_last"),
        ("cuda_graph", "on", "off"),
        ("generated", "on", "off"),
    ],
)
def test_how_the_loss_and_the_modules_run_is_given_up_too(name: str, given: str, other: str) -> None:
    plan = make_candidate().plan
    mesh = replace(plan.mesh, tp=1, pp=1, compile=True, memory_format="channels_last")
    result = replace(SOMETHING, best=replace(make_candidate(), plan=replace(plan, mesh=mesh, loss="chunked")))
    options = Options(fix=((name, given), ("dp", "4")))
    found = next(find_remedies(options, n_hosts=64, retry=lambda own, _: NOTHING if name in dict(own.fix) else result))
    assert (found.change, found.fix) == (f"{name}={other} instead of {name}={given}", ((name, other), ("dp", "4")))


def test_recomputation_that_needs_its_loss_chunked_says_so() -> None:
    # recompute=selective alone means a whole loss
    options = Options(global_batch=1, fix=(("recompute", "selective"),))
    problem = api.make_problem(LLAMA, hw="dgx_a100_40g_x8/1", overrides=LONG, options=options)
    assert api.decide(problem).result.status == "infeasible"
    first = next(find_remedies(options, n_hosts=1, retry=lambda own, _: _decided(problem, own)))
    assert first.change == "recompute=selective, loss=chunked instead of recompute=selective"
    assert first.fix == (("recompute", "selective"), ("loss", "chunked"))
    again = _decided(problem, replace(options, fix=first.fix)).best
    assert again is not None and again.estimate.step_s <= first.step_s * 1.001


def test_a_whole_loss_that_does_not_fit_is_chunked_before_hosts_are_added() -> None:
    options = Options(global_batch=1, fix=(("loss", "whole"),))
    problem = api.make_problem(LLAMA, hw="dgx_a100_40g_x8/1", overrides=LONG, options=options)
    found = next(find_remedies(options, n_hosts=1, retry=lambda own, _: _decided(problem, own)))
    assert found.change == "loss=chunked instead of loss=whole"
    assert _decided(problem, replace(options, fix=found.fix)).best is not None


def _decided(problem: Problem, options: Options) -> SearchResult:
    return api.decide(replace(problem, options=options)).result


def test_all_searches_together_end_at_the_time_limit() -> None:
    # each search takes 3 s of the 10 s: they start at 0, 3, 6 and 9 s, and the last has 1 s left
    clock = itertools.count(0.0, 3.0)
    limits_s = []

    def retry(options: Options, n_hosts: int) -> SearchResult:
        limits_s.append(options.time_limit_s)
        return NOTHING

    started_s = next(clock)  # what the first look at the clock gives
    ticks = itertools.chain([started_s, started_s], clock)
    assert list(find_remedies(Options(fix=ZERO), n_hosts=1, retry=retry, clock=lambda: next(ticks))) == []
    assert TIME_LIMIT_S == 10.0
    assert limits_s == [2.0, 2.0, 2.0, 1.0]


def test_random_toys_get_remedies_that_are_feasible() -> None:
    n_found = 0
    for seed in range(6):
        toy = random_toy(seed, n_segments=4, n_devices=2)
        for item in find_remedies(
            Options(max_micro_batch_size=2, fix=(("zero", "0"),)), n_hosts=1, retry=searching(toy)
        ):
            n_found += 1
            options = Options(max_micro_batch_size=2, fix=item.fix)
            assert searching(toy)(options, item.n_hosts).best is not None, (seed, item.change)
    assert n_found > 0


def test_the_closest_mesh_is_the_one_whose_plan_lacks_the_least() -> None:
    toy = replace(loose_toy(), memory_limit_bytes=2**24)
    result = search(toy.space, price=toy.price, options=Options(max_micro_batch_size=2), make_plan=make_plan)
    closest = result.closest
    assert result.status == "infeasible" and closest is not None
    assert closest.stage is not None and f"stage {closest.stage} needs" in closest.detail
    assert closest.short_bytes == min(item.short_bytes for item in result.rejected if item.short_bytes is not None)
    assert result.why_nothing == closest.detail
