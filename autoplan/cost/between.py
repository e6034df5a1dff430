"""What passes between the groups of hosts of a mixed cluster: over the uplinks that all devices of a group share."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.hardware.cluster import GroupLink


def between_s(n_bytes: float, between: GroupLink, *, n_devices: int) -> float:
    """Time to send `n_bytes` from each of `n_devices` of a group to another one: latency + n_devices x size / rate."""
    if n_bytes == 0:
        return 0.0
    rate = between.bytes_per_s_per_group * between.bus_efficiency
    return between.latency_s + n_devices * n_bytes / rate


@dataclass(frozen=True, slots=True)
class Exchange:
    """How groups of hosts with data-parallel ranks of one mesh sum what each has summed inside.

    The sum of a group lies in parts on its ranks (the middle of a hierarchical all-reduce), and the parts go around a
    ring of the groups, there and back:

        t = 2 (n_groups - 1) * between_s(size / n_groups, n_devices = n_columns)

    Attributes:
        n_columns: tensors of that size that are summed at the same time: one per shard and tensor-parallel rank.
    """

    between: GroupLink
    n_groups: int
    n_columns: int

    def seconds(self, size_bytes: float) -> float:
        """Time to sum one tensor of `size_bytes` per column."""
        return 2 * (self.n_groups - 1) * between_s(size_bytes / self.n_groups, self.between, n_devices=self.n_columns)
