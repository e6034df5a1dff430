"""Figures that a hardware file may have and that no machine is known to have: a unit is a thousand off more often.

`fields` refuses what cannot be, with bounds that leave room for machines to come. The ranges here are of machines of
today, with some room, and narrow enough that a figure off by 1000 is mostly outside; of figures without a range the
bounds of `fields` alone are as narrow. Nothing is refused by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from autoplan import units
from autoplan.hardware import CPU
from autoplan.hardware.cluster import Cluster, Hardware, is_cluster_file, kinds_of, load_cluster
from autoplan.hardware.file import parse_toml, read_path

_UNITS: Mapping[str, float] = {
    **units.BYTE_UNITS, **units.BYTE_RATE_UNITS, **units.BIT_RATE_UNITS, **units.FLOP_RATE_UNITS,
    **units.SECOND_UNITS, **units.USD_PER_HOUR_UNITS,
}  # fmt: skip
_PEAK_OF_PRODUCTS = ("10 TFLOP/s", "20 PFLOP/s")
_PEAK = ("2 TFLOP/s", "5 PFLOP/s")
_OF_BLOCK, _OF_PARAMETER = ("10 us", "10 ms"), ("1 ns", "1 ms")
_BUS_RATE = ("500 MB/s", "2 TB/s")
# By the field without the names of networks: a group of devices is 2, a tier of a network has only the tier's own.
USUAL: Mapping[str, tuple[str, str]] = {
    "device.memory_bandwidth": ("10 GB/s", "100 TB/s"),
    "device.collective_launch": ("2 us", "10 ms"),
    "device.host_copy_rate": ("1 GB/s", "1 TB/s"),
    "device.peak.fp64": ("100 GFLOP/s", "200 TFLOP/s"),
    "device.peak.fp32": _PEAK,
    "device.peak.tf32": _PEAK,
    "device.peak.bf16": _PEAK_OF_PRODUCTS,
    "device.peak.fp16": _PEAK_OF_PRODUCTS,
    "device.peak.fp8": _PEAK_OF_PRODUCTS,
    "device.sharding.hooks": _OF_BLOCK,
    "device.sharding.gather": _OF_BLOCK,
    "device.sharding.reduce": _OF_BLOCK,
    "device.sharding.hooks_of_parameter": _OF_PARAMETER,
    "device.sharding.gather_of_parameter": _OF_PARAMETER,
    "device.sharding.reduce_of_parameter": _OF_PARAMETER,
    "device.sharding.optimizer_of_parameter": _OF_PARAMETER,
    "host.price_per_device_hour": ("0.05 USD/h", "100 USD/h"),
    "host_link.rate_per_device_one_direction": ("1 GB/s", "2 TB/s"),
    "host_link.latency_per_step": ("50 ns", "500 us"),
    "host_link.half_rate_size": ("1 KiB", "256 MiB"),
    "host_link.all_reduce_bus_rate": _BUS_RATE,
    "host_link.all_gather_bus_rate": _BUS_RATE,
    "host_link.all_to_all_bus_rate": _BUS_RATE,
    "host_link.send_bus_rate": _BUS_RATE,
    "host_link.multicast_all_reduce_bus_rate": _BUS_RATE,
    "host_link.all_reduce_bus_rate_of_group.2": _BUS_RATE,
    "network.rate_per_port_one_direction": ("1 Gbit/s", "2 Tbit/s"),
    "network.latency_per_step": ("500 ns", "1 ms"),
    "network.half_rate_size_per_port": ("16 KiB", "256 MiB"),
    "network.all_reduce_bus_rate_per_port": ("50 MB/s", "250 GB/s"),
    "between.latency_per_step": ("1 us", "100 ms"),
    "between.rate_per_group_one_direction": ("1 Gbit/s", "1000 Tbit/s"),
}


def unusual_of(hardware: Hardware) -> tuple[str, ...]:
    """A sentence for each figure of these hosts, and of what joins them, that no machine is known to have."""
    own = hardware.values if isinstance(hardware, Cluster) else ()
    of_kinds = (kind.values for kind in kinds_of(hardware) if not kind.device.is_cpu)  # processors may be slower
    return tuple(unusual(chain(*of_kinds, own)))


def unusual_of_file(path: Path) -> tuple[str, ...]:
    """Likewise of a hardware file that is valid: of all of its networks; of a mixed cluster, as it is."""
    if is_cluster_file(path):
        return unusual_of(load_cluster(path))
    _, where, text = read_path(path)
    table = parse_toml(text, where=where)
    return () if table["device"]["name"] == CPU else tuple(unusual(_written(table, ())))


def unusual(values: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Of (field, value as it is written) pairs."""
    for field, text in dict.fromkeys(values):
        usual = USUAL.get(_kind_of(field))
        if usual is None:
            continue
        low, high = (units.parse_quantity(bound, _UNITS) for bound in usual)
        if not low <= units.parse_quantity(text, _UNITS) <= high:
            yield f"{field} is {text}, where {usual[0]} to {usual[1]} is usual: is its unit right?"


def _kind_of(field: str) -> str:
    """`network.latency_per_step` of `network.lab.latency_per_step`; a tier has no ranges."""
    field = re.sub(r"^network\.[^.]+\.", "network.", field)
    return re.sub(r"_of_group\.\d+$", "_of_group.2", field)


def _written(table: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(field, value) of every figure in a table of a file; tables in double brackets, the tiers, have no ranges."""
    if isinstance(table, dict) and set(table) == {"value", "source"}:
        yield ".".join(path), table["value"]
    elif isinstance(table, dict):
        for key, inner in table.items():
            yield from _written(inner, (*path, key))
