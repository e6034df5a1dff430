"""Hardware files: TOML -> HardwareProfile. The schema is in the docstring of `autoplan.hardware_profiles`.

A file is checked completely before anything is built (`hardware.fields`). What a profile leaves out comes from
`shared.toml` and is marked "assumed" in the profile's sources; what has no honest default is an error. Nothing
defaults to zero.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from autoplan import units
from autoplan.errors import InputError, UsageError
from autoplan.hardware import CollectiveTimes, Device, HardwareProfile, LinkTier, ShardingHost, attention_of
from autoplan.hardware.fields import (
    BUS_RATE,
    DEVICE_FIELDS,
    HOST_FIELDS,
    HOST_LINK_FIELDS,
    LIKE_SHIPPED,
    LINK_KINDS,
    OVERLAP_FIELDS,
    PAIR_KINDS,
    PEAK,
    PEAK_PRECISIONS,
    SHARDING_FIELDS,
    SHARED_FILE,
    TIMED_KINDS,
    Figure,
    Figures,
    Sources,
    Table,
    check_choice,
    check_keys,
    check_not_above,
    did_you_mean,
    inner_table,
    plain,
    section,
    timed_size,
)
from autoplan.hardware.networks import HostShape, read_network
from autoplan.options import MAX_HOSTS
from autoplan.overlap import Overlap

PROFILE_PACKAGE = "autoplan.hardware_profiles"
PRICES_FILE = "prices.toml"
MAX_FILE_BYTES = units.MiB

# --- from a name or path to a profile --------------------------------------------------------------------------


def shipped_names() -> tuple[str, ...]:
    """Names of the profiles in the package, sorted."""
    names = (item.name for item in files(PROFILE_PACKAGE).iterdir())
    others = (SHARED_FILE, PRICES_FILE)
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml") and name not in others))


def shipped_prices() -> str:
    """The text of the prices that come with autoplan; see `what_if.prices`."""
    return files(PROFILE_PACKAGE).joinpath(PRICES_FILE).read_text(encoding="utf-8")


def read_hardware_profile(name_or_path: str, *, n_hosts: int, network: str | None) -> HardwareProfile:
    """See `autoplan.hardware.load_hardware_profile`."""
    if not isinstance(name_or_path, str):
        fix = 'a name, such as "dgx_a100_x8", or the path of a file as text'
        raise UsageError.of("hw", found=name_or_path, expected="a text", fix=fix)
    if not isinstance(n_hosts, int) or not 1 <= n_hosts <= MAX_HOSTS:
        fix = "count hosts, of which each has several devices"
        raise UsageError.of("--hosts", found=n_hosts, expected=f"1 to {MAX_HOSTS}", fix=fix)
    base, suffix = _split_network(name_or_path)
    base, n_devices = _split_fragment(base)
    if network and suffix and network != suffix:
        raise UsageError.of(
            f"hardware {name_or_path}", found=f"networks {suffix} and {network}", expected="one", fix="drop one of them"
        )
    name, where, text = _find(base, n_devices)
    return build_hardware_profile(
        text, name=name, where=where, n_hosts=n_hosts, network=network or suffix, n_devices_per_host=n_devices
    )


def validate(path: str | Path) -> HardwareProfile:
    """See `autoplan.hardware.validate_file`."""
    name, where, text = read_path(Path(path))
    return build_hardware_profile(text, name=name, where=where, n_hosts=1, network=None)


def _split_network(name_or_path: str) -> tuple[str, str | None]:
    """`dgx_a100_x8+ethernet_10g:2` -> name, and network and ports; a path that holds a "+" of its own stays whole."""
    base, plus, tail = name_or_path.rpartition("+")
    return (base, tail) if plus and "/" not in tail and not tail.endswith(".toml") else (name_or_path, None)


def with_ports(name_or_path: str, n_ports: int) -> str:
    """The name of the same hosts with so many network ports each: `dgx_a100_x8` -> `dgx_a100_x8+:4`."""
    base, network = _split_network(name_or_path)
    return f"{base}+{(network or '').partition(':')[0]}:{n_ports}"


def _split_fragment(base: str) -> tuple[str, int | None]:
    """`dgx_a100_x8/4` -> name and devices of each host; None without a number after the last "/"."""
    name, slash, count = base.rpartition("/")
    return (name, int(count)) if slash and re.fullmatch("[0-9]{1,9}", count) else (base, None)


def _find(base: str, n_devices: int | None) -> tuple[str, str, str]:
    """Likewise of a profile's name or path."""
    if base.endswith(".toml"):
        return read_path(Path(base))
    if base not in shipped_names():
        raise UsageError.of(
            "hardware",
            found=base,
            expected=f"a path ending in .toml, or one of {', '.join(shipped_names())}",
            fix=_several_hosts(base)
            or _in_order(base, n_devices)
            or _names_with(base)
            or did_you_mean(base, shipped_names())
            or "list them with: autoplan hw list",
        )
    file = f"{base}.toml"
    return base, file, files(PROFILE_PACKAGE).joinpath(file).read_text(encoding="utf-8")


