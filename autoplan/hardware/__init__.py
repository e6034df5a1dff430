"""HardwareProfile: one cluster as numbers, read from TOML with a unit in each value and a source on each figure.

    devices --links[0] (NVLink, PCIe)--> host --links[1] (leaf)--> rack --links[2] (spine)--> site --links[3]--> sites

A file in `hardware_profiles/` describes one kind of host; `load_hardware_profile` makes a cluster of them. Ranks fill
hosts, hosts fill racks, racks fill sites, in order. Most networks have one tier; a cluster has those that it reaches.
Where the links of a host join several hosts (a rack of GB200), they are the first tier beyond the host, too:

    devices --links[0] (NVLink)--> host of 4 --links[1] (NVLink)--> 18 hosts --links[2] (InfiniBand)--> racks

file reads a hardware file with what fields says of each figure and networks of links beyond the host; cluster has
groups of hosts of several kinds; usual says which figures no machine is known to have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from autoplan.overlap import Overlap


@dataclass(frozen=True, slots=True)
class ShardingHost:
    """What `fully_shard` takes of the host, in seconds per block and for each parameter tensor of it.

    Attributes:
        hooks_s, hooks_of_parameter_s: in every forward and every backward pass.
        gather_s, gather_of_parameter_s: where the pass gathers the block.
        reduce_s, reduce_of_parameter_s: where the pass reduces its gradients.
        optimizer_of_parameter_s: the gradient norm and the optimizer, once per step.
    """

    hooks_s: float
    hooks_of_parameter_s: float
    gather_s: float
    gather_of_parameter_s: float
    reduce_s: float
    reduce_of_parameter_s: float
    optimizer_of_parameter_s: float


NO_SHARDING = ShardingHost(*[0.0] * 7)  # where the host does not run `fully_shard`


CPU = "CPU"  # a device's name


def attention_of(device_name: str) -> str:
    """What `Device.attention` is, by the name that the driver gives.

    Since torch 2.5 cuDNN's on Hopper and later. Before A100 (Pascal, Volta, Turing) there is no flash attention.
    """
    if device_name == CPU:
        return "cpu"
    if re.search(r"\bG?[HB]\d{2,3}\b", device_name):
        return "cudnn"
    is_older = re.search(r"\b(Tesla|Quadro|TITAN|GTX|RTX 20[678]0|G?[KMPTV]\d+)", device_name)
    return "efficient" if is_older else "flash"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Attributes:
        peak_flops_per_s: (precision, dense peak) pairs; a precision that is absent is not supported.
        memory_bytes: what the driver offers.
        memory_bytes_per_s: data-sheet memory bandwidth.
        matmul_efficiency: fraction of the peak that matrix products keep up for seconds; less than the best of a burst,
            where the power limit lowers the clock.
        memory_efficiency: best achieved fraction of the memory bandwidth by an elementwise op.
        launch_s: host time to launch one bare op in eager mode; ops of a model take a multiple of it
            (`cost.op_time.host_s`).
        kernel_s: shortest time of one kernel on the device.
        collective_launch_s: host time to start one collective.
        sharding: see `ShardingHost`.
        pipeline_action_s, pipeline_transfer_s: host time of one action of a pipeline beside its blocks, and of each
            time it sends or receives.
        host_copy_bytes_per_s: from page-locked memory of the host to each device, all devices of the host at once; None
            when unknown.
        attention: the fused attention that it is best at, in 16 bits: "cudnn", "flash", "efficient", or "cpu"; see
            `attention_of` and `analysis.attention_kernel`.
    """

    name: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    launch_s: float
    kernel_s: float
    collective_launch_s: float
    sharding: ShardingHost
    pipeline_action_s: float = 0.0
    pipeline_transfer_s: float = 0.0
    host_copy_bytes_per_s: float | None = None
    attention: str = "flash"

    @property
    def is_cpu(self) -> bool:
        """Whether this is the processor of a host, as `hw measure --device cpu` names it."""
        return self.name == CPU

    @property
    def copy_bytes_per_s(self) -> float:
        """The memory bandwidth that a copy achieves."""
        return self.memory_bytes_per_s * self.memory_efficiency


class CollectiveTimes(NamedTuple):
    """Measured times of one kind of collective over `n_devices` of a host, or between two (`PAIR_KINDS`).

    Attributes:
        times: (bytes of the full tensor, seconds), both in ascending order: a larger one that was found to be faster
            takes as long as a smaller one.
    """

    kind: str
    n_devices: int
    times: tuple[tuple[int, float], ...]

    def sped_up(self, factor: float) -> CollectiveTimes:
        """What links that carry `factor` times as much would take; starting, where it is known, takes as long."""
        start_s = self.times[0][1] if len(self.times) > 1 else 0.0
        return self._replace(times=tuple((size, start_s + (s - start_s) / factor) for size, s in self.times))


