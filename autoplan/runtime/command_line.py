"""The command line of a program, which all of its processes read: one of a host says what is wrong with it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, NoReturn

from .refusal import is_first_of_host, let_first_speak

# What does nothing without another option, and what is not done under --check.
NEEDED = {
    "eval_batches": "eval_every",
    "checkpoint_every": "checkpoint_dir",
    "keep": "checkpoint_dir",
    "profile_dir": "profile_steps",
}
NOT_CHECKED = ("checkpoint_dir", "init_from", "export", "profile_steps")
NOT_ALONE = ("check", *NOT_CHECKED, "eval_every", "log_jsonl", "tensorboard")


class ProgramParser(ArgumentParser):
    """A parser of one of several processes."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with 2."""
        let_first_speak()
        super().error(message)

    def print_help(self, file: Any = None) -> None:
        """Print the help, once a host."""
        if is_first_of_host():
            super().print_help(file)


def check_options(parser: ArgumentParser, options: Namespace, model_file: Any) -> None:
    """A usage error for options of `train.py` that contradict each other, or that do nothing without another one."""
    for name, needed in NEEDED.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            parser.error(f"argument {_typed(name)}: does nothing without {_typed(needed)}")
    if options.resume in ("auto", "none") and options.checkpoint_dir is None:
        parser.error(f"argument --resume: {options.resume} does nothing without --checkpoint-dir")
    is_resumed = options.resume not in (None, "auto", "none")
    if is_resumed and options.init_from is not None:
        parser.error("--init-from and --resume PATH both say where to start: leave one out")
    given = [name for name in NOT_CHECKED if getattr(options, name) is not None] + ["resume"] * is_resumed
    if options.check and given:
        parser.error(f"--check compares a run with one process from its start: leave out {_typed(given[0])}")
    given = [name for name in NOT_ALONE if getattr(options, name)] + ["resume"] * is_resumed
    if options.alone is not None and given:
        parser.error(f"--alone shows the memory of one rank, and no more: leave out {_typed(given[0])}")
    _check_reading(parser, options, model_file)


def _check_reading(parser: ArgumentParser, options: Namespace, model_file: Any) -> None:
    """A usage error for options on the batches of a dataset where none is read."""
    given = ["repeat_batches"] * (options.check and options.repeat_batches is not None)
    given += ["fill_last_batch"] * options.fill_last_batch
    given += ["workers"] * (options.workers > 0 and options.eval_every is None)
    if options.check:
        why = " with --check, which draws a random batch for each step"
    elif options.repeat_batches is not None:
        why = " with --repeat-batches, which draws random ones"
    elif not hasattr(model_file, "build_dataset"):
        why = ", as the model file has no build_dataset()"
    else:
        return
    if given:
        parser.error(f"argument {_typed(given[0])}: does nothing{why}")


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")