def _in_order(base: str, n_devices: int | None) -> str:
    """What `dgx_a100_x8+ethernet_10g` before a number of devices means; empty for other names."""
    name, plus, network = base.partition("+")
    return f"--hw {name}/{n_devices}+{network}" if plus and n_devices and name in shipped_names() else ""


def _several_hosts(base: str) -> str:
    """What `8xdgx_a100_x8` or `dgx_a100_x8*8` seem to mean; empty for other names."""
    found = re.fullmatch(r"(?P<before>\d*)[x*]?(?P<name>\w+?)(?:\*(?P<after>\d+))?", base)
    n_hosts = found and (found["before"] or found["after"])
    return f"--hw {found['name']} --hosts {n_hosts}" if found and n_hosts and found["name"] in shipped_names() else ""


def _names_with(base: str) -> str:
    """The names that hold this one, as `dgx_h100_x8` does `h100_x8`; empty without any."""
    names = [f'"{name}"' for name in shipped_names() if base and base.lower() in name]
    return f"did you mean {'one of ' if len(names) > 1 else ''}{', '.join(names)}?" if names else ""


def read_path(path: Path, *, expected: str = "a hardware file") -> tuple[str, str, str]:
    """(name, what to call the file in messages, text) of a TOML file; `expected` says what it is to be.

    Raises: InputError when it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputError.of(str(path), found="over 1 MiB", expected="a profile of a few KiB", fix="check the path")
        return path.stem, str(path), content.decode("utf-8")
    except OSError as error:
        raise InputError.unreadable(str(path), error, expected=expected) from None
    except UnicodeDecodeError:
        raise InputError.of(str(path), found="not text", expected="TOML in UTF-8", fix="check the path") from None


def network_names() -> tuple[str, ...]:
    """The networks that every profile may have in place of its own, as `NAME+NETWORK`."""
    return tuple(_shared()["network"])


@lru_cache(maxsize=1)
def _shared() -> Table:
    return parse_toml(files(PROFILE_PACKAGE).joinpath(SHARED_FILE).read_text(encoding="utf-8"), where=SHARED_FILE)


def parse_toml(text: str, *, where: str) -> Table:
    """The tables of a hardware file; raises InputError with the line that is wrong."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        is_twice = "overwrite" in str(error)
        raise InputError.of(
            where,
            found=f"{error}{_line_of(error, text)}",
            expected="each key once" if is_twice else "TOML",
            fix="leave one of the two out" if is_twice else "correct that line: a quote or a bracket may be open",
        ) from None


def _line_of(error: Exception, text: str) -> str:
    """`: the line` that a TOML error points at, or nothing."""
    match = re.search(r"at line (\d+)", str(error))
    return f": {text.splitlines()[int(match[1]) - 1].strip()[:80]}" if match else ""


# --- from text to a profile ------------------------------------------------------------------------------------


