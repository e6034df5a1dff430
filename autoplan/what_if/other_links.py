"""Clusters with other links: faster or slower networks, other links inside the hosts, NVLink switched off."""

from __future__ import annotations

from dataclasses import replace

from autoplan.errors import InputError
from autoplan.hardware import HardwareProfile, LinkTier
from autoplan.hardware.cluster import Cluster, Hardware
from autoplan.hardware.file import generic_host_link, link_kind_rate
from autoplan.what_if.points import Point

NO_NVLINK = "no_nvlink"  # as the kind of links inside a host
# PCI Express of the same devices, by their data sheets: A100 generation 4; H100, H200 and B200 generation 5.
PCIE_BESIDE = {"nvlink3": "pcie4", "nvlink4": "pcie5", "nvlink5": "pcie5"}


def changed(hardware: Hardware, point: Point) -> Hardware:
    """The cluster with the links that the point asks for.

    Raises: InputError where it has no such links.
    """
    if point.network_scale == 1.0 and not point.host_link:
        return hardware
    if isinstance(hardware, Cluster):
        raise InputError.of(
            hardware.name, found="a mixed cluster", expected="one kind of host for other links", fix="edit its file"
        )
    joins_hosts = hardware.n_devices_joined > hardware.n_devices_per_host
    n_own = len(hardware.links) - len(hardware.networks) + joins_hosts
    own = hardware.links[:n_own]
    if point.host_link and joins_hosts:
        raise InputError.of(
            f"{hardware.name}: other links in a host",
            found=f"links that join {hardware.n_devices_joined} devices of several hosts",
            expected="links that end at the host",
            fix="ask for one host, or edit a copy of its file",
        )
    if point.host_link and own:
        kind = kind_without_nvlink(hardware) if point.host_link == NO_NVLINK else point.host_link
        own = (generic_host_link(kind, n_devices=own[0].n_devices),)
    return replace(hardware, links=(*own, *(scaled(tier, point.network_scale) for tier in hardware.links[n_own:])))


def scaled(tier: LinkTier, factor: float) -> LinkTier:
    """Links that carry `factor` times as much; starting a transfer takes as long as before."""
    half_rate_bytes = max(1, round(tier.half_rate_bytes * factor))
    return replace(tier.at_rate(tier.bytes_per_s * factor), half_rate_bytes=half_rate_bytes)


def kind_without_nvlink(hardware: HardwareProfile) -> str:
    """What joins the devices of such a host where NVLink is switched off, or missing.

    Raises: InputError where they have no NVLink, or nobody has figures of what is beside it.
    """
    link = hardware.host_link
    rate = link.bytes_per_s if link is not None and link.name == "nvlink" else None
    found = [kind for nvlink, kind in PCIE_BESIDE.items() if rate is not None and rate == link_kind_rate(nvlink)]
    if not found:
        raise InputError.of(
            f"{hardware.name}: NVLink off",
            found="no NVLink" if rate is None else "NVLink of another rate",
            expected=f"the rate of {', '.join(PCIE_BESIDE)}",
            fix="name the links that it has instead: --host-link pcie4",
        )
    return found[0]
