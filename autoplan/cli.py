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
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autoplan import __version__
from autoplan.errors import AutoplanError, InfeasibleError, InputError, StoppedError, ToleranceError, UsageError
from autoplan.option_checks import FIX_VALUES
from autoplan.options import MEMORY_FORMATS, OBJECTIVES, PRECISIONS, Options
from autoplan.parallel_plan import SCHEMA_VERSION

if TYPE_CHECKING:
    from autoplan.answer import Answer
    from autoplan.api import Problem
    from autoplan.what_if.question import Question

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
_page = _options(
    click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page to look at, too."),
    click.option("--force", is_flag=True, help="Replace FILE."),
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
        help=f"What the plan must have: {', '.join(FIX_VALUES)}.",
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
@_page
@_output
def explain_command(
    path: Path,
    why_not: tuple[str, ...],
    asks_sensitivity: bool,
    html: Path | None,
    force: bool,
    output_format: str,
) -> None:
    """Say why this plan, why not the next best, and what each second is spent on.

    With --why-not and --sensitivity, say instead why not another plan, and what would change the decision.
    """
    from autoplan import api, questions
    from autoplan.answer import answer_to_dict
    from autoplan.html_report import plan_page
    from autoplan.option_checks import parse_fix
    from autoplan.output_folder import check_page, read_answer, write_page
    from autoplan.report_explain import explain_report, sensitivity_report, why_not_report

    if html is not None:
        check_page(html, force=force)
    answer = read_answer(path)
    if not why_not and not asks_sensitivity:
        if html is not None:
            write_page(html, plan_page(answer), force=force)
            _progress(f"wrote {html}")
        _print_answer(answer, explain_report, output_format)
        return
    found, texts = answer_to_dict(answer), []
    rows: tuple[questions.SensitivityRow, ...] = ()
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
        if html is not None:
            page = plan_page(
                questions.judged_again(problem, answer),
                memory=api.memory_curves(problem, answer.best.plan),
                sensitivity=rows,
            )
            write_page(html, page, force=force)
            _progress(f"wrote {html}")
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
@click.option(
    "--memory-format",
    type=click.Choice([*MEMORY_FORMATS, "both"]),
    default=MEMORY_FORMATS[0],
    show_default=True,
    help="How images lie in memory, for models with convolutions.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Append results; go on where it ends.")
@click.option("--fresh", is_flag=True, help="Measure again what earlier runs of this machine, of any model, measured.")
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
    fresh: bool,
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
        rows = profiling.run_measurements(files, out=out, device=device, cache=profiling.cache_file(fresh))
        found = {"out": str(out), **profiling.count_results(rows)}
        _print(_json(found) if output_format == "json" else profiling.results_table(rows))


# ------------------------------------------------------------------------------------------- hardware


@cli.group("hw")
def hw_group() -> None:
    """List, show, validate, measure and price hardware profiles."""


@hw_group.command("list")
@_output
def hw_list(output_format: str) -> None:
    """Every profile that comes with autoplan."""
    from autoplan.hardware import load_profile, profile_names
    from autoplan.report_hardware import profile_list

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
    from autoplan.report_hardware import profile_sheet

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
    from autoplan.report_hardware import profile_sheet

    with _stdout_kept_clean():
        profile = measure_host(out, **options, progress=_progress)
    if profile is not None:
        _progress(f"wrote {out}")
        _print(_json(asdict(profile)) if output_format == "json" else profile_sheet(profile))


@hw_group.command("prices")
@click.argument("catalogs", metavar="[VMS.CSV]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--date", "day", metavar="YYYY-MM-DD", help="When the catalogs were made. [today]")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["toml", "json"]),
    default="toml",
    show_default=True,
    help="toml: what --prices reads.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def hw_prices(catalogs: tuple[Path, ...], day: str | None, output_format: str) -> None:
    """Print the prices that come with autoplan, or those of SkyPilot catalogs, as a file for --prices."""
    import tomllib

    from autoplan.hardware_file import shipped_prices
    from autoplan.output_folder import read_text_file
    from autoplan.what_if.prices import catalog_prices, read_prices

    try:
        made = date.today() if day is None else date.fromisoformat(day)
    except ValueError:
        raise UsageError(f"--date: found {day!r}\n  expected: a day such as 2026-05-01") from None
    texts = {path.name: read_text_file(path) for path in catalogs}
    found = catalog_prices(texts, names=read_prices(), day=made) if catalogs else shipped_prices()
    _print(_json(tomllib.loads(found)) if output_format == "json" else found)


# ------------------------------------------------------------------------------------------- purchase


