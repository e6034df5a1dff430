"""The command line: arguments in, one result on stdout, everything else on stderr, an exit code.

    0 ok             3 bad input file        6 stopped (no plan, or no proof)    9 cannot write output
    1 bug            4 cannot trace          7 measuring failed                  130 interrupted
    2 usage          5 proved infeasible     8 verify out of tolerance

Imports stand inside the commands, so that `--help` loads neither torch nor the solver.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autoplan import __version__
from autoplan.errors import AutoplanError, InfeasibleError, InputError, StoppedError, ToleranceError, UsageError
from autoplan.options import OBJECTIVES, PRECISIONS, Options
from autoplan.parallel_plan import SCHEMA_VERSION

if TYPE_CHECKING:
    from autoplan.answer import Answer
    from autoplan.api import Problem

INTERRUPTED = 130
_DEFAULTS = Options()
_Command = TypeVar("_Command", bound=Callable[..., Any])


def main() -> None:
    """Entry point of the command `autoplan`; after Ctrl-C it ends with 130 whatever became of the exception.

    An interrupt during an import reaches us as ImportError, and one inside native code may be lost on the way.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    code = run(sys.argv[1:], is_interrupted=lambda: bool(interrupts))
    sys.exit(INTERRUPTED if interrupts else code)


def run(arguments: Sequence[str], *, is_interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run one command line and return its exit code."""
    show_traceback = "--debug" in arguments
    try:
        code = cli.main(args=list(arguments), prog_name="autoplan", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except AutoplanError as error:
        return _report_error(str(error), error.exit_code, show_traceback=show_traceback)
    except (click.Abort, KeyboardInterrupt):
        return _report_error("interrupted", INTERRUPTED, show_traceback=False)
    except Exception as error:  # the outermost frame: everything that gets here is a bug
        if is_interrupted():
            return _report_error("interrupted", INTERRUPTED, show_traceback=False)
        text = f"internal error: {type(error).__name__}: {error}\n  this is a bug; --debug shows where it happened"
        return _report_error(text, AutoplanError.exit_code, show_traceback=show_traceback)


def _report_error(text: str, code: int, *, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exc()
    click.echo(f"autoplan: {text}", err=True)
    return code


# ------------------------------------------------------------------------------------------- shared options


def _options(*decorators: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


_output = _options(
    click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
_model = _options(
    click.argument("model", metavar="MODEL|hf:CONFIG.JSON", type=click.Path(path_type=Path)),
    click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable."
    ),
)
_cluster = _options(
    click.option(
        "--hw", required=True, metavar="NAME|FILE", help="Hardware profile, or mixed cluster; see `autoplan hw list`."
    ),
    click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="How many equal hosts."),
)
_rules = click.option(
    "--rules", metavar="FILE", multiple=True, help="File of op rules of your own, ending in RULES = {...}; repeatable."
)
_measurements = click.option(
    "--profile", metavar="FILE", help="Measurements of `autoplan profile`, in place of computed times."
)
_workload = _options(
    click.option("--global-batch", type=click.IntRange(min=1), help="Samples per optimizer step."),
    click.option("--precision", type=click.Choice(PRECISIONS), default=_DEFAULTS.precision, show_default=True),
    click.option("--objective", type=click.Choice(OBJECTIVES), default=_DEFAULTS.objective, show_default=True),
    click.option(
        "--fix",
        multiple=True,
        metavar="NAME=VALUE,...",
        help="What the plan must have: dp, tp, pp, zero, shard, micro_batch, schedule, recompute, compile.",
    ),
    click.option(
        "--time-limit",
        "time_limit_s",
        type=float,
        metavar="SECONDS",
        help=f"Stop searching with the best plan so far [{_DEFAULTS.time_limit_s:g}; none under --require-optimal].",
    ),
    click.option("--strict", is_flag=True, help="An op without a cost rule is an error."),
    _rules,
    click.option(
        "--module-level",
        is_flag=True,
        help="Run the model instead of tracing it; for branches on data. No tensor or pipeline parallelism.",
    ),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Find the parallelism that trains a PyTorch model fastest on a cluster, and write the program that does it."""


# ------------------------------------------------------------------------------------------- plans


@cli.command("plan")
@_model
@_cluster
@_workload
@click.option("--top", type=click.IntRange(min=1), default=_DEFAULTS.top, show_default=True, help="Alternatives kept.")
@click.option("--require-optimal", is_flag=True, help="Exit 6 unless the plan is proved optimal.")
@_measurements
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write program and reports there.")
@click.option("--force", is_flag=True, help="Replace DIR if autoplan wrote it.")
@click.option(
    "--emit",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Also write the plan for torchtitan, megatron, deepspeed or accelerate into DIR/interop; repeatable.",
)
@_output
def plan_command(
    model: Path,
    overrides: tuple[str, ...],
    hw: str,
    hosts: int,
    out: Path | None,
    force: bool,
    targets: tuple[str, ...],
    output_format: str,
    **options: Any,
) -> None:
    """Find the fastest plan for MODEL and, with --out, write the program that trains it so."""
    from autoplan import api
    from autoplan.interop import check_targets
    from autoplan.output_folder import check_target
    from autoplan.report import plan_report

    check_targets(targets, out=out)
    if out is not None:
        check_target(out, force=force)
    with _stdout_kept_clean():
        problem = _problem(model, overrides, hw=hw, hosts=hosts, options=_read_options(**options))
        _progress("searching")
        answer = api.solve(problem)
    if out is not None and answer.result.best is not None:
        api.emit(problem, answer, out, force=force, targets=targets)
        _progress(f"wrote {out}")
    _print_answer(answer, plan_report, output_format)
    _check_status(answer, problem.options)


@cli.command("estimate")
@_model
@_cluster
@_workload
@_measurements
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan.json, or the folder that holds it.")
@_output
def estimate_command(
    model: Path,
    overrides: tuple[str, ...],
    hw: str,
    hosts: int,
    plan_file: Path | None,
    output_format: str,
    **options: Any,
) -> None:
    """Score the plan of --plan, or the best one that has every value of --fix."""
    from autoplan import api
    from autoplan.output_folder import read_answer
    from autoplan.report import plan_report

    if plan_file is None and not options["fix"]:
        raise UsageError("estimate needs a plan\n  fix: add --fix dp=8,tp=1,pp=1 or --plan plan.json")
    if plan_file is not None and options["fix"]:
        raise UsageError("estimate: --fix beside --plan\n  expected: one of them\n  fix: leave --fix out")
    given = None if plan_file is None else read_answer(plan_file)
    if given is not None and given.result.best is None:
        raise InputError.of(
            str(plan_file), found=f"no plan ({given.result.status})", expected="a plan", fix="plan again, or use --fix"
        )
    with _stdout_kept_clean():
        problem = _problem(model, overrides, hw=hw, hosts=hosts, options=_read_options(**options))
        answer = api.solve(problem) if given is None else api.score(problem, given.best.plan)
    _print_answer(answer, plan_report, output_format)
    _check_status(answer, problem.options)


@cli.command("rule")
@_model
@click.option(
    "--op", "ops", metavar="NAME", multiple=True, help="This operator, whether it has a rule or not; repeatable."
)
@_rules
@_output
def rule_command(
    model: Path, overrides: tuple[str, ...], ops: tuple[str, ...], rules: tuple[str, ...], output_format: str
) -> None:
    """Find out how the operators of MODEL without a rule can be split, and print the rules as a file for --rules.

    Each split is tried on random numbers with 2 and 3 shards, forward and gradient.
    """
    from autoplan import api
    from autoplan.option_checks import parse_overrides

    _progress(f"tracing {model}")
    with _stdout_kept_clean():
        text = api.discover_rules(model, overrides=parse_overrides(overrides), ops=ops, rules=rules)
    _print(_json({"rules": text}) if output_format == "json" else text)


@cli.command("explain")
@click.argument("path", metavar="DIR|PLAN.JSON", type=click.Path(path_type=Path))
@click.option("--why-not", multiple=True, metavar="NAME=VALUE,...", help="Search for the best plan with this --fix.")
@click.option("--sensitivity", "asks_sensitivity", is_flag=True, help="Search on slightly better clusters.")
@_output
def explain_command(path: Path, why_not: tuple[str, ...], asks_sensitivity: bool, output_format: str) -> None:
    """Say why this plan, why not the next best, and what each second is spent on.

    With --why-not and --sensitivity, say instead why not another plan, and what would change the decision.
    """
    from autoplan import questions
    from autoplan.answer import answer_to_dict
    from autoplan.option_checks import parse_fix
    from autoplan.output_folder import read_answer
    from autoplan.report_explain import explain_report, sensitivity_report, why_not_report

    answer = read_answer(path)
    if not why_not and not asks_sensitivity:
        _print_answer(answer, explain_report, output_format)
        return
    found, texts = answer_to_dict(answer), []
    with _stdout_kept_clean():
        problem = questions.asked_again(answer, folder=path if path.is_dir() else None)
        if why_not:
            _progress(f"searching with {', '.join(why_not)}")
            why = questions.why_not(problem, answer, fix=parse_fix(why_not))
            found["why_not"] = {"fix": dict(why.fix), "answer": answer_to_dict(why.instead)}
            texts.append(why_not_report(why))
        if asks_sensitivity:
            rows = questions.sensitivity(problem, answer, progress=_progress)
            found["sensitivity"] = [asdict(row) for row in rows]
            texts.append(sensitivity_report(rows))
    _print(json.dumps(found, indent=2) if output_format == "json" else "\n".join(texts))


@cli.command("verify")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--steps", "n_steps", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@_output
def verify_command(folder: Path, n_steps: int, device: str, output_format: str) -> None:
    """Run the program of DIR (this runs its code): parity with one process on CPU, the prediction on CUDA."""
    from autoplan.verify import outside_text, verification_text, verify_folder

    _progress(f"running {folder} for {n_steps} steps on {device}")
    found = verify_folder(folder, n_steps=n_steps, device=device)
    _print(_json(asdict(found)) if output_format == "json" else verification_text(found))
    if found.within_interval is False:
        raise ToleranceError(f"{folder}: outside of what was predicted: {outside_text(found)}")


@cli.command("profile")
@_model
@click.option("--hw", required=True, metavar="NAME|FILE", help="Hardware profile whose device this machine has.")
@click.option("--precision", type=click.Choice(PRECISIONS), default=_DEFAULTS.precision, show_default=True)
@click.option("--tp", "degrees", metavar="1,2,...", help="Tensor-parallel degrees [all that fit into a host].")
@click.option("--micro-batch", "sizes", default="1,2,4", show_default=True, metavar="1,2,...", help="Samples.")
@click.option(
    "--compile",
    type=click.Choice(["off", "on", "both"]),
    default="off",
    show_default=True,
    help="Measure blocks and the loss eager, compiled, or both ways; to compile takes up to a minute each.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Append results there; go on where it ends."
)
@click.option("--emit", type=click.Path(path_type=Path), metavar="DIR", help="Only write the folder that measures.")
@click.option("--force", is_flag=True, help="Replace DIR if autoplan wrote it.")
@_rules
@_output
def profile_command(
    model: Path,
    overrides: tuple[str, ...],
    hw: str,
    degrees: str | None,
    sizes: str,
    device: str,
    out: Path | None,
    emit: Path | None,
    force: bool,
    output_format: str,
    **options: Any,
) -> None:
    """Measure the parts of MODEL on one device of this machine, for --profile of plan and estimate.

    With --emit nothing is measured here: copy DIR to the machine and run `python DIR/measure.py` (needs torch).
    """
    from autoplan import api, profiling
    from autoplan.option_checks import parse_overrides
    from autoplan.output_folder import check_target, write_folder

    if (out is None) == (emit is None):
        raise UsageError("profile: expected one of --out FILE and --emit DIR\n  fix: --out measured.json measures here")
    if emit is not None:
        check_target(emit, force=force)
    with _stdout_kept_clean():
        _progress(f"tracing {model}")
        files = api.measurement_folder(
            model,
            hw=hw,
            overrides=parse_overrides(overrides),
            degrees=() if degrees is None else _counts(degrees, option="--tp"),
            micro_batch_sizes=_counts(sizes, option="--micro-batch"),
            **options,
        )
    if emit is not None:
        write_folder(emit, files, force=force)
        run = f"python {emit}/measure.py --out measured.json"
        _print(_json({"folder": str(emit), "command": run}) if output_format == "json" else run)
    if out is not None:
        rows = profiling.run_measurements(files, out=out, device=device)
        found = {"out": str(out), **profiling.count_results(rows)}
        _print(_json(found) if output_format == "json" else profiling.results_table(rows))


# ------------------------------------------------------------------------------------------- hardware


@cli.group("hw")
def hw_group() -> None:
    """List, show and validate hardware profiles."""


@hw_group.command("list")
@_output
def hw_list(output_format: str) -> None:
    """Every profile that comes with autoplan."""
    from autoplan.hardware import load_profile, profile_names
    from autoplan.report import profile_list

    profiles = [load_profile(name) for name in profile_names()]
    if output_format == "json":
        rows = [{"name": item.name, "description": item.description} for item in profiles]
        _print(_json({"profiles": rows}))
    else:
        _print(profile_list(profiles))


@hw_group.command("show")
@click.argument("name")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True)
@_output
def hw_show(name: str, hosts: int, output_format: str) -> None:
    """Every figure of a profile, with its source."""
    from autoplan.hardware import load_profile
    from autoplan.report import profile_sheet

    profile = load_profile(name, n_hosts=hosts)
    _print(_json(asdict(profile)) if output_format == "json" else profile_sheet(profile))


