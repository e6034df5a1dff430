"""Recommend: what is looked at, what is chosen, and what would change it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from whatif_toys import TODAY, toy_result, toy_row

import autoplan
from autoplan import cli, load_hardware_profile
from autoplan.errors import UsageError
from autoplan.options import Options
from autoplan.what_if import recommending
from autoplan.what_if.answer_changes import FACTORS, Limit, much_cheaper, swing_cells, swings, varied
from autoplan.what_if.conditions import Condition
from autoplan.what_if.points import Point
from autoplan.what_if.question import Question
from autoplan.what_if.recommendation_text import recommendation_text, recommendation_to_dict
from autoplan.what_if.recommending import candidates, host_counts, least_hosts, parse_budget, parse_deadline
from autoplan.what_if.rows import SHARES

GPT = str(Path(__file__).parent.parent / "examples" / "gpt.py")
FIXED = Options(fix=(("tp", "1"),))
QUESTION = Question(GPT, ("slow", "fast"), n_samples=72_000.0)
# device-hours of the toy are 20 x devices x step / 8; each doubling of hosts makes a step 1.8 times as fast
SPEEDS = {"slow": 2.0, "fast": 0.5}
REST = tuple((f"{part}_s", 0.0) for part in SHARES[1:9])
USD = {"slow": 1.0, "fast": 5.0}


@pytest.fixture
def toy_market(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Two kinds of hosts that cost nothing to search; the list says which clusters were looked at."""
    asked: list[tuple[str, int]] = []

    def ask(question, *, n_jobs, today, progress=None):
        rows = []
        for name in question.hw:
            for n_hosts in question.hosts:
                asked.append((name, n_hosts))
                step_s = SPEEDS[name] / n_hosts**0.848
                result = toy_result(
                    n_hosts=n_hosts,
                    n_devices=4 * n_hosts,
                    n_used_devices=4 * n_hosts,
                    step_s=step_s,
                    breakdown=(("compute_s", step_s), *REST),
                )
                point = Point(name, n_hosts, 8, "bf16")
                given = {"n_samples": question.n_samples, "given_usd": tuple(USD.items())}
                rows.append(toy_row(result=result, point=point, **given))
        return type("Answer", (), {"rows": tuple(rows), "sweep": type("Sweep", (), {"is_interrupted": False})})

    monkeypatch.setattr(recommending, "ask", ask)
    monkeypatch.setattr(recommending, "_check_prices", lambda question, today: None)
    monkeypatch.setattr(recommending, "_counts", lambda question, name, limit, most: host_counts(1, most))
    return asked


def test_the_cheapest_that_meets_the_deadline(toy_market) -> None:
    # 9000 steps. slow x 1: 5 h, 20 USD; fast x 1: 1.25 h, 25 USD. slow x 4 takes 1.54 h, x 6 takes 1.09 h and 26.3 USD
    for deadline_h, expected in ((6.0, ("slow", 1)), (1.3, ("fast", 1)), (0.8, ("fast", 2))):
        found = autoplan.recommend(QUESTION, deadline_s=deadline_h * 3600, max_hosts=64, today=TODAY)
        assert (found.best.hardware, found.best.n_hosts) == expected
        assert found.best.train_s <= deadline_h * 3600
        every = autoplan.recommend(QUESTION, budget_usd=1e9, max_hosts=64, today=TODAY)
        assert every.best.train_s <= found.best.train_s
        assert 1 <= len(found.alternatives) <= 3
        assert all(row.cost_usd >= found.best.cost_usd for row in found.alternatives)


def test_the_fastest_within_the_budget(toy_market) -> None:
    # fast: 25 USD x hosts^0.152; 8 hosts cost 34.3 USD, 12 cost 36.5
    found = autoplan.recommend(QUESTION, budget_usd=35.0, max_hosts=256, today=TODAY)
    assert (found.best.hardware, found.best.n_hosts) == ("fast", 8)
    assert found.best.cost_usd <= 35.0