def build_hardware_profile(
    text: str, *, name: str, where: str, n_hosts: int, network: str | None, n_devices_per_host: int | None = None
) -> HardwareProfile:
    """The profile that `text` describes; `where` names it in messages. Every network of the file is checked.

    `n_devices_per_host` is how many devices of each host are ours; None takes all.

    Raises: InputError that names the field.
    """
    table = parse_toml(text, where=where)
    if "group" in table:
        raise InputError.of(
            where,
            found="a mixed cluster, of several [[group]]",
            expected="one kind of host",
            fix="give the profile of one group",
        )
    check_keys(table, where, ("description", "default_network", "device", "host", "host_link", "network"))
    assumed = _shared()["assumed"]
    sources: Sources = []
    host_table = inner_table(table, where, "host")
    host_figures = section(
        host_table,
        f"{where}: host",
        HOST_FIELDS,
        others=("n_devices", "shards"),
        fallback=assumed["host"],
        sources=sources,
    )
    host = _host_shape(table, where, n_devices_per_host)
    device = _device(inner_table(table, where, "device"), where, assumed["device"], sources)
    is_linked = host.n_used > 1 or min(n_hosts, host.n_joined) > 1
    links = []
    if host.n_devices > 1:
        link_sources: Sources = sources if is_linked else []
        links = _own_links(inner_table(table, where, "host_link"), where, host, n_hosts, link_sources)
    default_network = plain(table, where, "default_network", str, "network between hosts")
    chosen = default_network + network if network and network.startswith(":") else network or default_network
    error = UsageError if network else InputError
    tiers = _network(table.get("network", {}), where, chosen, host, n_hosts, sources, error)
    price = host_figures.get("price_per_device_hour")
    other_network = chosen if chosen != default_network else None
    return HardwareProfile(
        name=_full_name(name, host, other_network),
        description=plain(table, where, "description", str, "one line for lists of profiles"),
        device=device,
        n_devices_per_host=host.n_used,
        n_hosts=n_hosts,
        links=(*links, *tiers),
        overlap=_overlap(host_figures, exposed=host_figures["exposed_when_overlapped"]),
        overlap_of_shards=_overlap_of_shards(host_table.get("shards", {}), where, host_figures, sources),
        price_usd_per_device_hour=price.value if price else None,
        sources=tuple((field, source) for field, source, _ in sources),
        values=tuple((field, text) for field, _, text in sources),
        n_hosts_joined=host.n_joined,
        other_network=other_network,
    )


def _overlap(figures: Figures, *, exposed: Figure) -> Overlap:
    """Where it is not said what compute adds to communication, the same share as the other way round."""
    exposed = figures.get("exposed_when_overlapped", exposed)
    compute_exposed = figures.get("compute_exposed_when_overlapped", exposed)
    return Overlap(communication_exposed=exposed.value, compute_exposed=compute_exposed.value)


def _overlap_of_shards(table: Any, where: str, host_figures: Figures, sources: Sources) -> Overlap:
    """Where nothing is said of shards, what all-reduces add to compute, either way."""
    label = f"{where}: host.shards"
    if not isinstance(table, dict):
        raise InputError.of(label, found=table, expected="a table", fix=LIKE_SHIPPED)
    figures = section(table, label, OVERLAP_FIELDS, sources=sources, required=False)
    return _overlap(figures, exposed=host_figures["exposed_when_overlapped"])


def _host_shape(table: Table, where: str, n_used: int | None) -> HostShape:
    n_devices = plain(inner_table(table, where, "host"), f"{where}: host", "n_devices", int, "devices of one host")
    if not 1 <= n_devices <= 1024:
        raise InputError.of(
            f"{where}: host.n_devices", found=n_devices, expected="1 to 1024", fix="count the devices of a host"
        )
    if n_used is not None and not 1 <= n_used <= n_devices:
        raise UsageError.of(
            f"devices of each host, {where}",
            found=n_used,
            expected=f"1 to {n_devices}, which a host has",
            fix=f"write /{n_devices} or less after the name, and ask for more hosts",
        )
    return HostShape(n_devices, n_used or n_devices, _n_joined(table.get("host_link"), f"{where}: host_link"))


def _n_joined(table: Any, label: str) -> int:
    """How many hosts the links of a host join: 1, unless the file says more."""
    if not isinstance(table, dict) or "n_hosts" not in table:
        return 1
    count: int = plain(table, label, "n_hosts", int, "hosts that these links join")
    if not 2 <= count <= 1024:
        raise InputError.of(
            f"{label}.n_hosts",
            found=count,
            expected="2 to 1024: hosts that these links join",
            fix="count them, or leave it out where the links end at the host",
        )
    return count


def _full_name(name: str, host: HostShape, network: str | None) -> str:
    """The name that loads the same profile again: `dgx_a100_x8/4+ethernet_10g`."""
    fragment = "" if host.n_used == host.n_devices else f"/{host.n_used}"
    return f"{name}{fragment}+{network}" if network else f"{name}{fragment}"