@hw_group.command("validate")
@click.argument("file", type=click.Path(path_type=Path))
@_output
def hw_validate(file: Path, output_format: str) -> None:
    """Check a profile or a mixed cluster of your own."""
    from autoplan.hardware import validate_file
    from autoplan.hardware_cluster import is_cluster_file, load_cluster

    name = load_cluster(file).name if is_cluster_file(file) else validate_file(file).name
    _print(_json({"valid": True, "name": name}) if output_format == "json" else f"{file}: valid ({name})")


@hw_group.command("measure")
@click.option("--out", required=True, metavar="FILE.toml", type=click.Path(path_type=Path), help="The profile.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--json", "with_json", is_flag=True, help="Write every time beside the profile, as FILE.json.")
@click.option("--force", is_flag=True, help="Replace the files.")
@_output
def hw_measure(out: Path, output_format: str, **options: Any) -> None:
    """Measure this host, and write its profile: devices, links between them, and what overlap costs.

    One device by itself; all of a host under: torchrun --standalone --nproc-per-node N -m autoplan hw measure ...
    """
    from autoplan.measure_hardware import measure_host
    from autoplan.report import profile_sheet

    with _stdout_kept_clean():
        profile = measure_host(out, **options, progress=_progress)
    if profile is not None:
        _progress(f"wrote {out}")
        _print(_json(asdict(profile)) if output_format == "json" else profile_sheet(profile))


