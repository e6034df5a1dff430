"""The question of a what-if: flags, keywords and a whatif.toml all become one `Question`.

[workload]
model = "llama.py"                        beside this file, or hf:CONFIG.JSON
set = { size = "8b" }                -    arguments of build_model
sweep = { seq_len = [2048, 4096] }   -    arguments of build_model to compare
tokens = 1e12                        -    or samples = 1e9
global_batch = [512, 1024]           -    samples of a step
precision = ["bf16"]                 -
scaling = "strong"                   -    "weak": the batch is that of the fewest hosts and grows with them
fix = "zero=1"                       -    what every plan must have

[clusters]
hw = ["dgx_a100_x8", "dgx_h100_x8"]
hosts = [1, 2, 4]                    -
network_scale = [1.0, 2.0]           -    factor on the bandwidth between hosts; half of the ports is 0.5
host_link = ["", "pcie4"]            -    links inside a host in place of the profile's own, which "" keeps

[money]                              -    every key of it, too
rent = "on_demand"                        or "reserved", "spot"
prices = "my_prices.toml"                 see `what_if.prices`
price = { dgx_a100_x8 = "1.80 USD/h" }    of one device; beats all files
electricity = "0.12 USD/kWh"
pue = 1.3                                 site power / machine power
load = "90 %"                             mean power of a device / its board power
host_power = "3 kW"                       without its devices

[money.own]                          -    own hardware, per device
capex = "30000 USD"
network_share = "20 %"    years = 4    residual_share = "10 %"    utilisation = "70 %"    support_share_per_year = "5 %"
staff_per_year = "500 USD"

[reliability]                        -    see `conditions.Reliability`
device_mtbf = "50000 h"    checkpoint = "30 s"    checkpoint_rate_per_host = "2 GB/s"    restart = "10 min"
spare_hosts = 2    repair = "2 d"    interruptions_per_device_hour = 0.01    notice = "30 s"
slow_device_speed = "50 %"    step_jitter = "1 %"

[loading]                            -    see `conditions.Loading`
samples_per_s_per_host = 2000    storage_rate = "10 GB/s"    sample_size = "150 KB"

A list in place of a value of [money], [money.own], [reliability] or [loading] makes a row of each, without another
search: device_mtbf = ["50000 h", "10000 h"].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from autoplan import units
from autoplan.errors import InputError, UsageError
from autoplan.hardware_fields import Quantity, Table, check_choice, check_keys, number
from autoplan.hardware_file import parse_toml, read_path
from autoplan.hugging_face import is_hugging_face
from autoplan.option_checks import parse_fix
from autoplan.options import PRECISIONS, Options
from autoplan.what_if.conditions import Loading, Reliability
from autoplan.what_if.money import RENTS, Money, Own
from autoplan.what_if.points import SCALINGS, SEARCHES, Overrides
from autoplan.what_if.prices import PRICE

LISTED = ("money", "reliability", "loading")  # tables whose values may be lists
MAX_POINTS = 10_000
MAX_AMOUNT = 1e20  # of tokens or samples
MAX_HOSTS = 10**6
MAX_BATCH = 10**9

_SECONDS = Quantity(units.SECOND_UNITS, 1e-3, 1e12, "10 min", "time")
_SHARE = Quantity(units.RATIO_UNITS, 1e-6, 1.0, "10 %", "share")
_RATE = Quantity(units.BYTE_RATE_UNITS, units.MB, 1e18, "10 GB/s", "rate")
_USD = Quantity({"USD": 1.0}, 0.01, 1e9, "30000 USD", "amount")
# TOML key -> (field, what it may be), per table
_MONEY: Mapping[str, tuple[str, Quantity]] = {
    "electricity": ("usd_per_kwh", Quantity({"USD/kWh": 1.0}, 0.001, 10.0, "0.12 USD/kWh", "price of energy")),
    "load": ("load", _SHARE),
    "host_power": ("host_power_w", Quantity({"W": 1.0, "kW": 1000.0}, 1.0, 1e5, "3 kW", "power of a host")),
}
_OWN: Mapping[str, tuple[str, Quantity]] = {
    "capex": ("capex_usd", _USD),
    "network_share": ("network_share", _SHARE),
    "residual_share": ("residual_share", Quantity(units.RATIO_UNITS, 1e-6, 0.99, "10 %", "share")),
    "utilisation": ("utilisation", _SHARE),
    "staff_per_year": ("staff_usd_per_year", _USD),
    "support_share_per_year": ("support_share_per_year", _SHARE),
}
_RELIABILITY: Mapping[str, tuple[str, Quantity]] = {
    "device_mtbf": ("device_mtbf_s", Quantity(units.SECOND_UNITS, 1.0, 1e12, "50000 h", "time between failures")),
    "checkpoint": ("checkpoint_s", _SECONDS),
    "checkpoint_rate_per_host": ("checkpoint_bytes_per_s_per_host", _RATE),
    "restart": ("restart_s", _SECONDS),
    "repair": ("repair_s", _SECONDS),
    "notice": ("notice_s", _SECONDS),
    "slow_device_speed": ("slow_device_speed", Quantity(units.RATIO_UNITS, 0.01, 1.0, "50 %", "speed")),
    "step_jitter": ("step_jitter", _SHARE),
}
_LOADING: Mapping[str, tuple[str, Quantity]] = {
    "storage_rate": ("storage_bytes_per_s", _RATE),
    "sample_size": ("sample_bytes", Quantity(units.BYTE_UNITS, 1.0, units.TB, "150 KB", "size of a sample")),
}
# plain numbers: TOML key -> (field, smallest, largest), per table
_MONEY_NUMBERS = {"pue": ("pue", 1.0, 5.0)}
_OWN_NUMBERS = {"years": ("years", 0.1, 50.0)}
_RELIABILITY_NUMBERS = {
    "spare_hosts": ("n_spare_hosts", 0, MAX_HOSTS),
    "interruptions_per_device_hour": ("interruptions_per_device_hour", 0.0, 3600.0),
}
_LOADING_NUMBERS = {"samples_per_s_per_host": ("samples_per_s_per_host", 1e-6, 1e12)}


@dataclass(frozen=True, slots=True)
class Condition:
    """Money, reliability and loading, and in words what sets them apart from other ones."""

    words: str = ""
    money: Money = Money()
    reliability: Reliability = Reliability()
    loading: Loading = Loading()


@dataclass(frozen=True, slots=True)
class Question:
    """What to compare; the fields are those of the module docstring.

    `conditions` take the place of money, reliability and loading where there are any. `time_limit_s` is processor time
    of one search; see `what_if.points` for what it is without.
    """

    model: str
    hw: tuple[str, ...]
    hosts: tuple[int, ...] = (1,)
    overrides: Overrides = ()
    sweeps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    n_tokens: float | None = None
    n_samples: float | None = None
    global_batches: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ("bf16",)
    scaling: str = "strong"
    network_scales: tuple[float, ...] = (1.0,)
    host_links: tuple[str, ...] = ("",)
    search: str = "quick"
    time_limit_s: float | None = None
    money: Money = Money()
    reliability: Reliability = Reliability()
    loading: Loading = Loading()
    prices_file: str | None = None
    given_usd: tuple[tuple[str, float], ...] = ()
    options: Options = Options()
    conditions: tuple[Condition, ...] = ()


def read_question(path: str | Path, *, changes: Table | None = None, options: Options | None = None) -> Question:
    """The question of a whatif.toml; `changes` are tables whose keys, sweeps too, take the place of the file's.

    Raises: InputError naming the field that cannot be used.
    """
    _, where, text = read_path(Path(path))
    tables = _without_set(parse_toml(text, where=where), changes or {})
    return parse_question(merged(tables, changes or {}), where=where, folder=Path(path).parent, options=options)


def _without_set(tables: Table, changes: Table) -> Table:
    """The tables without sweeps of arguments that the changes set."""
    workload = tables.get("workload")
    sweep = workload.get("sweep") if isinstance(workload, dict) else None
    if not isinstance(workload, dict) or not isinstance(sweep, dict):
        return tables
    given = changes.get("workload", {}).get("set", {})
    kept = {name: values for name, values in sweep.items() if name not in given}
    return {**tables, "workload": {**workload, "sweep": kept}}


def merged(below: Table, above: Table) -> Table:
    """Tables with the keys of `above` in the place of those of `below`."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def parse_question(table: Table, *, where: str, folder: Path | None = None, options: Options | None = None) -> Question:
    """The question that these tables ask; files are named from `folder`, or from the current one."""
    check_keys(table, where, ("workload", "clusters", "money", "reliability", "loading"))
    workload, clusters, money = (_table(table, where, name) for name in ("workload", "clusters", "money"))
    label = f"{where}: workload"
    check_keys(
        workload,
        label,
        ("model", "set", "sweep", "tokens", "samples", "global_batch", "precision", "scaling", "fix", "search"),
    )
    check_keys(clusters, f"{where}: clusters", ("hw", "hosts", "network_scale", "host_link"))
    options = options or Options()
    if "fix" in workload:
        options = replace(options, fix=parse_fix([_text(workload, label, "fix")]))
    listed = {name: _table(table, where, name) for name in LISTED}
    conditions = tuple(_condition(words, changed, where) for words, changed in _variants(listed))
    first = conditions[0]
    return checked_question(
        Question(
            model=_model(_text(workload, label, "model"), folder),
            hw=tuple(_hardware(name, folder) for name in _texts(clusters, f"{where}: clusters", "hw")),
            hosts=_counts(clusters, f"{where}: clusters", "hosts", MAX_HOSTS) or (1,),
            overrides=tuple(_table(workload, label, "set").items()),
            sweeps=tuple(
                (name, _values(values, label, name)) for name, values in _table(workload, label, "sweep").items()
            ),
            n_tokens=_amount(workload, label, "tokens"),
            n_samples=_amount(workload, label, "samples"),
            global_batches=_counts(workload, label, "global_batch", MAX_BATCH),
            precisions=_texts(workload, label, "precision", default=("bf16",)),
            scaling=_text(workload, label, "scaling", default="strong"),
            network_scales=_scales(clusters, f"{where}: clusters"),
            host_links=_texts(clusters, f"{where}: clusters", "host_link", default=("",)),
            search=_text(workload, label, "search", default="quick"),
            money=first.money,
            reliability=first.reliability,
            loading=first.loading,
            conditions=conditions if len(conditions) > 1 else (),
            prices_file=_prices_file(money, f"{where}: money", folder),
            given_usd=tuple(
                (name, number(str(text), f"{where}: money.price.{name}", PRICE))
                for name, text in _table(money, f"{where}: money", "price").items()
            ),
            options=options,
        ),
        where=where,
    )