def _device(table: Table, where: str, assumed: Table, sources: Sources) -> Device:
    label = f"{where}: device"
    others = ("name", "peak", "sharding")
    figures = section(table, label, DEVICE_FIELDS, others=others, fallback=assumed, sources=sources)
    peaks = inner_table(table, label, "peak")
    peak_fields = dict.fromkeys(PEAK_PRECISIONS, PEAK)
    peak_figures = section(peaks, f"{label}.peak", peak_fields, sources=sources, required=False)
    if not peak_figures:
        raise InputError.of(f"{label}.peak", found="nothing", expected=PEAK.purpose, fix="give at least one precision")
    name = plain(table, label, "name", str, "what the driver calls it")
    return Device(
        name=name,
        peak_flops_per_s=tuple((precision, figure.value) for precision, figure in peak_figures.items()),
        memory_bytes=round(figures["memory"].value),
        memory_bytes_per_s=figures["memory_bandwidth"].value,
        matmul_efficiency=figures["matmul_efficiency"].value,
        memory_efficiency=figures["memory_efficiency"].value,
        launch_s=figures["launch"].value,
        kernel_s=figures["kernel"].value,
        collective_launch_s=figures["collective_launch"].value,
        pipeline_action_s=figures["pipeline_action"].value,
        pipeline_transfer_s=figures["pipeline_transfer"].value,
        host_copy_bytes_per_s=figures["host_copy_rate"].value,
        sharding=_sharding(table.get("sharding", {}), f"{label}.sharding", assumed["sharding"], sources),
        attention=attention_of(name),
    )


def _sharding(table: Any, label: str, assumed: Table, sources: Sources) -> ShardingHost:
    if not isinstance(table, dict):
        raise InputError.of(label, found=table, expected="a table", fix=LIKE_SHIPPED)
    figures = section(table, label, SHARDING_FIELDS, fallback=assumed, sources=sources)
    return ShardingHost(**{f"{key}_s": figure.value for key, figure in figures.items()})


def _own_links(table: Table, where: str, host: HostShape, n_hosts: int, sources: Sources) -> list[LinkTier]:
    """The links of a host within it, where several of its devices are ours, and between the hosts that they join."""
    link = _host_link(table, where, host.n_devices, sources)
    n_joined = min(n_hosts, host.n_joined)
    n_devices = n_joined * host.n_used
    between = replace(link, n_devices=n_devices, group_bus_efficiency=(), multicast_bus_efficiency=None, timed=())
    return [link] * (host.n_used > 1) + [between] * (n_joined > 1)


def _host_link(table: Table, where: str, n_devices: int, sources: Sources) -> LinkTier:
    label = f"{where}: host_link"
    kinds = _shared()["link_kind"]
    others = ("kind", "n_hosts", "all_reduce_bus_rate_of_group", "times")
    check_keys(table, label, (*HOST_LINK_FIELDS, *others))
    kind = plain(table, label, "kind", str, "sort of link between the devices of a host")
    check_choice(kind, kinds, f"{label}.kind")
    figures = section(table, label, HOST_LINK_FIELDS, others=others, fallback=kinds[kind], sources=sources)
    rate = figures["rate_per_device_one_direction"].value
    _check_known_rate(rate, kind, f"{label}.rate_per_device_one_direction")
    groups = _group_rates(table.get("all_reduce_bus_rate_of_group", {}), label, n_devices, sources)
    multicast = figures.get("multicast_all_reduce_bus_rate")
    achieved = {kind: f"{kind}_bus_rate" for kind in ("all_reduce", *LINK_KINDS) if f"{kind}_bus_rate" in figures}
    for field in achieved.values():
        check_not_above(figures[field].value, rate, f"{label}.{field}")
    return LinkTier(
        name=kind.rstrip("0123456789"),
        n_devices=n_devices,
        latency_s=figures["latency_per_step"].value,
        bytes_per_s=rate,
        bus_efficiency=figures["all_reduce_bus_rate"].value / rate,
        half_rate_bytes=round(figures["half_rate_size"].value),
        kind_bus_efficiency=tuple(
            (kind, figures[achieved[kind]].value / rate) for kind in LINK_KINDS if kind in achieved
        ),
        group_bus_efficiency=tuple((size, bus_rate / rate) for size, bus_rate in groups),
        multicast_bus_efficiency=multicast.value / rate if multicast else None,
        timed=_timed(table.get("times"), f"{label}.times", n_devices, sources),
        drift=figures["drift"].value if "drift" in figures else 0.0,
    )


def generic_host_link(kind: str, *, n_devices: int) -> LinkTier:
    """Links of this kind between the devices of a host, as `shared.toml` has them.

    Raises: UsageError for a kind that it does not have, InputError for one that has no figures of its own.
    """
    check_choice(kind, _shared()["link_kind"], "kind of link inside a host", UsageError)
    return _host_link({"kind": kind}, SHARED_FILE, n_devices, [])


