"""Tree all-reduce between hosts: fewer steps than a ring, a little more traffic; it wins for small tensors.

Two complementary trees over k hosts use both directions of every port, so each rank sends about twice the tensor:

    t = 2 ceil(log2 k) * latency + (2 S + half_rate) / rate

Over several racks a tree joins the hosts of each rack, and another the racks; 2 S leave a rack through the shares of
all its members. The slowest tier sets the pace. For groups with one member per host; `hierarchical.py` uses it between
hosts.

Source: "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009.
"""

from autoplan.cost.collective_time import Route


def all_reduce_s(size_bytes: float, route: Route) -> float | None:
    """Time of a double-tree all-reduce; None unless every host has exactly one member."""
    if route.levels[0].is_host:
        return None
    steps_s = sum(
        (-(-level.n_parts // level.n_domains) - 1).bit_length() * level.link.latency_s for level in route.levels
    )
    return 2 * steps_s + max(level.link.transfer_s(2 * size_bytes / level.n_below) for level in route.levels)


COLLECTIVES = {("all_reduce", "tree"): all_reduce_s}