def test_more_time_never_costs_more(toy_market) -> None:
    found = [autoplan.recommend(QUESTION, deadline_s=hours * 3600, today=TODAY) for hours in (0.2, 0.5, 1, 2, 5)]
    costs = [answer.best.cost_usd for answer in found]
    assert costs == sorted(costs, reverse=True)


def test_break_even_price_is_where_both_cost_the_same(toy_market) -> None:
    found = autoplan.recommend(QUESTION, deadline_s=6 * 3600, today=TODAY)
    other = next(row for row in found.alternatives if row.hardware == "fast")
    usd = found.best.cost_usd / other.device_hours
    assert any(f"fast would be as cheap at {usd:.2f} USD" in text for text in found.changes)
    assert usd < USD["fast"]


def test_none_found_is_an_answer_with_the_nearest_and_what_was_looked_at(toy_market) -> None:
    found = autoplan.recommend(QUESTION, deadline_s=60.0, max_hosts=8, today=TODAY)
    assert found.best is None and (found.nearest.hardware, found.nearest.n_hosts) == ("fast", 8)
    assert "would be met by 8 x fast (32 devices)" in found.changes[0]
    text = recommendation_text(found)
    assert text.startswith("None found: no plan found trains it within 60 s (12 clusters looked at)")
    assert "slow: 1, 2, 3, 4, 6, 8 hosts" in text and "plans under schedule 1f1b" in text
    assert recommendation_to_dict(found)["status"] == "none_found"
    poor = autoplan.recommend(QUESTION, budget_usd=1.0, max_hosts=8, today=TODAY)
    assert poor.best is None and poor.nearest.hardware == "slow" and poor.nearest.n_hosts == 1


