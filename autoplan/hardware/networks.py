"""Networks of a hardware file: a table `[network.NAME]` -> the tiers that a cluster reaches.

    hosts --ports--> leaf (n_hosts of them) --uplinks--> spine (n_domains leaves) --uplinks--> sites ...

Every rate is one device's share while all devices drive the tier. With m devices of each of h hosts below an uplink:

    ports      min(N / m, max(1, N / n)) ports of a device           N ports and n devices in the whole host
    uplinks    min(share of the tier below, uplink rate / (h m))     uplink rate = rate of all below / oversubscription

So a fragment of a host (m < n) is alone with the ports of the host and gets more of them, but a device never drives
more than one port, or than its share in a whole host where that is more; and never more than the tier below lets out.
The bus efficiency and the start-up time of a transfer are those of the ports at every tier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoplan import units
from autoplan.errors import InputError, UsageError
from autoplan.hardware import LinkTier
from autoplan.hardware.fields import (
    LIKE_SHIPPED,
    NETWORK_FIELDS,
    TIER_FIELDS,
    Sources,
    Table,
    check_not_above,
    plain,
    section,
)

MAX_DOMAINS = 10**6


@dataclass(frozen=True, slots=True)
class HostShape:
    """Devices of one host: all of them, those we use, and how many hosts its own links join."""

    n_devices: int
    n_used: int
    n_joined: int = 1


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier of a network.

    Attributes:
        link: its `n_devices` are those of one host, until the size of the cluster is known.
        n_hosts: hosts of one domain; None where it joins as many as there are.
        rate_below_bytes_per_s: of everything in one domain that leads up to this tier, all devices of the hosts.
        sources: of its figures.
    """

    link: LinkTier
    n_hosts: int | None
    rate_below_bytes_per_s: float
    sources: tuple[tuple[str, str, str], ...]


def read_network(table: Any, label: str, *, host: HostShape, n_hosts: int, sources: Sources) -> tuple[LinkTier, ...]:
    """The tiers that `n_hosts` hosts reach, innermost first; appends the sources of these.

    The whole table is checked, whatever they reach. What joins no more hosts than their own links do is not reached.
    Raises: InputError for a wrong table, UsageError for more hosts than the network joins.
    """
    if not isinstance(table, dict):
        raise InputError.of(label, found=table, expected="a table", fix=LIKE_SHIPPED)
    outer = table.get("tier", [])
    if not isinstance(outer, list):
        raise InputError.of(
            f"{label}.tier", found=outer, expected="tables in double brackets", fix=f"write [[{_path(label)}.tier]]"
        )
    tiers = [_ports_tier(table, label, host, has_tiers=bool(outer))]
    for index, entry in enumerate(outer):
        is_outermost = index == len(outer) - 1
        tiers.append(_uplink_tier(entry, f"{label}.tier[{index}]", host, tiers[-1], is_outermost=is_outermost))
    return _reached(tiers, label, host, n_hosts, sources)


def _reached(tiers: list[_Tier], label: str, host: HostShape, n_hosts: int, sources: Sources) -> tuple[LinkTier, ...]:
    most = tiers[-1].n_hosts
    if most is not None and n_hosts > most:
        raise UsageError.of(
            "--hosts",
            found=n_hosts,
            expected=f"at most {most}, which {_path(label)} joins ({label.partition(':')[0]})",
            fix="ask for fewer hosts, or leave out n_domains of its outermost tier",
        )
    found, n_below = [], host.n_joined
    for tier in tiers:
        reached = min(n_hosts, tier.n_hosts or n_hosts)
        if reached > n_below:
            sources.extend(tier.sources)
            n_below = reached
            found.append(replace(tier.link, n_devices=n_below * host.n_used))
    return tuple(found)


