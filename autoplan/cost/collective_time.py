"""Collectives: seconds of one collective over one mesh axis, on the links that the axis really crosses.

    collective_s = min over COLLECTIVES of  n_steps x latency + (bytes through a link + half_rate) / achieved rate

Groups inside a host whose collectives were measured take what was measured (`LinkTier.timed`): between two sizes time
grows in proportion, below the smallest it stays, beyond the largest it goes on growing.
Sends of ranks that receive ahead have few thread blocks and take at least `FEW_BLOCKS_TIMES`.

The last term is `Link.transfer_s`: the bus bandwidth rises with size, is half the achieved rate at `half_rate_bytes`
and approaches it for large tensors. The algorithms are the files of `cost_models/` (`COLLECTIVES`); `route_of`
prepares what they need, once per group.

    ranks of an axis: r, r + stride, r + 2 stride, ...      host 0: ranks 0..7, host 1: ranks 8..15
    dp=2, tp=8 (stride 8):  one member in each of two hosts; eight such groups run at the same time

Ranks fill hosts, hosts fill racks, racks fill sites, in order. A `Level` is one tier on the way:

    16 members, 2 hosts of 4 in each of 2 racks     host: 1 member below, 16 parts, 4 domains
                                                    leaf: 4 below,         4 parts, 2 domains
                                                    spine: 8 below,        2 parts, 1 domain

Every rate is one device's share of the tier while all devices drive it (ports of a host, uplinks of a rack or site
divided by the devices behind them), so groups that run side by side are counted. Members behind the same uplinks pool
their shares: bytes of a ring that leave a rack spread over `n_below` of them. Left out: congestion between different
axes, and ranks that the scheduler does not place in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from autoplan.errors import InputError
from autoplan.hardware import HardwareProfile, LinkTier
from autoplan.registry import load_table

Times = tuple[tuple[int, float], ...]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Sends by the 4 thread blocks of ranks that receive ahead (`runtime.mesh.SEND_BLOCKS`), of which NCCL seems to
# take 2 up to 16 MiB: 2 H200, torch 2.11 (benchmarks/results/sends_h200_x2_2026-11-22.jsonl; what the smallest takes is
# its launch). Taken for all devices.
FEW_BLOCKS_TIMES: Times = ((1 << 20, 42e-6), (16 << 20, 246e-6), (64 << 20, 514e-6), (256 << 20, 2039e-6))


class Spread(NamedTuple):
    """How a group lies over the domains of one tier: `n_members` in one, the fewest, of the `n_domains` it touches."""

    n_members: int
    n_domains: int


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one mesh axis that communicate with each other.

    Attributes:
        n_devices: its size.
        n_per_host: members in one host; the fewest, where hosts hold different numbers.
        n_hosts_touched: hosts it spans where that is not n_devices / n_per_host.
        above_hosts: its spread over racks, sites, ... outwards, as far as it spans several.
    """

    n_devices: int
    n_per_host: int
    n_hosts_touched: int | None = None
    above_hosts: tuple[Spread, ...] = ()

    @property
    def n_hosts(self) -> int:
        """Hosts it spans."""
        return self.n_hosts_touched or -(-self.n_devices // self.n_per_host)


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective achieves on one tier; per device, one direction.

    Attributes:
        latency_s: start-up of one step.
        bytes_per_s: achieved bus bandwidth of a large all-reduce.
        kind_bytes_per_s: likewise of an "all_gather" (or reduce-scatter), an "all_to_all", a "send".
        half_rate_bytes: bytes through the link at which half of that is reached.
    """

    latency_s: float
    bytes_per_s: float
    half_rate_bytes: float
    kind_bytes_per_s: tuple[tuple[str, float], ...] = ()

    def transfer_s(self, n_bytes: float, kind: str = "all_reduce") -> float:
        """Time of `n_bytes` of such a collective through the link, start-up apart."""
        return (n_bytes + self.half_rate_bytes) / dict(self.kind_bytes_per_s).get(kind, self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Level:
    """One tier that a group crosses, and how the group lies around it.

    Attributes:
        link: what the tier achieves.
        is_host: it joins the devices of a host; what leaves the host does not pass it.
        n_below: members in one domain of the tier below, which share its way out; the fewest.
        n_within: members in one domain of this tier.
        n_parts: domains of the tier below that the group touches; devices, at the host.
        n_domains: domains of this tier that it touches.
    """

    link: Link
    is_host: bool
    n_below: int
    n_within: int
    n_parts: int
    n_domains: int

    @property
    def n_hops(self) -> int:
        """Hops over this tier when something goes from the first member to the last."""
        return self.n_parts - self.n_domains


@dataclass(frozen=True, slots=True)
class Route:
    """A group on the links it crosses: all that an algorithm may know.

    Attributes:
        levels: the tiers it crosses, from the innermost outwards; the host's only where a host has several members.
        multicast: what an all-reduce inside the switch achieves; None unless the group fills a host that can.
        timed: what was measured of this group: per kind, (bytes, seconds) in ascending order.
    """

    n_devices: int
    levels: tuple[Level, ...]
    multicast: Link | None = None
    timed: tuple[tuple[str, Times], ...] = ()

    def beyond_innermost(self) -> Route:
        """The route of a group with one member in each domain of the innermost level."""
        n_members = self.levels[0].n_within
        counts = [max(1, level.n_below // n_members) for level in self.levels[1:]]
        n_devices = self.levels[1].n_parts
        levels = (
            Level(level.link, False, n_below, n_within, level.n_parts, level.n_domains)
            for level, n_below, n_within in zip(self.levels[1:], counts, (*counts[1:], n_devices), strict=True)
        )
        return Route(n_devices, tuple(levels))

    def measured_s(self, kind: str, size_bytes: float) -> float | None:
        """The time of a size among those that were measured; None where none of this kind was."""
        times = dict(self.timed).get(kind)
        return None if times is None else _between_times_s(times, size_bytes)


def _between_times_s(times: Times, size_bytes: float) -> float:
    """In proportion between two sizes; the time of the smallest below it, and growing on beyond the largest."""
    sizes = [size for size, _ in times]
    if size_bytes <= sizes[0] or len(times) == 1:
        return times[0][1] * max(1.0, size_bytes / sizes[0])
    after = min(bisect_left(sizes, size_bytes), len(sizes) - 1)
    (size, seconds), (larger, more_s) = times[after - 1], times[after]
    return seconds + (more_s - seconds) * (size_bytes - size) / (larger - size)


Algorithm = Callable[[float, Route], float | None]


def axis_group(hardware: HardwareProfile, *, size: int, stride: int, n_devices: int | None = None) -> Group:
    """The group of a mesh axis: ranks r, r + stride, ..., hosts filled in order of rank.

    `n_devices` is how many devices the mesh has; None takes all of the cluster.
    Raises: InputError when the axis does not fit into the cluster.
    """
    if size < 1 or stride < 1 or size * stride > hardware.n_devices:
        raise InputError.of(
            "mesh axis",
            found=f"{size} ranks with stride {stride}",
            expected=f"within the {hardware.n_devices} devices of {hardware.name}",
            fix="choose smaller degrees, or more hosts",
        )
    return _axis_group(hardware.domain_sizes, n_devices or hardware.n_devices, size, stride)


def pair_group(hardware: HardwareProfile, *, n_devices: int) -> Group:
    """Two devices as far apart as any neighbouring stages of a pipeline that fills the first `n_devices`.

    Stages follow each other in order of rank, so some pair crosses each tier that these devices do not all share. One
    device has no neighbour, and is a group of its own.
    """
    if n_devices == 1:
        return Group(1, 1)
    host, *above = (size < n_devices for size in hardware.domain_sizes)
    spreads = tuple(Spread(1, 2) for is_crossed in above if is_crossed)
    return Group(2, 1 if host else 2, above_hosts=spreads)


@lru_cache(maxsize=4096)
def _axis_group(domain_sizes: tuple[int, ...], n_devices: int, size: int, stride: int) -> Group:
    """The axis's spread over hosts, and over whatever it crosses above them."""
    (n_per_host, n_hosts), *above = (_worst_spread(domain, n_devices, size, stride) for domain in domain_sizes)
    crossed = tuple(spread for spread in above if spread.n_domains > 1)
    return Group(size, n_per_host, None if size == n_per_host * n_hosts else n_hosts, crossed)


def _worst_spread(domain: int, n_devices: int, size: int, stride: int) -> Spread:
    """The spread of the group with the fewest members in any domain of `domain` devices, among those of the axis."""
    span = size * stride
    if domain % span == 0 or domain >= n_devices:
        return Spread(size, 1)
    if domain % stride == 0 and span % domain == 0:
        return Spread(domain // stride, span // domain)
    if stride % domain == 0:
        return Spread(1, size)
    worst = Spread(size, 1)
    for block in range(min(n_devices // span, lcm(span, domain) // span)):
        for first in range(block * span, block * span + stride):
            members = Counter((first + i * stride) // domain for i in range(size))
            if min(members.values()) < worst.n_members:
                worst = Spread(min(members.values()), len(members))
    return worst


def collective_s(kind: str, size_bytes: float, *, group: Group, hardware: HardwareProfile) -> float:
    """Time of one collective by its cheapest algorithm.

    `kind` is one of KINDS; `size_bytes` is the full, unsharded tensor for each of them: what an all-gather ends
    with, what a reduce-scatter starts from, and for an all-to-all the tensor of which every device holds 1/n.
    One device, or no bytes, takes 0.0 s.
    """
    return route_s(kind, size_bytes, route_of(group, hardware))


def route_s(kind: str, size_bytes: float, route: Route) -> float:
    """Time of one collective on this route, as measured or by its cheapest algorithm; see `collective_s`."""
    if route.n_devices == 1 or size_bytes == 0:
        return 0.0
    if (measured_s := route.measured_s(kind, size_bytes)) is not None:
        return measured_s
    ways_s = [algorithm(size_bytes, route) for algorithm in _algorithms()[kind]]
    return min(seconds for seconds in ways_s if seconds is not None)


def send_s(size_bytes: float, *, pair: Group, hardware: HardwareProfile, is_ahead: bool = False) -> float:
    """Time to send `size_bytes` from one device of `pair` to the other: latency + (size + half_rate) / achieved rate.

    Over the outermost tier between the two, the slowest on the way. Every device of the sending stage is taken to send
    at the same time, each over its own share of that tier. A device sends itself nothing. Ranks that
    receive ahead (`is_ahead`) send by few thread blocks.
    """
    if pair.n_devices == 1 or size_bytes == 0:
        return 0.0
    route = route_of(pair, hardware)
    link = route.levels[-1].link
    measured_s = route.measured_s("send", size_bytes)
    by_all_s = link.latency_s + link.transfer_s(size_bytes, "send") if measured_s is None else measured_s
    return max(by_all_s, _between_times_s(FEW_BLOCKS_TIMES, size_bytes)) if is_ahead else by_all_s


def sendrecv_s(size_bytes: float, *, pair: Group, hardware: HardwareProfile, alone_s: float) -> float:
    """Time of a sendrecv, two such sends between the same devices, one each way at once; `alone_s` is that of one.

    As much, where `hw measure` found nothing else.
    """
    if pair.n_devices == 1 or size_bytes == 0:
        return alone_s
    return max(alone_s, route_of(pair, hardware).measured_s("sendrecv", size_bytes) or 0.0)


@lru_cache(maxsize=4096)
def route_of(group: Group, hardware: HardwareProfile) -> Route:
    """What the group's members achieve on each tier they cross.

    Raises: InputError when the group spans more than the hardware has.
    """
    n_per_host, n_hosts = group.n_per_host, group.n_hosts
    if n_hosts > hardware.n_hosts or n_per_host > hardware.n_devices_per_host:
        raise InputError.of(
            f"group of {group.n_devices} devices",
            found=f"{n_hosts} hosts with {n_per_host} members each",
            expected=f"within {hardware.name}: {hardware.n_hosts} hosts of {hardware.n_devices_per_host} devices each",
            fix="plan for more hosts, or a smaller mesh",
        )
    networks = hardware.networks
    if len(group.above_hosts) > max(0, len(networks) - 1):
        raise InputError.of(
            f"group of {group.n_devices} devices",
            found=f"{len(group.above_hosts)} tiers above the first network",
            expected=f"at most the {max(0, len(networks) - 1)} of {hardware.name}",
            fix="plan for more hosts, or a network with more tiers",
        )
    # Where the group lies in one domain of a tier, the tiers above it are not crossed.
    below = (Spread(1, group.n_devices), Spread(n_per_host, n_hosts), *group.above_hosts)
    within = (*below[1:], Spread(group.n_devices, 1))
    host, *crossed = zip((hardware.host_link, *networks), below, within, strict=False)
    levels = [_level(*host, is_host=True)] if n_per_host > 1 else []
    levels += [_level(*tier, is_host=False) for tier in crossed if tier[1].n_domains > tier[2].n_domains]
    inside = hardware.host_link.timed if hardware.host_link is not None and n_hosts == 1 else ()
    timed = tuple((own.kind, own.times) for own in inside if own.n_devices == group.n_devices)
    return Route(group.n_devices, tuple(levels), _multicast(hardware.host_link, group), timed)


def route_in_host(n_devices: int, link: Link, *, multicast: Link | None = None) -> Route:
    """The route of a group of `n_devices` of one host."""
    return Route(n_devices, (Level(link, True, 1, n_devices, n_devices, 1),), multicast)


def _level(tier: LinkTier | None, below: Spread, within: Spread, *, is_host: bool) -> Level:
    assert tier is not None
    efficiency = tier.bus_efficiency_of(within.n_members) if is_host else tier.bus_efficiency
    return Level(
        link=_link(tier, efficiency),
        is_host=is_host,
        n_below=below.n_members,
        n_within=within.n_members,
        n_parts=below.n_domains,
        n_domains=within.n_domains,
    )


def _link(tier: LinkTier, bus_efficiency: float) -> Link:
    """What a tier achieves at this bus efficiency of an all-reduce; other collectives as much more or less as there."""
    of_kind = dict(tier.kind_bus_efficiency)
    gather = of_kind.get("all_gather", tier.bus_efficiency)
    share = bus_efficiency / tier.bus_efficiency
    efficiencies = {
        "all_gather": gather * share,
        "all_to_all": of_kind.get("all_to_all", gather) * share,
        "send": of_kind.get("send", bus_efficiency),
    }
    return Link(
        latency_s=tier.latency_s,
        bytes_per_s=tier.bytes_per_s * bus_efficiency,
        half_rate_bytes=tier.half_rate_bytes,
        kind_bytes_per_s=tuple((kind, tier.bytes_per_s * found) for kind, found in efficiencies.items()),
    )


def _multicast(tier: LinkTier | None, group: Group) -> Link | None:
    if tier is None or tier.multicast_bus_efficiency is None or group.n_devices != tier.n_devices or group.n_hosts > 1:
        return None
    return _link(tier, tier.multicast_bus_efficiency)


@lru_cache(maxsize=1)
def _algorithms() -> dict[str, tuple[Algorithm, ...]]:
    """The algorithms of each kind, read once from `cost_models/`."""
    table = load_table("autoplan.cost_models", "COLLECTIVES")
    kinds = dict.fromkeys(kind for kind, _ in table)
    return {kind: tuple(f for (of_kind, _), f in table.items() if of_kind == kind) for kind in kinds}
