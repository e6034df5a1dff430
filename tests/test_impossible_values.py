"""What no plan can have: values that are fixed, given plans, and clusters that are too small."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan import api, cli, errors
from autoplan.checks.options import check_degrees, parse_fix
from autoplan.options import Options
from autoplan.parallel_plan import Plan
from autoplan.planning import problem as problems
from autoplan.search import remedies

CHECKOUT = Path(__file__).parent.parent
MLP = "examples/mlp.py"


def test_infeasible_on_a_hardware_file_exits_5(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "TIME_LIMIT_S", 0.0)
    text = (CHECKOUT / "hardware_profiles" / "dgx_a100_x8.toml").read_text()
    box = tmp_path / "my_box.toml"
    box.write_text(re.sub(r'^memory = \{ value = "[^"]*"', 'memory = { value = "2 GiB"', text, flags=re.MULTILINE))
    arguments = ["plan", "examples/gpt.py", "--set", "size=char", "--hw", str(box), "--fix", "dp=8,zero=0"]
    assert cli.run([*arguments, "--format", "json"]) == 5
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "infeasible" and "unknown" not in err


def test_no_mesh_divides_is_an_infeasible_answer_in_json_and_in_the_library(capsys) -> None:
    # there is nothing to shard over one data-parallel rank
    arguments = ["plan", MLP, "--hw", "dgx_a100_x8", "--global-batch", "12", "--fix", "dp=1,zero=1"]
    assert cli.run([*arguments, "--format", "json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert (
        found["status"] == "infeasible" and "legal dp (divides the global batch): 1, 2, 3, 4, 6" in found["nearest_fix"]
    )
    assert cli.run(arguments) == 5
    assert "legal dp" in capsys.readouterr().out
    result = autoplan.plan(CHECKOUT / MLP, hw="dgx_a100_x8", global_batch=12, fix=(("dp", "1"), ("zero", "1")))
    assert (result.status, result.best) == ("infeasible", None)


def test_a_fixed_dp_that_does_not_divide_the_global_batch_is_a_usage_error(capsys) -> None:
    assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", "--global-batch", "7", "--fix", "dp=8"]) == 2
    error = capsys.readouterr().err
    assert "--fix dp=8 does not divide --global-batch 7" in error
    assert "fix: use dp=1, or a global batch that is a multiple of 8" in error
    with pytest.raises(errors.UsageError, match="use dp=4, or"):
        autoplan.plan(CHECKOUT / MLP, hw="dgx_a100_x8", global_batch=12, fix=(("dp", "8"),))


@pytest.mark.parametrize(
    ("arguments", "found", "expected", "fix"),
    [
        (
            ["--hw", "dgx_a100_x8", "--fix", "dp=8,tp=2"],
            "--fix dp=8,tp=2: found 8 x 2 = 16 devices",
            "at most 8 devices, as the cluster has",
            "use dp x tp of 1, 2, 4, 8, or more hosts: --hosts 2",
        ),
        (
            ["--hw", "dgx_a100_x8", "--fix", "dp=3"],
            "--fix dp=3: found 3 devices",
            "a divisor of 1, 2, 4 or 8 of the 8 devices, which a plan may use",
            "use dp of 1, 2, 4, 8",
        ),
        (
            ["--hw", "dgx_a100_x8", "--fix", "tp=3"],
            "--fix tp=3: found '3, on 1 x 8 devices'",
            "a divisor or a multiple of the devices of a host",
            "use tp of 1, 2, 4, 8",
        ),
        (  # plans for 2 of 3 hosts leave one idle, but none is for a host and a half
            ["--hw", "dgx_a100_x8", "--hosts", "3", "--fix", "tp=4,dp=3,pp=1"],
            "--fix tp=4,dp=3,pp=1: found 4 x 3 x 1 = 12 devices",
            "1, 2, 4, 8, 16 or 24 of the 24 devices, which a plan may use",
            "use tp x dp x pp of 2, 4, 8, 16",
        ),
        (  # of 17 hosts there is no plan: up to 16 any number, then every second
            ["--hw", "dgx_a100_x8", "--hosts", "64", "--fix", "tp=8,dp=17,pp=1"],
            "--fix tp=8,dp=17,pp=1: found 8 x 17 x 1 = 136 devices",
            "1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, ... or 512 of the 512 devices, which a plan may use",
            "use tp x dp x pp of 120, 128, 144, 160",
        ),
        (
            ["--hw", "dgx_a100_x8", "--global-batch", "24", "--fix", "dp=4,micro_batch=16"],
            "--fix micro_batch=16 does not divide a rank's part of --global-batch 24",
            "a divisor of 24 / 4 ranks = 6 samples",
            "use micro_batch=2, or a global batch that is a multiple of 64",
        ),
        (
            ["--hw", "dgx_a100_x8", "--fix", "micro_batch=128"],
            "--fix micro_batch=128 does not divide a rank's part of the default global batch of 64",
            "a divisor of 64 samples",
            "use micro_batch=64, or a global batch that is a multiple of 128",
        ),
        (
            ["--hw", "v100_x8"],
            "--precision bf16, the default: found 'Tesla V100-SXM2-32GB without bf16'",
            "one of fp32, fp16",
            "use --precision fp16, or another device",
        ),
    ],
)
def test_values_that_no_plan_on_the_cluster_has_are_usage_errors_before_the_trace(
    arguments: list[str], found: str, expected: str, fix: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "trace_model", lambda *given, **options: pytest.fail("traced"))
    assert cli.run(["plan", MLP, *arguments]) == 2
    assert f"{found}\n  expected: {expected}\n  fix: {fix}\n" in capsys.readouterr().err


@pytest.mark.parametrize("fix", ["dp=8", "dp=16", "dp=4,tp=2", "tp=3", "dp=2,tp=2,pp=4"])
def test_fixed_degrees_may_leave_hosts_idle(fix: str) -> None:
    # of 3 hosts of 8 devices: plans may use 1, 2, 4, 8, 16 or 24
    check_degrees(Options(fix=parse_fix([fix])), counts=(24, 16, 8, 4, 2, 1), n_devices_per_host=8)


def test_ops_without_a_rule_are_reported_and_refused_under_strict(tmp_path: Path, capsys) -> None:
    model = tmp_path / "odd.py"
    text = (CHECKOUT / MLP).read_text()
    assert "F.gelu(" in text or "relu(" in text
    model.write_text(re.sub(r"(?:F|torch|functional)\.(?:gelu|relu)\(", "torch.special.bessel_j1(", text))
    arguments = ["plan", str(model), "--hw", "dgx_a100_x8"]
    assert cli.run(arguments) == 0
    assert "no rule: aten.special_bessel_j1" in " ".join(capsys.readouterr().out.split())
    assert cli.run([*arguments, "--strict"]) == 3
    assert "aten.special_bessel_j1" in capsys.readouterr().err


def test_fixing_what_a_model_does_not_have_exits_2(capsys) -> None:
    assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", "--fix", "batch_norm=synchronized"]) == 2
    assert "no BatchNorm" in capsys.readouterr().err
    assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", "--fix", "loss_average=global_batch"]) == 2
    assert "--fix loss_average=global_batch: found 'a loss that is not one mean" in capsys.readouterr().err
    for fix in ("tp=2", "pp=2"):
        assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", "--module-level", "--fix", fix]) == 2
        assert f"--fix {fix} beside --module-level" in capsys.readouterr().err


@pytest.fixture(scope="module")
def fp32_problem_and_plan():
    fix = (("tp", "2"), ("pp", "2"), ("zero", "1"))
    options = Options(global_batch=32, precision="fp32", fix=fix, time_limit_s=3.0)
    problem = api.make_problem(CHECKOUT / "examples" / "gpt.py", hw="dgx_a100_x8", options=options)
    return replace(problem, options=replace(options, precision="bf16", fix=())), api.solve(problem).best.plan


def test_a_given_plan_is_not_scored_with_another_batch_or_precision(tmp_path: Path, capsys) -> None:
    model, of_plan = [str(CHECKOUT / MLP), "--hw", "dgx_a100_x8"], ["--plan", str(tmp_path / "plan")]
    assert cli.run(["plan", *model, "--global-batch", "32", "--fix", "dp=8", "--out", str(tmp_path / "plan")]) == 0
    assert cli.run(["estimate", *model, *of_plan]) == 0
    assert "global batch 32, that of the plan" in capsys.readouterr().out
    assert cli.run(["estimate", *model, *of_plan, "--global-batch", "32", "--precision", "bf16"]) == 0
    for option, value, said in (
        ("--global-batch", "64", "--global-batch: found 64\n  expected: 32, as the given plan has"),
        ("--precision", "fp32", "--precision: found 'fp32'\n  expected: bf16, as the given plan has"),
    ):
        assert cli.run(["estimate", *model, *of_plan, option, value]) == 2
        assert said in capsys.readouterr().err


def test_the_library_scores_a_given_plan_in_its_own_precision_alone() -> None:
    # V100 have no bf16, the default
    model, hw = CHECKOUT / MLP, "v100_x8"
    plan = api.plan(model, hw=hw, precision="fp16", fix="dp=8").best.plan
    assert api.estimate(model, hw=hw, plan=plan).best.plan == plan
    assert api.estimate(model, hw=hw, plan=plan, precision="fp16").best.plan == plan
    with pytest.raises(errors.UsageError, match=r"--precision: found 'fp32'\n  expected: fp16, as the given plan has"):
        api.estimate(model, hw=hw, plan=plan, precision="fp32")


def test_mfu_of_a_given_plan_is_against_the_peak_of_its_precision(fp32_problem_and_plan) -> None:
    problem, plan = fp32_problem_and_plan
    peaks = dict(problem.hardware.device.peak_flops_per_s)
    assert api.score(problem, plan).workload.peak_flops_per_s == peaks["fp32"] != peaks["bf16"]


def _first_layout(plan: Plan, text: str) -> Plan:
    first = plan.shardings[0]
    values = ((first.values[0][0], text), *first.values[1:])
    return replace(plan, shardings=(replace(first, values=values), *plan.shardings[1:]))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda plan: replace(plan, mesh=replace(plan.mesh, dp=0)), "mesh.dp"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, zero_shard_degree=0)), "mesh.zero_shard_degree"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, zero_shard_degree=3)), "mesh.zero_shard_degree"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, zero_stage=7)), "mesh.zero_stage"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, schedule="zigzag")), "mesh.schedule"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, n_chunks=0)), "mesh.n_chunks"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, sharding="Q")), "mesh.sharding"),
        (lambda plan: replace(plan, precision="int8"), "precision"),
        (lambda plan: replace(plan, stages=()), "stages"),
        (lambda plan: replace(plan, stages=(replace(plan.stages[0], start=1), *plan.stages[1:])), "stages[0].start"),
        (lambda plan: replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], stop=99))), "stop"),
        (
            lambda plan: replace(plan, stages=(replace(plan.stages[0], recomputed=(-1,)), *plan.stages[1:])),
            "recomputed",
        ),
        (lambda plan: replace(plan, shardings=()), "shardings"),
        (lambda plan: replace(plan, mesh=replace(plan.mesh, tp=1)), "shardings"),
        (lambda plan: _first_layout(plan, "S(zero)"), "shardings of"),
        (lambda plan: _first_layout(plan, "S(0/0)"), "shardings of"),
        (lambda plan: _first_layout(plan, "S(9)"), "shardings of"),
    ],
)
def test_impossible_plan_is_an_input_error_naming_the_field(fp32_problem_and_plan, damage, named: str) -> None:
    problem, plan = fp32_problem_and_plan
    with pytest.raises(errors.InputError, match=re.escape(named)) as caught:
        api.score(problem, damage(plan))
    assert caught.value.exit_code == 3
