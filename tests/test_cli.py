"""The command line: results on stdout, the rest on stderr, and exit codes that scripts may rely on."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import autoplan
from autoplan import api, cli, errors
from autoplan.answers.answer import Answer, Request, answer_to_json
from autoplan.cli.console import told_while_tracing
from autoplan.files import write_folder
from autoplan.options import Options
from autoplan.output import verify
from autoplan.output.folder import report_files
from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.planning.answering import model_name
from autoplan.search.result import Rejection

CHECKOUT = Path(__file__).parent.parent
PLAN = ["plan", "toy.py", "--hw", "toy_x4"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> SimpleNamespace:
    """Replaces tracing and search by a given answer, and keeps what was asked."""
    seen = SimpleNamespace(answer=answer, options=None, overrides=None, n_searches=0)

    def make_problem(model, *, hw, hosts=1, overrides=None, options, while_tracing):
        seen.options, seen.overrides = options, overrides
        return SimpleNamespace(options=options, model=model)

    def solve(problem) -> Answer:
        seen.n_searches += 1
        if isinstance(seen.answer, BaseException):
            raise seen.answer
        return seen.answer

    monkeypatch.setattr(api, "make_problem", make_problem)
    monkeypatch.setattr(api, "solve", solve)
    monkeypatch.setattr(api, "program_files", lambda problem, answer: {"train.py": "x", **report_files(answer)})
    return seen


def _autoplan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoplan", *arguments],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, **environment},
        check=False,
    )


def test_plan_prints_the_table_on_stdout_and_progress_on_stderr(asked, capsys) -> None:
    assert cli.run(PLAN) == 0
    out, err = capsys.readouterr()
    assert "<- chosen" in out
    assert "searching" in err and "searching" not in out


def test_json_is_all_of_stdout(asked, capsys) -> None:
    assert cli.run([*PLAN, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "optimal"


def test_what_model_files_and_native_code_print_stays_off_stdout(asked, capfd, monkeypatch, answer: Answer) -> None:
    def chatty(problem) -> Answer:
        print("hello from the model file")
        ctypes.CDLL(None).printf(b"hello from the solver\n")
        return answer

    monkeypatch.setattr(api, "solve", chatty)
    assert cli.run([*PLAN, "--format", "json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["status"] == "optimal"
    assert "from the model file" in err and "from the solver" in err


def test_options_reach_the_search_as_the_library_spells_them(asked) -> None:
    arguments = ["--global-batch", "64", "--fix", "dp=2,tp=2", "--fix", "zero=1", "--time-limit", "5", "--top", "3"]
    assert cli.run([*PLAN, *arguments, "--set", "width=8", "--set", "size=1.5b"]) == 0
    fix = (("dp", "2"), ("tp", "2"), ("zero", "1"))
    assert asked.options == Options(global_batch=64, fix=fix, time_limit_s=5.0, top=3)
    assert asked.overrides == {"width": 8, "size": "1.5b"}


def test_defaults_of_the_command_line_are_the_defaults_of_options(asked) -> None:
    assert cli.run(PLAN) == 0
    assert asked.options == Options()


def test_infeasible_exits_5_with_the_reasons_on_stdout(asked, capsys, infeasible: Answer) -> None:
    asked.answer = infeasible
    assert cli.run([*PLAN, "--format", "json"]) == 5
    assert json.loads(capsys.readouterr().out)["rejected"][0]["reason"] == "memory"


def test_stopped_without_a_plan_exits_6(asked, infeasible: Answer) -> None:
    asked.answer = replace(infeasible, result=replace(infeasible.result, status="unknown"))
    assert cli.run(PLAN) == 6


def test_without_a_plan_a_huge_batch_is_named_as_what_to_change(asked, capsys, infeasible: Answer) -> None:
    # 10^9 samples on 4 devices: 2^7 x 5^9 each, in 2^6 x 5^3 = 8000 micro-batches of 2 x 5^6; 8192 would be 30518
    request = Request("toy.py", (), "toy_x4", 1, Options(global_batch=10**9))
    late = Rejection(infeasible.result.rejected[0].mesh, "time limit", "not examined in time")
    rejected = (*infeasible.result.rejected, late, late)
    result = replace(infeasible.result, status="unknown", rejected=rejected, n_meshes=3)
    asked.answer = replace(infeasible, result=result, request=request)
    assert cli.run(PLAN) == 6
    out, err = capsys.readouterr()
    assert "none has fewer than 31250 samples. A smaller --global-batch or more devices" in " ".join(out.split())
    assert "1 of 3 combinations considered" in out and "2 not looked at" in out
    assert "every plan lacks" not in out  # which only all of them would prove
    assert "fix: raise --time-limit, or give a smaller --global-batch" in err


def test_unproved_plan_exits_0_and_6_under_require_optimal(asked, answer: Answer) -> None:
    # bound 1.2 s for a plan of 1.6 s: at most 25 % slower than the best
    asked.answer = replace(answer, result=replace(answer.result, status="feasible", bound_s=1.2))
    assert cli.run(PLAN) == 0
    assert cli.run([*PLAN, "--require-optimal"]) == 6


def test_interrupted_search_prints_its_best_plan_and_exits_130(asked, capsys, answer: Answer) -> None:
    asked.answer = replace(answer, result=replace(answer.result, status="feasible", stopped_by="interrupted"))
    assert cli.run(PLAN) == 130
    out = capsys.readouterr().out
    assert "feasible: the search was interrupted;" in out and "<- chosen" in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("boom"), 1),
        (errors.UsageError("x"), 2),
        (errors.PlanMismatchError("x"), 2),
        (errors.InputError("x"), 3),
        (errors.TraceError("x"), 4),
        (errors.InfeasibleError("x"), 5),
        (errors.StoppedError("x"), 6),
        (errors.MeasureError("x"), 7),
        (errors.ToleranceError("x"), 8),
        (errors.OutputError("x"), 9),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_ends_with_its_exit_code_and_no_traceback(asked, capsys, error: BaseException, code: int) -> None:
    asked.answer = error
    assert cli.run(PLAN) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "autoplan: " in err


def test_debug_shows_the_traceback_of_a_bug(asked, capsys) -> None:
    asked.answer = RuntimeError("boom")
    assert cli.run([*PLAN, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_out_writes_the_folder_and_refuses_it_the_second_time_before_searching(asked, tmp_path: Path) -> None:
    out = str(tmp_path / "my plan")
    assert cli.run([*PLAN, "--out", out]) == 0
    assert (tmp_path / "my plan" / "train.py").is_file()
    assert cli.run([*PLAN, "--out", out]) == 9
    assert asked.n_searches == 1
    assert cli.run([*PLAN, "--out", out, "--force"]) == 0


def test_infeasible_plan_writes_no_folder(asked, infeasible: Answer, tmp_path: Path) -> None:
    asked.answer = infeasible
    assert cli.run([*PLAN, "--out", str(tmp_path / "out")]) == 5
    assert list(tmp_path.iterdir()) == []


def test_explain_reads_a_folder_or_its_plan_file(tmp_path: Path, capsys, answer: Answer) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    assert cli.run(["explain", str(tmp_path / "out")]) == 0
    first = capsys.readouterr().out
    assert cli.run(["explain", str(tmp_path / "out" / "plan.json")]) == 0
    assert first == capsys.readouterr().out
    assert "Why not the next best" in first


def test_explain_of_a_missing_plan_exits_3(tmp_path: Path, capsys) -> None:
    assert cli.run(["explain", str(tmp_path / "none.json")]) == 3
    assert "none.json" in capsys.readouterr().err


MLP = "examples/mlp.py"


def test_search_says_what_ended_it() -> None:
    gpt = CHECKOUT / "examples" / "gpt.py"
    late = autoplan.plan(gpt, hw="dgx_a100_x8", time_limit_s=1e-6)
    done = autoplan.plan(CHECKOUT / MLP, hw="dgx_a100_x8", require_optimal=True, time_limit_s=None)
    assert (late.stopped_by, late.status != "optimal") == ("time limit", True)
    assert (done.stopped_by, done.status) == ("", "optimal")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpus", "Devices are given by --hw NAME/N, for N of each host, and --hosts."),
        ("--batch-size", "The samples of a step are given by --global-batch;"),
        ("--hsots", "'--hosts'"),
    ],
)
def test_an_option_of_other_programs_is_answered_with_ours(option: str, said: str, capsys) -> None:
    assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", option, "8"]) == 2
    error = capsys.readouterr().err
    assert f"No such option '{option}'. " in error and said in error and "--rules" not in error


@pytest.mark.parametrize(("name", "ours"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32")])
def test_precisions_may_have_the_names_of_torch(name: str, ours: str, capsys) -> None:
    assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8/2", "--precision", name, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["precision"] == ours


def test_reports_call_a_configuration_by_its_folder_and_a_model_file_by_its_name() -> None:
    assert model_name("hf:models/llama-8b/config.json") == "hf:llama-8b/config.json"
    assert model_name(Path("models/llama.py")) == "llama.py"


def test_estimate_refuses_a_plan_file_without_a_plan_and_fix_beside_a_plan(
    asked, tmp_path: Path, infeasible: Answer
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(answer_to_json(infeasible))
    arguments = ["estimate", "toy.py", "--hw", "toy_x4", "--plan", str(path)]
    assert cli.run(arguments) == 3
    assert cli.run([*arguments, "--fix", "dp=2"]) == 2


def test_every_json_answer_starts_with_the_schema_version(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    found = verify.Verification(1, 1, True, 1.0, None, None, "toy", (), {})
    monkeypatch.setattr(verify, "verify_folder", lambda *_, **__: found)
    for arguments in (["hw", "list"], ["hw", "show", "dgx_a100_x8"], ["verify", "x"], ["doctor"]):
        assert cli.run([*arguments, "--format", "json"]) == 0
        text = capsys.readouterr().out
        assert next(iter(json.loads(text).items())) == ("schema_version", SCHEMA_VERSION)
        assert ': ""' not in text  # nothing is null


def test_verify_says_that_it_runs_a_program_only_once_there_is_one(tmp_path, capsys) -> None:
    for device in ("cpu", "cuda"):
        assert cli.run(["verify", str(tmp_path / "nowhere"), "--device", device]) == 3
        assert "running" not in capsys.readouterr().err


def test_verify_prints_what_it_found_and_ends_with_8_when_it_lies_outside(monkeypatch, capsys) -> None:
    step = verify.Comparison(verify.STEP, "s", 1.0, 2.0, -0.5, (0.8, 1.2))
    found = verify.Verification(1, 1, None, 1.0, 2.0, False, "", (step,), {})
    monkeypatch.setattr(verify, "verify_folder", lambda *_, **__: found)
    assert cli.run(["verify", "x", "--device", "cuda"]) == 8
    printed = capsys.readouterr()
    assert "OUTSIDE" in printed.out
    assert "step 2 s, expected 800 ms to 1.2 s" in printed.err


def test_doctor_reports_versions_as_json(capsys) -> None:
    assert cli.run(["doctor", "--format", "json"]) == 0
    findings = {item["name"]: item["found"] for item in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["python"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["ortools"].startswith("9.15")


def test_help_loads_neither_torch_nor_the_solver() -> None:
    code = "import sys; from autoplan import cli; cli.run(['plan', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert "--require-optimal" in done.stdout
    assert not {"torch", "ortools", "networkx", "numpy"} & set(done.stdout.splitlines()[-1].split())


def test_piped_output_has_no_colour_codes_and_names_each_command() -> None:
    done = _autoplan("--help", NO_COLOR="1")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for command in (
        "plan",
        "estimate",
        "explain",
        "verify",
        "profile",
        "hw",
        "whatif",
        "recommend",
        "advise",
        "doctor",
    ):
        assert f"\n  {command} " in done.stdout


def test_closed_pipe_is_silent(tmp_path: Path, answer: Answer) -> None:
    write_folder(tmp_path / "out", report_files(answer))
    command = f"'{sys.executable}' -m autoplan explain '{tmp_path}/out' | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_pipe_changes_no_exit_code() -> None:
    command = f"'{sys.executable}' -m autoplan explain nowhere 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=CHECKOUT, check=False)
    assert done.returncode == errors.InputError.exit_code


def test_a_trace_that_takes_long_says_what_may_shorten_it_and_then_that_it_goes_on(capsys) -> None:
    with told_while_tracing("model.py", first_s=0.05, every_s=0.05):
        time.sleep(0.5)
    said = capsys.readouterr().err
    assert said.startswith("tracing model.py ...\ntracing takes long")
    assert said.count("--set") == 2 and "--module-level" in said
    assert "tracing model.py for 0 s ..." in said
    with told_while_tracing("model.py", first_s=30.0):
        pass
    assert capsys.readouterr().err == "tracing model.py ...\n"


@pytest.mark.parametrize(
    "command",
    [
        "plan nowhere.py --hw dgx_a100_x8",
        f"plan {MLP} --hw dgx_a100_x9",
        f"plan {MLP} --hw dgx_a100_x8 --fix dq=2",
        f"plan {MLP} --hw dgx_a100_x8 --set width",
        f"plan {MLP} --hw dgx_a100_x8 --rules nowhere.py",
        f"plan {MLP} --hw dgx_a100_x8 --rules {MLP}",
        f"profile {MLP} --hw dgx_a100_x8 --rules {MLP} --out measured.json",
        f"whatif {MLP} --hw dgx_a100_x8 --hosts 1 --rules {MLP}",
        f"plan {MLP} --hw dgx_a100_x8 --profile nowhere.json",
        f"profile {MLP} --hw dgx_a100_x9 --out measured.json",
        f"whatif {MLP} --hw dgx_a100_x9",
        f"recommend {MLP} --among dgx_a100_x9 --samples 1e6 --budget 9",
        f"advise {MLP} --hw dgx_a100_x8 --fix dq=2",
    ],
)
def test_what_is_misspelt_is_refused_before_a_trace_is_told_of(command: str, capsys) -> None:
    assert cli.run(command.split()) in (2, 3)
    assert "tracing" not in capsys.readouterr().err


def test_once_points_are_searched_no_trace_takes_long(capsys) -> None:
    with told_while_tracing("model.py", first_s=0.2, every_s=0.05) as tell_points:
        tell_points(0, 3)
        time.sleep(0.5)
    assert capsys.readouterr().err == f"tracing model.py ...\n[{' ' * 30}] 0 of 3 points\n"


@pytest.mark.parametrize(
    "command",
    [
        f"plan {MLP} --hw dgx_a100_x8",
        f"whatif {MLP} --hw dgx_a100_x8 --jobs 1",
        f"recommend {MLP} --among dgx_a100_x8 --samples 1e6 --budget 9 --max-hosts 1 --jobs 1",
        f"advise {MLP} --hw dgx_a100_x8 --max-hosts 1 --jobs 1",
        "explain {} --why-not dp=4",
    ],
)
def test_every_command_that_traces_says_what_may_shorten_that(
    command: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    if command.startswith("explain"):
        assert cli.run(["plan", MLP, "--hw", "dgx_a100_x8", "--out", str(tmp_path / "out")]) == 0
        capsys.readouterr()
    monkeypatch.setitem(told_while_tracing.__wrapped__.__kwdefaults__, "first_s", 0.0)
    cli.run(command.format(tmp_path / "out").split())
    assert re.match(r"tracing (\S+/)?mlp.py ...\ntracing takes long", capsys.readouterr().err)