# ------------------------------------------------------------------------------------------- purchase


@cli.command("whatif")
@_model
@click.option("--hw", required=True, metavar="A,B,...", help="Hardware profiles, separated by commas.")
@click.option("--hosts", default="1", show_default=True, metavar="1,2,...", help="Host counts, separated by commas.")
@_workload
@click.option("--tokens", "n_tokens", type=float, help="Train on this many tokens, such as 300e9.")
@click.option("--samples", "n_samples", type=float, help="Train on this many samples.")
@click.option("--price", "prices", multiple=True, metavar="NAME=USD", help="US dollars per device-hour; repeatable.")
@_output
def whatif_command(
    model: Path,
    overrides: tuple[str, ...],
    hw: str,
    hosts: str,
    n_tokens: float | None,
    n_samples: float | None,
    prices: tuple[str, ...],
    output_format: str,
    **options: Any,
) -> None:
    """Compare clusters: step time, time to train and cost of MODEL on each."""
    from autoplan import api
    from autoplan.option_checks import parse_overrides, parse_prices
    from autoplan.what_if import whatif_table, whatif_to_dict

    with _stdout_kept_clean():
        rows = api.whatif(
            model,
            hw=_split(hw),
            hosts=_counts(hosts),
            n_tokens=_amount("--tokens", n_tokens),
            n_samples=_amount("--samples", n_samples),
            prices_usd_per_device_hour=parse_prices(prices),
            overrides=parse_overrides(overrides),
            progress=_progress,
            **asdict(_read_options(**options)),
        )
    _print(json.dumps(whatif_to_dict(rows), indent=2) if output_format == "json" else whatif_table(rows))


