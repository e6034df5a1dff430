"""Fields of a hardware file: what each figure may be, and how it is read and refused.

A figure is `{ value = "80 GiB", source = "data sheet" }`. `section` reads one table of them: every key known, every
required one present, each with a unit, a source and a plausible size. Messages name file, field, found, expected, fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan import units
from autoplan.errors import InputError

SHARED_FILE = "shared.toml"
LIKE_SHIPPED = "write it as hardware_profiles/dgx_a100_x8.toml has it"
PEAK_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a figure may be: its units, its plausible range in base units, an example, and what it is for."""

    units: Mapping[str, float]
    low: float
    high: float
    example: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in base units, where it comes from, and how it was written."""

    value: float
    source: str
    text: str


Table = dict[str, Any]
Figures = dict[str, Figure]
Sources = list[tuple[str, str, str]]  # (field, where it comes from, value as it was written)

_SMALLEST_LINK, _LARGEST_LINK = 10 * units.MB, 2 * units.TB


def _rate(example: str, purpose: str) -> Quantity:
    return Quantity(units.BYTE_RATE_UNITS, _SMALLEST_LINK, _LARGEST_LINK, example, purpose)


def _seconds(low: float, high: float, example: str, purpose: str) -> Quantity:
    return Quantity(units.SECOND_UNITS, low, high, example, purpose)


def _percent(example: str, purpose: str, *, high: float = 1.0) -> Quantity:
    return Quantity(units.RATIO_UNITS, 0.01, high, example, purpose)


PEAK = Quantity(
    units.FLOP_RATE_UNITS,
    0.001 * units.TFLOP,
    10**5 * units.TFLOP,
    "312 TFLOP/s",
    "dense peak rate, never the sparsity figure",
)
_LATENCY = _seconds(1e-8, 0.1, "5 us", "start-up time of one step of a collective")
_HALF_RATE = Quantity(
    units.BYTE_UNITS, units.KiB, units.GiB, "6 MiB", "bytes a rank moves at which half the bus rate is reached"
)
BUS_RATE = _rate("229 GB/s", "achieved bus bandwidth of a large all-reduce")
# Kinds of communication whose bus rate may differ from that of an all-reduce; an all-gather stands for reduce-scatter.
LINK_KINDS = ("all_gather", "all_to_all", "send")
PAIR_KINDS = ("send", "sendrecv")  # from one device to another, and as much back at once
TIMED_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", *PAIR_KINDS)

DEVICE_FIELDS: Mapping[str, Quantity] = {
    "memory": Quantity(units.BYTE_UNITS, units.GiB, 2 * units.TiB, "80 GiB", "memory that the driver offers"),
    "memory_bandwidth": Quantity(
        units.BYTE_RATE_UNITS, units.GB, 100 * units.TB, "2039 GB/s", "data-sheet memory bandwidth"
    ),
    "matmul_efficiency": _percent("69 %", "fraction of the bf16 (else fp16) peak that products keep up for seconds"),
    "memory_efficiency": _percent("90 %", "best achieved fraction of the memory bandwidth"),
    "launch": _seconds(1e-7, 1e-3, "6 us", "host time to launch one bare op in eager mode"),
    "kernel": _seconds(1e-8, 1e-3, "2 us", "shortest time of one kernel on the device"),
    "collective_launch": _seconds(1e-7, 1e-2, "100 us", "host time to start one collective"),
    "pipeline_action": _seconds(1e-7, 1e-2, "100 us", "host time of an action of a pipeline, beside its blocks"),
    "pipeline_transfer": _seconds(1e-7, 1e-2, "100 us", "host time of sending or receiving once in an action"),
    "host_copy_rate": _rate("43 GB/s", "copies from the host to each device, all at once"),
}
SHARDING_FIELDS: Mapping[str, Quantity] = {
    key: _seconds(1e-9, 0.1, "100 us", f"host time of fully_shard: {purpose}")
    for key, purpose in (
        ("hooks", "hooks of a block, in a pass"),
        ("hooks_of_parameter", "hooks of each of its parameters, in a pass"),
        ("gather", "gathering a block"),
        ("gather_of_parameter", "gathering each of its parameters"),
        ("reduce", "reducing the gradients of a block"),
        ("reduce_of_parameter", "reducing each of its gradients"),
        ("optimizer_of_parameter", "norm and optimizer of a parameter, in a step"),
    )
}
OVERLAP_FIELDS: Mapping[str, Quantity] = {
    "exposed_when_overlapped": _percent("31 %", "share of communication that adds to longer compute", high=0.99),
    "compute_exposed_when_overlapped": _percent(
        "10 %", "share of compute that adds to longer communication", high=0.99
    ),
}
HOST_FIELDS: Mapping[str, Quantity] = {
    "price_per_device_hour": Quantity(units.USD_PER_HOUR_UNITS, 0.001, 1000, "1.5 USD/h", "price of one device"),
    **OVERLAP_FIELDS,
}
HOST_LINK_FIELDS: Mapping[str, Quantity] = {
    "rate_per_device_one_direction": _rate("300 GB/s", "data-sheet rate of one device's link, one direction"),
    "latency_per_step": _LATENCY,
    "half_rate_size": _HALF_RATE,
    "all_reduce_bus_rate": BUS_RATE,
    "all_gather_bus_rate": _rate("210 GB/s", "achieved bus bandwidth of a large all-gather"),
    "all_to_all_bus_rate": _rate("200 GB/s", "achieved bus bandwidth of a large all-to-all"),
    "send_bus_rate": _rate("240 GB/s", "achieved rate of a large transfer from one device to another"),
    "multicast_all_reduce_bus_rate": _rate("480 GB/s", "all-reduce of a whole host inside the switch"),
    "drift": Quantity(units.RATIO_UNITS, 0.0, 1.0, "5 %", "standard deviation of times from one minute to another"),
}
NETWORK_FIELDS: Mapping[str, Quantity] = {
    "rate_per_port_one_direction": Quantity(
        units.BIT_RATE_UNITS, _SMALLEST_LINK, _LARGEST_LINK, "400 Gbit/s", "data-sheet rate of one network port"
    ),
    "latency_per_step": _LATENCY,
    "half_rate_size_per_port": _HALF_RATE,
    "all_reduce_bus_rate_per_port": _rate("48 GB/s", "achieved bus bandwidth of a large all-reduce, per port"),
}
TIER_FIELDS: Mapping[str, Quantity] = {
    "latency_per_step": _LATENCY,
    "oversubscription": Quantity(
        {":1": 1.0}, 1.0, 1000.0, "2:1", "rate of all that lies below an uplink / rate of the uplink"
    ),
    "rate_per_uplink_one_direction": Quantity(
        units.BIT_RATE_UNITS, _SMALLEST_LINK, 1000 * units.TB, "1600 Gbit/s", "rate of all uplinks of one domain below"
    ),
}
BETWEEN_FIELDS: Mapping[str, Quantity] = {
    "latency_per_step": _LATENCY,
    "rate_per_group_one_direction": Quantity(
        units.BIT_RATE_UNITS, _SMALLEST_LINK, 1000 * units.TB, "400 Gbit/s", "rate of all uplinks of one group together"
    ),
    "bus_efficiency": _percent("80 %", "achieved bus bandwidth / rate of the uplinks"),
}
_OPTIONAL = frozenset(
    {
        "price_per_device_hour",
        "compute_exposed_when_overlapped",
        "all_gather_bus_rate",
        "all_to_all_bus_rate",
        "send_bus_rate",
        "multicast_all_reduce_bus_rate",
        "drift",
        "oversubscription",
        "rate_per_uplink_one_direction",
    }
)


def section(
    table: Table,
    label: str,
    fields: Mapping[str, Quantity],
    *,
    sources: Sources,
    others: Iterable[str] = (),
    fallback: Table | None = None,
    required: bool = True,
) -> Figures:
    """The figures of one table, those of `fallback` where it has none; appends to `sources`.

    Raises: InputError that names the figure that is missing or wrong.
    """
    check_keys(table, label, (*fields, *others))
    figures: Figures = {}
    field_path = label.partition(": ")[2]
    for key, quantity in fields.items():
        if key in table:
            figures[key] = _figure(table[key], f"{label}.{key}", quantity)
        elif fallback and key in fallback:
            generic = _figure(fallback[key], f"{SHARED_FILE}: {key}", quantity)
            figures[key] = Figure(generic.value, f"assumed: {generic.source}", generic.text)
        elif required and key not in _OPTIONAL:
            raise InputError.of(
                f"{label}.{key}",
                found="nothing",
                expected=f"the {quantity.purpose}",
                fix=f'{key} = {{ value = "{quantity.example}", source = "where it comes from" }}',
            )
        if key in figures:
            sources.append((f"{field_path}.{key}", figures[key].source, figures[key].text))
    return figures


def timed_size(size: str, seconds: Any, label: str) -> tuple[int, float]:
    """(bytes, seconds) of an entry such as "64 KiB" = "9.1 us".

    Raises: InputError that names what is wrong.
    """
    where, expected = f'{label}."{size}"', 'a size and the time it takes, such as "64 KiB" = "9.1 us"'
    if not isinstance(seconds, str):
        raise InputError.of(where, found=seconds, expected=expected, fix="add the unit, in quotes")
    try:
        n_bytes = round(units.parse_quantity(size, units.BYTE_UNITS))
        duration_s = units.parse_quantity(seconds, units.SECOND_UNITS)
    except ValueError as error:
        raise InputError.of(where, found=f"{size} = {seconds}", expected=expected, fix=str(error)) from error
    if n_bytes < 1:
        raise InputError.of(where, found=size, expected="at least one byte", fix="leave it out")
    return n_bytes, duration_s


def _figure(entry: Any, label: str, quantity: Quantity) -> Figure:
    form = f'{{ value = "{quantity.example}", source = "..." }}'
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise InputError.of(label, found=entry, expected=form, fix="give a value with its unit, and its source")
    text, source = entry["value"], entry["source"]
    if not isinstance(text, str):
        raise InputError.of(
            f"{label}.value", found=text, expected=f'text with a unit, such as "{quantity.example}"', fix="add the unit"
        )
    if not isinstance(source, str) or not source.strip():
        raise InputError.of(
            f"{label}.source", found=source, expected="where the figure comes from", fix="name data sheet or command"
        )
    return Figure(number(text, label, quantity), source, text)


def number(text: str, label: str, quantity: Quantity) -> float:
    """The figure in base units; raises InputError when it has no unit, a wrong one, or is of no plausible size."""
    try:
        value = units.parse_quantity(text, quantity.units)
    except ValueError as error:
        raise InputError.of(
            label, found=text, expected=f'such as "{quantity.example}"', fix=_unit_fix(text, error, quantity)
        ) from None
    if quantity.low <= value <= quantity.high:
        return value
    raise InputError.of(
        label,
        found=text,
        expected=f"{_spell(quantity.low, quantity)} to {_spell(quantity.high, quantity)}, the {quantity.purpose}",
        fix=_magnitude_fix(text, quantity),
    ) from None


def _unit_fix(text: str, error: ValueError, quantity: Quantity) -> str:
    """The parser's advice; where the rate of a port is given in bytes, what was probably meant."""
    unit = text.strip().removeprefix(units.number_text(text)).strip()
    in_bits = unit.replace("B/s", "bit/s")
    if quantity.units is units.BIT_RATE_UNITS and unit in units.BYTE_RATE_UNITS and in_bits in quantity.units:
        return f'ports are sold in bits: did you mean "{units.number_text(text)} {in_bits}"?'
    return str(error)


