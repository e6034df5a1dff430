"""Collectives: seconds of one collective over one mesh axis, on the links that the axis really crosses.

    collective_s = min over COLLECTIVES of  n_steps x latency + (bytes through a link + half_rate) / achieved rate

The last term is `Link.transfer_s`: the bus bandwidth rises with size, is half the achieved rate at `half_rate_bytes`
and approaches it for large tensors. The algorithms are the files of `cost_models/` (`COLLECTIVES`); `route_of`
prepares what they need, once per group.

    ranks of an axis: r, r + stride, r + 2 stride, ...      host 0: ranks 0..7, host 1: ranks 8..15
    dp=2, tp=8 (stride 8):  one member in each of two hosts; eight such groups run at the same time

Network rates are per device (its share of the host's network ports), so groups that run side by side are counted.
Left out: contention beyond the host's ports (oversubscribed switches), and congestion between different axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from autoplan.errors import InputError
from autoplan.hardware import HardwareProfile, LinkTier
from autoplan.registry import load_table

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one mesh axis that communicate with each other.

    Attributes:
        n_devices: its size.
        n_per_host: members in one host; the fewest, where hosts hold different numbers.
        n_hosts_touched: hosts it spans where that is not n_devices / n_per_host.
    """

    n_devices: int
    n_per_host: int
    n_hosts_touched: int | None = None

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
        gather_bytes_per_s: likewise of an all-gather or reduce-scatter.
        half_rate_bytes: bytes through the link at which half of that is reached.
    """

    latency_s: float
    bytes_per_s: float
    gather_bytes_per_s: float
    half_rate_bytes: float

    def transfer_s(self, n_bytes: float) -> float:
        """Time of `n_bytes` of an all-reduce through the link, start-up apart."""
        return (n_bytes + self.half_rate_bytes) / self.bytes_per_s

    def gather_transfer_s(self, n_bytes: float) -> float:
        """Time of `n_bytes` of an all-gather, reduce-scatter or all-to-all through the link, start-up apart."""
        return (n_bytes + self.half_rate_bytes) / self.gather_bytes_per_s


@dataclass(frozen=True, slots=True)
class Route:
    """A group on the links it crosses: all that an algorithm may know.

    Attributes:
        host_link: between members in one host; None when there is one member per host.
        network: between hosts; None when the group lies in one host.
        multicast: what an all-reduce inside the switch achieves; None unless the group fills a host that can.
    """

    n_devices: int
    n_per_host: int
    n_hosts: int
    host_link: Link | None
    network: Link | None
    multicast: Link | None


Algorithm = Callable[[float, Route], float | None]


def axis_group(profile: HardwareProfile, *, size: int, stride: int) -> Group:
    """The group of a mesh axis: ranks r, r + stride, ..., hosts filled in order of rank.

    Raises: InputError when the axis does not fit into the cluster.
    """
    if size < 1 or stride < 1 or size * stride > profile.n_devices:
        raise InputError.of(
            "mesh axis",
            found=f"{size} ranks with stride {stride}",
            expected=f"within the {profile.n_devices} devices of {profile.name}",
            fix="choose smaller degrees, or more hosts",
        )
    return _axis_group(profile.n_devices_per_host, profile.n_devices, size, stride)


@lru_cache(maxsize=4096)
def _axis_group(n_devices_per_host: int, n_devices: int, size: int, stride: int) -> Group:
    """The worst group of the axis: the fewest members in any host it touches."""
    worst = Group(size, size)
    for block in range(n_devices // (size * stride)):
        for offset in range(stride):
            first = block * size * stride + offset
            hosts = [(first + i * stride) // n_devices_per_host for i in range(size)]
            fewest = min(hosts.count(host) for host in set(hosts))
            if fewest < worst.n_per_host:
                worst = Group(size, fewest, len(set(hosts)))
    is_even = worst.n_devices == worst.n_per_host * worst.n_hosts
    return Group(worst.n_devices, worst.n_per_host) if is_even else worst


def collective_s(kind: str, size_bytes: float, *, group: Group, profile: HardwareProfile) -> float:
    """Time of one collective by its cheapest algorithm.

    `kind` is one of KINDS; `size_bytes` is the full, unsharded tensor for each of them: what an all-gather ends
    with, what a reduce-scatter starts from, and for an all-to-all the tensor of which every device holds 1/n.
    One device, or no bytes, takes 0.0 s.
    """
    if group.n_devices == 1 or size_bytes == 0:
        return 0.0
    route = route_of(group, profile)
    times = [algorithm(size_bytes, route) for algorithm in _algorithms()[kind]]
    return min(seconds for seconds in times if seconds is not None)


def send_s(size_bytes: float, *, crosses_hosts: bool, profile: HardwareProfile) -> float:
    """Time to send `size_bytes` from one device to another: latency + (size + half_rate) / achieved rate.

    Every device of the sending stage is taken to send at the same time, each over its own share of the network.
    """
    if size_bytes == 0:
        return 0.0
    route = route_of(Group(2, 1 if crosses_hosts else 2), profile)
    link = route.network if crosses_hosts else route.host_link
    assert link is not None
    return link.latency_s + link.transfer_s(size_bytes)


@lru_cache(maxsize=4096)
def route_of(group: Group, profile: HardwareProfile) -> Route:
    """What the group's members achieve on each tier they cross.

    Raises: InputError when the group spans hosts and the profile has one.
    """
    n_per_host, n_hosts = group.n_per_host, group.n_hosts
    if n_hosts > profile.n_hosts or n_per_host > profile.n_devices_per_host:
        raise InputError.of(
            f"group of {group.n_devices} devices",
            found=f"{n_hosts} hosts with {n_per_host} members each",
            expected=f"within {profile.name}: {profile.n_hosts} hosts with {profile.n_devices_per_host} devices each",
            fix="plan for more hosts, or a smaller mesh",
        )
    host, network = profile.host_link, profile.network
    return Route(
        n_devices=group.n_devices,
        n_per_host=n_per_host,
        n_hosts=n_hosts,
        host_link=_link(host, host.bus_efficiency_of(n_per_host)) if host and n_per_host > 1 else None,
        network=_link(network, network.bus_efficiency) if network and n_hosts > 1 else None,
        multicast=_multicast(host, group),
    )


def _link(tier: LinkTier, bus_efficiency: float) -> Link:
    gather_efficiency = tier.gather_bus_efficiency or tier.bus_efficiency
    return Link(
        latency_s=tier.latency_s,
        bytes_per_s=tier.bytes_per_s * bus_efficiency,
        gather_bytes_per_s=tier.bytes_per_s * bus_efficiency * gather_efficiency / tier.bus_efficiency,
        half_rate_bytes=tier.half_rate_bytes,
    )


def _multicast(tier: LinkTier | None, group: Group) -> Link | None:
    if tier is None or tier.multicast_bus_efficiency is None or group.n_devices != tier.n_devices or group.n_hosts > 1:
        return None
    return _link(tier, tier.multicast_bus_efficiency)


@lru_cache(maxsize=1)
def _algorithms() -> dict[str, tuple[Algorithm, ...]]:
    """The algorithms of each kind, read once from `cost_models/`."""
    table = load_table("autoplan.cost_models", "COLLECTIVES")
    return {kind: tuple(f for (of_kind, _), f in table.items() if of_kind == kind) for kind in KINDS}
