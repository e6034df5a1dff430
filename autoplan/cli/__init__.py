"""The command line: arguments in, one result on stdout, everything else on stderr, an exit code.

    0 ok             3 bad input file        6 stopped (no plan, or no proof)    9 cannot write output
    1 bug            4 cannot trace          7 measuring failed                  130 interrupted
    2 usage          5 proved infeasible     8 verify out of tolerance

plan_commands, hardware_commands and purchase_commands are the commands, shared_options what several of them take;
console prints, page_files writes pages. Imports stand inside the commands, so that `--help` loads neither torch nor the
solver.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import click

from autoplan import __version__
from autoplan.errors import AutoplanError, UsageError
from autoplan.garbage import few_collections

from .hardware_commands import doctor_command, hw_group, profile_command
from .plan_commands import estimate_command, explain_command, plan_command, rule_command, verify_command
from .purchase_commands import advise_command, recommend_command, whatif_command

INTERRUPTED = 130
_DEVICES = "Devices are given by --hw NAME/N, for N of each host, and --hosts."
_BATCH = "The samples of a step are given by --global-batch; --fix micro_batch=N is what a rank computes at once."
# option of other programs -> ours that says it, and how
OTHER_NAMES = {
    **dict.fromkeys(("--gpus", "--n-gpus", "--num-gpus", "--devices", "--nproc-per-node"), ("--hw", _DEVICES)),
    **dict.fromkeys(("--nodes", "--nnodes", "--num-nodes"), ("--hosts", _DEVICES)),
    **dict.fromkeys(("--batch-size", "--batch", "--global-batch-size"), ("--global-batch", _BATCH)),
}


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
    gc.freeze()  # the process ends: nobody needs to look through what is left of it
    sys.exit(INTERRUPTED if interrupts else code)


def run(arguments: Sequence[str], *, is_interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run one command line and return its exit code."""
    show_traceback = "--debug" in arguments
    try:
        with few_collections():
            code = cli.main(args=list(arguments), prog_name="autoplan", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.NoSuchOption as error:
        _with_our_option(error).show()
        return UsageError.exit_code
    except click.ClickException as error:
        _with_what_there_is(error).show()
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


def _with_our_option(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with what an option of other programs is called here, where the command has that."""
    ours, text = OTHER_NAMES.get(error.option_name, ("", ""))
    known = {name for own in (error.ctx.command.params if error.ctx else ()) for name in own.opts}
    if ours not in known:
        return error
    return click.NoSuchOption(error.option_name, f"{error.format_message().partition('.')[0]}. {text}", ctx=error.ctx)


def _with_what_there_is(error: click.ClickException) -> click.ClickException:
    """The error with where to find the names of hardware, where none is given."""
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "hw":
        names = "`autoplan hw list` shows the hardware profiles, such as --hw dgx_a100_x8."
        return click.MissingParameter(names, error.ctx, error.param)
    return error


def _report_error(text: str, code: int, *, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exc()
    with suppress(BrokenPipeError):  # a reader that has left (`2>&1 | head`) changes no exit code
        click.echo(f"autoplan: {text}", err=True)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Find the parallelism that trains a PyTorch model fastest on a cluster, and write the program that does it."""


for _command in (
    plan_command,
    estimate_command,
    rule_command,
    explain_command,
    verify_command,
    profile_command,
    hw_group,
    whatif_command,
    recommend_command,
    advise_command,
    doctor_command,
):
    cli.add_command(_command)
