"""Prices: shipped and own files, catalogs, and every way to get them wrong."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from whatif_toys import PRICES, toy_prices

from autoplan import cli, hardware_names, load_hardware_profile
from autoplan.errors import InputError
from autoplan.what_if.prices import catalog_prices, parse_prices, read_prices, rent_price

CATALOG = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
toy.8xlarge,TOY-1,8,96,1152,16.0,us-1,,4.0
toy.8xlarge,TOY-1,8,96,1152,24.0,eu-1,,
toy.large,TOY-1,1,12,144,2.5,us-1,,0.8
cpu.large,,,4,16,0.2,us-1,,0.1
"""


def test_shipped_prices_are_of_shipped_hardware() -> None:
    devices = {load_hardware_profile(name).device.name for name in hardware_names()}
    book = read_prices()
    assert {device.name for device in book.devices} == devices
    assert all(device.power_w is not None for device in book.devices)
    # what a hardware profile names lies between the offers
    for name in hardware_names():
        hardware = load_hardware_profile(name)
        rents = dict(book.of(hardware.device.name).rents)
        if hardware.price_usd_per_device_hour is not None and "on_demand" in rents:
            assert rents["on_demand"].low_usd <= hardware.price_usd_per_device_hour <= rents["on_demand"].high_usd


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('low = "1.00 USD/h"', 'low = "0 USD/h"', "device[0].on_demand.low"),
        ('low = "1.00 USD/h"', 'low = "-1 USD/h"', "device[0].on_demand.low"),
        ('low = "1.00 USD/h"', 'low = "1.00 EUR/h"', "EUR/h"),
        ('low = "1.00 USD/h"', 'low = "1.00"', "no unit"),
        ('low = "1.00 USD/h"', "low = 1.0", "price of an hour with its currency"),
        ('low = "1.00 USD/h"', 'low = "5.00 USD/h"', "low <= high"),
        ('low = "1.00 USD/h"', "", "device[0].on_demand.low"),
        ('high = "3.00 USD/h"', 'high = "98.32 USD/h"', 'write per = "host" and n_devices = 8'),
        ('per = "device"', "", '"device" or "host"'),
        ('per = "device"', 'per = "node"', "device[0].on_demand.per"),
        ('per = "device"', 'per = "host"', "devices of the host"),
        ('per = "device"', 'per = "device"\nn_devices = 8', 'only beside per = "host"'),
        ("n_devices = 8", "n_devices = 0", "device[0].spot.n_devices"),
        ("date = 2026-05-01", 'date = "May"', "device[0].on_demand.date"),
        ("date = 2026-05-01", "", "device[0].on_demand.date"),
        ('source = "toy market"', "", "device[0].on_demand.source"),
        ("[device.on_demand]", "[device.on_demnad]", 'did you mean "on_demand"'),
        ('"500 W"', '"500 kW"', "device[0].power"),
        ("[[device]]", "[device]", "tables [[device]]"),
    ],
)
def test_bad_prices_name_the_field(tmp_path: Path, capsys, old: str, new: str, said: str) -> None:
    assert old in PRICES
    path = tmp_path / "prices.toml"
    path.write_text(PRICES.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read_prices(path)
    assert said in str(caught.value) and "prices.toml" in str(caught.value)
    assert cli.run(["whatif", "examples/mlp.py", "--hw", "dgx_a100_x8", "--prices", str(path)]) == 3


def test_a_host_price_is_shared_by_its_devices() -> None:
    spot = dict(toy_prices().of("Toy").rents)["spot"]
    assert (spot.low_usd, spot.high_usd) == (0.5, 1.0)


def test_who_knows_best() -> None:
    shipped = toy_prices()
    own = parse_prices(PRICES.replace('"1.00 USD/h"', '"2.80 USD/h"'), where="own")

    def usd(**known) -> float | None:
        defaults = {"given_usd": None, "own": None, "shipped": shipped, "profile_usd": None}
        price = rent_price("Toy", "on_demand", **{**defaults, **known})
        return None if price is None else price.usd

    assert usd(given_usd=1.5, own=own, profile_usd=1.2) == 1.5
    assert usd(own=own, profile_usd=1.2) == pytest.approx(2.9)
    assert usd(profile_usd=1.2) == 1.2
    assert usd() == 2.0
    within = rent_price("Toy", "on_demand", given_usd=None, own=None, shipped=shipped, profile_usd=1.2)
    assert within.source == "hardware profile; the offers: toy market" and within.high_usd == 3.0
    assert rent_price("Other", "spot", given_usd=None, own=own, shipped=shipped, profile_usd=1.0) is None


def test_a_catalog_becomes_a_price_file() -> None:
    text = catalog_prices({"vms.csv": CATALOG}, names=toy_prices(), day=date(2026, 5, 2))
    found = parse_prices(text, where="made").of("Toy")
    rents = dict(found.rents)
    # 16 / 8, 24 / 8 and 2.5 USD an hour of one device; spot 4 / 8 and 0.8
    assert (rents["on_demand"].low_usd, rents["on_demand"].high_usd) == (2.0, 3.0)
    assert (rents["spot"].low_usd, rents["spot"].high_usd) == (0.5, 0.8)
    assert rents["spot"].day == date(2026, 5, 2) and found.power_w == 500.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "no column AcceleratorName"),
        (CATALOG.replace("16.0", "0.0"), "line 2, Price"),
        (CATALOG.replace("16.0", "nan"), "line 2, Price"),
        (CATALOG.replace("TOY-1", "OTHER"), "none of the devices"),
        (CATALOG.replace("TOY-1,8", "TOY-1,x"), "line 2, Price"),
    ],
)
def test_bad_catalogs_name_the_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        catalog_prices({"vms.csv": text}, names=toy_prices(), day=date(2026, 5, 2))


def test_hw_prices_prints_what_prices_reads(tmp_path: Path, capsys) -> None:
    assert cli.run(["hw", "prices"]) == 0
    assert parse_prices(capsys.readouterr().out, where="printed").devices == read_prices().devices
    catalog = tmp_path / "vms.csv"
    catalog.write_text(CATALOG.replace("TOY-1", "H100"))
    assert cli.run(["hw", "prices", str(catalog), "--date", "2026-05-02"]) == 0
    own = parse_prices(capsys.readouterr().out, where="printed")
    assert [device.name for device in own.devices] == ["NVIDIA H100 80GB HBM3"]
    assert cli.run(["hw", "prices", str(catalog), "--date", "2026-05-02", "--format", "json", "--debug"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["device"]
    assert device["on_demand"]["date"] == "2026-05-02" and device["name"] == "NVIDIA H100 80GB HBM3"