@cli.command("recommend")
@_model
@click.option("--deadline", help="Latest acceptable time to train.")
@click.option("--budget", help="Most US dollars to spend.")
@_output
def recommend_command(**_: Any) -> None:
    """The smallest cluster for a deadline or a budget (not available in this version)."""
    raise UsageError(
        "recommend is not available in this version\n  fix: autoplan whatif compares the clusters you name"
    )


@cli.command("doctor")
@_output
def doctor_command(output_format: str) -> None:
    """Versions, devices, links, and what is missing."""
    from autoplan.doctor import diagnose
    from autoplan.report import text_table

    findings = diagnose()
    if output_format == "json":
        _print(_json({"findings": [asdict(item) for item in findings]}))
    else:
        _print(text_table(("", "found", "to fix"), [(item.name, item.found, item.fix) for item in findings]))


# ------------------------------------------------------------------------------------------- in and out


def _read_options(*, fix: tuple[str, ...], **options: Any) -> Options:
    from autoplan.option_checks import parse_fix

    if options["time_limit_s"] is None and not options.get("require_optimal"):
        options["time_limit_s"] = _DEFAULTS.time_limit_s
    return Options(fix=parse_fix(fix), **options)


def _problem(model: Path, overrides: tuple[str, ...], *, hw: str, hosts: int, options: Options) -> Problem:
    from autoplan import api
    from autoplan.option_checks import parse_overrides

    _progress(f"tracing {model}")
    return api.make_problem(model, hw=hw, hosts=hosts, overrides=parse_overrides(overrides), options=options)


