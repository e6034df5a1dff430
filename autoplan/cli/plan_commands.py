"""Commands that make, judge, explain and run plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoplan.errors import InfeasibleError, InputError, StoppedError, ToleranceError, UsageError
from autoplan.options import Options

from .console import json_text, print_answer, print_result, stdout_kept_clean, tell, told_while_tracing
from .page_files import PageFiles
from .shared_options import (
    DEFAULTS,
    cluster_options,
    model_argument,
    output_option,
    page_options,
    profile_option,
    rules_option,
    workload_options,
)

if TYPE_CHECKING:
    from autoplan.answers.answer import Answer
    from autoplan.answers.comparisons import SensitivityRow
    from autoplan.planning.problem import Problem


@click.command("plan")
@model_argument
@cluster_options
@workload_options
@click.option("--top", type=click.IntRange(min=1), default=DEFAULTS.top, show_default=True, help="Alternatives kept.")
@click.option("--require-optimal", is_flag=True, help="Exit 6 unless the plan is proved optimal.")
@profile_option
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write program and reports there.")
@click.option("--force", is_flag=True, help="Replace DIR if autoplan wrote it.")
@click.option(
    "--emit",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Also write the plan for torchtitan, megatron, deepspeed or accelerate into DIR/interop; repeatable.",
)
@output_option
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
    from autoplan.files import check_target
    from autoplan.interop.targets import check_targets
    from autoplan.report.plan import plan_report

    check_targets(targets, out=out)
    if out is not None:
        check_target(out, force=force)
    with stdout_kept_clean():
        problem = _problem(model, overrides, hw=hw, hosts=hosts, options=_read_options(**options))
        tell("searching")
        answer = api.solve(problem)
    if out is not None and answer.result.best is not None:
        api.emit(problem, answer, out, force=force, targets=targets)
        tell(f"wrote {out}")
    print_answer(answer, plan_report, output_format)
    _check_status(answer, problem.options)


@click.command("estimate")
@model_argument
@cluster_options
@workload_options
@profile_option
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan.json, or the folder that holds it.")
@output_option
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
    from autoplan.checks.plan import precision_to_judge
    from autoplan.output.folder import read_answer
    from autoplan.report.plan import plan_report

    if plan_file is None and not options["fix"]:
        raise UsageError("estimate needs a plan\n  fix: add --fix dp=8,tp=1,pp=1 or --plan plan.json")
    if plan_file is not None and options["fix"]:
        raise UsageError("estimate: --fix beside --plan\n  expected: one of them\n  fix: leave --fix out")
    given = None if plan_file is None else read_answer(plan_file)
    if given is not None and given.result.best is None:
        raise InputError.of(
            str(plan_file), found=f"no plan ({given.result.status})", expected="a plan", fix="plan again, or use --fix"
        )
    if given is not None:
        source = click.get_current_context().get_parameter_source("precision")
        asked = None if source == click.core.ParameterSource.DEFAULT else options["precision"]
        options["precision"] = precision_to_judge(given.best.plan, asked=asked)
    with stdout_kept_clean():
        problem = _problem(model, overrides, hw=hw, hosts=hosts, options=_read_options(**options))
        answer = api.solve(problem) if given is None else api.score(problem, given.best.plan)
    print_answer(answer, plan_report, output_format)
    _check_status(answer, problem.options)


@click.command("rule")
@model_argument
@click.option(
    "--op", "ops", metavar="NAME", multiple=True, help="This operator, whether it has a rule or not; repeatable."
)
@rules_option
@output_option
def rule_command(
    model: Path, overrides: tuple[str, ...], ops: tuple[str, ...], rules: tuple[str, ...], output_format: str
) -> None:
    """Find out how the operators of MODEL without a rule can be split, and print the rules as a file for --rules.

    Each split is tried on random numbers with 2 and 3 shards, forward and gradient.
    """
    from autoplan import api
    from autoplan.checks.options import parse_overrides

    arguments = parse_overrides(overrides)
    with stdout_kept_clean():
        told = told_while_tracing(model)
        text = api.discover_rules(model, overrides=arguments, ops=ops, rules=rules, while_tracing=told)
    print_result(json_text({"rules": text}) if output_format == "json" else text)


@click.command("explain")
@click.argument("path", metavar="DIR|PLAN.JSON", type=click.Path(path_type=Path))
@click.option(
    "--why-not",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Find the best plan with this --fix, beside the plan's own.",
)
@click.option("--sensitivity", "asks_sensitivity", is_flag=True, help="Search on slightly better clusters.")
@page_options
@output_option
def explain_command(
    path: Path,
    why_not: tuple[str, ...],
    asks_sensitivity: bool,
    output_format: str,
    **page_files: Any,
) -> None:
    """Say why this plan, why not the next best, and what each second is spent on.

    With --why-not and --sensitivity, say instead why not another plan, and what would change the decision.
    """
    from autoplan import api
    from autoplan.answers.answer import answer_to_dict
    from autoplan.checks.options import parse_fix
    from autoplan.html_report import chart_files, plan_page
    from autoplan.output.folder import read_answer
    from autoplan.planning import questions
    from autoplan.report.explain import explain_report, sensitivity_report, why_not_report
    from autoplan.report.plan import fix_text

    beside = PageFiles(**page_files)
    beside.check()
    answer = read_answer(path)
    if not why_not and not asks_sensitivity:
        beside.write(page=lambda: plan_page(answer), files=lambda: chart_files(answer, has_png=beside.png))
        print_answer(answer, explain_report, output_format)
        return
    found, texts = answer_to_dict(answer), []
    rows: tuple[SensitivityRow, ...] = ()
    with _named("--why-not"):
        fix = parse_fix(why_not)
        questions.check_why_not(answer, fix)
    with stdout_kept_clean():
        with told_while_tracing(answer.workload.model):
            problem = questions.asked_again(answer, folder=path if path.is_dir() else None)
        if why_not:
            tell(f"searching with {', '.join(why_not)}")
            with _named("--why-not", beside=fix_text(problem.options.fix)):
                why = questions.why_not(problem, answer, fix=fix)
            found["why_not"] = {"fix": dict(why.fix), "answer": answer_to_dict(why.instead)}
            texts.append(why_not_report(why))
        if asks_sensitivity:
            rows = questions.sensitivity(problem, answer, progress=tell)
            found["sensitivity"] = [asdict(row) for row in rows]
            texts.append(sensitivity_report(rows))
        if beside.html is not None or beside.charts is not None:
            again = questions.judged_again(problem, answer)
            memory = api.memory_curves(problem, answer.best.plan)
            beside.write(
                page=lambda: plan_page(again, memory=memory, sensitivity=rows),
                files=lambda: chart_files(again, memory=memory, sensitivity=rows, has_png=beside.png),
            )
    print_result(json.dumps(found, indent=2) if output_format == "json" else "\n".join(texts))


@click.command("verify")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--steps", "n_steps", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--alone", "is_alone", is_flag=True, help="With --device cuda: one rank of each stage on one GPU.")
@output_option
def verify_command(folder: Path, n_steps: int, device: str, is_alone: bool, output_format: str) -> None:
    """Run the program of DIR (this runs its code): parity with one process on CPU, the prediction on CUDA.

    With --alone, the first rank of each pipeline stage runs by itself, one after another, on one GPU of those planned
    for: is its memory as predicted? Exit code 8 if step or memory are not.
    """
    from autoplan.output.verify import outside_text, verification_text, verify_folder

    found = verify_folder(folder, n_steps=n_steps, device=device, is_alone=is_alone, progress=tell)
    print_result(json_text(asdict(found)) if output_format == "json" else verification_text(found))
    if found.within_interval is False:
        raise ToleranceError(f"{folder}: outside of what was predicted: {outside_text(found)}")


@contextmanager
def _named(option: str, *, beside: str = "") -> Iterator[None]:
    """Errors about --fix have the name of the option that was typed, and say what was fixed `beside` it."""
    try:
        yield
    except UsageError as error:
        stays = f"\n  the plan was made with --fix {beside}, which stays: name it anew to change it"
        raise UsageError(str(error).replace("--fix", option) + (stays if beside else "")) from error


def _read_options(*, fix: tuple[str, ...], **options: Any) -> Options:
    from autoplan.checks.options import parse_fix

    if options["time_limit_s"] is None and not options.get("require_optimal"):
        options["time_limit_s"] = DEFAULTS.time_limit_s
    return Options(fix=parse_fix(fix), **options)


def _problem(model: Path, overrides: tuple[str, ...], *, hw: str, hosts: int, options: Options) -> Problem:
    from autoplan import api
    from autoplan.checks.options import parse_overrides

    arguments, told = parse_overrides(overrides), told_while_tracing(model)
    return api.make_problem(model, hw=hw, hosts=hosts, overrides=arguments, options=options, while_tracing=told)


def _check_status(answer: Answer, options: Options) -> None:
    """The exit code of a search that gave no plan, or not the proof that was asked for."""
    status = answer.result.status
    if answer.result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    if status == "infeasible":
        has_none = answer.result.n_meshes == 0
        raise InfeasibleError("there is no such plan" if has_none else "no plan fits, and that is proved")
    if answer.result.best is None:
        from autoplan.report.plan import large_batch_text

        smaller = ", or give a smaller --global-batch" if large_batch_text(answer) else ""
        raise StoppedError(f"the search stopped before it found a plan\n  fix: raise --time-limit{smaller}")
    if options.require_optimal and status != "optimal":
        raise StoppedError("the search stopped before its plan was proved optimal\n  fix: raise --time-limit")
