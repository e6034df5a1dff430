"""Commands about clusters that one may buy or rent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoplan.errors import InputError, StoppedError, UsageError
from autoplan.options import OBJECTIVES, PRECISIONS, Options
from autoplan.plain_text import count

from .console import print_result, stdout_kept_clean, text_width, told_while_tracing
from .page_files import PageFiles
from .shared_options import (
    DEFAULTS,
    amount_options,
    fix_option,
    module_level_option,
    money_options,
    output_option,
    page_options,
    row_output_option,
    rules_option,
    sweep_options,
)

_FIELD = re.compile(r"command line: (?:workload|clusters)\.(\w+)")  # which a flag of the same name gives

if TYPE_CHECKING:
    from autoplan.what_if.advice_facts import AdviceAnswer
    from autoplan.what_if.question import Question
    from autoplan.what_if.recommending import Recommendation


@click.command("whatif")
@click.argument("model", metavar="[MODEL|hf:CONFIG.JSON|WHATIF.TOML]", required=False)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--sweep", "sweeps", metavar="KEY=V1,V2,...", multiple=True, help="Compare values of such an argument.")
@click.option("--hw", metavar="A,B,...", help="Hardware profiles, separated by commas.")
@click.option("--hosts", metavar="1,2,...", help="Host counts, separated by commas. [1]")
@click.option(
    "--global-batch", "batches", metavar="B1,B2,...", help="Samples per optimizer step. [8 per device of the largest]"
)
@click.option("--precision", "precisions", metavar="P1,P2,...", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@click.option("--network-scale", "scales", metavar="0.5,1,...", help="Factors on the bandwidth between hosts. [1]")
@click.option(
    "--host-link", "links", metavar="own,pcie4,...", help="Links inside a host, in place of the profile's own."
)
@click.option("--nics", metavar="1,4,...", help="Network ports of each host. [those of the profile]")
@click.option("--nvlink", metavar="on,off", help="off: PCI Express in its place.")
@click.option("--scaling", type=click.Choice(["strong", "weak"]), help="weak: the batch grows with the hosts. [strong]")
@click.option("--objective", type=click.Choice(OBJECTIVES), default=DEFAULTS.objective, show_default=True)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=float,
    metavar="SECONDS",
    help="Per point, of processor time. [quick: 1, or 15 where that finds no plan and for mixed clusters; full: 15]",
)
@module_level_option
@click.option("--schema", "asks_schema", is_flag=True, help="Print the JSON Schema of --format json.")
@fix_option
@amount_options
@money_options
@sweep_options
@rules_option
@page_options
@row_output_option
def whatif_command(
    model: str | None,
    time_limit_s: float | None,
    objective: str,
    module_level: bool,
    memory_confidence: float,
    rules: tuple[str, ...],
    n_jobs: int | None,
    output_format: str,
    asks_schema: bool,
    html: Path | None,
    charts: Path | None,
    png: bool,
    force: bool,
    **flags: Any,
) -> None:
    """Compare clusters: step, losses, time to train, cost and energy of MODEL on each.

    A WHATIF.TOML holds the whole question; flags take the place of its values.
    """
    from autoplan.html_report.png import chart_texts
    from autoplan.html_report.sweep_charts import sweep_charts
    from autoplan.html_report.sweep_page import sweep_page, sweep_title
    from autoplan.what_if.asking import ask
    from autoplan.what_if.report_text import assumption_texts, whatif_report
    from autoplan.what_if.row_tables import whatif_csv, whatif_schema, whatif_to_dict
    from autoplan.what_if.sweep import default_n_jobs

    if asks_schema:
        print_result(json.dumps(whatif_schema(), indent=2))
        return
    beside = PageFiles(html, charts, png, force)
    beside.check()
    options = Options(objective=objective, module_level=module_level, memory_confidence=memory_confidence, rules=rules)
    with stdout_kept_clean():
        question = replace(_question(model, flags, options), time_limit_s=time_limit_s)
        with told_while_tracing(question.model) as tell_points:
            answer = ask(question, n_jobs=n_jobs or default_n_jobs(), progress=tell_points)
    rows, notes = answer.rows, assumption_texts(answer.assumptions)
    in_words = {
        "table": lambda: whatif_report(answer, search=question.search, width=text_width()),
        "csv": lambda: whatif_csv(rows),
        "json": lambda: json.dumps(whatif_to_dict(answer), indent=2, allow_nan=False),
    }
    beside.write(
        page=lambda: sweep_page(rows, title=sweep_title(question), notes=notes),
        files=lambda: {
            **chart_texts(sweep_charts(rows), has_png=png),
            **{f"rows.{name}": in_words[name]() for name in ("csv", "json")},
        },
    )
    print_result(in_words[output_format]())
    if answer.sweep.is_interrupted:
        raise KeyboardInterrupt


@click.command("recommend")
@click.argument("model", metavar="MODEL|hf:CONFIG.JSON|WHATIF.TOML")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--deadline", metavar="14d", help="Latest acceptable time to train: the cheapest cluster that meets it.")
@click.option("--budget", metavar="USD", help="Most US dollars to spend: the fastest cluster that meets it.")
@click.option(
    "--among",
    "hw",
    metavar="A,B,...",
    help="Hardware profiles to choose from. [of a file: its own; else all that have a price]",
)
@click.option("--max-hosts", type=click.IntRange(min=1), default=256, show_default=True, help="Most hosts to look at.")
@click.option("--global-batch", "batches", metavar="B", help="Samples per optimizer step. [512 on every cluster]")
@click.option("--precision", "precisions", metavar="P", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@module_level_option
@fix_option
@amount_options
@money_options
@sweep_options
@rules_option
@output_option
def recommend_command(
    model: str,
    deadline: str | None,
    budget: str | None,
    hw: str | None,
    max_hosts: int,
    module_level: bool,
    memory_confidence: float,
    rules: tuple[str, ...],
    n_jobs: int | None,
    output_format: str,
    **flags: Any,
) -> None:
    """The cheapest cluster that meets a deadline, or the fastest within a budget, and what would change that.

    A WHATIF.TOML holds the question but for its hosts; flags take the place of its values.
    """
    from autoplan.what_if.recommendation_text import recommendation_text, recommendation_to_dict
    from autoplan.what_if.recommending import candidates, parse_budget, parse_deadline, recommend
    from autoplan.what_if.sweep import default_n_jobs

    options = Options(module_level=module_level, memory_confidence=memory_confidence, rules=rules)
    hw = hw if hw or model.endswith(".toml") else ",".join(candidates())
    with stdout_kept_clean():
        question = _question(model, {**flags, "hw": hw}, options)
        deadline_s = None if deadline is None else parse_deadline(deadline)
        budget_usd = None if budget is None else parse_budget(budget)
        with told_while_tracing(question.model) as tell_points:
            answer = recommend(
                question,
                deadline_s=deadline_s,
                budget_usd=budget_usd,
                max_hosts=max_hosts,
                n_jobs=n_jobs or default_n_jobs(),
                progress=tell_points,
            )
    _print_purchase(answer, recommendation_to_dict, recommendation_text, output_format=output_format)
    if answer.best is None and answer.is_beyond_peak_rates:
        raise StoppedError(f"{count(max_hosts, 'host')} cannot meet it\n  fix: a later --deadline, or more --max-hosts")
    if answer.best is None:
        raise StoppedError("no cluster that was looked at meets it; that none does is not proved")


@click.command("advise")
@click.argument("model", metavar="MODEL|hf:CONFIG.JSON")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable.")
@click.option("--hw", required=True, metavar="NAME|FILE", help="Hardware profile of the hosts.")
@click.option("--max-hosts", type=click.IntRange(min=1), default=64, show_default=True, help="Most hosts to look at.")
@click.option("--global-batch", "batches", metavar="B", help="Samples per optimizer step. [8 per device of a host]")
@click.option("--precision", "precisions", metavar="P", help=f"Of {', '.join(PRECISIONS)}. [bf16]")
@click.option("--deadline", metavar="14d", help="Latest acceptable time to train.")
@module_level_option
@fix_option
@amount_options
@money_options
@sweep_options
@rules_option
@output_option
def advise_command(
    model: str,
    deadline: str | None,
    max_hosts: int,
    module_level: bool,
    memory_confidence: float,
    rules: tuple[str, ...],
    n_jobs: int | None,
    output_format: str,
    **flags: Any,
) -> None:
    """Whether to go multi-GPU, and how: one line per rule that applies to MODEL on these devices and links."""
    from autoplan.what_if.advice_text import advice_text
    from autoplan.what_if.advising import advice_to_dict, advise
    from autoplan.what_if.recommending import parse_deadline
    from autoplan.what_if.sweep import default_n_jobs

    options = Options(module_level=module_level, memory_confidence=memory_confidence, rules=rules)
    question = _question(model, flags, options)
    deadline_s = None if deadline is None else parse_deadline(deadline)
    with stdout_kept_clean(), told_while_tracing(model) as tell_points:
        advice = advise(
            question,
            max_hosts=max_hosts,
            deadline_s=deadline_s,
            n_jobs=n_jobs or default_n_jobs(),
            progress=tell_points,
        )
    _print_purchase(advice, advice_to_dict, advice_text, output_format=output_format)


def _print_purchase(
    answer: Recommendation | AdviceAnswer,
    to_dict: Callable[[Any], dict[str, Any]],
    to_text: Callable[..., str],
    *,
    output_format: str,
) -> None:
    """The answer as asked for; one that was interrupted is printed as far as it goes."""
    if output_format == "json":
        print_result(json.dumps(to_dict(answer), indent=2, allow_nan=False))
    else:
        print_result(to_text(answer, width=text_width()))
    if answer.is_interrupted:
        raise KeyboardInterrupt


def _question(model: str | None, flags: dict[str, Any], options: Options) -> Question:
    """The question of a file with the flags in the place of its values, or of the flags alone.

    Names and values are checked here, before anything is told of the trace.
    """
    from autoplan.hardware.cluster import load_hardware
    from autoplan.planning.problem import checked
    from autoplan.rules import load_rules
    from autoplan.what_if.flags import Flags, flag_tables
    from autoplan.what_if.question import question_of

    tables, is_file = flag_tables(Flags(**flags)), model is not None and model.endswith(".toml")
    if model is None or not (is_file or flags.get("hw")):
        raise UsageError("expected MODEL with --hw, or a WHATIF.TOML\n  fix: autoplan whatif model.py --hw dgx_a100_x8")
    try:
        question = question_of(model, tables, where="command line", options=options)
    except InputError as error:
        if is_file or isinstance(error, UsageError):
            raise
        raise UsageError(_FIELD.sub(lambda found: f"--{found[1].replace('_', '-')}", str(error))) from None
    load_rules(checked(question.options).rules)
    for name in question.hw:
        load_hardware(name)
    return question