_amounts = _options(
    click.option("--tokens", "n_tokens", type=float, help="Train on this many tokens, such as 300e9."),
    click.option("--samples", "n_samples", type=float, help="Train on this many samples."),
)
_money = _options(
    click.option(
        "--price", "prices", multiple=True, metavar="NAME=USD", help="US dollars per device-hour; repeatable."
    ),
    click.option(
        "--prices", "prices_file", metavar="FILE", help="Price file of your own; `autoplan hw prices` shows one."
    ),
    click.option("--rent", type=click.Choice(["on_demand", "reserved", "spot"]), help="[on_demand]"),
    click.option(
        "--given",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        help='A value of whatif.toml: reliability.restart="5 min", money.pue=1.2, loading.storage_rate="10 GB/s", ...',
    ),
)
_sweep = _options(
    click.option("--search", type=click.Choice(["quick", "full"]), help="quick: one stage per rank only. [quick]"),
    click.option("--jobs", "n_jobs", type=click.IntRange(min=1), help="Processes that search. [one per core]"),
)
_fix = click.option("--fix", multiple=True, metavar="NAME=VALUE,...", help="What every plan must have; as for plan.")
_row_output = _options(
    click.option(
        "--format", "output_format", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True
    ),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)


@cli.command("whatif")
@click.argument("model", metavar="[MODEL|hf:CONFIG.JSON|WHATIF.TOML]", required=False)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--sweep", "sweeps", metavar="KEY=V1,V2,...", multiple=True, help="Compare values of such an argument.")
@click.option("--hw", metavar="A,B,...", help="Hardware profiles, separated by commas.")
@click.option("--hosts", metavar="1,2,...", help="Host counts, separated by commas. [1]")
@click.option("--global-batch", "batches", metavar="B1,B2,...", help="Samples per optimizer step.")
@click.option("--precision", "precisions", metavar="P1,P2,...", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@click.option("--network-scale", "scales", metavar="0.5,1,...", help="Factors on the bandwidth between hosts. [1]")
@click.option(
    "--host-link", "links", metavar="own,pcie4,...", help="Links inside a host, in place of the profile's own."
)
@click.option("--scaling", type=click.Choice(["strong", "weak"]), help="weak: the batch grows with the hosts. [strong]")
@click.option("--objective", type=click.Choice(OBJECTIVES), default=_DEFAULTS.objective, show_default=True)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=float,
    metavar="SECONDS",
    help="Per point, of processor time. [quick: 1, or 15 where that finds no plan; full: 15]",
)
@click.option("--module-level", is_flag=True, help="As for plan.")
@click.option("--schema", "asks_schema", is_flag=True, help="Print the JSON Schema of --format json.")
@_fix
@_amounts
@_money
@_sweep
@_rules
@_page
@_row_output
def whatif_command(
    model: str | None,
    time_limit_s: float | None,
    objective: str,
    module_level: bool,
    rules: tuple[str, ...],
    n_jobs: int | None,
    output_format: str,
    asks_schema: bool,
    html: Path | None,
    force: bool,
    **flags: Any,
) -> None:
    """Compare clusters: step, losses, time to train, cost and energy of MODEL on each.

    A WHATIF.TOML holds the whole question; flags take the place of its values.
    """
    from autoplan.html_report.sweep_page import sweep_page, sweep_title
    from autoplan.output_folder import check_page, write_page
    from autoplan.what_if.asking import ask
    from autoplan.what_if.sweep import default_n_jobs
    from autoplan.what_if.tables import assumption_texts, whatif_csv, whatif_report, whatif_schema, whatif_to_dict

    if asks_schema:
        _print(json.dumps(whatif_schema(), indent=2))
        return
    if html is not None:
        check_page(html, force=force)
    options = Options(objective=objective, module_level=module_level, rules=rules)
    with _stdout_kept_clean():
        question = replace(_question(model, flags, options), time_limit_s=time_limit_s)
        answer = ask(question, n_jobs=n_jobs or default_n_jobs(), progress=_progress_bar)
    if html is not None:
        notes = assumption_texts(answer.assumptions)
        write_page(html, sweep_page(answer.rows, title=sweep_title(question), notes=notes), force=force)
        _progress(f"wrote {html}")
    if output_format == "table":
        _print(whatif_report(answer, search=question.search))
    else:
        rows = answer.rows
        _print(
            whatif_csv(rows)
            if output_format == "csv"
            else json.dumps(whatif_to_dict(answer), indent=2, allow_nan=False)
        )
    if answer.sweep.is_interrupted:
        raise KeyboardInterrupt


