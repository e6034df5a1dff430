"""Prices: what a device-hour costs to rent and what a device draws, from a dated and sourced TOML file.

    [[device]]
    name = "NVIDIA A100-SXM4-80GB"            as in the hardware profile
    catalog_names = ["A100-80GB"]        -    what SkyPilot's catalogs call it
    power = { value = "400 W", source = "data sheet" }    -    of the board, at most

    [device.on_demand]                   -    also [device.reserved] and [device.spot]
    low = "0.80 USD/h"                        the cheapest and the dearest offer; equal for one offer
    high = "3.00 USD/h"
    per = "device"                            or "host", and then n_devices = 8
    date = 2026-05-01                         when they were read
    source = "where"

`-` may be left out: unknown stays unknown. There is one currency, US dollars: a price in another one is refused, not
converted. A price older than `FRESH_DAYS` is used, and said to be old. `catalog_prices` makes such a file of a SkyPilot
catalog, whose prices are per host.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from autoplan import units
from autoplan.errors import InputError
from autoplan.hardware.fields import Quantity, Table, check_choice, check_keys, number, plain
from autoplan.hardware.file import PRICES_FILE, parse_toml, read_path, shipped_prices
from autoplan.what_if.money import RENTS

FRESH_DAYS = 30
# An hour of one device has cost between 2 cents and 15 dollars; an hour of a whole host is above the upper end.
PRICE = Quantity(units.USD_PER_HOUR_UNITS, 0.01, 40.0, "2.50 USD/h", "price of one device")
POWER = Quantity({"W": 1.0, "kW": 1000.0}, 10.0, 5000.0, "700 W", "most power of one device")
SCOPES = ("device", "host")
PROFILE = "hardware profile"  # source of a price
LIKE_SHIPPED = "write it as hardware_profiles/prices.toml has it"
CATALOG_COLUMNS = ("AcceleratorName", "AcceleratorCount", "Price", "SpotPrice")


@dataclass(frozen=True, slots=True)
class PriceRange:
    """Offers for an hour of one device; `usd` is what sums are made with, the middle unless an offer is known.

    `day` is that of the offers.
    """

    usd: float
    low_usd: float
    high_usd: float
    source: str
    day: date | None = None

    def age_days(self, today: date) -> int | None:
        """None for a price without a date: one that the user gave."""
        return None if self.day is None else (today - self.day).days


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a price file says of one device."""

    name: str
    rents: tuple[tuple[str, PriceRange], ...] = ()
    power_w: float | None = None
    power_source: str = ""
    catalog_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PriceBook:
    """A price file."""

    devices: tuple[DeviceFigures, ...]
    where: str

    def of(self, device: str) -> DeviceFigures | None:
        """The figures of a device; None where the file has none."""
        return next((item for item in self.devices if item.name == device), None)


def read_prices(path: str | Path | None = None) -> PriceBook:
    """The price file of a path, or the one that comes with autoplan.

    Raises: InputError naming the field that cannot be used.
    """
    if path is None:
        return parse_prices(shipped_prices(), where=PRICES_FILE)
    _, where, text = read_path(Path(path), expected="a file of prices")
    return parse_prices(text, where=where)


def parse_prices(text: str, *, where: str) -> PriceBook:
    """The prices of a TOML text; `where` names it in messages.

    Raises: InputError that names the field.
    """
    table = parse_toml(text, where=where)
    check_keys(table, where, ("device",))
    entries = table.get("device", [])
    if not isinstance(entries, list) or not entries:
        raise InputError.of(f"{where}: device", found=entries, expected="tables [[device]]", fix=LIKE_SHIPPED)
    devices = tuple(_device(entry, f"{where}: device[{index}]") for index, entry in enumerate(entries))
    names = [device.name for device in devices]
    for name in names:
        if names.count(name) > 1:
            raise InputError.of(f"{where}: device", found=f"{name} twice", expected="each once", fix="delete one")
    return PriceBook(devices, where)


