"""NCCL's log: over what the devices of a host really talked to each other, and to which kind of link that belongs.

Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM          the transport of one channel
Pattern 4, ..., type NVL/PIX, sameChannels 1       the slowest link inside the host, of the rings (pattern 4)
16 coll channels, ..., 16 nvls channels, ...       more than 0: all-reduces inside the switch
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOG_SUBSYSTEMS = "INIT,ENV,GRAPH"
_NVLINK_OF_CAPABILITY = {7: "nvlink2", 8: "nvlink3", 9: "nvlink4", 10: "nvlink5"}
_PCIE_OF_GENERATION = {4: "pcie4", 5: "pcie5"}
HOST_MEMORY, SOCKET, UNKNOWN_LINK = "host_memory", "socket", "unknown"


@dataclass(frozen=True, slots=True)
class Transport:
    """What NCCL used between the devices of a host.

    Attributes:
        channels: transports in order of first use: "P2P/CUMEM", "SHM/direct/direct", "NET/Socket/0", ...
        path: the slowest link between two devices, in NCCL's words: "NVL", "PIX", "PHB", "SYS", ...; None if unsaid.
        has_multicast: whether all-reduces may run inside the switch.
    """

    channels: tuple[str, ...]
    path: str | None
    has_multicast: bool

    def __str__(self) -> str:
        """In words, for the source of a figure."""
        path = f" ({self.path})" if self.path else ""
        switch = ", all-reduce in the switch (NVLS)" if self.has_multicast else ""
        return (", ".join(self.channels) or "unknown transport") + path + switch


def read_nccl_log(text: str) -> Transport:
    """The transport that a log of NCCL_DEBUG=INFO with `LOG_SUBSYSTEMS` tells of."""
    rings = re.findall(r"Pattern 4, .*? type (\w+)/", text)
    return Transport(
        channels=tuple(dict.fromkeys(re.findall(r"Channel \d+(?:/\d+)? : .*? via (\S+)", text))),
        path=rings[-1] if rings else None,
        has_multicast=any(int(count) > 0 for count in re.findall(r"(\d+) nvls channels", text)),
    )


def link_kind(transport: Transport, *, capability_major: int, pcie_generation: int | None) -> str:
    """The kind of host link, one of `[link_kind.*]` in shared.toml: that of the slowest transport in use.

    A PCIe generation without a kind of its own is taken for the nearest that has one.
    """
    families = {channel.partition("/")[0] for channel in transport.channels}
    if not families:
        return UNKNOWN_LINK
    if families - {"P2P", "SHM"}:
        return SOCKET
    if "SHM" in families:
        return HOST_MEMORY
    if transport.path in ("NVL", "NVB") and capability_major in _NVLINK_OF_CAPABILITY:
        return _NVLINK_OF_CAPABILITY[capability_major]
    generation = min(max(pcie_generation or 4, min(_PCIE_OF_GENERATION)), max(_PCIE_OF_GENERATION))
    return _PCIE_OF_GENERATION[generation]
