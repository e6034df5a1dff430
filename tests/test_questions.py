"""Questions about an answer: why not another plan, what would change the decision, and what would make it fit."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan import api, cli
from autoplan.answers.answer import Answer, answer_from_json, answer_to_json
from autoplan.errors import InputError, PlanMismatchError, UsageError
from autoplan.options import Options
from autoplan.planning import deciding, questions
from autoplan.report.explain import sensitivity_report, why_not_report
from autoplan.report.plan import plan_report
from autoplan.units import GB, GiB

CHECKOUT = Path(__file__).parent.parent
MLP = CHECKOUT / "examples" / "mlp.py"


@pytest.fixture(scope="module")
def asked() -> tuple[api.Problem, Answer]:
    options = Options(global_batch=64, fix=(("dp", "4"), ("pp", "1")))
    problem = api.make_problem(MLP, hw="dgx_a100_x8", overrides={"depth": 8}, options=options)
    return problem, api.solve(problem)


def _with_device(problem: api.Problem, **changes: object) -> api.Problem:
    hardware = problem.hardware
    return replace(problem, hardware=replace(hardware, device=replace(hardware.device, **changes)))


def test_what_was_asked_survives_json_and_is_asked_again(asked, tmp_path: Path) -> None:
    problem, answer = asked
    read = answer_from_json(answer_to_json(answer))
    assert read.request == answer.request
    again = questions.asked_again(read)
    assert (again.graph, again.hardware, again.overrides) == (problem.graph, problem.hardware, problem.overrides)
    # the model file is gone: the copy in the output folder stands for it
    shutil.copy(MLP, tmp_path / "model.py")
    moved = replace(read, request=replace(read.request, model="gone/mlp.py"))
    assert questions.asked_again(moved, folder=tmp_path).graph.content_hash() == problem.graph.content_hash()


def test_another_model_or_no_plan_is_not_asked_about(asked, infeasible: Answer) -> None:
    answer = asked[1]
    best = replace(answer.best, plan=replace(answer.best.plan, graph_hash="of another model"))
    with pytest.raises(PlanMismatchError):
        questions.asked_again(replace(answer, result=replace(answer.result, best=best)))
    with pytest.raises(InputError, match="plan again"):
        questions.asked_again(infeasible)


def test_why_not_is_the_best_plan_with_the_fix_and_no_faster(asked) -> None:
    problem, answer = asked
    # tp takes the place of nothing, dp that of the dp that was fixed
    why = questions.why_not(problem, answer, fix=(("tp", "2"), ("dp", "2")))
    mesh = why.instead.best.plan.mesh
    assert (mesh.tp, mesh.dp, mesh.pp) == (2, 2, 1)
    # of the plans with dp 4 and pp 1 the chosen one is the best; this one has dp 2
    best = api.decide(replace(problem, options=replace(problem.options, fix=(("dp", "2"), ("pp", "1"), ("tp", "2")))))
    assert why.instead.best.estimate.step_s == pytest.approx(best.best.estimate.step_s, rel=2e-3)
    text = why_not_report(why)
    assert text.startswith("Why not tp=2, dp=2\n") and "with pp=1, tp=2, dp=2" in text
    assert "peak memory" in text and "exposed tp comm" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_why_not_says_what_it_would_train_otherwise(asked) -> None:
    problem, answer = asked
    note = "- dropout draws other masks than one process"
    before = replace(answer, notes=())
    why = questions.why_not(problem, before, fix=(("tp", "2"), ("dp", "2")))
    assert why.notes == why.instead.notes and why.left_out == ()
    more = (note.removeprefix("- "),)
    text = why_not_report(replace(why, notes=more, left_out=()))
    assert text.endswith(f"It trains otherwise than the chosen plan\n{note}\n")
    text = why_not_report(replace(why, notes=(), left_out=more))
    assert text.endswith(f"Only the chosen plan is not as one process here\n{note}\n")
    assert questions.why_not(problem, replace(answer, notes=more), fix=(("tp", "2"), ("dp", "2"))).left_out == more


def test_why_not_of_what_the_plan_has_says_so(asked) -> None:
    problem, answer = asked
    assert "The chosen plan has it." in why_not_report(questions.why_not(problem, answer, fix=(("dp", "4"),)))


def test_why_not_of_what_does_not_fit_says_by_how_much_and_where(asked) -> None:
    # 2 % of a GiB above the context and workspaces of a device: only plans that shard their state fit
    problem, answer = asked
    (ddp,) = (item for item in answer.result.baselines if item.baseline == "DDP")
    fixed_bytes = dict(ddp.estimate.memory_parts_bytes[0])["context_and_communicators"]
    small = _with_device(problem, memory_bytes=fixed_bytes + 2**20)
    text = why_not_report(questions.why_not(small, answer, fix=(("zero", "0"),)))
    assert "it is proved that no plan with dp=4, pp=1, zero=0 fits" in text
    assert "Device memory is what is short" in text and "stage 0 needs" in text and "GiB short" in text


def test_why_not_of_numbers_without_a_mesh_lists_those_that_would_do(asked) -> None:
    problem, answer = asked
    text = why_not_report(questions.why_not(problem, answer, fix=(("dp", "3"),)))
    assert "infeasible: there is no plan with pp=1, dp=3\n" in text
    assert "legal dp (divides the global batch): 1, 2, 4, 8" in text
    assert "0 combinations" not in text and "fits" not in text
    with pytest.raises(UsageError):
        questions.why_not(problem, answer, fix=(("tensor", "3"),))


def test_betterments_change_one_figure_each(asked) -> None:
    hardware = asked[0].hardware
    found = dict(questions.betterments(hardware))
    assert found["+1 GiB of memory"].device.memory_bytes == hardware.device.memory_bytes + GiB
    (link,) = [better for name, better in found.items() if name.startswith("+1 GB/s")]
    assert link.links[0].bytes_per_s == hardware.links[0].bytes_per_s + GB
    assert replace(link, links=hardware.links) == hardware
    rates = dict(found["1 % more compute"].device.peak_flops_per_s)
    assert rates["bf16"] == pytest.approx(1.01 * dict(hardware.device.peak_flops_per_s)["bf16"])
    # measured times of segments do not follow the data sheet
    assert "1 % more compute" not in dict(questions.betterments(hardware, is_measured=True))
    of_two = replace(hardware, n_devices_per_host=2)
    assert "+1 GB/s of nvlink (2 devices)" in dict(questions.betterments(of_two))


def test_sensitivity_finds_what_the_step_is_bound_by(asked) -> None:
    # at 1 GFLOP/s all of the step is compute, so 1 % more of it saves 1 - 1 / 1.01 = 0.99 % and the rest nothing
    problem, _ = asked
    slow = _with_device(problem, peak_flops_per_s=(("bf16", 1e9), ("fp32", 1e9)))
    rows = questions.sensitivity(slow, api.decide(slow))
    gains = {row.change: row.gain for row in rows}
    assert gains.pop("1 % more compute") == pytest.approx(1 - 1 / 1.01, rel=0.05)
    assert all(0.0 <= gain < 0.001 for gain in gains.values())
    assert {row.plan_changes for row in rows} == {"same plan"}
    assert "0.9" in sensitivity_report(rows)


def test_sensitivity_says_which_plan_more_memory_would_allow(asked) -> None:
    # the best plan of one device is short of memory by a byte, so a slower one is chosen, until there is 1 GiB more;
    # the batch is large enough for activations to need more than gradients
    problem, _ = asked
    fix = (("dp", "1"), ("tp", "1"), ("pp", "1"))
    free = replace(problem, options=replace(problem.options, fix=fix, global_batch=2**16))
    best = api.decide(free).best
    tight = _with_device(free, memory_bytes=max(best.estimate.needed_bytes) - 1)
    chosen = api.decide(tight).best
    memory = next(row for row in questions.sensitivity(tight, api.decide(tight)) if row.change == "+1 GiB of memory")
    assert memory.step_s == pytest.approx(best.estimate.step_s)
    assert memory.gain == pytest.approx(1 - best.estimate.step_s / chosen.estimate.step_s)
    assert memory.gain > 0 and memory.plan_changes.startswith("plan changes: ")


def test_sensitivity_without_time_says_so_and_invents_nothing(asked) -> None:
    problem, answer = asked
    clock = itertools.count(0.0, 100.0)
    rows = questions.sensitivity(problem, answer, clock=lambda: next(clock))
    assert [row.step_s is None for row in rows] == [False, True, True, True]
    assert "no time left to search" in sensitivity_report(rows)


def test_plan_changes_name_what_differs(answer: Answer) -> None:
    plan = answer.best.plan
    wider = replace(plan, mesh=replace(plan.mesh, tp=2))
    assert questions.plan_changes(plan, plan) == "same plan"
    assert questions.plan_changes(plan, wider) == "plan changes: tensor parallel 1 -> 2"
    chunked = replace(plan, loss="chunked")
    assert questions.plan_changes(plan, chunked) == "plan changes: loss as usual -> chunked: in slices of its rows"
    assert questions.plan_changes(chunked, plan) == "plan changes: loss chunked: in slices of its rows -> as usual"
    captured = replace(plan, mesh=replace(plan.mesh, compile=True, cuda_graph=True))
    assert questions.plan_changes(plan, captured) == "plan changes: modules as usual -> compiled, CUDA graph"
    moved = replace(plan, stages=(replace(plan.stages[0], stop=1), replace(plan.stages[1], start=1)))
    assert questions.plan_changes(plan, moved) == "plan changes: other layers per stage"


def test_an_infeasible_answer_comes_with_remedies_that_fit(asked) -> None:
    # the memory is half way between what the whole state and an eighth of it need
    problem, _ = asked
    whole, eighth = (
        replace(problem, options=replace(problem.options, fix=(("dp", "8"), ("pp", "1"), ("tp", "1"), ("zero", zero))))
        for zero in "03"
    )
    needed_bytes = [max(api.decide(item).best.estimate.needed_bytes) for item in (whole, eighth)]
    found = api.solve(_with_device(whole, memory_bytes=sum(needed_bytes) // 2))
    assert (found.result.status, found.result.closest.stage) == ("infeasible", 0)
    first = found.result.remedies[0]
    assert first.change == f"zero={first.mesh.zero_stage} instead of zero=0" and first.mesh.dp == 8
    assert found.result.nearest_fix.startswith(first.change)
    text = plan_report(found)
    assert "no plan with dp=8, pp=1, tp=1, zero=0 fits" in " ".join(text.split()) and first.change in text
    assert answer_from_json(answer_to_json(found)) == found
    assert json.loads(answer_to_json(found))["nearest_fix"] == found.result.nearest_fix


def test_ctrl_c_keeps_the_remedies_found_so_far(asked, answer: Answer, infeasible: Answer, monkeypatch) -> None:
    problem, _ = asked
    monkeypatch.setattr(deciding, "decide", lambda problem: infeasible)
    results = iter([answer.result, replace(answer.result, stopped_by="interrupted")])
    monkeypatch.setattr(deciding, "_retry", lambda *_: next(results))
    found = api.solve(problem).result
    assert (found.status, found.stopped_by) == ("infeasible", "interrupted")
    assert [remedy.change for remedy in found.remedies] == ["pp=2 instead of pp=1"]


def test_explain_asks_again_on_the_command_line(asked, tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text(answer_to_json(asked[1]))
    assert cli.run(["explain", str(path), "--why-not", "tp=2", "--sensitivity", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why_not"]["fix"] == {"tp": "2"}
    assert found["why_not"]["answer"]["plan"]["tp"] == 2
    assert [row["change"] for row in found["sensitivity"]][:2] == ["as it is", "+1 GiB of memory"]
    assert cli.run(["explain", str(path), "--why-not", "tp=two"]) == 2


def test_a_wrong_why_not_is_refused_before_the_model_is_traced_again(asked, tmp_path: Path, capsys) -> None:
    answer = asked[1]
    gone = replace(answer, request=replace(answer.request, model="gone/mlp.py"))  # a trace would not find it
    path = tmp_path / "plan.json"
    path.write_text(answer_to_json(gone))
    assert cli.run(["explain", str(path), "--why-not", "microbatch=2"]) == 2
    assert "--why-not: unknown name 'microbatch'; did you mean \"micro_batch\"" in capsys.readouterr().err
    for fix in ("tp=3", "dp=64"):  # on 8 devices
        assert cli.run(["explain", str(path), "--why-not", fix]) == 2
        assert re.search(f"--why-not .*{fix}: found .*\n  expected: .*\n  fix: ", capsys.readouterr().err)