def with_fields(question: Question, fields: Mapping[str, Any]) -> Question:
    """The question with other fields.

    Raises: UsageError for money, reliability or loading in a question that has several of them in its file.
    """
    for name in LISTED:
        if name in fields and question.conditions and "conditions" not in fields:
            raise UsageError(
                f"asked: {name}: found {len(question.conditions)} conditions in the file\n"
                f"  expected: a file without lists in [{', ['.join(f'{item}]' for item in LISTED)}\n"
                '  fix: change the file, or give "conditions"'
            )
    return replace(question, **fields)


def checked_question(question: Question, *, where: str) -> Question:
    """The question once it is known to be possible; batch, precision and time limit move from its options.

    Raises: InputError naming the field.
    """
    question = _folded(question, where)
    for name, word, words in (
        ("workload.scaling", question.scaling, SCALINGS),
        ("workload.search", question.search, SEARCHES),
        ("money.rent", question.money.rent, RENTS),
        *(("workload.precision", precision, PRECISIONS) for precision in question.precisions),
    ):
        check_choice(word, words, f"{where}: {name}")
    if question.n_tokens is not None and question.n_samples is not None:
        raise InputError.of(
            f"{where}: workload", found="tokens and samples", expected="one of them", fix="delete the other"
        )
    for given, _ in question.given_usd:
        if given not in question.hw:
            raise InputError.of(
                f"{where}: money.price.{given}",
                found="no such name among the hardware",
                expected=f"one of {', '.join(question.hw)}",
                fix="use the name exactly as in hw",
            )
    n_points = math.prod(
        [
            len(question.hw),
            len(question.hosts),
            len(question.global_batches) or 1,
            len(question.precisions),
            len(question.network_scales),
            len(question.host_links),
            len(question.conditions) or 1,
            *(len(values) for _, values in question.sweeps),
        ]
    )
    if n_points > MAX_POINTS:
        raise InputError.of(where, found=f"{n_points} points", expected=f"at most {MAX_POINTS}", fix="compare fewer")
    return question


