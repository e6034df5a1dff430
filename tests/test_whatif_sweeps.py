"""Sweeps: what is kept of them, in processes, interrupted, damaged, with clusters that cannot be used."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from whatif_toys import keep_points_apart, toy_result

import autoplan
from autoplan import api, cli
from autoplan.checks.options import parse_fix
from autoplan.errors import InputError, StoppedError
from autoplan.garbage import NEW_OBJECTS_PER_COLLECTION, few_collections
from autoplan.hardware.cluster import load_hardware
from autoplan.options import Options
from autoplan.parallel_plan import GroupRanks, Mesh, Plan, StagePlan
from autoplan.search import GOOD_ENOUGH
from autoplan.what_if import asking
from autoplan.what_if import points as whatif_points
from autoplan.what_if import sweep as sweeping
from autoplan.what_if.asking import ask
from autoplan.what_if.other_sizes import of_other_sizes
from autoplan.what_if.points import Point, searched
from autoplan.what_if.question import Question, checked_question, parse_question
from autoplan.what_if.row_tables import row_to_dict
from autoplan.what_if.sweep import Task
from autoplan.what_if.worker_pool import done_in_processes

CHECKOUT = Path(__file__).parent.parent
GPT = str(CHECKOUT / "examples" / "gpt.py")
MLP = str(CHECKOUT / "examples" / "mlp.py")
CHAR = (("size", "char"),)
PLAIN = Options(fix=(("schedule", "plain"),))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_points_apart(tmp_path_factory.mktemp("points"), monkeypatch)


def _question(**changes) -> Question:
    return replace(
        Question(GPT, ("dgx_a100_x8",), hosts=(1, 2), overrides=CHAR, global_batches=(64,), n_tokens=1e9), **changes
    )


def test_a_second_sweep_searches_only_what_is_new() -> None:
    first = ask(_question())
    assert (first.sweep.n_kept, len(first.rows)) == (0, 2)
    dearer = replace(_question(given_usd=(("dgx_a100_x8", 9.0),)), hosts=(1, 2, 4))
    second = ask(dearer)
    assert (second.sweep.n_kept, len(second.rows)) == (2, 3)
    assert [row.step_s for row in second.rows[:2]] == [row.step_s for row in first.rows]
    assert second.rows[0].cost_usd == pytest.approx(9.0 * first.rows[0].device_hours)


@pytest.mark.parametrize("found", ["a slow plan", "nothing"])
def test_more_hosts_are_never_slower_than_fewer(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    solve, asked = sweeping.solve_point, []

    def stop_early(problem, **given):
        asked.append(problem)
        result = solve(problem, **given)
        if problem.hardware.n_hosts == 1 or "dp" in dict(problem.options.fix):
            return result
        if found == "nothing":
            return replace(result, status="unknown", step_s=None, gap=None)
        return replace(result, status="feasible", step_s=1.25, gap=0.992)  # no plan takes less than 0.01 s

    monkeypatch.setattr(sweeping, "solve_point", stop_early)
    one, two = ask(_question(options=PLAIN)).rows
    assert (two.step_s, two.n_hosts, two.status) == (one.step_s, 2, "feasible")
    assert two.fix == one.fix and two.n_idle_devices == (one.n_idle_devices or 0) + 8
    assert two.gap == (None if found == "nothing" else pytest.approx(max(0.0, 1.0 - 0.01 / (one.step_s or 0.0))))
    assert [problem.hardware.n_hosts for problem in asked] == [1, 2, 2]
    monkeypatch.setattr(sweeping, "solve_point", solve)
    again = ask(_question(options=PLAIN))
    assert (again.rows == (one, two)) == (
        found == "nothing"
    )  # all three searches are kept, but for one far from a proof


def test_the_mesh_of_a_quick_plan_is_judged_under_every_schedule() -> None:
    (quick,), (plain,) = ask(_question(hosts=(1,))).rows, ask(_question(hosts=(1,), options=PLAIN)).rows
    (full,) = ask(_question(hosts=(1,), search="full")).rows
    assert "1f1b" in (plain.plan or "") and "interleaved" in (quick.plan or "")
    assert quick.step_s == pytest.approx(full.step_s, rel=GOOD_ENOUGH) and quick.step_s < plain.step_s


def test_a_plan_counts_for_every_number_of_hosts_that_has_its_devices() -> None:
    # of 16 devices the plan takes 8, which two hosts have, and one has not
    used = {1: (4, 3.0), 2: (8, 3.0), 4: (8, 1.0)}
    points = [Point("toy_x4", n_hosts, 8, "bf16") for n_hosts in used]
    results = [
        toy_result(n_hosts=n_hosts, n_devices=4 * n_hosts, n_used_devices=n_used, step_s=step_s, fix=f"dp={n_used}")
        for n_hosts, (n_used, step_s) in used.items()
    ]
    tasks = [Task("graph", load_hardware("dgx_a100_x8"), Options(), "toy_x4")] * 3
    assert {place: task.options.fix for place, task in of_other_sizes(points, tasks, results).items()} == {
        1: (("dp", "8"),)
    }


def test_an_error_in_a_process_comes_with_the_lines_that_it_came_through() -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        list(done_in_processes(int, {"a": ("x",)}, n_jobs=1))
    assert "worker_pool.py" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="KeywordOnly: lost"):
        list(done_in_processes(raise_keyword_only, {"a": ()}, n_jobs=1))


class KeywordOnly(Exception):
    def __init__(self, *, text: str) -> None:
        super().__init__(text)


def raise_keyword_only() -> None:
    raise KeywordOnly(text="lost")


def test_another_optimizer_is_another_point(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    text = Path(GPT).read_text() + "\n\ndef build_optimizer(params):\n    return torch.optim."
    rows = []
    for optimizer in ("AdamW(params)", "SGD(params, lr=0.1)"):
        model.write_text(f"{text}{optimizer}\n")
        answer = ask(replace(_question(hosts=(1,), options=PLAIN), model=str(model)))
        assert answer.sweep.n_kept == 0
        rows += answer.rows
    assert rows[0].peak_bytes > rows[1].peak_bytes and rows[0].step_s > rows[1].step_s


@pytest.mark.parametrize(("gap", "n_kept"), [(0.05, 1), (0.5, 0)])
def test_what_was_left_far_from_a_proof_is_searched_again(monkeypatch: pytest.MonkeyPatch, gap, n_kept) -> None:
    solve = sweeping.solve_point
    monkeypatch.setattr(sweeping, "solve_point", lambda *given, **named: replace(solve(*given, **named), gap=gap))
    for known in (0, n_kept):
        assert ask(_question(hosts=(1,), options=PLAIN)).sweep.n_kept == known


def test_a_damaged_result_is_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "cache_entry", lambda name, key: tmp_path / f"{key}.json")
    first = ask(_question(hosts=(1,), options=PLAIN))
    (entry,) = tmp_path.glob("*.json")
    for text in ("{", json.dumps({**json.loads(entry.read_text()), "result": '{"step_s": 1e-9}'}), "[1]"):
        entry.write_text(text)
        again = ask(_question(hosts=(1,), options=PLAIN))
        assert again.sweep.n_kept == 0 and again.rows == first.rows
    assert ask(_question(hosts=(1,), options=PLAIN)).sweep.n_kept == 1


def test_processes_and_the_command_line_give_the_same_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    alone = ask(_question(time_limit_s=60.0))  # so long that no search is cut off, however busy the machine
    monkeypatch.setattr(sweeping, "cache_entry", lambda name, key: tmp_path / f"{key}.json")
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1,2", "--global-batch", "64"]
    arguments += ["--tokens", "1e9", "--time-limit", "60"]
    assert cli.run([*arguments, "--jobs", "2", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["n_known_before"] == 0 and "2 of 2 points" in err
    assert found["rows"] == json.loads(json.dumps([row_to_dict(row) for row in alone.rows]))
    asked = {"hw": ("dgx_a100_x8",), "hosts": (1, 2), "global_batch": 64, "overrides": dict(CHAR)}
    library = api.whatif(GPT, **asked, n_tokens=1e9, time_limit_s=60.0)
    assert library == alone.rows


def test_batch_and_precision_of_the_options_are_those_of_the_question() -> None:
    given = replace(_question(), global_batches=(), options=Options(global_batch=32, precision="fp32"))
    folded = checked_question(given, where="q")
    assert (folded.global_batches, folded.precisions) == ((32,), ("fp32",))
    assert folded.options == Options() and checked_question(folded, where="q") == folded
    for changes in ({"global_batches": (64,)}, {"precisions": ("fp16", "bf16")}):
        with pytest.raises(InputError, match="expected: one of the two"):
            checked_question(replace(given, **changes), where="q")


def test_processes_are_born_with_interrupts_blocked_and_the_parent_is_not() -> None:
    ((key, blocked),) = done_in_processes(signal.pthread_sigmask, {"a": (signal.SIG_BLOCK, ())}, n_jobs=2)
    assert key == "a" and signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_and_commands_look_for_garbage_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), []
    monkeypatch.setattr(cli.cli, "main", lambda **_: seen.append(gc.get_threshold()))
    assert cli.run([]) == 0
    ((_, threshold),) = done_in_processes(gc.get_threshold, {"a": ()}, n_jobs=1)
    assert seen[0][0] == threshold[0] == NEW_OBJECTS_PER_COLLECTION > 10 * before[0]
    assert gc.get_threshold() == before  # of a program that runs a command, nothing has changed
    for n_objects in (0, 10 * NEW_OBJECTS_PER_COLLECTION):
        gc.set_threshold(n_objects)
        try:
            with few_collections():
                assert gc.get_threshold()[0] == n_objects
        finally:
            gc.set_threshold(*before)


def test_processes_end_at_once_with_what_they_run_and_what_they_have_not_read() -> None:
    unread = (0.0, "x" * 2**20)  # more than a pipe holds; `time.sleep` refuses it when it has been read
    done = done_in_processes(time.sleep, {"short": (0.0,), "long": (600.0,), "waiting": unread}, n_jobs=2)
    assert next(done) == ("short", None)
    started_s = time.perf_counter()
    done.close()
    assert time.perf_counter() - started_s < 5.0 and not multiprocessing.active_children()


def test_what_a_process_raises_is_raised_and_one_that_ends_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(done_in_processes(int, {"a": ("x",)}, n_jobs=1))
    with pytest.raises(StoppedError, match="ended before its time"):
        list(done_in_processes(os._exit, {"a": (1,)}, n_jobs=1))


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    solve, n_done = sweeping.solve_point, []

    def interrupted_at_the_second(problem, **given):
        if n_done:
            raise KeyboardInterrupt
        n_done.append(1)
        return solve(problem, **given)

    monkeypatch.setattr(sweeping, "solve_point", interrupted_at_the_second)
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1,2", "--global-batch", "64"]
    assert cli.run([*arguments, "--jobs", "1", "--format", "json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["is_interrupted"] and [row["status"] == "interrupted" for row in found["rows"]] == [False, True]
    monkeypatch.setattr(sweeping, "solve_point", solve)
    assert ask(_question()).sweep.n_kept == 1


def test_an_unusable_cluster_is_a_row(capsys) -> None:
    # a V100 has no bf16
    arguments = ["whatif", MLP, "--hw", "v100_x8,dgx_a100_x8", "--jobs", "1", "--format", "json"]
    assert cli.run(arguments) == 0
    v100, a100 = json.loads(capsys.readouterr().out)["rows"]
    assert v100["status"] == "unusable" and "bf16" in v100["detail"]
    assert a100["step_s"] is not None and a100["global_batch"] == v100["global_batch"] == 64
    # 16 data-parallel ranks do not fit on one host of 8
    assert cli.run(["whatif", MLP, "--hw", "dgx_a100_x8", "--hosts", "1,2", "--fix", "dp=16", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "infeasible" in text and "fastest" in text and "global batch: 128 samples on every cluster" in text


def test_fixed_values_that_divide_no_global_batch_are_refused_before_the_trace(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["whatif", MLP, "--hw", "dgx_a100_x8", "--jobs", "1", "--format", "json"]
    fixed = [*arguments, "--fix", "dp=8,micro_batch=4", "--global-batch"]
    assert cli.run([*fixed, "16,32"]) == 0  # 16 samples are 2 on each rank: a row that says so
    assert [row["status"] == "infeasible" for row in json.loads(capsys.readouterr().out)["rows"]] == [True, False]
    monkeypatch.setattr(asking, "trace_all", lambda *given: pytest.fail("traced"))
    assert cli.run([*fixed, "16"]) == 2
    assert "--fix micro_batch=4 does not divide a rank's part of --global-batch 16" in capsys.readouterr().err
    assert cli.run([*arguments, "--fix", "dp=3"]) == 2
    assert "--fix dp=3 does not divide the default global batch of 64" in capsys.readouterr().err


def test_absurd_sizes_are_answered_without_infinities(capsys) -> None:
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1", "--global-batch", "64"]
    for tokens in ("1", "1e20"):
        assert cli.run([*arguments, "--tokens", tokens, "--jobs", "1", "--format", "json"]) == 0
        (row,) = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["rows"]
        assert row["train_s"] > 0


def test_quick_searches_are_of_one_stage_per_rank_unless_a_schedule_is_fixed() -> None:
    assert dict(searched(Options(), search="quick").fix)["schedule"] == "plain"
    fixed = Options(fix=(("schedule", "gpipe"),))
    assert searched(fixed, search="quick").fix == fixed.fix and searched(Options(), search="full").fix == ()


@pytest.mark.parametrize(
    ("arguments", "limits_s"),
    [
        ([], [(1.0, 15.0)]),
        (["--time-limit", "1"], [(1.0, None)]),
        (["--time-limit", "7"], [(7.0, None)]),
        (["--search", "full"], [(15.0, None)]),
    ],
)
def test_a_time_limit_that_is_given_is_that_of_each_search(
    monkeypatch: pytest.MonkeyPatch, capsys, arguments: list[str], limits_s: list[tuple[float, float | None]]
) -> None:
    asked: list[tuple[float | None, float | None]] = []
    decide = whatif_points.decide

    def find_nothing(problem, *, clock, patience_s):
        asked.append((problem.options.time_limit_s, patience_s))
        answer = decide(problem, clock=clock, patience_s=patience_s)
        return replace(answer, result=replace(answer.result, status="unknown", best=None))

    monkeypatch.setattr(whatif_points, "decide", find_nothing)
    command = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--fix", "dp=8,tp=1,pp=1,recompute=none"]
    assert cli.run([*command, "--global-batch", "64", "--jobs", "1", *arguments]) == 0
    assert asked == limits_s
    library = {"hw": ("dgx_a100_x8",), "overrides": dict(CHAR), "global_batch": 64, "fix": (("dp", "8"),)}
    if arguments[:1] == ["--time-limit"]:
        autoplan.whatif(GPT, time_limit_s=float(arguments[1]), **library)
        assert asked == 2 * limits_s


def test_a_question_names_no_more_points_than_can_be_answered() -> None:
    tables = {
        "workload": {"model": "m.py", "global_batch": list(range(1, 200))},
        "clusters": {"hw": ["a"], "hosts": list(range(1, 200))},
    }
    with pytest.raises(InputError, match="39601 points"):
        parse_question(tables, where="w")


LLAMA = str(CHECKOUT / "examples" / "llama.py")
LONG_LLAMA = {"size": "1b", "context": 32768}  # on one device of 40 GB, which it needs all of


@pytest.mark.parametrize(
    ("model", "overrides", "hw", "batch", "asked"),
    [
        (GPT, {}, "dgx_a100_x8/2", 16, ""),  # compiled, a CUDA graph
        (GPT, {}, "dgx_a100_x8/2", 16, "cuda_graph=off,compile=off"),
        (GPT, {}, "dgx_a100_x8/2", 16, "grad_compression=powersgd,powersgd_rank=2,loss_average=global_batch"),
        (LLAMA, LONG_LLAMA, "dgx_a100_40g_x8/1", 1, ""),  # a chunked loss
        (LLAMA, LONG_LLAMA, "dgx_a100_40g_x8/1", 1, "keep_attention=off"),
    ],
)
def test_the_fix_of_a_row_is_what_plan_takes_to_get_its_plan(model, overrides, hw, batch, asked: str) -> None:
    def problem(fix: str, **options):
        given = Options(global_batch=batch, fix=parse_fix([fix]), **options)
        return api.make_problem(model, hw=hw, overrides=overrides, options=given)

    first = problem(asked)
    row = whatif_points.solve_point(replace(first, options=searched(first.options, search="quick")))
    assert row.fix is not None
    again = api.decide(problem(row.fix, top=1)).best
    assert again is not None and again.estimate.step_s == pytest.approx(row.step_s, rel=1e-9)
    assert whatif_points.fix_of(again.plan, parse_fix([asked])) == row.fix
    assert asked.split(",") == [""] or set(asked.split(",")) <= set(row.fix.split(","))


def test_the_fix_of_a_row_names_no_choice_that_is_none() -> None:
    plan = Plan(Mesh(dp=8, n_micro_batches=2), (StagePlan(0, 3),))
    rest = "recompute=none,loss=whole,compile=off,memory_format=contiguous,cuda_graph=off"
    # one stage, nothing sharded, nothing recomputed: what was asked of these is left out, as it is of the quick search
    asked = (("keep_attention", "on"), ("schedule", "plain"), ("batch_norm", "local"))
    text = f"dp=8,tp=1,pp=1,zero=0,micro_batch=1,{rest},generated=off,batch_norm=local"
    assert whatif_points.fix_of(plan, asked) == text
    # code of a pipeline is always generated, whatever was asked
    piped = replace(plan, mesh=Mesh(dp=4, pp=2, n_micro_batches=2, zero_stage=1, zero_shard_degree=4))
    text = f"dp=4,tp=1,pp=2,zero=1,shard=4,micro_batch=1,schedule=1f1b,{rest},generated=on"
    assert whatif_points.fix_of(piped, (("generated", "on"),)) == text
    # a mixed cluster takes neither of these on, though a plan in one of its groups may have them
    alone = replace(plan, mesh=replace(plan.mesh, cuda_graph=True), groups=(GroupRanks(0, 1, "dgx_a100_x8"),))
    assert "cuda_graph" not in whatif_points.fix_of(alone)
