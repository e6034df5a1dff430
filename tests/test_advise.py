"""Advise: each rule on a case that it is for, and on one that it is not for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from whatif_toys import PARTS, toy_result, toy_row

from autoplan import cli, load_hardware_profile
from autoplan.hardware.cluster import groups_alone, load_hardware
from autoplan.options import DEFAULT_TIME_LIMIT_S
from autoplan.units import GiB
from autoplan.what_if import advising, asking
from autoplan.what_if import sweep as sweeping
from autoplan.what_if.advice_facts import AdviceAnswer, Facts, passes, speed_up, stop_at
from autoplan.what_if.advice_rules import (
    RULES,
    busy_first,
    data_parallel,
    failures_first,
    leave_the_host,
    not_over_two_hosts,
    stay_small,
    stop_scaling,
)
from autoplan.what_if.advice_text import advice_text, worth_showing
from autoplan.what_if.advising import fragment
from autoplan.what_if.advising_mixed import mixed_rules
from autoplan.what_if.conditions import Loading
from autoplan.what_if.points import QUICK_TIME_LIMIT_S, Point
from autoplan.what_if.question import Question
from autoplan.what_if.rows import WhatIfRow

GPT = str(Path(__file__).parent.parent / "examples" / "gpt.py")


def _row(
    n_hosts: int, n_devices: int, *, compute_s: float, comm_s: float = 0.0, launch_s: float = 0.0, **changes
) -> WhatIfRow:
    seconds = {"compute": compute_s, "exposed_dp": comm_s, "launch": launch_s}
    step_s = sum(seconds.values())
    result = toy_result(
        n_hosts=n_hosts,
        n_devices=n_devices,
        n_used_devices=n_devices,
        step_s=step_s,
        step_s_interval=(0.8 * step_s, 1.25 * step_s),
        breakdown=tuple((f"{part}_s", seconds.get(part, 0.0)) for part in PARTS),
    )
    return toy_row(result=result, point=Point("toy", n_hosts, 8, "bf16"), n_samples=8000.0, **changes)


NO_PLAN = toy_row(result=toy_result(step_s=None, status="infeasible", detail="too big"))
# 1000 steps: 8000 s on one device, 1000 s on a host of 8; more hosts gain less and less
ROWS = (
    _row(1, 8, compute_s=1.0, comm_s=0.02),
    _row(2, 16, compute_s=0.5, comm_s=0.04),
    _row(4, 32, compute_s=0.25, comm_s=0.1),
    _row(8, 64, compute_s=0.125, comm_s=0.15),
)
GOOD = Facts(
    hardware=load_hardware_profile("dgx_a100_x8"),
    one=_row(1, 1, compute_s=8.0),
    between=(_row(1, 2, compute_s=4.0, comm_s=0.02),),
    half=_row(1, 4, compute_s=2.0, comm_s=0.02),
    host=ROWS[0],
    split=_row(2, 8, compute_s=1.0, comm_s=0.03),
    hosts=ROWS,
    batches=(),
    state_bytes=10 * GiB,
    layer_bytes=GiB,
    layer="blocks.0",
    deadline_s=None,
    can_compile=True,
)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("fewer_first", {"one": _row(1, 1, compute_s=1.25 * 1.02)}),
        ("feed_first", {"host": _row(1, 8, compute_s=1.0, loading=Loading(samples_per_s_per_host=4.0))}),
        ("busy_first", {"one": _row(1, 1, compute_s=8.0, launch_s=2.0)}),
        ("busy_first", {"host": _row(1, 8, compute_s=1.0, launch_s=0.25)}),
        ("mend_links", {"hardware": load_hardware_profile("a100_pcie_x8")}),
        ("leave_the_host", {"host": NO_PLAN, "hosts": (NO_PLAN, *ROWS[1:])}),
        ("split_layers", {"layer_bytes": 100 * GiB}),
        ("stay_small", {"deadline_s": 9000.0}),
        ("raise_batch", {"host": _row(1, 8, compute_s=1.0, comm_s=0.5), "batches": ((16, ROWS[0]),)}),
        ("raise_batch", {"host": replace(ROWS[0], n_idle_devices=4)}),
        ("shard_state", {"one": NO_PLAN, "state_bytes": 100 * GiB}),
        ("drop_activations", {"one": NO_PLAN}),
        ("not_over_two_hosts", {"split": _row(2, 8, compute_s=1.0, comm_s=0.9)}),
        ("meet_deadline", {"deadline_s": 600.0}),
        ("failures_first", {"hosts": (*ROWS, _row(64, 512, compute_s=0.016))}),
    ],
)
def test_each_rule_applies_to_its_case_only(rule: str, changes: dict) -> None:
    (function,) = (item for item in RULES if item.__name__ == rule)
    assert not function(GOOD).applies
    said = function(replace(GOOD, **changes))
    assert said.applies and said.advice and said.figures


def test_a_model_that_scales_is_told_how_far() -> None:
    applying = [rule(GOOD) for rule in RULES if rule(GOOD).applies]
    # a token on 2 hosts costs 2 x 0.54 / 1.02 = 1.06, on 4 hosts 1.37 of what it costs on one
    assert [item.advice for item in applying] == [
        "use the whole host by data parallelism",
        "stop at 2 hosts with batch 8, unless time is worth more than devices; a larger batch scales further",
        "up to 2 hosts cost little more a token",
    ]
    # communication: 4 %, 7 %, 29 %, 55 % of the time
    assert "passes 10% at 32 devices; communication passes 30% at 64 devices" in applying[1].figures


PYTHON = "is what remains; they wait for Python, "


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        ("micro-batch 2 x 4", "larger micro-batches, compiled blocks (measure with autoplan profile --compile both)"),
        ("micro-batch 8 x 1", "compiled blocks (measure with autoplan profile --compile both)"),
        ("micro-batch 2 x 4, compiled", "larger micro-batches"),
        ("micro-batch 1 x 7 + 1 x 1, compiled", "larger micro-batches"),
        ("micro-batch 8 x 1, compiled", f"{PYTHON}in the passes, in the optimizer and between steps"),
        ("micro-batch 2 x 4, compiled, CUDA graph", f"{PYTHON}in the optimizer and between steps"),
    ],
)
def test_a_device_that_waits_for_its_host_is_offered_what_its_plan_lacks(plan: str, advice: str) -> None:
    def said(row: WhatIfRow) -> str:
        return busy_first(replace(GOOD, one=replace(row, plan=f"dp 1, tp 1, pp 1, ZeRO 0, {plan}"))).advice

    only = "a larger batch " if PYTHON in advice else ""
    fewer = "a larger batch or fewer devices " if PYTHON in advice else ""
    assert said(_row(1, 1, compute_s=8.0, launch_s=2.0)) == f"keep devices busy first: {only}{advice}"
    assert said(_row(1, 8, compute_s=8.0, launch_s=2.0)) == f"keep devices busy first: {fewer}{advice}"


def test_where_nothing_can_be_compiled_that_is_not_advised() -> None:
    row = replace(_row(1, 1, compute_s=8.0, launch_s=2.0), plan="dp 1, tp 1, pp 1, ZeRO 0, micro-batch 8 x 1")
    said = busy_first(replace(GOOD, one=row, can_compile=False)).advice
    assert said == f"keep devices busy first: a larger batch {PYTHON}in the passes, in the optimizer and between steps"


def test_advice_names_the_axes_and_the_unit_of_the_plan() -> None:
    pipeline = "dp 2, tp 1, pp 4, ZeRO 1, micro-batch 8 x 1, gpipe"
    facts = replace(GOOD, host=replace(GOOD.host, plan=pipeline, tokens_per_s=None))
    assert data_parallel(facts).advice == f"use the whole host, not by data parallelism alone: {pipeline}"
    assert "a sample costs" in stay_small(facts).figures


def test_fewer_devices_that_may_be_as_fast_are_told_first_with_both_times() -> None:
    def told(one_s: float, **changes) -> list[str]:
        facts = replace(GOOD, hosts=ROWS[:1], one=_row(1, 1, compute_s=one_s), **changes)
        said = [rule(facts) for rule in RULES]
        return [text for item in said if item.applies for text in (item.advice, item.figures)]

    # the host takes 1.02 s, up to 1.275 s by its interval
    as_fast = told(1.0)
    assert as_fast[0] == "take 1 device: as fast as 8 devices"
    assert as_fast[1] == "1 device: 1 s a step; 8 devices: 1.02 s, off by -20% +25%"
    assert not any("whole host" in text for text in as_fast)
    assert told(1.27)[0] == "take 1 device: perhaps as fast as 8 devices"
    assert told(1.28)[0] == "use the whole host by data parallelism"
    one = told(1.0, half=_row(1, 4, compute_s=1.1))
    assert "take 1 device, or a larger batch: 8 may be no faster, in one host too" in one
    # 1000 steps of 1.27 s miss a deadline that the host meets
    assert told(1.27, deadline_s=1100.0)[0] == "use the whole host by data parallelism"
    assert told(8.0, between=(_row(1, 2, compute_s=1.2),))[0] == "take 2 devices: perhaps as fast as 8 devices"
    half = told(8.0, half=_row(1, 4, compute_s=1.2))
    assert half[0] == "take 4 devices: perhaps as fast as 8 devices"
    assert "take 4 devices, or a larger batch: 8 may be no faster, in one host too" in half


def test_the_fewest_devices_that_meet_a_deadline_are_advised_and_not_the_whole_host_beside_them() -> None:
    def advised(**changes) -> list[str]:
        facts = replace(GOOD, **changes)
        return [rule(facts).advice for rule in RULES if rule(facts).applies]

    # 1000 steps take 8000 s on one device, 4020 s on two, 2020 s on four and 1020 s on all eight
    whole = "use the whole host by data parallelism"
    assert advised(deadline_s=8001.0)[0] == "stay on one device" and whole not in advised(deadline_s=8001.0)
    two = advised(deadline_s=5000.0)
    assert two[0] == "take 2 devices: fewer miss the deadline, or are short of memory" and whole not in two
    assert advised(deadline_s=1100.0)[0] == whole


def test_failures_are_those_of_the_hosts_that_are_advised() -> None:
    # 512 devices are 51 times as fast as 8: a token costs 1.25 times as much, so two hosts are advised
    many = replace(GOOD, hosts=(*ROWS, _row(64, 512, compute_s=0.02)))
    assert not failures_first(many).applies and "16 devices: a failure" in failures_first(many).figures
    assert failures_first(replace(many, deadline_s=30.0)).applies  # which only they meet


def test_a_host_of_one_device_has_no_whole_to_use_and_no_second_device_inside() -> None:
    one = _row(1, 1, compute_s=8.0)
    alone = replace(GOOD, between=(), half=one, host=one, split=_row(2, 2, compute_s=7.0), hosts=(one,))
    assert not data_parallel(alone).applies
    said = not_over_two_hosts(alone)
    assert said.advice == "do not add a second host for speed: take a faster network, or a larger batch"
    assert said.figures == "+14% speed for 2 times the devices"


def test_figures_by_hand() -> None:
    assert speed_up(ROWS[1], ROWS[0]) == pytest.approx(1.02 / 0.54, rel=1e-6)
    assert passes(ROWS, 0.10) is ROWS[2] and passes(ROWS, 0.9) is None
    assert stop_at(ROWS) is ROWS[1] and stop_at((NO_PLAN,)) is None


def test_clusters_that_gain_less_than_one_percent_are_one_line() -> None:
    one, more = _row(1, 8, compute_s=1.0), _row(2, 16, compute_s=0.5)
    idle = replace(_row(4, 32, compute_s=0.499), n_idle_devices=16)
    assert worth_showing((one, more, idle, NO_PLAN)) == (one, more, NO_PLAN)
    assert worth_showing((replace(one, n_idle_devices=4), _row(1, 4, compute_s=1.0)))[0].n_devices == 4
    text = " ".join(advice_text(AdviceAnswer("", (), (one, more, idle))).split())
    assert (
        "Left out, as less than 1% faster than a smaller cluster: 4 x toy; 1 of these 1 would leave devices idle."
        in text
    )


def test_devices_that_gain_nothing_in_one_host_are_not_offered_instead_of_two() -> None:
    idle = replace(_row(1, 8, compute_s=2.0, comm_s=0.02), n_idle_devices=4)
    said = not_over_two_hosts(replace(GOOD, host=idle, split=replace(idle, n_hosts=2)))
    assert said.applies and said.advice == "take 4 devices, or a larger batch: 8 may be no faster, in one host too"
    assert "4 of 8 devices idle; 8 devices in one host: +0%" in said.figures
    flat = stop_scaling(replace(GOOD, hosts=(ROWS[0], replace(_row(2, 16, compute_s=1.015), n_idle_devices=8))))
    assert "more of them gain less than 1%" in flat.advice and flat.figures.endswith("8 of 16 devices idle")


def test_fragments_of_hosts_keep_the_network() -> None:
    assert fragment("dgx_a100_x8", 4) == "dgx_a100_x8/4"
    assert fragment("dgx_a100_x8/4+ethernet_10g", 2) == "dgx_a100_x8/2+ethernet_10g"
    assert fragment("/boxes+old/my_box.toml", 2) == "/boxes+old/my_box.toml/2"


def test_rules_never_fail_without_plans() -> None:
    nothing = replace(GOOD, one=NO_PLAN, half=NO_PLAN, host=NO_PLAN, split=NO_PLAN, hosts=(NO_PLAN, NO_PLAN))
    assert [rule(nothing).situation for rule in RULES]
    assert leave_the_host(nothing).applies


@pytest.mark.parametrize(("n_done", "n_rows"), [(2, 2), (6, 6)])
def test_an_interrupt_keeps_the_rows_found(
    n_done: int, n_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    # 1, 2, 4 and 2 x 4 devices, one and two hosts; then the host with larger batches, which the network starves
    solve, solved = sweeping.solve_point, []

    def interrupted(problem, **given):
        if len(solved) == n_done:
            raise KeyboardInterrupt
        solved.append(problem)
        return solve(problem, **given)

    monkeypatch.setattr(sweeping, "solve_point", interrupted)
    monkeypatch.setattr(sweeping, "cache_entry", lambda name, key: tmp_path / f"{key}.json")
    monkeypatch.setattr(advising, "is_starved", lambda row: True)
    arguments = ["advise", GPT, "--set", "size=char", "--hw", "a100_pcie_x8", "--max-hosts", "2", "--fix", "tp=1,pp=1"]
    assert cli.run([*arguments, "--jobs", "1", "--format", "json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["is_interrupted"] and found["rules"] == [] and len(found["rows"]) == n_rows
    assert all(row["step_s"] for row in found["rows"])


def test_advise_from_the_command_line(capsys) -> None:
    arguments = ["advise", GPT, "--set", "size=char", "--hw", "a100_pcie_x8+ethernet_10g", "--max-hosts", "2"]
    arguments += ["--fix", "tp=1,pp=1"]
    assert cli.run([*arguments, "--samples", "1e6", "--deadline", "30d", "--jobs", "1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = (Path(GPT).parent.parent / "docs" / "what_to_buy.md").read_text()
    assert [name for name in (*found, *found["rules"][0]) if f"`{name}`" not in documented] == ["schema_version"]
    assert len(found["rules"]) == len(RULES) and "stay on one device" in found["verdict"]
    shapes = [(row["n_hosts"], row["n_devices"]) for row in found["rows"]]
    assert shapes == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (2, 16)]
    assert cli.run([*arguments, "--samples", "1e6", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Advice\n 1. ") and "8 devices over two hosts instead of 4 in one" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "is not so\n" in text and "- one layer does not fit" in text


def test_models_that_branch_on_data_and_rules_of_ones_own_are_advised_on(tmp_path: Path, capsys) -> None:
    model = str(Path(__file__).parent / "families" / "data_dependent.py")
    arguments = ["advise", model, "--hw", "dgx_a100_x8/2", "--max-hosts", "1", "--jobs", "1"]
    assert cli.run(arguments) == 4
    assert cli.run([*arguments, "--module-level"]) == 0
    assert "compiled" not in capsys.readouterr().out
    assert cli.run([*arguments, "--rules", str(tmp_path / "none.py")]) == 3
    buy = ["recommend", model, "--among", "dgx_a100_x8", "--max-hosts", "1", "--samples", "1e6", "--deadline", "1d"]
    assert cli.run([*buy, "--jobs", "1", "--module-level"]) == 0


def test_groups_of_a_mixed_cluster_train_together_where_that_is_faster() -> None:
    fast, slow = _row(8, 64, compute_s=1.0), _row(4, 32, compute_s=2.0)
    rules = mixed_rules(_row(12, 96, compute_s=0.75), [fast, slow], deadline_s=None)
    # 1 / 0.75 of the fast group; apart they train 1 + 1/2 in the time in which together they train 1 / 0.75
    assert [rule.applies for rule in rules] == [True, True, False]
    assert "1.33 times as fast as 8 x toy alone" in rules[0].advice and "1.13 times the samples" in rules[1].advice
    unsure = mixed_rules(_row(12, 96, compute_s=0.85), [fast, slow], deadline_s=None)  # 0.85 s, up to 1.06 s
    assert unsure[0].advice.endswith("8 x toy alone, or no faster: 1 s and 850 ms a step, off by -20% +25%")
    held_back = mixed_rules(_row(12, 96, compute_s=0.75, comm_s=0.3), [fast, slow], deadline_s=10.0)
    assert held_back[0].advice.startswith("train on 8 x toy alone") and held_back[2].applies
    too_big = mixed_rules(fast, [NO_PLAN, NO_PLAN], deadline_s=None)
    assert too_big[0].advice.endswith("no group alone holds it") and not too_big[1].applies
    nothing = mixed_rules(NO_PLAN, [NO_PLAN], deadline_s=60.0)
    assert "nothing fits" in nothing[0].advice and nothing[2].figures == "no plan"


def test_groups_that_lack_a_precision_are_told_another_and_not_to_add_hosts(capsys) -> None:
    # a V100 has no bf16; of fp16 and fp32, which both have, fp16 is faster
    file = str(Path(GPT).parent / "a100_v100.toml")
    arguments = ["advise", GPT, "--set", "size=char", "--hw", file, "--fix", "tp=1,pp=1,dp=64,zero=0"]
    assert cli.run([*arguments, "--jobs", "1", "--format", "json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict == "pass --precision fp16, or train on 8 x dgx_a100_x8 alone"
    alone = mixed_rules(NO_PLAN, [_row(8, 64, compute_s=1.0), NO_PLAN], deadline_s=None)
    assert alone[0].advice == "train on 8 x toy alone"


def test_advise_on_a_mixed_cluster_from_the_command_line(capsys) -> None:
    file = str(Path(GPT).parent / "a100_v100.toml")
    assert groups_alone(file) == (("dgx_a100_x8", 8), ("v100_x8", 4))
    arguments = ["advise", GPT, "--set", "size=char", "--hw", file, "--precision", "fp16", "--fix", "tp=1,pp=1"]
    assert cli.run([*arguments, "--jobs", "1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["n_hosts"], row["n_devices"]) for row in found["rows"]] == [(12, 96), (8, 64), (4, 32)]
    assert found["verdict"] and len(found["rules"]) == 3


def test_a_quick_search_of_a_mixed_cluster_has_time_for_batches_that_groups_share() -> None:
    file = str(Path(GPT).parent / "a100_v100.toml")
    point = Point(hw=file, n_hosts=1, global_batch=96, precision="fp16")
    question = Question(model=GPT, hw=(file,))
    tasks = [asking.task_of(point, load_hardware(name), question, graph="") for name in ("dgx_a100_x8", file)]
    assert [task.options.time_limit_s for task in tasks] == [QUICK_TIME_LIMIT_S, DEFAULT_TIME_LIMIT_S]
    given = asking.task_of(point, load_hardware(file), replace(question, time_limit_s=3.0), graph="")
    assert given.options.time_limit_s == 3.0
