"""Ring algorithms: every rank sends to its neighbour, over one host or over several.

With n ranks over k hosts, g in each, a step takes the latency of the link it crosses; in one round of the ring,
n - k hops stay in a host and k - 1 cross hosts (in one host: n - 1 hops). Every rank sends m bytes:

    all_reduce                    m = 2 (n - 1) / n * S     two rounds
    all_gather, reduce_scatter    m = (n - 1) / n * S       one round
    broadcast                     m = S                     one round
    all_to_all (pairwise)         m = (n - 1) / n * S / n   one hop to each other rank

Over several hosts g rings run side by side, each over the network share of its own device: m / g bytes through each.
The slower of the two tiers sets the pace. NCCL has no two-level all-gather or reduce-scatter, so a ring is all
there is.

Source: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from autoplan.cost.collectives import Route


def all_reduce_s(size_bytes: float, route: Route) -> float:
    """Time of a ring all-reduce: a reduce-scatter and an all-gather, each one round."""
    moved_bytes = 2 * (route.n_devices - 1) / route.n_devices * size_bytes
    host_s = route.host_link.transfer_s(moved_bytes) if route.host_link else 0.0
    network_s = route.network.transfer_s(moved_bytes / route.n_per_host) if route.network else 0.0
    return 2 * _round_s(route) + max(host_s, network_s)


def gather_s(size_bytes: float, route: Route) -> float:
    """Time of a ring all-gather or reduce-scatter: one round."""
    return _round_s(route) + _one_round_transfer_s((route.n_devices - 1) / route.n_devices * size_bytes, route)


def broadcast_s(size_bytes: float, route: Route) -> float:
    """Time of a broadcast in many small pieces along the ring."""
    return _round_s(route) + _one_round_transfer_s(size_bytes, route)


def all_to_all_s(size_bytes: float, route: Route) -> float:
    """Time of a pairwise exchange: every device holds 1/n of the tensor and keeps 1/n of that."""
    n, n_abroad = route.n_devices, route.n_devices - route.n_per_host
    pair_bytes = size_bytes / n / n
    total_s = pace_s = 0.0
    if route.host_link:
        total_s += (route.n_per_host - 1) * route.host_link.latency_s
        pace_s = route.host_link.gather_transfer_s((route.n_per_host - 1) * pair_bytes)
    if route.network:
        total_s += n_abroad * route.network.latency_s
        pace_s = max(pace_s, route.network.gather_transfer_s(n_abroad * pair_bytes))
    return total_s + pace_s


def _one_round_transfer_s(moved_bytes: float, route: Route) -> float:
    host_s = route.host_link.gather_transfer_s(moved_bytes) if route.host_link else 0.0
    network_s = route.network.gather_transfer_s(moved_bytes / route.n_per_host) if route.network else 0.0
    return max(host_s, network_s)


def _round_s(route: Route) -> float:
    """Start-up of one round: the hops of one piece from its first rank to its last."""
    host_s = (route.n_devices - route.n_hosts) * route.host_link.latency_s if route.host_link else 0.0
    network_s = (route.n_hosts - 1) * route.network.latency_s if route.network else 0.0
    return host_s + network_s


COLLECTIVES = {
    ("all_reduce", "ring"): all_reduce_s,
    ("all_gather", "ring"): gather_s,
    ("reduce_scatter", "ring"): gather_s,
    ("broadcast", "ring"): broadcast_s,
    ("all_to_all", "pairwise"): all_to_all_s,
}
