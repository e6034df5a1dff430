"""Two-level all-reduce: inside each host, between hosts on 1/g of the tensor, inside each host again.

    t =   (g - 1) * host_latency + ((g - 1) / g * S + half_rate) / host_rate          reduce-scatter in the host
        + all-reduce of S / g between k hosts over each device's own network share     the cheapest way
        + (g - 1) * host_latency + ((g - 1) / g * S + half_rate) / host_rate           all-gather in the host

Against a ring over all ranks it sends about half as much over the network when there are two hosts, and needs far
fewer network steps; NCCL's tree algorithm does the same (chains in the host, a tree between hosts). The middle step is
a ring or a tree over all hosts, or, where they fill several racks, again this: inside each rack, then between racks.
The three phases follow each other; overlapping them is left out. There is no such algorithm for all-gather and
reduce-scatter in NCCL, so none here: see `ring.py`.
"""

from autoplan.cost_models import ring, tree

from autoplan.cost.collective_time import Route


def all_reduce_s(size_bytes: float, route: Route) -> float | None:
    """Time of a two-level all-reduce; None unless the group crosses two tiers or more."""
    if len(route.levels) < 2:
        return None
    innermost = route.levels[0]
    g, link = innermost.n_within, innermost.link
    inside_s = (g - 1) * link.latency_s + link.transfer_s((g - 1) / g * size_bytes)
    share_bytes, between = size_bytes / g, route.beyond_innermost()
    ways_s = (way(share_bytes, between) for way in (ring.all_reduce_s, tree.all_reduce_s, all_reduce_s))
    return 2 * inside_s + min(seconds for seconds in ways_s if seconds is not None)


COLLECTIVES = {("all_reduce", "hierarchical"): all_reduce_s}
