"""Tree all-reduce between hosts: fewer steps than a ring, a little more traffic; it wins for small tensors.

Two complementary trees over k hosts use both directions of every port, so each rank sends about twice the tensor:

    t = 2 ceil(log2 k) * latency + (2 S + half_rate) / rate

For groups with one member per host; `hierarchical.py` has the same formula between hosts.

Source: "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009.
"""

from autoplan.cost.collectives import Link, Route


def all_reduce_s(size_bytes: float, route: Route) -> float | None:
    """Time of a double-tree all-reduce; None unless every host has exactly one member."""
    if route.network is None or route.host_link is not None:
        return None
    return tree_s(size_bytes, n_hosts=route.n_hosts, link=route.network)


def tree_s(size_bytes: float, *, n_hosts: int, link: Link) -> float:
    """Up and down the tree: 2 ceil(log2 k) steps, 2 S bytes."""
    return 2 * (n_hosts - 1).bit_length() * link.latency_s + link.transfer_s(2 * size_bytes)


COLLECTIVES = {("all_reduce", "tree"): all_reduce_s}