def _folded(question: Question, where: str) -> Question:
    """The question whose options name no batch, precision or time limit of their own: each is in one place."""
    options, unset, limit_s = question.options, Options(), question.time_limit_s
    batches, precisions = question.global_batches, question.precisions
    if options.global_batch is not None:
        _check_same(batches or (options.global_batch,), options.global_batch, f"{where}: workload.global_batch")
        batches = (options.global_batch,)
    if options.precision != unset.precision:
        given = (options.precision,) if precisions == (unset.precision,) else precisions
        _check_same(given, options.precision, f"{where}: workload.precision")
        precisions = (options.precision,)
    if options.time_limit_s is not None and options.time_limit_s != unset.time_limit_s:
        limit_s = options.time_limit_s if limit_s is None else limit_s
        _check_same((limit_s,), options.time_limit_s, f"{where}: time limit")
        options = replace(options, time_limit_s=unset.time_limit_s)
    options = replace(options, global_batch=unset.global_batch, precision=unset.precision)
    return replace(question, options=options, global_batches=batches, precisions=precisions, time_limit_s=limit_s)


def _check_same(values: tuple[Any, ...], option: Any, label: str) -> None:
    if values != (option,):
        found = f"{', '.join(map(str, values))}, and {option} in the options"
        raise InputError.of(label, found=found, expected="one of the two", fix="leave it out of the options")


