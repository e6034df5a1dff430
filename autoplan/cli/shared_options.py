"""Options that several commands have, as decorators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from autoplan.checks.options import FIX_VALUES
from autoplan.options import OBJECTIVES, PRECISIONS, TORCH_PRECISIONS, Options

DEFAULTS = Options()
_Command = TypeVar("_Command", bound=Callable[..., Any])


def combined(*decorators: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Several decorators as one, which `--help` lists in this order."""

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class PrecisionName(click.Choice[str]):
    """A precision, by our name or by that of torch's dtype."""

    def __init__(self) -> None:
        super().__init__(PRECISIONS)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Our name of what was given."""
        return super().convert(TORCH_PRECISIONS.get(value, value), parameter, context)


output_option = combined(
    click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
model_argument = combined(
    click.argument("model", metavar="MODEL|hf:CONFIG.JSON", type=click.Path(path_type=Path)),
    click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Argument for build_model; repeatable."
    ),
)
cluster_options = combined(
    click.option(
        "--hw",
        required=True,
        metavar="NAME|FILE",
        help="Hardware profile, or mixed cluster; see `autoplan hw list`. NAME/2: 2 of the devices of each host;"
        " NAME+ethernet_10g: that network between hosts.",
    ),
    click.option("--hosts", type=int, default=1, show_default=True, help="How many equal hosts."),
)
page_options = combined(
    click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page to look at, too."),
    click.option("--charts", type=click.Path(path_type=Path), metavar="DIR", help="Write charts (SVG) and rows, too."),
    click.option("--png", is_flag=True, help="Charts as PNG, too; needs `pip install autoplan[png]`."),
    click.option("--force", is_flag=True, help="Replace FILE and DIR."),
)
rules_option = click.option(
    "--rules", metavar="FILE", multiple=True, help="File of op rules of your own, ending in RULES = {...}; repeatable."
)
profile_option = click.option(
    "--profile", metavar="FILE", help="Measurements of `autoplan profile`, in place of computed times."
)
confidence_option = click.option(
    "--memory-confidence",
    type=click.FloatRange(50, 100, max_open=True),
    metavar="PERCENT",
    default=100 * DEFAULTS.memory_confidence,
    show_default=True,
    callback=lambda context, parameter, value: value / 100,
    help="With what chance memory must suffice for a plan to count as fitting; 50: as computed.",
)
workload_options = combined(
    click.option("--global-batch", type=int, help="Samples per optimizer step.  [default: 8 per device]"),
    click.option("--precision", type=PrecisionName(), default=DEFAULTS.precision, show_default=True),
    click.option("--objective", type=click.Choice(OBJECTIVES), default=DEFAULTS.objective, show_default=True),
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
        help=f"Stop searching with the best plan so far [{DEFAULTS.time_limit_s:g}; none under --require-optimal].",
    ),
    confidence_option,
    click.option("--strict", is_flag=True, help="An op without a cost rule is an error."),
    rules_option,
    click.option(
        "--module-level",
        is_flag=True,
        help="Run the model instead of tracing it; for branches on data. Nothing is split, put on stages or compiled.",
    ),
)

amount_options = combined(
    click.option("--tokens", "n_tokens", type=float, help="Train on this many tokens, such as 300e9."),
    click.option("--samples", "n_samples", type=float, help="Train on this many samples."),
)
money_options = combined(
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
sweep_options = combined(
    confidence_option,
    click.option(
        "--search",
        type=click.Choice(["quick", "full"]),
        help="quick: 1f1b, or gpipe with few micro-batches; the best mesh of 1f1b then under all; full: all. [quick]",
    ),
    click.option("--jobs", "n_jobs", type=click.IntRange(min=1), help="Processes that search. [one per core]"),
)
module_level_option = click.option("--module-level", is_flag=True, help="As for plan.")
fix_option = click.option(
    "--fix", multiple=True, metavar="NAME=VALUE,...", help="What every plan must have; as for plan."
)
row_output_option = combined(
    click.option(
        "--format", "output_format", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True
    ),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
