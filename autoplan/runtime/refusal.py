"""How a program ends where what it was given cannot work: with a message that says why, and no traceback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import ClassVar, TypeVar

OTHERS_FIRST_S = 5.0  # torchrun looks at its processes every 0.1 s
Result = TypeVar("Result")


class Refusal(SystemExit):
    """Ends the program with the message and exit code 1.

    Where every process comes to the same end, the first of a host says why, and the others end with the code alone;
    `str()` of it is the message on all of them. A note is said by the rank that adds it. See also `said_once`.
    """

    may_be_of_one_rank: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        speaks = self.may_be_of_one_rank or is_first_of_host()
        self.code = message if speaks else 1

    def add_note(self, note: str, /) -> None:
        super().add_note(note)
        said = f"rank {os.environ.get('RANK', '0')}: {note}"
        self.code = said if self.code == 1 else f"{self.code}\n{said}"


class OptionError(Refusal):
    """An option of the command line asks for what is not there."""


class DataError(Refusal):
    """What the model file gives to train on or to evaluate on cannot be read as batches of the plan."""

    may_be_of_one_rank = True


class DatasetError(DataError):
    """What is given as a dataset is none, on every rank."""

    may_be_of_one_rank = False


class OutputError(Refusal):
    """What a rank writes beside checkpoints cannot be written."""

    may_be_of_one_rank = True


def is_first_of_host() -> bool:
    """Whether this process speaks for those of its host; one that no launcher started does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def let_first_speak() -> None:
    """Before an error is said: in all but the first process of a host, wait whether that has the same to say.

    torchrun then ends this process in the meantime, also where a handler of SIGTERM would finish the step first.
    """
    if not is_first_of_host():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_FIRST_S)


def said_once(program: Callable[[], Result]) -> Callable[[], Result]:
    """A program whose refusals the first process of a host says; another one only where it may be alone with one."""

    @wraps(program)
    def run() -> Result:
        try:
            return program()
        except Refusal as refusal:
            if not getattr(refusal, "__notes__", ()):
                let_first_speak()
            raise

    return run