def _check_status(answer: Answer, options: Options) -> None:
    """The exit code of a search that gave no plan, or not the proof that was asked for."""
    status = answer.result.status
    if answer.result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    if status == "infeasible":
        raise InfeasibleError("no plan fits, and that is proved")
    if answer.result.best is None:
        raise StoppedError("the search stopped before it found a plan\n  fix: raise --time-limit")
    if options.require_optimal and status != "optimal":
        raise StoppedError("the search stopped before its plan was proved optimal\n  fix: raise --time-limit")


def _split(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError("--hw: found nothing\n  expected: profile names separated by commas")
    return names


def _counts(text: str, *, option: str = "--hosts") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"{option}: found {text!r}\n  expected: counts separated by commas, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _amount(option: str, number: float | None) -> float | None:
    if number is not None and not 0 < number < float("inf"):
        raise UsageError(f"{option}: found {number}\n  expected: a number above 0")
    return number


def _print_answer(answer: Answer, render: Callable[[Answer], str], output_format: str) -> None:
    from autoplan.answer import answer_to_json

    _print(answer_to_json(answer) if output_format == "json" else render(answer))


def _json(values: dict[str, Any]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2)


def _print(text: str) -> None:
    """The result, on stdout; a reader that has left (`| head`) is no error."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115  (so that closing at exit does not fail again)


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """While we work, what a model file or the solver prints goes to stderr: stdout is for the result alone.

    Native code writes to the file descriptor, through a buffer of its own that is flushed before stdout comes back.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


def _progress(text: str) -> None:
    click.echo(f"{text} ...", err=True)
