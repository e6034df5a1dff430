"""All-reduce in the switch (NVLink multicast, "NVLS"): the switch adds and spreads, so each link carries less.

    t = 2 * latency + (2 (n - 1) / n * S + slow_start_fit * half_rate) / multicast_rate

Only for groups that fill a host whose profile gives a multicast rate. The maintainers of NCCL say it needs more than
256 MB to reach its rate; `SLOW_START_FIT` puts it at 86 % there, where a ring is near its own best.

Source: NVIDIA/nccl-tests issue 212.
"""

from autoplan.cost.collective_time import Route

SLOW_START_FIT = 12.0  # 256 MB on 8 devices: 448 MB moved; 448 / (448 + 12 * 6 MiB) = 0.86


def all_reduce_s(size_bytes: float, route: Route) -> float | None:
    """Time of an all-reduce in the switch; None where the route has no multicast."""
    link = route.multicast
    if link is None:
        return None
    moved_bytes = 2 * (route.n_devices - 1) / route.n_devices * size_bytes
    return 2 * link.latency_s + (moved_bytes + SLOW_START_FIT * link.half_rate_bytes) / link.bytes_per_s


COLLECTIVES = {("all_reduce", "nvls"): all_reduce_s}
