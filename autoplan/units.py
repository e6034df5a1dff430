"""Units: text with a unit -> a number in base units where data enters, and back where it leaves.

Inside the program there are only bytes, seconds, FLOPs, bytes/s, FLOPs/s and US dollars. `GB` is 10**9 bytes and
`GiB` is 2**30; a network rate in bits is written `Gbit/s`. A text without a unit, or with a unit that could be read
in two ways (`Gb`, `GBps`), is refused rather than guessed.

Every parser raises ValueError saying what is wrong and what to write instead; the loader that knows the file and
the field turns it into an InputError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
TFLOP = 10**12
THOUSAND, MILLION, BILLION = 10**3, 10**6, 10**9  # of what has no unit of its own: tokens, dollars
BITS_PER_BYTE = 8
SECONDS_PER_HOUR = 3600

BYTE_UNITS: Mapping[str, float] = {
    "B": 1, "KB": KB, "kB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
}  # fmt: skip
BYTE_RATE_UNITS: Mapping[str, float] = {f"{unit}/s": factor for unit, factor in BYTE_UNITS.items()}
BIT_RATE_UNITS: Mapping[str, float] = {
    f"{prefix}bit/s": factor / BITS_PER_BYTE for prefix, factor in (("", 1), ("k", KB), ("M", MB), ("G", GB), ("T", TB))
}
FLOP_RATE_UNITS: Mapping[str, float] = {"GFLOP/s": TFLOP / 1000, "TFLOP/s": TFLOP, "PFLOP/s": TFLOP * 1000}
SECOND_UNITS: Mapping[str, float] = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": SECONDS_PER_HOUR,
    "d": 24 * SECONDS_PER_HOUR,
}  # fmt: skip
WALL_TIME_UNITS: Mapping[str, float] = {unit: SECOND_UNITS[unit] for unit in ("ms", "s", "min", "h", "d")}
USD_PER_HOUR_UNITS: Mapping[str, float] = {"USD/h": 1}
RATIO_UNITS: Mapping[str, float] = {"%": 0.01}

# What people write, and what they may have meant: offered, never guessed.
_AMBIGUOUS = {
    "Gb": '"Gbit/s" or "GB/s"', "Gb/s": '"Gbit/s" or "GB/s"', "Gbps": '"Gbit/s" or "GB/s"', "Gbit": '"Gbit/s"',
    "GBps": '"GB/s"', "Mb": '"Mbit/s" or "MB"', "Mbps": '"Mbit/s"', "TFLOPS": '"TFLOP/s"', "TFLOPs": '"TFLOP/s"',
    "TFLOP": '"TFLOP/s"', "TFlops": '"TFLOP/s"', "usec": '"us"', "sec": '"s"', "$/h": '"USD/h"', "$": '"USD/h"',
    **dict.fromkeys(("day", "days"), '"d"'), **dict.fromkeys(("hour", "hours", "hr", "hrs"), '"h"'),
    **dict.fromkeys(("minute", "minutes", "mins"), '"min"'), **dict.fromkeys(("second", "seconds", "secs"), '"s"'),
}  # fmt: skip
_QUANTITY = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)")


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of a text such as "2039 GB/s" or, in bits, "400 Gbit/s" (50 GB/s)."""
    return parse_quantity(text, {**BYTE_RATE_UNITS, **BIT_RATE_UNITS})


def parse_usd_per_hour(text: str) -> float:
    """US dollars per hour of a text such as "1.5 USD/h"."""
    return parse_quantity(text, USD_PER_HOUR_UNITS)


def parse_quantity(text: str, units: Mapping[str, float]) -> float:
    """The positive, finite number of `text` times the factor of its unit.

    Raises: ValueError that says what to write instead.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a number with a unit; write for example {_examples(units, number='5 ')}")
    number, unit = float(match[1]), match[2]
    if unit not in units:
        raise ValueError(_unit_message(unit, units))
    if not math.isfinite(number) or number <= 0:
        raise ValueError("must be finite and above 0; leave the field out if the figure is unknown")
    return number * units[unit]


def number_text(text: str) -> str:
    """The number of a text as it is written, without its unit; empty when it does not start with one."""
    match = _QUANTITY.fullmatch(text.strip())
    return match[1] if match else ""


def _unit_message(unit: str, units: Mapping[str, float]) -> str:
    if not unit:
        return f"no unit; use {_examples(units)}"
    return f'unknown unit "{unit}"; use {_AMBIGUOUS.get(unit) or _examples(units)}'


def _examples(units: Mapping[str, float], number: str = "") -> str:
    known = ("GB", "GiB", "GB/s", "Gbit/s", "us", "h", "d", "TFLOP/s", "USD/h", "%")
    fitting = [unit for unit in known if unit in units]
    return " or ".join(f'"{number}{unit}"' for unit in fitting[:2])


def format_bytes(n_bytes: float) -> str:
    """Binary units, one decimal: "80.0 GiB"."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(n_bytes) >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def format_share(share: float) -> str:
    """`54%`; a share below 1 % in two digits, `0.018%`, so that little does not read as nothing."""
    return f"{share:.0%}" if share >= 0.01 or share == 0.0 else f"{share / 0.01:.2g}%"


def format_seconds(seconds: float) -> str:
    """Three significant digits in the largest unit that keeps the number at or above 1: "1.23 ms"."""
    for unit, factor in (("d", 24 * SECONDS_PER_HOUR), ("h", SECONDS_PER_HOUR), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def format_rate(bytes_per_s: float) -> str:
    """Decimal units, as data sheets print them: "2.04 TB/s"."""
    return f"{_decimal(bytes_per_s, 'B/s')}"


def format_flops_per_s(flops_per_s: float) -> str:
    """Decimal units: "312 TFLOP/s"."""
    return f"{_decimal(flops_per_s, 'FLOP/s')}"


def format_usd(usd: float) -> str:
    """Dollars with cents below 100, whole dollars from there on: "1.50 USD", "12,345 USD"."""
    return f"{usd:,.2f} USD" if abs(usd) < 100 else f"{usd:,.0f} USD"


def _decimal(value: float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    """The number with three significant digits, without an exponent: 0.5, 1.23, 12.3, 1234."""
    n_decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{n_decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