def _group_rates(table: Any, label: str, n_devices: int, sources: Sources) -> list[tuple[int, float]]:
    """(group size, bus rate) pairs in order of size."""
    where = f"{label}.all_reduce_bus_rate_of_group"
    if not isinstance(table, dict):
        raise InputError.of(where, found=table, expected="a table such as { 2 = {...} }", fix=LIKE_SHIPPED)
    sizes = {str(size): BUS_RATE for size in range(2, n_devices)}
    figures = section(table, where, sizes, sources=sources, required=False)
    return sorted((int(size), figure.value) for size, figure in figures.items())


def _timed(table: Any, label: str, n_devices: int, sources: Sources) -> tuple[CollectiveTimes, ...]:
    """Measured times by kind and group size; none where the file has no such table."""
    if table is None:
        return ()
    form = 'tables such as all_gather = { 2 = { "64 KiB" = "9.1 us" } }, and source = "where they come from"'
    if not isinstance(table, dict) or not isinstance(table.get("source"), str) or not table["source"].strip():
        raise InputError.of(label, found=table, expected=form, fix=f"{LIKE_SHIPPED}; source says where they come from")
    check_keys(table, label, ("source", *TIMED_KINDS))
    found = []
    for kind, groups in ((key, value) for key, value in table.items() if key != "source"):
        sizes = [str(size) for size in range(2, 3 if kind in PAIR_KINDS else n_devices + 1)]
        if not isinstance(groups, dict) or not all(isinstance(times, dict) and times for times in groups.values()):
            raise InputError.of(f"{label}.{kind}", found=groups, expected=form, fix=LIKE_SHIPPED)
        check_keys(groups, f"{label}.{kind}", sizes)
        for n, times in groups.items():
            where = f"{label}.{kind}.{n}"
            pairs = sorted(timed_size(size, text, where) for size, text in times.items())
            n_bytes = [size for size, _ in pairs]
            if len(set(n_bytes)) < len(n_bytes):
                raise InputError.of(where, found=times, expected="different sizes", fix="leave one of them out")
            seconds = accumulate((duration_s for _, duration_s in pairs), max)
            found.append(CollectiveTimes(kind, int(n), tuple(zip(n_bytes, seconds, strict=True))))
    n_times = sum(len(own.times) for own in found)
    sources.append((label.partition(": ")[2], table["source"], f"{n_times} times"))
    return tuple(found)


def _network(
    own: Any, where: str, name: str, host: HostShape, n_hosts: int, sources: Sources, error: type[InputError]
) -> tuple[LinkTier, ...]:
    """The tiers of the network called `name`, or `name:PORTS` of a host.

    The file's own networks come before the shared ones of the same name.

    `error` is what an unknown name is: the user's (UsageError) or the file's.
    """
    if not isinstance(own, dict):
        raise InputError.of(f"{where}: network", found=own, expected="tables [network.NAME]", fix=LIKE_SHIPPED)
    known = {**_shared()["network"], **own}
    name, colon, n_ports = name.partition(":")
    check_choice(name, known, f"{where}: network", error)
    for other, table in own.items():
        if other != name:
            read_network(table, f"{where}: network.{other}", host=host, n_hosts=1, sources=[])
    home = where if name in own else SHARED_FILE
    table = {**known[name], "ports": f"{n_ports} per host"} if colon else known[name]
    return read_network(table, f"{home}: network.{name}", host=host, n_hosts=n_hosts, sources=sources)


def link_kind_rate(kind: str) -> float | None:
    """Bytes/s of one device's link of this kind, one direction; None for a kind that has no rate of its own."""
    entry = _shared()["link_kind"][kind].get("rate_per_device_one_direction")
    return units.parse_bytes_per_s(entry["value"]) if entry else None


def _check_known_rate(rate: float, kind: str, label: str) -> None:
    """A link cannot be faster than its kind; exactly twice is the sum of both directions."""
    known = link_kind_rate(kind)
    if known is None or rate <= 1.05 * known:
        return
    is_duplex = 1.9 <= rate / known <= 2.1
    raise InputError.of(
        label,
        found=units.format_rate(rate),
        expected=f"at most {units.format_rate(known)}, one direction, for {kind}",
        fix=f'that is the sum of both directions: write "{known / units.GB:g} GB/s"' if is_duplex else "check the kind",
    )
