"""Plans fit with the chance that is asked for; where none does, plans that fit as computed are told as such."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import best_by_trying, make_plan, random_toy
from conftest import make_candidate, make_estimate
from hypothesis import given
from hypothesis import strategies as st
from mixed_toys import EXACT, best_of_all, best_s, mixed_space, two_toys
from whatif_toys import toy_result, toy_row

from autoplan import api, cli
from autoplan.answers.answer import Answer, answer_from_json, answer_to_json, chance_short, short_words
from autoplan.answers.intervals import MEMORY_ERRORS, Errors, chance_above, margin_of, memory_margin
from autoplan.errors import UsageError
from autoplan.html_report import chart_files, plan_page
from autoplan.options import AS_COMPUTED, Options
from autoplan.parallel_plan import Mesh
from autoplan.planning import questions
from autoplan.planning.confidence import search_confidently
from autoplan.report.explain import why_not_report
from autoplan.report.plan import plan_report, status_text
from autoplan.search import search
from autoplan.search.mixed.search import search_mixed
from autoplan.search.outlook import seems_hopeless
from autoplan.search.result import SearchResult
from autoplan.units import GiB
from autoplan.what_if.points import solve_point

CHECKOUT = Path(__file__).parent.parent
MLP = CHECKOUT / "examples" / "mlp.py"
MARGIN = 0.1
CONFIDENCES = (AS_COMPUTED, 0.8, 0.95, 0.999)

# ----------------------------------------------------------------------------------------------- chance and margin


@given(st.floats(0.5, 0.9999), st.floats(1e-3, 0.3), st.floats(1.0, 1e12))
def test_margin_and_chance_are_inverse(confidence: float, rms: float, predicted: float) -> None:
    errors = Errors(rms, 0, "given")
    limit = predicted * (1.0 + margin_of(confidence, errors))
    assert chance_above(limit, predicted, errors) == pytest.approx(1.0 - confidence, rel=1e-6)


def test_a_profile_needs_a_smaller_margin_and_the_segment_known_least_counts() -> None:
    # exp(1.645 x 0.035) - 1 = 5.9 %, exp(1.645 x 0.017) - 1 = 2.8 %
    computed, measured = (memory_margin(sources, confidence=0.95) for sources in ((), ("measured", "measured")))
    assert (computed, measured) == (pytest.approx(0.0593, abs=1e-4), pytest.approx(0.0284, abs=1e-4))
    assert memory_margin(("measured", "scaled"), confidence=0.95) == computed
    assert memory_margin((), confidence=AS_COMPUTED) == 0.0


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("sources", [(), ("measured", "measured", "measured", "measured")])
def test_a_plan_fits_with_a_confidence_where_its_chance_is_no_larger(confidence: float, sources) -> None:
    margin = memory_margin(sources, confidence=confidence)
    estimate = replace(make_estimate(), segment_sources=sources, memory_margin=margin)
    # ranks of 4 and 7 GiB allocated, 5 and 8 needed
    just = round(8 * GiB + margin * 7 * GiB) + 1
    fits, not_quite = (replace(estimate, memory_limit_bytes=just + change) for change in (0, -2))
    assert fits.fits and chance_short(fits) <= 1.0 - confidence + 1e-9
    assert not not_quite.fits and chance_short(not_quite) >= 1.0 - confidence - 1e-9
    assert not_quite.fits_as_computed == (confidence > AS_COMPUTED)


# ------------------------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in (1, 2))])
def test_the_search_with_a_margin_equals_brute_force_on_60_random_toys(block: int) -> None:
    n_other = 0
    for seed in range(20 * block, 20 * block + 20):
        toy = replace(
            random_toy(seed, n_segments=4, n_devices=4 if seed % 4 == 0 else 2, tight=True), memory_margin=MARGIN
        )
        want = best_by_trying(toy, EXACT)
        result = search(toy.space, price=toy.price, options=EXACT, make_plan=make_plan)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or best_s(result) == pytest.approx(want, rel=1e-6), seed
        n_other += want != best_by_trying(replace(toy, memory_margin=0.0), EXACT)
    assert n_other > 0  # the margin matters


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.nightly)])
def test_a_mixed_cluster_with_a_margin_equals_brute_force(seeds: range) -> None:
    for seed in seeds:
        toys = tuple(replace(toy, memory_margin=MARGIN) for toy in two_toys(seed))
        between_s = random.Random(seed).choice([0.0, 0.1, 0.5])
        want = best_of_all(toys, between_s)
        result = search_mixed(mixed_space(toys, between_s), options=EXACT)
        assert result.status == ("infeasible" if want is None else "optimal"), seed
        assert want is None or best_s(result) == pytest.approx(want, rel=1e-6), seed


def test_rejections_name_the_margin_and_what_lacks_it_on_no_device_is_not_told_twice() -> None:
    toy = replace(random_toy(2), memory_limit_bytes=2**20, memory_margin=MARGIN)
    result = search(toy.space, price=toy.price, options=EXACT, make_plan=make_plan)
    assert result.status == "infeasible"
    assert all("with its margin" in item.detail for item in result.rejected)


def test_a_search_that_knows_no_plan_gives_way_after_half_of_its_time_and_the_whole_device_is_tried() -> None:
    asked: list[tuple[float, float | None, float]] = []
    nothing = SearchResult("unknown", None, (), (), (), None, 3, 4.0, stopped_by="time limit")
    found = replace(nothing, status="optimal", best=make_candidate(), search_s=1.0)

    def under(options: Options, planless_share: float) -> SearchResult:
        asked.append((options.memory_confidence, options.time_limit_s, planless_share))
        return nothing if options.memory_confidence > AS_COMPUTED else found

    result = search_confidently(under, Options(time_limit_s=10.0))
    assert asked == [(0.95, 10.0, 0.5), (AS_COMPUTED, 6.0, 1.0)]
    assert (result.unmet_confidence, result.unmet_status, result.search_s) == (0.95, "unknown", 5.0)
    search_confidently(under, Options(time_limit_s=1.0), is_patient=True)
    assert asked[-1] == (AS_COMPUTED, 1.0, 1.0)
    interrupted = replace(nothing, stopped_by="interrupted")
    assert search_confidently(lambda *_: interrupted, Options()) == interrupted


def test_where_it_seems_hopeless_the_whole_device_is_tried_first_and_only_a_plan_on_it_leads_to_a_second_search() -> (
    None
):
    asked: list[tuple[float, float | None]] = []
    nothing = SearchResult("infeasible", None, (), (), (), None, 3, 4.0)
    plan = replace(nothing, status="optimal", best=make_candidate(), search_s=1.0)

    def under(found: SearchResult, sure: SearchResult) -> SearchResult:
        def one(options: Options, planless_share: float) -> SearchResult:
            asked.append((options.memory_confidence, options.time_limit_s))
            return replace(sure if options.memory_confidence > AS_COMPUTED else found)

        return search_confidently(one, Options(time_limit_s=10.0), seems_hopeless=lambda: True)

    assert under(nothing, plan) == nothing
    assert asked == [(AS_COMPUTED, 10.0)]
    assert under(plan, plan) == replace(plan, search_s=2.0)
    assert asked[1:] == [(AS_COMPUTED, 10.0), (0.95, 9.0)]
    unmet = replace(plan, search_s=5.0, unmet_confidence=0.95, unmet_status="infeasible")
    assert under(plan, nothing) == unmet
    assert len(asked) == 5
    interrupted = replace(plan, stopped_by="interrupted")
    assert under(interrupted, nothing) == replace(interrupted, unmet_confidence=0.95, unmet_status="unknown")


def test_a_space_seems_hopeless_only_where_no_plan_is_by_any_arithmetic() -> None:
    for seed in range(20):
        toy = random_toy(seed)
        for limit_bytes in (2**20, 2**40):
            own = replace(toy, memory_limit_bytes=limit_bytes)
            assert seems_hopeless(own.space, EXACT, price=own.price) == (limit_bytes == 2**20)
        fixed = replace(EXACT, fix=(("dp", "3"),))  # there is no such mesh, which the search says
        assert not seems_hopeless(toy.space, fixed, price=toy.price)


def test_what_fits_on_no_device_is_searched_once(monkeypatch) -> None:
    from autoplan import search as searches

    asked: list[float] = []
    whole = searches.search

    def counted(space, *, options, **rest):
        asked.append(options.memory_confidence)
        return whole(space, options=options, **rest)

    monkeypatch.setattr(searches, "search", counted)
    short, tight = (on_device(0.95, memory_bytes=only_bytes() + n, fix=ONE_PLAN) for n in (-(2**28), 2**20))
    asked.clear()
    assert api.decide(short).result.status == "infeasible" and asked == [AS_COMPUTED]
    asked.clear()
    assert api.decide(tight).best is not None and asked == [0.95, AS_COMPUTED]


def test_a_search_without_a_plan_ends_after_its_planless_share() -> None:
    toy = replace(random_toy(2), memory_limit_bytes=2**20)

    def stopped_by(limit_s: float | None, share: float) -> tuple[str, float]:
        clock = itertools.count(0.0, 1.0)
        options = replace(EXACT, require_optimal=False, time_limit_s=limit_s)
        found = search(
            toy.space,
            price=toy.price,
            options=options,
            make_plan=make_plan,
            clock=lambda: next(clock),
            planless_share=share,
        )
        return found.stopped_by, next(clock)

    _, n_ticks = stopped_by(1e6, 1.0)
    assert stopped_by(4.0 * n_ticks, 1.0)[0] == ""
    assert stopped_by(4.0 * n_ticks, 0.05)[0] == "time limit"


# ----------------------------------------------------------------------------------------------------- a real model


ONE_PLAN = (("micro_batch", "1024"), ("recompute", "none"), ("compile", "off"))


def on_device(
    confidence: float, *, memory_bytes: int | None = None, fix: tuple[tuple[str, str], ...] = ()
) -> api.Problem:
    """The MLP on a device where activations fill the memory; no graph, which may need more of it."""
    pinned = (("dp", "1"), ("tp", "1"), ("pp", "1"), ("cuda_graph", "off"))
    chosen = Options(global_batch=2**16, fix=(*pinned, *fix), memory_confidence=confidence)
    problem = api.make_problem(MLP, hw="dgx_a100_x8", overrides={"depth": 8}, options=chosen)
    if memory_bytes is None:
        return problem
    device = replace(problem.hardware.device, memory_bytes=memory_bytes)
    return replace(problem, hardware=replace(problem.hardware, device=device))


@pytest.fixture(scope="module")
def full_bytes() -> int:
    """Memory that the fastest plan fills."""
    return max(api.decide(on_device(AS_COMPUTED)).best.estimate.needed_bytes)


def test_more_confidence_never_makes_a_plan_faster_or_its_chance_larger(full_bytes: int) -> None:
    answers = [api.decide(on_device(confidence, memory_bytes=full_bytes)) for confidence in CONFIDENCES]
    steps_s = [answer.best.estimate.step_s for answer in answers]
    chances = [chance_short(answer.best.estimate) for answer in answers]
    assert steps_s == sorted(steps_s) and steps_s[0] < steps_s[-1]
    assert chances == sorted(chances, reverse=True)
    assert all(chance <= 1.0 - confidence + 1e-9 for chance, confidence in zip(chances, CONFIDENCES, strict=True))
    assert [answer.result.memory_confidence for answer in answers] == list(CONFIDENCES)


def test_a_confidence_of_a_half_takes_a_plan_that_fills_the_device(full_bytes: int) -> None:
    answer = api.decide(on_device(AS_COMPUTED, memory_bytes=full_bytes))
    assert max(answer.best.estimate.needed_bytes) == full_bytes
    assert chance_short(answer.best.estimate) == pytest.approx(0.5, abs=1e-3)
    assert "confidence" not in status_text(answer)


def only_bytes() -> int:
    """What the one plan that has all of `ONE_PLAN` needs."""
    return max(api.decide(on_device(AS_COMPUTED, fix=ONE_PLAN)).best.estimate.needed_bytes)


def test_where_nothing_fits_so_the_plan_that_fits_as_computed_is_told_with_its_chance(
    tmp_path: Path, capfd, monkeypatch
) -> None:
    problem = on_device(0.95, memory_bytes=only_bytes() + 2**20, fix=ONE_PLAN)
    answer = api.solve(problem)
    result, chance = answer.result, chance_short(answer.best.estimate)
    assert (result.memory_confidence, result.unmet_confidence, result.unmet_status) == (AS_COMPUTED, 0.95, "infeasible")
    assert answer.best.estimate.fits and 0.05 < chance <= 0.5
    text = plan_report(answer)
    assert "it is proved that nothing with dp=1, tp=1, pp=1, " in text and "fits with 95% confidence;" in text
    assert f"its memory falls short with a chance of {chance:.0%}" in text.replace("\n", " ")
    values = json.loads(answer_to_json(answer))
    assert (values["memory_confidence"], values["unmet_confidence"]) == (AS_COMPUTED, 0.95)
    assert answer_from_json(answer_to_json(answer)).result.unmet_status == "infeasible"
    assert "no plan was found that fits with 95% confidence" in plan_page(answer)
    # the command succeeds; questions about it are asked with the confidence that was met
    monkeypatch.setattr(api, "make_problem", lambda *_, **__: problem)
    assert cli.run(["plan", str(MLP), "--hw", "dgx_a100_x8"]) == 0
    assert "it is proved that nothing with" in capfd.readouterr().out
    assert questions.asked_again(answer).options.memory_confidence == AS_COMPUTED
    # a point of a what-if has the plan and says so, too
    found = solve_point(problem)
    assert (found.step_s, found.unmet_confidence) == (answer.best.estimate.step_s, 0.95)
    assert found.chance_short_of_memory == pytest.approx(chance)


def test_where_nothing_fits_at_all_the_whole_device_is_what_is_short() -> None:
    answer = api.decide(on_device(0.95, memory_bytes=only_bytes() - 2**20, fix=ONE_PLAN))
    assert answer.result.status == "infeasible" and answer.result.unmet_confidence is None
    text = plan_report(answer)
    assert "GiB short" in text and "margin" not in text and "confidence" not in text


def test_why_not_a_plan_that_fits_less_surely_says_so(full_bytes: int) -> None:
    problem = on_device(0.95, memory_bytes=full_bytes)
    answer = api.decide(problem)
    fast = api.decide(on_device(AS_COMPUTED, memory_bytes=full_bytes)).best.plan
    fix = (("micro_batch", str(fast.mesh.micro_batch_size)), ("recompute", fast.recompute), ("zero", "0"))
    text = why_not_report(
        questions.why_not(problem, answer, fix=(*fix, ("compile", "on" if fast.mesh.compile else "off")))
    )
    assert "faster, but memory is less sure to suffice:" in text.replace("\n", " ")
    assert "it is proved that nothing with" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.nightly
def test_prices_of_a_profile_and_of_a_mixed_cluster_have_the_margin(tmp_path: Path) -> None:
    from autoplan.planning.deciding import cost_table

    whole = on_device(0.95)
    plan = api.decide(whole).best.plan
    assert cost_table(whole, plan).memory_margin == memory_margin((), confidence=0.95)
    hardware = CHECKOUT / "examples" / "a100_v100.toml"
    mixed = api.make_problem(
        MLP, hw=str(hardware), overrides={"depth": 8}, options=Options(global_batch=96, precision="fp16")
    )
    best = api.decide(mixed).best
    assert cost_table(mixed, best.plan).memory_margin == memory_margin((), confidence=0.95)
    assert best.estimate.memory_margin == memory_margin((), confidence=0.95)
    assert set(MEMORY_ERRORS) >= {"measured", "scaled", "calibrated"}


# -------------------------------------------------------------------------------------------------------- the words


def sure(answer: Answer) -> Answer:
    """The toy answer with plans that fit with 95 %."""
    return replace(answer, result=replace(answer.result, memory_confidence=0.95))


def test_the_status_says_of_which_plans_something_is_proved(answer: Answer) -> None:
    text = status_text(sure(answer)).replace("\n", " ")
    assert text.startswith(
        "optimal: no other plan of the space that fits with 95% confidence is faster (gap 0, proved)"
    )
    near = replace(sure(answer).result, status="feasible", bound_s=1.599)
    text = status_text(replace(answer, result=near)).replace("\n", " ")
    assert "at most 0.06% slower than any other of the space that fits with 95% confidence" in text
    assert "no other plan of the space is faster" in status_text(answer)


def test_a_recipe_that_fits_only_less_surely_is_marked_and_the_mark_explained(answer: Answer) -> None:
    # DDP needs 9.9 of 10 GiB, 8.9 of them allocated: 1.1 % to spare, 0.32 of the errors of 3.5 %
    tight = replace(make_estimate(peaks_gib=(9.9, 9.9)), memory_margin=memory_margin((), confidence=0.95))
    ddp = make_candidate(mesh=Mesh(dp=4, micro_batch_size=2), estimate=tight, baseline="DDP")
    shown = replace(sure(answer), result=replace(sure(answer).result, baselines=(ddp,)))
    assert short_words(tight) == "short 37%"
    text = plan_report(shown)
    assert "DDP, short 37%\n" in text and "best plain recipe" not in text
    assert (
        "short N%: memory falls short with that chance, so it does not fit with 95% confidence"
        in text.replace("\n", " ")
        and max(map(len, text.splitlines())) <= 80
    )
    rows = json.loads(str(chart_files(shown)["rows.json"]))["candidates"]
    (row,) = (row for row in rows if row["name"] == "DDP")
    assert row["fits"] is False and row["chance_short_of_memory"] == pytest.approx(0.37, abs=0.01)
    assert "short N%" not in plan_report(sure(answer))


def test_a_row_of_a_what_if_says_where_nothing_fits_with_the_confidence_asked_for() -> None:
    row = toy_row(result=toy_result(unmet_confidence=0.95, chance_short_of_memory=0.26))
    (warning,) = (text for text in row.warnings if "confidence" in text)
    assert warning == (
        "1 host of toy_x4, batch 8, bf16: no plan was found that fits with 95% confidence;"
        " memory falls short with a chance of 26%"
    )
    assert row.chance_short_of_memory == 0.26
    assert not any("confidence" in text for text in toy_row(result=toy_result(chance_short_of_memory=0.01)).warnings)


def test_impossible_confidences_are_refused() -> None:
    for confidence in (0.0, 0.49, 1.0, 95.0, float("nan")):
        with pytest.raises(UsageError, match="a chance from 0.5"):
            api.make_problem(MLP, hw="dgx_a100_x8", options=Options(memory_confidence=confidence))
