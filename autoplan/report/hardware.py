"""Hardware profiles as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.hardware import HardwareProfile
from autoplan.hardware.file import network_names
from autoplan.plain_text import page, text_table
from autoplan.report.figures import figures_text
from autoplan.units import GiB, format_flops_per_s, format_rate, format_seconds

NOT_LISTED = "not listed: autoplan hw measure --out my_box.toml writes that of this machine"


def hardware_list(profiles: Sequence[HardwareProfile]) -> str:
    """One line per hardware profile, what their names may end with, and how to make one of another machine."""
    rows = [(item.name, f"{item.n_devices_per_host} x {item.device.name}", item.description) for item in profiles]
    endings = (
        "NAME/2: 2 of the devices of each host; with --hosts 2 or more NAME+NETWORK has another network between them: "
    )
    networks = endings + ", ".join(network_names())
    return page([text_table(("profile", "one host", "description"), rows), networks, NOT_LISTED])


def hardware_sheet(hardware: HardwareProfile) -> str:
    """Every figure of a hardware profile, then all of the file with their sources."""
    device = hardware.device
    to_device = device.host_copy_bytes_per_s
    price = hardware.price_usd_per_device_hour
    rows = [
        ("hosts x devices", f"{hardware.n_hosts} x {hardware.n_devices_per_host}"),
        ("device", device.name),
        *((f"peak {precision}", format_flops_per_s(rate)) for precision, rate in device.peak_flops_per_s),
        ("memory", f"{device.memory_bytes / GiB:.1f} GiB"),
        ("memory bandwidth", format_rate(device.memory_bytes_per_s)),
        (
            "copies from the host",
            "unknown" if to_device is None else f"{format_rate(to_device)} to each device at once",
        ),
        ("price", "unknown" if price is None else f"{price:.2f} USD per device-hour"),
    ]
    for link in hardware.links:
        rate = f"{format_rate(link.bytes_per_s)} per device and direction, {format_seconds(link.latency_s)}"
        rows.append((f"{link.name} ({link.n_devices})", rate))
    network = hardware.other_network
    if hardware.n_hosts == 1:
        rows.append(("between hosts", f"with --hosts N: {network or 'the tiers that N hosts reach'}"))
    figures = figures_text(hardware.sources, dict(hardware.values))
    title = f"{hardware.name}: {hardware.description}" + (f"; here {network} between hosts" if network else "")
    return page([title, text_table(("", ""), rows, show_header=False), figures])
