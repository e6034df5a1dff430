"""What went wrong in the user's code, in the user's terms: the file, the line, and what to do."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.errors import InputError

_NOT_THE_USERS = ("site-packages", "/lib/python", str(Path(__file__).parent) + os.sep)
_DATA_DEPENDENT = ("DataDependent", "data-dependent", "Could not guard", "unbacked", "aten._local_scalar_dense")


def user_frame(error: BaseException, path: Path) -> str:
    """The error with the innermost line of the user's file."""
    lines = [error.lineno] if isinstance(error, SyntaxError) and error.lineno else []
    lines += [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path) and f.lineno]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def users_place(error: BaseException) -> str:
    """` at FILE:LINE: TEXT`, the innermost line of the user's code that an error came through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not any(part in frame.filename for part in _NOT_THE_USERS)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def made_batch(make_batch: Callable[[int], Any], batch_size: int, *, where: str) -> Any:
    """What the user's `make_batch` gives.

    Raises: InputError with the line of the user's file that failed.
    """
    try:
        return make_batch(batch_size)
    except Exception as error:
        found = f"{type(error).__name__}: {first_line(error)}{users_place(error)}"
        fix = "correct it, or the --set values it works with"
        raise InputError.of(
            f"{where}: make_batch failed", found=found, expected="(inputs, targets)", fix=fix
        ) from error


def trace_failure(name: str, error: BaseException) -> str:
    """Why `torch.export` could not follow the model: file and line, what was found, and the ways out."""
    where = users_place(error)
    if any(word in f"{type(error).__name__} {error}" for word in _DATA_DEPENDENT):
        expected = "a forward whose operators do not depend on the values of tensors"
        fix = (
            "replace a branch on data by torch.where or torch.cond, or move it out of forward;"
            " or use --module-level, which plans without tensor and pipeline parallelism"
        )
    else:
        expected = "a forward that runs on the batch of make_batch"
        fix = "call the model on one batch yourself, outside of autoplan, and mend what fails there"
    return (
        f"{name}: torch.export cannot trace the model{where}\n"
        f"  found: {type(error).__name__}: {first_line(error)}\n  expected: {expected}\n  fix: {fix}"
    )