def check_single(question: Question, *, where: str) -> None:
    """Refuse several workloads or conditions where one is asked for: only clusters may differ.

    Raises: UsageError naming the field.
    """
    for name, values in (
        ("--global-batch", question.global_batches),
        ("--precision", question.precisions),
        ("network_scale", question.network_scales),
        ("host_link", question.host_links),
        ("--given", question.conditions),
        *((f"sweep of {name}", values) for name, values in question.sweeps),
    ):
        if len(values) > 1:
            raise UsageError(
                f"{where}: {name}: found {len(values)} values\n  expected: one, since only clusters are compared\n"
                "  fix: ask once for each, or use autoplan whatif"
            )


def _condition(words: str, table: Table, where: str) -> Condition:
    money, reliability, loading = (_table(table, where, name) for name in LISTED)
    own = _table(money, f"{where}: money", "own") if "own" in money else None
    return Condition(
        words,
        _money(money, f"{where}: money", own),
        Reliability(**_fields(reliability, f"{where}: reliability", _RELIABILITY, _RELIABILITY_NUMBERS)),
        Loading(**_fields(loading, f"{where}: loading", _LOADING, _LOADING_NUMBERS)),
    )


def _variants(table: Table) -> Iterator[tuple[str, Table]]:
    """Every combination of the values of lists, with words for it; the tables themselves where there is no list."""
    lists = [(path, value) for path, value in _leaves(table, ()) if isinstance(value, list) and value]
    for values in product(*(value for _, value in lists)):
        changed, words = table, []
        for (path, _), value in zip(lists, values, strict=True):
            nested: Any = value
            for key in reversed(path):
                nested = {key: nested}
            changed = merged(changed, nested)
            words.append(f"{path[-1]} {value}")
        yield ", ".join(words), changed