def _magnitude_fix(text: str, quantity: Quantity) -> str:
    """The same number with another unit, where that gives a plausible size; the unit of the example first."""
    number = units.number_text(text)
    example_unit = quantity.example.removeprefix(units.number_text(quantity.example)).strip()
    for unit in sorted(quantity.units, key=lambda unit: unit != example_unit):
        if quantity.low <= float(number) * quantity.units[unit] <= quantity.high:
            return f'did you mean "{_joined(number, unit)}"?'
    return "check the number and its unit"


def _spell(value: float, quantity: Quantity) -> str:
    """`value` in the largest unit of the quantity that keeps it at or above 1."""
    unit, factor = max(
        ((unit, factor) for unit, factor in quantity.units.items() if factor <= value * 1.0001),
        key=lambda item: item[1],
        default=next(iter(quantity.units.items())),
    )
    return _joined(f"{value / factor:.3g}", unit)


def _joined(number: str, unit: str) -> str:
    """`80 GiB`, but `2:1`."""
    return f"{number}{unit}" if unit.startswith(":") else f"{number} {unit}"


def check_not_above(bus_rate: float, rate: float, label: str) -> None:
    """Raise InputError when a bus bandwidth is above the rate of its link."""
    if bus_rate > rate:
        raise InputError.of(
            label,
            found=units.format_rate(bus_rate),
            expected=f"at most the link's rate of {units.format_rate(rate)}, one direction",
            fix="give the bus bandwidth of one device (or port), not of all together",
        )