@dataclass(frozen=True, slots=True)
class LinkTier:
    """How the devices of one domain talk to each other; every figure is per device and one direction.

    Attributes:
        name: "nvlink", "pcie", "infiniband", "ethernet", ...
        n_devices: devices that share one domain of the tier: those of a full host, of a rack, of a site; at the
            outermost tier all of the cluster.
        latency_s: alpha, the start-up time of one step of a collective.
        bytes_per_s: data-sheet rate of one device's link, one direction; of a link that devices share (ports of a
            host, uplinks of a rack), one device's share while all of them drive it.
        bus_efficiency: achieved bus bandwidth of a large all-reduce / `bytes_per_s`.
        half_rate_bytes: bytes a rank moves at which half the achieved bus bandwidth is reached.
        kind_bus_efficiency: likewise of other kinds, where they differ: "all_gather" (and reduce-scatter),
            "all_to_all", "send".
        group_bus_efficiency: (group size, bus efficiency) where smaller groups were measured; a size between two
            measured ones takes the smaller.
        multicast_bus_efficiency: `bus_efficiency` of an all-reduce of all `n_devices` in the switch (NVLink
            multicast, "NVLS"), which sends less over each link and so may pass 1; None where it is off.
        timed: of groups that were measured, which take these times whatever the figures above give.
        drift: standard deviation of ln(time of a collective / its mean) from one minute to another; 0 where unknown.
    """

    name: str
    n_devices: int
    latency_s: float
    bytes_per_s: float
    bus_efficiency: float
    half_rate_bytes: int
    kind_bus_efficiency: tuple[tuple[str, float], ...] = ()
    group_bus_efficiency: tuple[tuple[int, float], ...] = ()
    multicast_bus_efficiency: float | None = None
    timed: tuple[CollectiveTimes, ...] = ()
    drift: float = 0.0

    def at_rate(self, bytes_per_s: float) -> LinkTier:
        """The same links with another data-sheet rate."""
        factor = bytes_per_s / self.bytes_per_s
        return replace(self, bytes_per_s=bytes_per_s, timed=tuple(own.sped_up(factor) for own in self.timed))

    def bus_efficiency_of(self, n_devices: int) -> float:
        """The bus efficiency of an all-reduce over `n_devices` of the domain."""
        if n_devices >= self.n_devices:
            return self.bus_efficiency
        measured = [efficiency for size, efficiency in self.group_bus_efficiency if size <= n_devices]
        return measured[-1] if measured else self.bus_efficiency


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A cluster: `n_hosts` equal hosts, of which `n_devices_per_host` devices each are ours.

    Attributes:
        links: tiers from the innermost outwards: the in-host tier where we have several devices of a host, the same
            links between the hosts that they join, then each network tier that the hosts reach.
        overlap: what compute and all-reduces take longer while both run.
        overlap_of_shards: what compute, and all-gathers and reduce-scatters, take longer.
        price_usd_per_device_hour: None when unknown.
        sources: (field, source) pairs; "assumed: ..." where the figure was not measured on this hardware.
        values: (field, value) pairs of the same fields, as they are written in the file.
        n_hosts_joined: hosts that the links of a host join, where there are as many; 1 unless they leave the host.
        other_network: the network that was chosen in place of the profile's default; None where none was.
    """

    name: str
    description: str
    device: Device
    n_devices_per_host: int
    n_hosts: int
    links: tuple[LinkTier, ...]
    overlap: Overlap
    overlap_of_shards: Overlap
    price_usd_per_device_hour: float | None
    sources: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, str], ...] = ()
    n_hosts_joined: int = 1
    other_network: str | None = None

    @property
    def n_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.n_devices_per_host * self.n_hosts

    @property
    def n_devices_joined(self) -> int:
        """Devices on the links of one host: its own, and those of the other hosts that these links join."""
        return self.n_devices_per_host * min(self.n_hosts, self.n_hosts_joined)

    @property
    def host_link(self) -> LinkTier | None:
        """How the devices of one host talk to each other; None when a host has one device."""
        return self.links[0] if self.n_devices_per_host > 1 else None

    @property
    def networks(self) -> tuple[LinkTier, ...]:
        """How hosts talk to each other, over links of their own or not, then racks, then sites; empty for one host."""
        return self.links[1:] if self.n_devices_per_host > 1 else self.links

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Devices of one host, then of one domain of each network tier that has another above it."""
        return (self.n_devices_per_host, *(tier.n_devices for tier in self.networks[:-1]))


def load_hardware_profile(name_or_path: str, *, n_hosts: int = 1, network: str | None = None) -> HardwareProfile:
    """The cluster of `n_hosts` hosts that a shipped profile name or a path ending in `.toml` describes.

    `NAME/DEVICES` takes that many devices of each host and leaves the others idle: `dgx_a100_x8/4`. `NAME+NETWORK`
    chooses another network than the profile's default: `dgx_a100_x8+ethernet_10g`, `dgx_a100_x8/4+ethernet_10g`;
    `network` does the same for callers that hold it apart. See `autoplan.hardware_profiles` for the schema.

    Raises: UsageError for an unknown name, InputError for a file that cannot be used.
    """
    from autoplan.hardware import file

    return file.read_hardware_profile(name_or_path, n_hosts=n_hosts, network=network)


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    from autoplan.hardware import file

    return file.shipped_names()


def validate_file(path: str | Path) -> HardwareProfile:
    """The one-host profile that a file describes; raises InputError if anything in it is wrong, networks included."""
    from autoplan.hardware import file

    return file.validate(path)
