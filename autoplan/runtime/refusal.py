"""How a program ends where what it was given cannot work: with a message that says why, and no traceback."""

from __future__ import annotations

import os
from typing import ClassVar


class Refusal(SystemExit):
    """Ends the program with the message and exit code 1.

    Where every process comes to the same end, the first of a host says why, and the others end with the code alone;
    `str()` of it is the message on all of them. A note is said by the rank that adds it.
    """

    may_be_of_one_rank: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        speaks = self.may_be_of_one_rank or os.environ.get("LOCAL_RANK", "0") == "0"
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