def _device(entry: Any, label: str) -> DeviceFigures:
    if not isinstance(entry, dict):
        raise InputError.of(label, found=entry, expected="a table [[device]]", fix=LIKE_SHIPPED)
    check_keys(entry, label, ("name", "catalog_names", "power", *RENTS))
    watts, source = _power(entry["power"], f"{label}.power") if "power" in entry else (None, "")
    aliases = entry.get("catalog_names", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InputError.of(f"{label}.catalog_names", found=aliases, expected='["A100-80GB"]', fix="write a list")
    return DeviceFigures(
        name=plain(entry, label, "name", str, "name of the device, as in its hardware profile"),
        rents=tuple((kind, _range(entry[kind], f"{label}.{kind}")) for kind in RENTS if kind in entry),
        power_w=watts,
        power_source=source,
        catalog_names=tuple(aliases),
    )


def _power(entry: Any, label: str) -> tuple[float, str]:
    if not isinstance(entry, dict):
        raise InputError.of(label, found=entry, expected='{ value = "700 W", source = "..." }', fix="add the source")
    check_keys(entry, label, ("value", "source"))
    watts = number(plain(entry, label, "value", str, POWER.purpose), f"{label}.value", POWER)
    return watts, plain(entry, label, "source", str, "where it comes from")


def _range(entry: Any, label: str) -> PriceRange:
    if not isinstance(entry, dict):
        raise InputError.of(label, found=entry, expected="a table with low, high, per, date, source", fix=LIKE_SHIPPED)
    check_keys(entry, label, ("low", "high", "per", "n_devices", "date", "source"))
    n_devices = _n_devices(entry, label)
    low, high = (_usd(entry, label, key, n_devices) for key in ("low", "high"))
    if low > high:
        raise InputError.of(f"{label}.low", found=f"{low} above high, {high}", expected="low <= high", fix="swap them")
    day = entry.get("date")
    if type(day) is not date:
        raise InputError.of(f"{label}.date", found=day, expected="a day such as 2026-05-01", fix="say when it was read")
    return PriceRange((low + high) / 2.0, low, high, plain(entry, label, "source", str, "where it comes from"), day)


def _n_devices(entry: Table, label: str) -> int:
    scope = plain(entry, label, "per", str, 'whose hour it is: "device" or "host"')
    check_choice(scope, SCOPES, f"{label}.per")
    if scope == "device":
        if "n_devices" in entry:
            raise InputError.of(
                f"{label}.n_devices", found=entry["n_devices"], expected='it only beside per = "host"', fix="delete it"
            )
        return 1
    count: int = plain(entry, label, "n_devices", int, "devices of the host that the price is for")
    if not 1 <= count <= 1024:
        raise InputError.of(f"{label}.n_devices", found=count, expected="1 to 1024", fix="count them")
    return count


def _usd(entry: Table, label: str, key: str, n_devices: int) -> float:
    text = plain(entry, label, key, str, 'price of an hour with its currency, such as "2.50 USD/h"')
    scaled = Quantity(PRICE.units, PRICE.low * n_devices, PRICE.high * n_devices, PRICE.example, PRICE.purpose)
    try:
        return number(text, f"{label}.{key}", scaled) / n_devices
    except InputError:
        if n_devices == 1 and _looks_like_host(text):
            raise InputError.of(
                f"{label}.{key}",
                found=text,
                expected=f"{PRICE.low} to {PRICE.high:g} USD/h for one device",
                fix='for the price of a whole host write per = "host" and n_devices = 8',
            ) from None
        raise


def _looks_like_host(text: str) -> bool:
    try:
        return units.parse_usd_per_hour(text) > PRICE.high
    except ValueError:
        return False


def rent_price(
    device: str,
    kind: str,
    *,
    given_usd: float | None,
    own: PriceBook | None,
    shipped: PriceBook,
    profile_usd: float | None,
) -> PriceRange | None:
    """The price of an hour of one device: given, of the user's file, of the hardware profile, of autoplan's file.

    The range of autoplan's file stands beside the price of a hardware profile that lies in it. None where nobody knows.
    """
    if given_usd is not None:
        return PriceRange(given_usd, given_usd, given_usd, "given")
    known = _known(own, device, kind)
    if known is not None:
        return known
    market = _known(shipped, device, kind)
    if profile_usd is not None and kind == "on_demand":
        if market is not None and market.low_usd <= profile_usd <= market.high_usd:
            source = f"{PROFILE}; the offers: {market.source}"
            return PriceRange(profile_usd, market.low_usd, market.high_usd, source, market.day)
        return PriceRange(profile_usd, profile_usd, profile_usd, PROFILE)
    return market


def _known(book: PriceBook | None, device: str, kind: str) -> PriceRange | None:
    figures = None if book is None else book.of(device)
    return None if figures is None else dict(figures.rents).get(kind)


# ------------------------------------------------------------------------------------------------- SkyPilot catalogs


def catalog_prices(texts: Mapping[str, str], *, names: PriceBook, day: date) -> str:
    """A price file made of SkyPilot catalogs (CSV texts by file name): per device, the cheapest and dearest region.

    Devices are those that a `catalog_names` of `names` lists; others are left out, as are rows without a price.

    Raises: InputError for a file that is no catalog, or has none of these devices.
    """
    offers: dict[tuple[str, str], list[float]] = {}
    for where, text in texts.items():
        for accelerator, kind, usd in _catalog_rows(text, where):
            for device in names.devices:
                if accelerator in device.catalog_names:
                    offers.setdefault((device.name, kind), []).append(usd)
    if not offers:
        known = ", ".join(name for device in names.devices for name in device.catalog_names)
        raise InputError.of(
            ", ".join(texts),
            found="none of the devices",
            expected=f"AcceleratorName of {known}",
            fix="add catalog_names",
        )
    return _prices_text(offers, names, source=f"SkyPilot catalog {', '.join(texts)}, all regions", day=day)


def _catalog_rows(text: str, where: str) -> Iterable[tuple[str, str, float]]:
    """(accelerator, kind of rent, USD per hour of one device) of every row that has a price."""
    rows = csv.DictReader(io.StringIO(text))
    missing = [name for name in CATALOG_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError.of(
            where,
            found=f"no column {missing[0]}",
            expected=", ".join(CATALOG_COLUMNS),
            fix="give a vms.csv of SkyPilot",
        )
    for line, row in enumerate(rows, start=2):
        count = row["AcceleratorCount"]
        if not row["AcceleratorName"] or not count:
            continue
        for kind, column in (("on_demand", "Price"), ("spot", "SpotPrice")):
            if row[column]:
                yield row["AcceleratorName"], kind, _catalog_usd(row[column], count, f"{where}: line {line}, {column}")


def _catalog_usd(price: str, count: str, label: str) -> float:
    try:
        usd = float(price) / float(count)
    except (ValueError, ZeroDivisionError):
        usd = 0.0
    if not PRICE.low <= usd <= PRICE.high:
        raise InputError.of(
            label,
            found=f"{price} for {count} devices",
            expected=f"{PRICE.low} to {PRICE.high:g} USD per hour of one device",
            fix="delete the row",
        )
    return usd


def _prices_text(offers: Mapping[tuple[str, str], list[float]], names: PriceBook, *, source: str, day: date) -> str:
    blocks = []
    for device in names.devices:
        rents = [(kind, offers[device.name, kind]) for kind in RENTS if (device.name, kind) in offers]
        if not rents:
            continue
        lines = [
            "[[device]]",
            f"name = {json.dumps(device.name)}",
            f"catalog_names = {json.dumps(device.catalog_names)}",
        ]
        if device.power_w is not None:
            lines.append(f'power = {{ value = "{device.power_w:g} W", source = {json.dumps(device.power_source)} }}')
        for kind, usd in rents:
            lines += ["", f"[device.{kind}]", f'low = "{min(usd):.4f} USD/h"', f'high = "{max(usd):.4f} USD/h"']
            lines += ['per = "device"', f"date = {day.isoformat()}", f"source = {json.dumps(source)}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
