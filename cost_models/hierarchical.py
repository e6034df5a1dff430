"""Two-level all-reduce: inside each host, between hosts on 1/g of the tensor, inside each host again.

    t =   (g - 1) * host_latency + ((g - 1) / g * S + half_rate) / host_rate          reduce-scatter in the host
        + all-reduce of S / g between k hosts over each device's own network share     ring or tree, the cheaper
        + (g - 1) * host_latency + ((g - 1) / g * S + half_rate) / host_rate           all-gather in the host

Against a ring over all ranks it sends about half as much over the network when there are two hosts, and needs far
fewer network steps; NCCL's tree algorithm does the same (chains in the host, a tree between hosts). The three phases
follow each other; overlapping them is left out. There is no such algorithm for all-gather and reduce-scatter in NCCL,
so none here: see `ring.py`.
"""

from autoplan.cost.collectives import Link, Route


def all_reduce_s(size_bytes: float, route: Route) -> float | None:
    """Time of a two-level all-reduce; None unless the group has several members in each of several hosts."""
    if route.network is None or route.host_link is None:
        return None
    g, host = route.n_per_host, route.host_link
    in_host_s = (g - 1) * host.latency_s + host.transfer_s((g - 1) / g * size_bytes)
    return 2 * in_host_s + _between_hosts_s(size_bytes / g, route.n_hosts, route.network)


def _between_hosts_s(size_bytes: float, n_hosts: int, link: Link) -> float:
    """The cheaper of a ring and a double tree over one device of each host."""
    moved_bytes = 2 * (n_hosts - 1) / n_hosts * size_bytes
    ring_s = 2 * (n_hosts - 1) * link.latency_s + link.transfer_s(moved_bytes)
    tree_s = 2 * (n_hosts - 1).bit_length() * link.latency_s + link.transfer_s(2 * size_bytes)
    return min(ring_s, tree_s)


COLLECTIVES = {("all_reduce", "hierarchical"): all_reduce_s}
