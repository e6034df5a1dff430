"""Where numbers stand on an axis, and which of them are written there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.html_report.svg import label, line
from autoplan.units import SECOND_UNITS

MOST_LOG_TICKS = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `stop`; logarithmic values are all above 0."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        if self.high <= self.low:
            return (self.start + self.stop) / 2
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def ticks(low: float, high: float, *, n_most: int = 6) -> tuple[float, ...]:
    """Round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart, at most `n_most`."""
    if not high > low:
        return (low,)
    apart = 10.0 ** math.floor(math.log10((high - low) / n_most))
    while _n_steps(low, high, apart) > n_most:
        apart *= 2.5 if f"{apart:e}".startswith("2") else 2
    first = math.ceil(low / apart - _ROUNDING)
    return tuple((first + index) * apart for index in range(_n_steps(low, high, apart)))


_ROUNDING = 1e-9  # of a step: a tick that rounding put beyond the end is still a tick


def _n_steps(low: float, high: float, apart: float) -> int:
    return math.floor(high / apart + _ROUNDING) - math.ceil(low / apart - _ROUNDING) + 1


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Numbers on a logarithmic axis from `low` to `high`: 1, 2, 5 and so on, or powers of ten alone if many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [
            factor * 10.0**exponent
            for exponent in exponents
            for factor in factors
            if low <= factor * 10.0**exponent <= high
        ]
        if len(found) <= MOST_LOG_TICKS:
            return tuple(found) if len(found) > 1 else (low, high)
    apart = math.ceil(len(found) / MOST_LOG_TICKS)
    return tuple(found[::apart])


def time_unit_s(high_s: float) -> float:
    """In which unit times up to this are round: days, hours or seconds, as `units.format_seconds` writes them."""
    return next((unit_s for unit_s in (SECOND_UNITS["d"], SECOND_UNITS["h"]) if high_s >= unit_s), 1.0)


def time_ticks(high_s: float) -> tuple[float, ...]:
    """Of an axis of time that starts at 0."""
    unit_s = time_unit_s(high_s)
    return tuple(unit_s * value for value in ticks(0.0, high_s / unit_s, n_most=8))


def x_axis(
    axis: Axis, at: tuple[float, ...], *, top: float, bottom: float, text: Callable[[float], str], name: str = ""
) -> str:
    """Grid lines from `top` to `bottom`, their values below, and the name of the axis below these."""
    parts = [line(axis.at(value), top, axis.at(value), bottom, css="grid") for value in at]
    parts += [label(axis.at(value), bottom + 15, text(value), css="middle soft") for value in at]
    if name:
        parts.append(label((axis.start + axis.stop) / 2, bottom + 33, name, css="middle"))
    return "".join(parts)


def y_axis(
    axis: Axis, at: tuple[float, ...], *, left: float, right: float, text: Callable[[float], str], name: str = ""
) -> str:
    """Grid lines from `left` to `right`, their values to the left, and the name of the axis above."""
    parts = [line(left, axis.at(value), right, axis.at(value), css="grid") for value in at]
    parts += [label(left - 6, axis.at(value) + 4, text(value), css="end soft") for value in at]
    if name:
        parts.append(label(left - 6, min(axis.start, axis.stop) - 10, name))
    return "".join(parts)