def _leaves(table: Table, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _money(table: Table, label: str, own: Table | None) -> Money:
    fields = _fields(table, label, _MONEY, _MONEY_NUMBERS, others=("rent", "prices", "price", "own"))
    if "rent" in table:
        fields["rent"] = _text(table, label, "rent")
    if own is not None:
        owned = _fields(own, f"{label}.own", _OWN, _OWN_NUMBERS)
        if "capex_usd" not in owned:
            raise InputError.of(f"{label}.own.capex", found=None, expected='"30000 USD"', fix="give it per device")
        fields["own"] = Own(**owned)
    return Money(**fields)


def _fields(
    table: Table,
    label: str,
    quantities: Mapping[str, tuple[str, Quantity]],
    numbers: Mapping[str, tuple[str, float, float]],
    *,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """The keywords that a table gives for a dataclass."""
    check_keys(table, label, (*quantities, *numbers, *others))
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in quantities:
            field, quantity = quantities[key]
            if not isinstance(value, str):
                raise InputError.of(
                    f"{label}.{key}",
                    found=value,
                    expected=f'text with a unit, such as "{quantity.example}"',
                    fix="add it",
                )
            found[field] = number(value, f"{label}.{key}", quantity)
        elif key in numbers:
            field, low, high = numbers[key]
            found[field] = _number(value, f"{label}.{key}", low, high, cls=int if isinstance(low, int) else float)
    return found


def _number(value: Any, label: str, low: float, high: float, *, cls: type = float) -> Any:
    kinds = (int,) if cls is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        word = "a whole number" if cls is int else "a number"
        raise InputError.of(label, found=value, expected=f"{word}, {low:g} to {high:g}", fix="correct it")
    return cls(value)


def _table(table: Table, label: str, key: str) -> Table:
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        raise InputError.of(_path(label, key), found=inner, expected=f"a table [{key}]", fix="see the schema")
    return inner


def _text(table: Table, label: str, key: str, *, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value:
        raise InputError.of(_path(label, key), found=value, expected="a text", fix=f'add {key} = "..."')
    return value


def _texts(table: Table, label: str, key: str, *, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    values = table.get(key, list(default))
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise InputError.of(_path(label, key), found=values, expected="texts", fix=f'write {key} = ["...", "..."]')
    return tuple(dict.fromkeys(values))


def _values(values: Any, label: str, name: str) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise InputError.of(f"{label}.sweep.{name}", found=values, expected="a list", fix=f"write {name} = [1, 2]")
    return tuple(values)


def _counts(table: Table, label: str, key: str, most: int) -> tuple[int, ...]:
    values = table.get(key, [])
    values = values if isinstance(values, list) else [values]
    return tuple(dict.fromkeys(_number(value, _path(label, key), 1, most, cls=int) for value in values))


def _scales(table: Table, label: str) -> tuple[float, ...]:
    values = table.get("network_scale", [1.0])
    values = values if isinstance(values, list) else [values]
    return tuple(dict.fromkeys(_number(value, _path(label, "network_scale"), 0.001, 1000.0) for value in values)) or (
        1.0,
    )


def _amount(table: Table, label: str, key: str) -> float | None:
    return None if key not in table else _number(table[key], _path(label, key), 1.0, MAX_AMOUNT)


def _prices_file(table: Table, label: str, folder: Path | None) -> str | None:
    return str((folder or Path()) / _text(table, label, "prices")) if "prices" in table else None


def _model(name: str, folder: Path | None) -> str:
    return name if is_hugging_face(name) else str((folder or Path()) / name)


def _hardware(name: str, folder: Path | None) -> str:
    """A .toml file beside the question, or a profile's name."""
    return str(folder / name) if folder is not None and ".toml" in name else name


def _path(label: str, key: str) -> str:
    return f"{label}.{key}" if ": " in label else f"{label}: {key}"