def _ports_tier(table: Table, label: str, host: HostShape, *, has_tiers: bool) -> _Tier:
    """The innermost tier: what the network ports of the hosts are plugged into."""
    sources: Sources = []
    figures = section(table, label, NETWORK_FIELDS, others=("kind", "ports", "n_hosts", "tier"), sources=sources)
    kind = plain(table, label, "kind", str, 'sort of network: "infiniband", "ethernet", ...')
    port_rate, bus_rate = (
        figures[field].value for field in ("rate_per_port_one_direction", "all_reduce_bus_rate_per_port")
    )
    check_not_above(bus_rate, port_rate, f"{label}.all_reduce_bus_rate_per_port")
    n_ports, per_device = _ports(table, label, host)
    link = LinkTier(
        name=kind,
        n_devices=host.n_used,
        latency_s=figures["latency_per_step"].value,
        bytes_per_s=port_rate * per_device,
        bus_efficiency=bus_rate / port_rate,
        half_rate_bytes=max(1, round(figures["half_rate_size_per_port"].value * per_device)),
    )
    n_hosts = _count(table, label, "n_hosts", "hosts of one domain", is_required=has_tiers)
    return _Tier(link, n_hosts, port_rate * n_ports * (n_hosts or 1), tuple(sources))


def _uplink_tier(table: Any, label: str, host: HostShape, below: _Tier, *, is_outermost: bool) -> _Tier:
    """A tier that joins domains of the tier below over their uplinks."""
    if not isinstance(table, dict):
        raise InputError.of(label, found=table, expected="a table", fix=LIKE_SHIPPED)
    sources: Sources = []
    figures = section(table, label, TIER_FIELDS, others=("kind", "n_domains"), sources=sources)
    kind = plain(table, label, "kind", str, 'what joins the domains below: "spine", "site", ...')
    ratio, rate = figures.get("oversubscription"), figures.get("rate_per_uplink_one_direction")
    if (ratio is None) == (rate is None):
        raise InputError.of(
            label,
            found="both oversubscription and rate_per_uplink_one_direction" if ratio else "no rate",
            expected="oversubscription, or rate_per_uplink_one_direction, but not both",
            fix="delete one" if ratio else 'oversubscription = { value = "2:1", source = "where it comes from" }',
        )
    latency_s = figures["latency_per_step"].value
    if latency_s < below.link.latency_s:
        least = units.format_seconds(below.link.latency_s)
        raise InputError.of(
            f"{label}.latency_per_step",
            found=units.format_seconds(latency_s),
            expected=f"at least {least}, that of the tier below, which a step passes too",
            fix="give the time of a whole step between two devices, not of the switch alone",
        )
    assert below.n_hosts is not None
    uplink_bytes_per_s = rate.value if rate else below.rate_below_bytes_per_s / (ratio.value if ratio else 1.0)
    share = min(below.link.bytes_per_s, uplink_bytes_per_s / (below.n_hosts * host.n_used))
    n_domains = _count(table, label, "n_domains", "domains of the tier below", is_required=not is_outermost)
    link = replace(
        below.link,
        name=kind,
        latency_s=latency_s,
        bytes_per_s=share,
        half_rate_bytes=max(1, round(below.link.half_rate_bytes * share / below.link.bytes_per_s)),
    )
    n_hosts = None if n_domains is None else below.n_hosts * n_domains
    return _Tier(link, n_hosts, uplink_bytes_per_s * (n_domains or 1), tuple(sources))


def _count(table: Table, label: str, key: str, purpose: str, *, is_required: bool) -> int | None:
    """How many an inner domain joins; None, as many as there are, is for the outermost tier."""
    if key not in table and not is_required:
        return None
    count: int = plain(table, label, key, int, f"{purpose}, since a tier above joins several such domains")
    if 2 <= count <= MAX_DOMAINS:
        return count
    raise InputError.of(f"{label}.{key}", found=count, expected=f"2 to {MAX_DOMAINS}: {purpose}", fix="count them")


def _ports(table: Table, label: str, host: HostShape) -> tuple[int, float]:
    """Ports of a whole host, and of one of its used devices: `"8 per host"` or `"1 per device"`."""
    text = plain(table, label, "ports", str, 'network ports: "8 per host" or "1 per device"')
    count, _, scope = text.partition(" ")
    if not count.isascii() or not count.isdigit() or int(count) == 0 or scope not in ("per host", "per device"):
        raise InputError.of(
            f"{label}.ports", found=text, expected='"8 per host" or "1 per device"', fix="count the network ports"
        )
    n_ports = int(count)
    if scope == "per device":
        return n_ports * host.n_devices, float(n_ports)
    return n_ports, min(n_ports / host.n_used, max(1.0, n_ports / host.n_devices))


def _path(label: str) -> str:
    """`network.lab` of `my_box.toml: network.lab`."""
    return label.partition(": ")[2]
