"""Ring algorithms: every rank sends to its neighbour, over one host or over several.

With n ranks over k hosts, g in each, a step takes the latency of the link it crosses; in one round of the ring,
n - k hops stay in a host and k - 1 cross hosts (in one host: n - 1 hops); of those, r - 1 cross the r racks. Every
rank sends m bytes:

    all_reduce                    m = 2 (n - 1) / n * S     two rounds
    all_gather, reduce_scatter    m = (n - 1) / n * S       one round
    all_to_all (pairwise)         m = (n - 1) / n * S / n   one hop to each other rank

Over several hosts g rings run side by side, each over the network share of its own device: m / g bytes through each.
They leave a rack through the shares of all its p members: m / p bytes through each. The slowest tier sets the pace.
NCCL has no two-level all-gather or reduce-scatter, so a ring is all there is.

Source: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from autoplan.cost.collective_time import Route


def all_reduce_s(size_bytes: float, route: Route) -> float:
    """Time of a ring all-reduce: a reduce-scatter and an all-gather, each one round."""
    moved_bytes = 2 * (route.n_devices - 1) / route.n_devices * size_bytes
    return 2 * _round_s(route) + max(level.link.transfer_s(moved_bytes / level.n_below) for level in route.levels)


def gather_s(size_bytes: float, route: Route) -> float:
    """Time of a ring all-gather or reduce-scatter: one round."""
    moved_bytes = (route.n_devices - 1) / route.n_devices * size_bytes
    return _round_s(route) + max(
        level.link.transfer_s(moved_bytes / level.n_below, "all_gather") for level in route.levels
    )


def all_to_all_s(size_bytes: float, route: Route) -> float:
    """Time of a pairwise exchange: every device holds 1/n of the tensor and keeps 1/n of that.

    What a device sends to another rack passes the leaf and the spine; what it sends to another host, not the host's
    own links.
    """
    pair_bytes = size_bytes / route.n_devices / route.n_devices
    start_s, transfers_s = 0.0, []
    for level in route.levels:
        start_s += (level.n_within - level.n_below) * level.link.latency_s
        n_beyond = (level.n_within if level.is_host else route.n_devices) - level.n_below
        transfers_s.append(level.link.transfer_s(n_beyond * pair_bytes, "all_to_all"))
    return start_s + max(transfers_s)


def _round_s(route: Route) -> float:
    """Start-up of one round: the hops of one piece from its first rank to its last."""
    return sum(level.n_hops * level.link.latency_s for level in route.levels)


COLLECTIVES = {
    ("all_reduce", "ring"): all_reduce_s,
    ("all_gather", "ring"): gather_s,
    ("reduce_scatter", "ring"): gather_s,
    ("all_to_all", "pairwise"): all_to_all_s,
}
