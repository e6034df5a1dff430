"""Money, reliability and loading in the tables of a question; a list of values there makes a condition of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from autoplan import units
from autoplan.errors import InputError
from autoplan.hardware.fields import Quantity, Table
from autoplan.options import MAX_HOSTS
from autoplan.what_if.conditions import Condition, Loading, Reliability
from autoplan.what_if.money import Money, Own
from autoplan.what_if.table_values import fields_at, table_at, text_at

LISTED = ("money", "reliability", "loading")  # tables whose values may be lists

_SECONDS = Quantity(units.WALL_TIME_UNITS, 1e-3, 1e12, "10 min", "time")
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
    "device_mtbf": ("device_mtbf_s", Quantity(units.WALL_TIME_UNITS, 1.0, 1e12, "50000 h", "time between failures")),
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


def read_condition(words: str, table: Table, where: str) -> Condition:
    """What these tables say, called `words`."""
    money, reliability, loading = (table_at(table, where, name) for name in LISTED)
    own = table_at(money, f"{where}: money", "own") if "own" in money else None
    return Condition(
        words,
        _money(money, f"{where}: money", own),
        Reliability(**fields_at(reliability, f"{where}: reliability", _RELIABILITY, _RELIABILITY_NUMBERS)),
        Loading(**fields_at(loading, f"{where}: loading", _LOADING, _LOADING_NUMBERS)),
    )


def variants(table: Table) -> Iterator[tuple[str, Table]]:
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
    fields = fields_at(table, label, _MONEY, _MONEY_NUMBERS, others=("rent", "prices", "price", "own"))
    if "rent" in table:
        fields["rent"] = text_at(table, label, "rent")
    if own is not None:
        owned = fields_at(own, f"{label}.own", _OWN, _OWN_NUMBERS)
        if "capex_usd" not in owned:
            raise InputError.of(f"{label}.own.capex", found=None, expected='"30000 USD"', fix="give it per device")
        fields["own"] = Own(**owned)
    return Money(**fields)


def merged(below: Table, above: Table) -> Table:
    """Tables with the keys of `above` in the place of those of `below`."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found
