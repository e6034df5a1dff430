"""Where a program writes, tried on its command line rather than when there is something to write, and what fails then.

Rank 0 writes, so only its host must be able to; traces are written by every rank.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .refusal import OutputError


def named_path(text: str) -> Path:
    """The type of an option for any path; a variable of the shell that is not set is none.

    Raises: ArgumentTypeError for an empty text.
    """
    if not text:
        raise ArgumentTypeError("found '', expected a path")
    return Path(text)


def written_file(text: str) -> Path:
    """The type of an option for a file to write; its folders are made where there are none.

    Raises: ArgumentTypeError on rank 0 when it cannot be written.
    """
    _check(text, is_right=_is_no_folder, kind="file")
    return named_path(text)


def written_folder(text: str) -> Path:
    """The same for a folder."""
    _check(text, is_right=os.path.isdir, kind="folder")
    return named_path(text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes there.

    Raises: OutputError when the disk is full, or it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror or error}\n  fix: make room, or choose another place"
        ) from error


def _is_no_folder(path: str) -> bool:
    return not os.path.isdir(path)  # a pipe and /dev/null can be written too


def _check(text: str, *, is_right: Callable[[str], bool], kind: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    there = os.path.abspath(text)
    if os.path.exists(there) and not is_right(there):
        raise ArgumentTypeError(f"found {text!r}, expected a {kind}")
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.access(there, os.W_OK) or not (os.path.isdir(there) or there == os.path.abspath(text)):
        raise ArgumentTypeError(f"found {text!r}, expected a {kind} that can be written: {there} cannot")