@cli.command("recommend")
@click.argument("model", metavar="MODEL|hf:CONFIG.JSON")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--deadline", metavar="14d", help="Latest acceptable time to train: the cheapest cluster that meets it.")
@click.option("--budget", metavar="USD", help="Most US dollars to spend: the fastest cluster that meets it.")
@click.option("--among", "hw", metavar="A,B,...", help="Hardware profiles to choose from. [all that have a price]")
@click.option("--max-hosts", type=click.IntRange(min=1), default=256, show_default=True, help="Most hosts to look at.")
@click.option("--global-batch", "batches", metavar="B", help="Samples per optimizer step. [512]")
@click.option("--precision", "precisions", metavar="P", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@_fix
@_amounts
@_money
@_sweep
@_output
def recommend_command(
    model: str,
    deadline: str | None,
    budget: str | None,
    hw: str | None,
    max_hosts: int,
    n_jobs: int | None,
    output_format: str,
    **flags: Any,
) -> None:
    """The cheapest cluster that meets a deadline, or the fastest within a budget, and what would change that."""
    from autoplan.what_if.recommending import (
        candidates,
        parse_budget,
        parse_deadline,
        recommend,
        recommendation_text,
        recommendation_to_dict,
    )
    from autoplan.what_if.sweep import default_n_jobs

    with _stdout_kept_clean():
        question = _question(model, {**flags, "hw": hw or ",".join(candidates())}, Options())
        answer = recommend(
            question,
            deadline_s=None if deadline is None else parse_deadline(deadline),
            budget_usd=None if budget is None else parse_budget(budget),
            max_hosts=max_hosts,
            n_jobs=n_jobs or default_n_jobs(),
            progress=_progress_bar,
        )
    text = json.dumps(recommendation_to_dict(answer), indent=2, allow_nan=False)
    _print(text if output_format == "json" else recommendation_text(answer))
    if answer.is_interrupted:
        raise KeyboardInterrupt
    if answer.best is None:
        raise StoppedError("no cluster that was looked at meets it; that none does is not proved")


@cli.command("advise")
@click.argument("model", metavar="MODEL|hf:CONFIG.JSON")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--hw", required=True, metavar="NAME|FILE", help="Hardware profile of the hosts.")
@click.option("--max-hosts", type=click.IntRange(min=1), default=64, show_default=True, help="Most hosts to look at.")
@click.option("--global-batch", "batches", metavar="B", help="Samples per optimizer step. [8 per device of a host]")
@click.option("--precision", "precisions", metavar="P", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@click.option("--deadline", metavar="14d", help="Latest acceptable time to train.")
@_fix
@_amounts
@_money
@_sweep
@_output
def advise_command(
    model: str, deadline: str | None, max_hosts: int, n_jobs: int | None, output_format: str, **flags: Any
) -> None:
    """Whether to go multi-GPU, and how: one line per rule that applies to MODEL on these devices and links."""
    from autoplan.what_if.advising import advice_text, advice_to_dict, advise
    from autoplan.what_if.recommending import parse_deadline
    from autoplan.what_if.sweep import default_n_jobs

    with _stdout_kept_clean():
        advice = advise(
            _question(model, flags, Options()),
            max_hosts=max_hosts,
            deadline_s=None if deadline is None else parse_deadline(deadline),
            n_jobs=n_jobs or default_n_jobs(),
            progress=_progress_bar,
        )
    text = json.dumps(advice_to_dict(advice), indent=2, allow_nan=False)
    _print(text if output_format == "json" else advice_text(advice))
    if advice.is_interrupted:
        raise KeyboardInterrupt


def _question(model: str | None, flags: dict[str, Any], options: Options) -> Question:
    """The question of a file with the flags in the place of its values, or of the flags alone."""
    from autoplan.what_if.flags import flag_tables
    from autoplan.what_if.question import parse_question, read_question

    tables = flag_tables(**flags)
    if model is not None and model.endswith(".toml"):
        return read_question(model, changes=tables, options=options)
    if model is None or not flags.get("hw"):
        raise UsageError("expected MODEL with --hw, or a WHATIF.TOML\n  fix: autoplan whatif model.py --hw dgx_a100_x8")
    tables["workload"]["model"] = model
    try:
        return parse_question(tables, where="command line", options=options)
    except UsageError:
        raise
    except InputError as error:
        raise UsageError(str(error)) from None


def _progress_bar(n_done: int, n_all: int) -> None:
    """On stderr; on a terminal in one line."""
    width = 30
    filled = width if n_all == 0 else width * n_done // n_all
    bar = f"[{'#' * filled}{' ' * (width - filled)}] {n_done} of {n_all} points"
    if sys.stderr.isatty():
        click.echo(f"\r{bar}", err=True, nl=n_done == n_all)
    elif n_done in (0, n_all):
        click.echo(bar, err=True)


@cli.command("doctor")
@_output
def doctor_command(output_format: str) -> None:
    """Versions, devices, links, and what is missing."""
    from autoplan.doctor import diagnose
    from autoplan.plain_text import text_table

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


def _counts(text: str, *, option: str = "--hosts") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"{option}: found {text!r}\n  expected: counts separated by commas, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _print_answer(answer: Answer, render: Callable[[Answer], str], output_format: str) -> None:
    from autoplan.answer import answer_to_json

    _print(answer_to_json(answer) if output_format == "json" else render(answer))


def _json(values: dict[str, Any]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2, default=_day_text)


def _day_text(value: object) -> str:
    """A date as JSON has none."""
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"not a JSON value: {value!r}")


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
