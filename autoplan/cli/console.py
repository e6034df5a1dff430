"""What commands print: the result on stdout, everything else on stderr."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import date
from typing import TYPE_CHECKING, Any

import click

from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.plain_text import WIDTH

if TYPE_CHECKING:
    from autoplan.answers.answer import Answer

SLOW_TRACE = """\
tracing takes long: each op of forward is recorded once, and in a loop over tokens (a scan, a recurrent state) once per
token. To shorten it: fewer tokens by --set (of an hf: model --set context=64), or fewer layers; --module-level runs the
model instead, without tensor and pipeline parallelism. Ctrl-C ends it. What was traced is cached."""
MIN_WIDTH = 72  # of text; narrower terminals break lines themselves


def print_answer(answer: Answer, render: Callable[[Answer], str], output_format: str) -> None:
    """An answer as `--format` says, on stdout."""
    from autoplan.answers.answer import answer_to_json

    print_result(answer_to_json(answer) if output_format == "json" else render(answer))


def json_text(values: dict[str, Any]) -> str:
    """A result as `--format json` prints it."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2, default=_day_text)


def _day_text(value: object) -> str:
    """A date as JSON has none."""
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"not a JSON value: {value!r}")


def print_result(text: str) -> None:
    """The result, on stdout; a reader that has left (`| head`) is no error."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115  (so that closing at exit does not fail again)


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
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


def text_width() -> int:
    """Columns of text on stdout: those of the terminal; `WIDTH` in files and pipes, which are the same everywhere."""
    try:
        return max(MIN_WIDTH, os.get_terminal_size(1).columns)
    except OSError:
        return WIDTH


def tell(text: str) -> None:
    """What is being done, on stderr."""
    click.echo(f"{text} ...", err=True)


@contextmanager
def told_while_tracing(
    model: object, *, first_s: float = 30.0, every_s: float = 60.0
) -> Iterator[Callable[[int, int], None]]:
    """Say that a model is traced; once that has taken `first_s` what may shorten it, and then that it goes on.

    Where points are searched next, the value is `tell_points`, which ends this when it is first called.
    """
    tell(f"tracing {model}")
    is_done, started_s = threading.Event(), time.monotonic()

    def remind() -> None:
        if is_done.wait(first_s):
            return
        click.echo(SLOW_TRACE, err=True)
        while not is_done.wait(every_s):
            tell(f"tracing {model} for {time.monotonic() - started_s:.0f} s")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()

    def tell_first_points(n_done: int, n_all: int) -> None:
        is_done.set()
        tell_points(n_done, n_all)

    try:
        yield tell_first_points
    finally:
        is_done.set()
        reminder.join()


def tell_points(n_done: int, n_all: int) -> None:
    """How many points of a sweep are done, on stderr; on a terminal in one line."""
    width = 30
    filled = width if n_all == 0 else width * n_done // n_all
    bar = f"[{'#' * filled}{' ' * (width - filled)}] {n_done} of {n_all} points"
    if sys.stderr.isatty():
        click.echo(f"\r{bar}", err=True, nl=n_done == n_all)
    elif n_done in (0, n_all):
        click.echo(bar, err=True)