def check_keys(table: Table, label: str, allowed: Iterable[str]) -> None:
    """Raise InputError for the first key of `table` that is not allowed, with the nearest one that is."""
    names = tuple(allowed)
    for key in table:
        if key not in names:
            raise InputError.of(
                f"{label}.{key}" if ": " in label else f"{label}: {key}",
                found=key,
                expected=f"one of {', '.join(names)}",
                fix=did_you_mean(key, names) or "delete it",
            )


def check_choice(name: str, choices: Iterable[str], label: str, error: type[InputError] = InputError) -> None:
    """Raise `error` when `name` is none of `choices`, with the list and the nearest."""
    names = tuple(choices)
    if name not in names:
        raise error.of(
            label, found=name, expected=f"one of {', '.join(names)}", fix=did_you_mean(name, names) or "choose one"
        )


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`did you mean "x"?` for the nearest choice; empty when none is near."""
    close = difflib.get_close_matches(name, tuple(choices), n=1, cutoff=0.65)
    return f'did you mean "{close[0]}"?' if close else ""


def inner_table(table: Table, label: str, key: str) -> Table:
    """A required table inside another.

    Raises: InputError when it is missing.
    """
    inner = table.get(key)
    if not isinstance(inner, dict):
        path = f"{label}.{key}" if ": " in label else f"{label}: {key}"
        found = inner if key in table else "nothing"
        raise InputError.of(path, found=found, expected=f"a table [{key}]", fix=LIKE_SHIPPED)
    return inner


def plain(table: Table, label: str, key: str, cls: type, purpose: str) -> Any:
    """A required text or count, which carries no unit and needs no source.

    Raises: InputError when it is missing, or another type.
    """
    value = table.get(key)
    if not isinstance(value, cls) or isinstance(value, bool) or value == "":
        path = f"{label}.{key}" if ": " in label else f"{label}: {key}"
        word = "a text" if cls is str else "a whole number"
        found = value if key in table else "nothing"
        raise InputError.of(path, found=found, expected=f"{word}: {purpose}", fix=f"write {key} = ...")
    return value
