"""Mixed clusters: groups of equal hosts, each with its own devices and network, and what joins the groups.

    description = "8 hosts of A100 and 4 hosts of V100"

    [[group]]                              two or more
    profile = "dgx_a100_x8"                as for --hw: NAME[/DEVICES][+NETWORK], or a .toml file beside this one
    n_hosts = 8

    [[group]]
    profile = "v100_x8"
    n_hosts = 4

    [between]                              the network between groups; figures as in `autoplan.hardware_profiles`
    kind = "ethernet"
    latency_per_step = {...}               start-up of one step from group to group    "50 us"
    rate_per_group_one_direction = {...}   all uplinks of one group together, in bits  "400 Gbit/s"
    bus_efficiency = {...}                 achieved bus bandwidth / rate               "80 %"

Plans for it are made by `space.mixed_space` and `search.mixed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import InputError, UsageError
from autoplan.hardware import HardwareProfile
from autoplan.hardware.fields import BETWEEN_FIELDS, Sources, Table, check_keys, inner_table, plain, section
from autoplan.hardware.file import parse_toml, read_hardware_profile, read_path
from autoplan.options import MAX_HOSTS


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How the groups of a cluster talk to each other.

    Attributes:
        latency_s: start-up time of one step from group to group.
        bytes_per_s_per_group: data-sheet rate of all uplinks of one group together, one direction.
        bus_efficiency: achieved bus bandwidth / that rate.
    """

    name: str
    latency_s: float
    bytes_per_s_per_group: float
    bus_efficiency: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of equal hosts; `sources` and `values` are those of `between`, each group has its own."""

    name: str
    description: str
    groups: tuple[HardwareProfile, ...]
    between: GroupLink
    sources: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, str], ...] = ()

    @property
    def n_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.n_devices for group in self.groups)

    @property
    def n_hosts(self) -> int:
        """Hosts of all groups."""
        return sum(group.n_hosts for group in self.groups)


Hardware = HardwareProfile | Cluster


def kinds_of(hardware: Hardware) -> tuple[HardwareProfile, ...]:
    """Each kind of host."""
    return hardware.groups if isinstance(hardware, Cluster) else (hardware,)


def device_names(hardware: Hardware) -> str:
    """`NVIDIA A100-SXM4-80GB and Tesla V100-SXM2-32GB`."""
    return " and ".join(dict.fromkeys(kind.device.name for kind in kinds_of(hardware)))


def mean_price_usd_per_device_hour(hardware: Hardware) -> float | None:
    """Over all devices; None unless all prices are known."""
    if not isinstance(hardware, Cluster):
        return hardware.price_usd_per_device_hour
    known = [(group.n_devices, group.price_usd_per_device_hour) for group in hardware.groups]
    total_usd = sum(count * price for count, price in known if price is not None)
    return None if None in dict(known).values() else total_usd / hardware.n_devices


def load_hardware(name_or_path: str, *, n_hosts: int = 1) -> Hardware:
    """What --hw names: `n_hosts` equal hosts (`load_hardware_profile`), or a mixed cluster, whose file counts hosts.

    Raises: InputError for a file that cannot be used; UsageError for a name that does not exist, or a number of hosts
        beside a mixed cluster.
    """
    if not is_cluster_file(name_or_path):
        return read_hardware_profile(name_or_path, n_hosts=n_hosts, network=None)
    if n_hosts != 1:
        raise UsageError.of(
            "--hosts",
            found=f"{n_hosts}, beside {name_or_path}",
            expected="nothing, since the file says how many hosts each group has",
            fix="leave --hosts out, and change n_hosts in the file",
        )
    return load_cluster(name_or_path)


def is_cluster_file(name_or_path: str | Path) -> bool:
    """Whether this is the file of a mixed cluster; raises InputError when it is a file that cannot be read."""
    if not str(name_or_path).endswith(".toml"):
        return False
    _, where, text = read_path(Path(name_or_path))
    return "group" in parse_toml(text, where=where)


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes; see the module docstring for the schema.

    Raises: InputError for a file that cannot be used, or that names a profile that does not exist.
    """
    name, where, text = read_path(Path(path))

    def load(profile: str, n_hosts: int) -> HardwareProfile:
        return read_hardware_profile(_beside(path, profile), n_hosts=n_hosts, network=None)

    return build_cluster(text, name=name, where=where, load=load)


def groups_alone(path: str | Path) -> tuple[tuple[str, int], ...]:
    """(hardware, hosts) of each group of a cluster's file, as --hw and --hosts name it alone.

    Raises: InputError for a file that cannot be used.
    """
    load_cluster(path)  # every error is found there
    _, where, text = read_path(Path(path))
    groups = parse_toml(text, where=where)["group"]
    return tuple((_beside(path, group["profile"]), group["n_hosts"]) for group in groups)


def _beside(path: str | Path, profile: str) -> str:
    """The name of a shipped profile, or the path of a file beside the cluster's."""
    return str(Path(path).parent / profile) if ".toml" in profile else profile


def build_cluster(text: str, *, name: str, where: str, load: Callable[[str, int], HardwareProfile]) -> Cluster:
    """The cluster that `text` describes; `where` names it in messages, `load` makes a group of a profile's name.

    Raises: InputError that names the table.
    """
    table = parse_toml(text, where=where)
    check_keys(table, where, ("description", "group", "between"))
    groups = table.get("group")
    if not isinstance(groups, list) or len(groups) < 2:
        raise InputError.of(
            f"{where}: group",
            found="nothing" if groups is None else groups,
            expected="two tables [[group]] or more",
            fix="add groups; for one kind of host give its profile to --hw",
        )
    sources: Sources = []
    return Cluster(
        name=name,
        description=plain(table, where, "description", str, "one line for lists of clusters"),
        groups=tuple(_group(group, f"{where}: group[{index}]", load) for index, group in enumerate(groups)),
        between=_between(inner_table(table, where, "between"), f"{where}: between", sources),
        sources=tuple((field, source) for field, source, _ in sources),
        values=tuple((field, text) for field, _, text in sources),
    )


def _group(table: Any, label: str, load: Callable[[str, int], HardwareProfile]) -> HardwareProfile:
    if not isinstance(table, dict):
        raise InputError.of(label, found=table, expected="a table [[group]]", fix="write [[group]] before its lines")
    check_keys(table, label, ("profile", "n_hosts"))
    profile = plain(table, label, "profile", str, "hardware profile of the hosts of this group, as for --hw")
    n_hosts = plain(table, label, "n_hosts", int, "hosts of this group")
    if not 1 <= n_hosts <= MAX_HOSTS:
        raise InputError.of(
            f"{label}.n_hosts", found=n_hosts, expected=f"1 to {MAX_HOSTS}", fix="count the hosts of the group"
        )
    try:
        return load(profile, n_hosts)
    except UsageError as error:  # which it would be on the command line
        raise InputError(f"{label}.profile: {str(error).removeprefix('hardware: ')}") from error


def _between(table: Table, label: str, sources: Sources) -> GroupLink:
    figures = section(table, label, BETWEEN_FIELDS, others=("kind",), sources=sources)
    kind = plain(table, label, "kind", str, 'sort of network: "infiniband", "ethernet", ...')
    return GroupLink(
        name=kind,
        latency_s=figures["latency_per_step"].value,
        bytes_per_s_per_group=figures["rate_per_group_one_direction"].value,
        bus_efficiency=figures["bus_efficiency"].value,
    )
