"""Numbers on the command line of a program; one that means nothing there is a usage error."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """The type of an option for whole numbers from `smallest` on, up to `largest` if there is one."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            expected = f"of {smallest} or more" if largest is None else f"from {smallest} to {largest}"
            raise ArgumentTypeError(f"found {text!r}, expected a whole number {expected}")
        return value

    return parse


def not_negative(text: str) -> float:
    """A number of 0 or more.

    Raises: ArgumentTypeError for any other text.
    """
    return _finite(text, lambda value: value >= 0.0, "a number of 0 or more")


def positive(text: str) -> float:
    """A number above 0.

    Raises: ArgumentTypeError for any other text.
    """
    return _finite(text, lambda value: value > 0.0, "a number above 0")


def _finite(text: str, is_valid: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_valid(value)):
        raise ArgumentTypeError(f"found {text!r}, expected {expected}")
    return value