def test_a_plan_that_leaves_hosts_idle_counts_as_that_of_the_hosts_it_uses(
    toy_market, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the search of 8 hosts finds a plan of 2 of them, twice as fast as what that of 2 hosts found
    quick = recommending.ask

    def idle(question, **given):
        answer = quick(question, **given)
        rows = [
            replace(row, fix="dp=8", n_idle_devices=24 if row.n_hosts == 8 else 0, train_s=900.0, step_s=0.1)
            if row.n_hosts == 8 or question.options.fix
            else row
            for row in answer.rows
        ]
        answer.rows = tuple(replace(row, cost_usd=row.n_hosts * 5.0) for row in rows)
        return answer

    monkeypatch.setattr(recommending, "ask", idle)
    found = autoplan.recommend(replace(QUESTION, hw=("fast",)), budget_usd=1e9, max_hosts=8, today=TODAY)
    assert (found.best.n_hosts, found.best.train_s, found.best.cost_usd) == (2, 900.0, 10.0)
    assert 8 not in {row.n_hosts for row in found.alternatives}
    assert found.looked_at[0] == "fast: 1, 2, 3, 4, 6, 8 hosts"


def test_an_interrupt_of_the_full_search_keeps_the_quick_rows(toy_market, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = recommending.ask

    def interrupted_in_full(question, **given):
        answer = quick(question, **given)
        answer.sweep.is_interrupted = question.search == "full"
        if question.search == "full":
            answer.rows = tuple(replace(row, step_s=None, train_s=None, status="interrupted") for row in answer.rows)
        return answer

    monkeypatch.setattr(recommending, "ask", interrupted_in_full)
    found = autoplan.recommend(replace(QUESTION, search="full"), deadline_s=6 * 3600, max_hosts=8, today=TODAY)
    assert found.is_interrupted and (found.best.hardware, found.best.n_hosts) == ("slow", 1)


def test_a_deadline_stops_the_search_soon_after_it_is_met(toy_market) -> None:
    autoplan.recommend(QUESTION, deadline_s=6 * 3600, max_hosts=256, today=TODAY)
    assert len([n_hosts for name, n_hosts in toy_market if name == "slow"]) <= 4


def test_host_counts_are_powers_of_two_and_their_middles() -> None:
    assert host_counts(1, 16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert host_counts(5, 16) == (4, 6, 8, 12, 16) and host_counts(100, 16) == ()


def test_least_hosts_is_peak_arithmetic() -> None:
    # 8 x 312 TFLOP/s for 1000 s: 2.496e18 FLOPs a host
    hardware = load_hardware_profile("dgx_a100_x8")
    figures = {"precision": "bf16", "deadline_s": 1000.0}
    assert [least_hosts(hardware, n_flops=flops, **figures) for flops in (1.0, 2.4e18, 2.5e18, 9e18)] == [1, 1, 2, 4]
    exact = [least_hosts(hardware, n_flops=n * 2.496e18, **figures) for n in range(1, 6)]
    assert exact == [1, 2, 3, 4, 5]


def test_texts_of_deadlines_and_budgets() -> None:
    assert parse_deadline("14d") == 14 * 86_400 and parse_deadline("36 h") == 36 * 3600
    assert parse_budget("100000") == parse_budget("100,000 USD") == 100_000.0
    assert Limit(36 * 3600, None).text() == "within 1.5 d"
    for text in ("1k", "$100", "-5"):
        with pytest.raises(UsageError, match=r"--budget: found .*\n.*above 0\n  fix: write --budget 100000"):
            parse_budget(text)


def test_hardware_that_cannot_train_the_model_says_why(capsys) -> None:
    # a V100 has no bf16
    arguments = ["recommend", GPT, "--set", "size=char", "--among", "v100_x8", "--price", "v100_x8=1"]
    assert cli.run([*arguments, "--samples", "1e6", "--deadline", "1d", "--max-hosts", "2", "--jobs", "1"]) == 6
    assert "v100_x8: 1, 2 hosts: --precision bf16" in " ".join(capsys.readouterr().out.split())


def test_a_deadline_beyond_peak_rates_is_said_to_be_one(capsys) -> None:
    arguments = ["recommend", GPT, "--set", "size=char", "--among", "dgx_h100_x8", "--samples", "1e13"]
    assert cli.run([*arguments, "--deadline", "1h", "--max-hosts", "4", "--jobs", "1"]) == 6
    out, err = capsys.readouterr()
    said = "No cluster of at most 4 hosts trains it within 1 h: too slow even at the peak rate of its devices."
    assert " ".join(out.split()).startswith(said) and "fix: a later --deadline, or more --max-hosts" in err


@pytest.mark.parametrize("text", ["14", "14 us"])
def test_a_deadline_without_a_fitting_unit_is_told_fitting_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r'use "h" or "d"$'):
        parse_deadline(text)


def test_candidates_have_prices_and_whole_hosts() -> None:
    names = candidates()
    assert {"dgx_a100_x8", "dgx_h100_x8", "hgx_h200_x8", "dgx_b200_x8"} <= set(names)
    assert not {"h200_x4", "l40s_x8"} & set(names)


def test_recommend_from_the_command_line(capsys) -> None:
    arguments = ["recommend", GPT, "--set", "size=char", "--among", "dgx_a100_x8,dgx_h100_x8", "--samples", "1e6"]
    arguments += ["--fix", "tp=1"]
    assert cli.run([*arguments, "--deadline", "1d", "--max-hosts", "2", "--jobs", "1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = (Path(__file__).parent.parent / "docs" / "what_to_buy.md").read_text()
    assert [name for name in (*found, *found["swings"][0]) if f"`{name}`" not in documented] == ["schema_version"]
    best = found["best"]["hardware"]
    assert found["best"]["n_hosts"] == 1 and found["best"]["train_s"] <= 86_400
    hw = ("dgx_a100_x8", "dgx_h100_x8")
    question = Question(GPT, hw, overrides=(("size", "char"),), n_samples=1e6, options=FIXED)
    again = autoplan.recommend(question, deadline_s=86_400.0, max_hosts=2)
    assert json.loads(json.dumps(recommendation_to_dict(again))) == found
    assert found["assumptions"][0].startswith("global batch 512 (default)")
    assert {f"step on {best}", f"price of {best}", "time to restart, / 3 and x 3"} <= {
        swing["assumption"] for swing in found["swings"]
    }
    assert "cost with one assumption at its" in recommendation_text(again)
    assert cli.run([*arguments, "--deadline", "1ms", "--max-hosts", "1", "--jobs", "1"]) == 6
    out, err = capsys.readouterr()
    assert "dgx_h100_x8: not looked at: the peak rate of 1 host does not meet" in out and "1 host cannot meet it" in err


def test_recommend_reads_a_file_of_questions_and_chooses_among_its_hardware(tmp_path: Path, capsys) -> None:
    path = tmp_path / "question.toml"
    path.write_text(
        f'[workload]\nmodel = "{GPT}"\nset = {{ size = "char" }}\nsamples = 1e6\nfix = "tp=1"\n'
        '[clusters]\nhw = ["dgx_h100_x8"]\nhosts = [8]\n[reliability]\nrestart = ["5 min", "10 min"]\n'
    )
    arguments = ["recommend", str(path), "--deadline", "1d", "--max-hosts", "1", "--jobs", "1", "--format", "json"]
    assert cli.run(arguments) == 2
    assert "money, reliability and loading: found 2 values" in capsys.readouterr().err
    arguments += ["--given", 'reliability.restart="5 min"']
    for among, expected in (([], "dgx_h100_x8"), (["--among", "dgx_a100_x8"], "dgx_a100_x8")):
        assert cli.run([*arguments, *among]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["n_looked_at"], found["best"]["hardware"], found["best"]["n_hosts"]) == (1, expected, 1)


def _cluster(name: str, cost_usd: float, **fields):
    return replace(toy_row(n_samples=72_000.0), hardware=name, cost_usd=cost_usd, cost_usd_interval=None, **fields)


def test_a_swing_is_of_one_assumption_and_names_the_cluster_that_is_best_then() -> None:
    hour, limit = 3600.0, Limit(10 * 3600.0, None)
    best = _cluster("a", 20.0, train_s=8 * hour, train_s_interval=(6 * hour, 12 * hour))
    best = replace(best, cost_usd_interval=(10.0, 60.0))
    other = _cluster("b", 30.0, train_s=5 * hour, train_s_interval=(5 * hour, 5 * hour))
    worse = [replace(best, cost_usd=22.0), other]
    (name, *_), *_ = FACTORS.items()
    found = swings(best, [best, other], {f"{name}: low": worse, f"{name}: high": [best, other]}, limit)
    # the price from 10 to 60 USD, the step from 20 x 6/8 to 20 x 12/8 USD, failures from 22 to 20 USD
    assert [(swing.low, swing.high) for swing in found] == [(10.0, 60.0), (15.0, 30.0), (22.0, 20.0)]
    assert [swing_cells(swing, best, limit)[3] for swing in found] == [
        "high: 1 x b (4 devices)",
        "high: 1 x b (4 devices)",  # 12 h miss the deadline
        "same answer",
    ]
    within = swings(best, [best, other], {}, Limit(None, 25.0))
    assert [swing.assumption for swing in within] == ["step on a", "price of a"]
    assert within[1].high_answer is None and within[1].low == within[1].high == 8 * hour


def test_within_a_budget_two_percent_of_the_time_are_not_worth_more_money() -> None:
    limit = Limit(None, 100.0)
    fast, near, slow = (
        _cluster(name, usd, train_s=train_s)
        for name, usd, train_s in (("a", 90.0, 100.0), ("b", 50.0, 101.5), ("c", 10.0, 103.0))
    )
    assert [row.hardware for row in limit.ranked([slow, near, fast])] == ["b", "a", "c"]
    assert [row.hardware for row in limit.ranked([slow, fast])] == ["a", "c"]
    assert [row.hardware for row in Limit(1000.0, None).ranked([slow, near, fast])] == ["c", "b", "a"]


def test_within_a_budget_the_cheapest_that_may_be_as_fast_is_named_where_it_costs_much_less() -> None:
    best, near, dear, slow = (
        _cluster(name, usd, train_s=train_s, train_s_interval=(0.9 * train_s, 1.2 * train_s))
        for name, usd, train_s in (("a", 100.0, 100.0), ("b", 74.0, 119.0), ("c", 76.0, 101.0), ("d", 10.0, 121.0))
    )
    limit = Limit(None, 200.0)
    assert much_cheaper(best, [best, dear, near, slow], limit) == near
    assert much_cheaper(best, [best, dear, slow], limit) is None
    assert much_cheaper(best, [best, near], Limit(1000.0, None)) is None


def test_a_much_cheaper_cluster_that_may_be_as_fast_is_told_below_the_first_sentence(toy_market) -> None:
    found = autoplan.recommend(QUESTION, budget_usd=35.0, max_hosts=256, today=TODAY)
    cheap = _cluster("b", 60.0, train_s=1080.0)
    best = replace(found.best, train_s=1000.0, train_s_interval=(900.0, 1100.0))
    told = replace(found, best=best, much_cheaper=cheap)
    _, second, *_ = recommendation_text(told, width=200).splitlines()
    assert second == "1 x b (4 devices) may be as fast, by the interval (900 s to 1100 s): 1080 s, 60.00 USD."
    assert " 60.00 " in recommendation_text(told, width=200).partition("\n\n")[2]  # in the table, too
    assert recommendation_to_dict(told)["much_cheaper"]["hardware"] == "b"


def test_the_fastest_that_is_passed_over_is_told_and_sizes_that_gain_nothing_are_not(
    toy_market, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than two hosts gain less than 1 %, and four gain less on three than a search leaves open
    steps_s = {1: 0.5, 2: 0.25, 3: 0.248, 4: 0.2479}
    ask = recommending.ask

    def flat(question, **given):
        rows = ask(question, **given).rows
        scaled = tuple(
            replace(row, train_s=steps_s.get(row.n_hosts, 0.2479) * 9000, cost_usd=10.0 * row.n_hosts) for row in rows
        )
        return type("Answer", (), {"rows": scaled, "sweep": type("Sweep", (), {"is_interrupted": False})})

    monkeypatch.setattr(recommending, "ask", flat)
    found = autoplan.recommend(replace(QUESTION, hw=("fast",)), budget_usd=45.0, max_hosts=64, today=TODAY)
    assert (found.best.n_hosts, found.passed_over.n_hosts) == (2, 3)
    assert [row.n_hosts for row in found.alternatives] == [1]  # cheaper; 3 hosts are neither
    text = " ".join(recommendation_text(found).split())
    assert "The fastest, 3 x fast (12 devices), takes 0.8% less time and costs 30.00 USD; of those at most 2%" in text
    assert recommendation_to_dict(found)["passed_over"]["n_hosts"] == 3
    _, _, table = recommendation_text(found).partition("\n\n")
    assert any(line.startswith("3 x fast ") for line in table.splitlines())  # the figures of what the sentence names


def test_conditions_vary_one_thing_at_a_time() -> None:
    base = Condition()
    first, *others = varied(base)
    assert first == base and len(others) == 2 * len(FACTORS)
    for condition in others:
        fields = base.reliability.__dataclass_fields__
        changed = [name for name in fields if getattr(condition.reliability, name) != getattr(base.reliability, name)]
        assert len(changed) == 1 and changed[0] in {field for _, field in FACTORS.values()}
