"""Link fit: timed collectives -> the figures of a host link, as `cost.collective_time` uses them.

Latency and half-rate size are what makes the formulas of `cost_models/` agree best with the times of rings:

    (latency_fit, half_rate_fit) = argmin  sum over times of  log(formula / measured)^2

a search over a grid that is refined around its best point; for each point of it, every rate is the median of those
with which the formula gives the time of a large tensor exactly. The rate of the largest alone would flatter those of
usual size: a pair of H200 still gains 10 % from 256 MiB to 1 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

from autoplan.cost.collective_time import Algorithm, Link, route_in_host
from autoplan.errors import MeasureError
from autoplan.registry import load_table
from autoplan.units import GiB, KiB, MiB

LARGE_BYTES = 8 * MiB
GATHERS = ("all_gather", "reduce_scatter")
LATENCY_RANGE_S = (1e-7, 1e-2)
HALF_RATE_RANGE_BYTES = (KiB, GiB)
N_GRID_POINTS, N_REFINEMENTS = 17, 4
_NVLS_STEPS = 2
WHOLE_KINDS = ("broadcast", "send", "sendrecv")  # every link carries the whole tensor
WITHOUT_FORMULA = ("broadcast", "sendrecv")  # no plan is priced by one


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One timed collective; `kind` is one of `hardware.fields.TIMED_KINDS`.

    `size_bytes` is the full tensor, as in `cost.collective_time.collective_s`; `seconds` that of the slowest rank.
    """

    kind: str
    n_devices: int
    size_bytes: int
    seconds: float
    n_calls: int

    @property
    def moved_bytes(self) -> float:
        """Bytes that a ring sends over each link, one way; divided by `seconds` it is the bus bandwidth."""
        n = self.n_devices
        shares = {"all_reduce": 2 * (n - 1) / n, "all_to_all": (n - 1) / n / n, **dict.fromkeys(WHOLE_KINDS, 1.0)}
        return shares.get(self.kind, (n - 1) / n) * self.size_bytes


@dataclass(frozen=True, slots=True)
class LinkFit:
    """What the collectives of one host achieve; rates are bus bandwidths per device.

    Attributes:
        all_reduce_bytes_per_s: (group size, rate) of a ring, ascending; the last is the whole host.
        kind_bytes_per_s: of an "all_gather", an "all_to_all" of the whole host, and a "send"; those that were timed.
        multicast_bytes_per_s: all-reduce of the whole host in the switch; None where it was a ring.
        errors: (time, predicted seconds / measured seconds) of every time but those of `WITHOUT_FORMULA`.
    """

    latency_s: float
    half_rate_bytes: float
    all_reduce_bytes_per_s: tuple[tuple[int, float], ...]
    kind_bytes_per_s: tuple[tuple[str, float], ...]
    multicast_bytes_per_s: float | None
    errors: tuple[tuple[CollectiveTime, float], ...]

    @property
    def median_error(self) -> float:
        """Median of |predicted / measured - 1|."""
        return median(abs(ratio - 1.0) for _, ratio in self.errors)

    @property
    def worst(self) -> tuple[CollectiveTime, float]:
        """The time that is predicted worst, and predicted / measured."""
        return max(self.errors, key=lambda error: abs(math.log(error[1])))


def fit_links(times: Sequence[CollectiveTime], *, n_devices: int, has_multicast: bool = False) -> LinkFit:
    """The fit to the times of groups of a host with `n_devices`.

    Raises: MeasureError when there is no all-reduce or all-gather of the whole host.
    """
    for kinds in (("all_reduce",), GATHERS):
        if not any(time.kind in kinds and time.n_devices == n_devices for time in times):
            raise MeasureError(f"no {kinds[0]} over all {n_devices} devices was timed, so no rate can be given")
    latencies_s, half_rates_bytes = _grid(*LATENCY_RANGE_S), _grid(*HALF_RATE_RANGE_BYTES)
    for _ in range(N_REFINEMENTS):
        best = min(
            (
                _rated(times, n_devices, has_multicast, latency_s=latency_s, half_rate_bytes=half_rate_bytes)
                for latency_s in latencies_s
                for half_rate_bytes in half_rates_bytes
            ),
            key=_squared_error,
        )
        latencies_s = _around(latencies_s, best.latency_s)
        half_rates_bytes = _around(half_rates_bytes, best.half_rate_bytes)
    return best


def _grid(low: float, high: float) -> tuple[float, ...]:
    """Points from low to high, each the same factor above the last."""
    return tuple(low * (high / low) ** (i / (N_GRID_POINTS - 1)) for i in range(N_GRID_POINTS))


def _around(grid: tuple[float, ...], best: float) -> tuple[float, ...]:
    """A grid between the neighbours of `best`."""
    place = grid.index(best)
    return _grid(grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)])


def _squared_error(fit: LinkFit) -> float:
    """Of rings of a MiB and more, where there are any: smaller ones follow another protocol, and hardly count."""
    rings = [(time, ratio) for time, ratio in fit.errors if time.kind in ("all_reduce", *GATHERS)]
    counted = [ratio for time, ratio in rings if time.size_bytes >= MiB] or [ratio for _, ratio in rings]
    return sum(math.log(ratio) ** 2 for ratio in counted)


def _rated(
    times: Sequence[CollectiveTime],
    n_devices: int,
    has_multicast: bool,
    *,
    latency_s: float,
    half_rate_bytes: float,
) -> LinkFit:
    """The rates that belong to this latency and half-rate size, and how far every time is off."""

    def rate(kinds: tuple[str, ...], n: int, n_steps: int, slow_start: float = 1.0) -> float:
        found = [time for time in times if time.kind in kinds and time.n_devices == n]
        found = [time for time in found if time.size_bytes >= LARGE_BYTES] or found
        # where the steps alone would take longer than the whole, the point is a bad one, and its error shows it
        return median(
            (time.moved_bytes + slow_start * half_rate_bytes)
            / max(time.seconds - n_steps * latency_s, time.seconds / 10)
            for time in found
        )

    gather_rate = rate(GATHERS, n_devices, n_devices - 1)
    kind_rates = {"all_gather": gather_rate}
    for kind, n in (("all_to_all", n_devices), ("send", 2)):
        if any(time.kind == kind and time.n_devices == n for time in times):
            kind_rates[kind] = rate((kind,), n, n - 1)
    reduced = sorted({time.n_devices for time in times if time.kind == "all_reduce"})
    reduce_rates = {n: rate(("all_reduce",), n, 2 * (n - 1)) for n in reduced}
    multicast_rate = None
    if has_multicast:
        multicast_rate = rate(("all_reduce",), n_devices, _NVLS_STEPS, _slow_start())
        reduce_rates[n_devices] = gather_rate
    of_kinds, of_groups = tuple(kind_rates.items()), tuple(reduce_rates.items())
    priced = [time for time in times if time.kind not in WITHOUT_FORMULA]
    fit = LinkFit(latency_s, half_rate_bytes, of_groups, of_kinds, multicast_rate, ())
    return replace(fit, errors=tuple((time, predicted_s(time, fit) / time.seconds) for time in priced))


def predicted_s(time: CollectiveTime, fit: LinkFit) -> float:
    """What the formulas of `cost_models/` give for a timed collective."""
    n_host = fit.all_reduce_bytes_per_s[-1][0]
    reduce_rates = dict(fit.all_reduce_bytes_per_s)
    reduce_rate = reduce_rates.get(time.n_devices, reduce_rates[n_host])
    shares = {"send": 1.0}  # a pair is what was timed; the others are those of the whole host
    of_kinds = (
        (kind, rate * shares.get(kind, reduce_rate / reduce_rates[n_host])) for kind, rate in fit.kind_bytes_per_s
    )
    link = Link(fit.latency_s, reduce_rate, fit.half_rate_bytes, tuple(of_kinds))
    if time.kind == "send":
        return link.latency_s + link.transfer_s(time.size_bytes, "send")
    multicast = None
    if fit.multicast_bytes_per_s and time.n_devices == n_host:
        multicast = replace(link, bytes_per_s=fit.multicast_bytes_per_s)
    route = route_in_host(time.n_devices, link, multicast=multicast)
    found = (algorithm(time.size_bytes, route) for algorithm in _algorithms(time.kind))
    return min(seconds for seconds in found if seconds is not None)


@lru_cache(maxsize=8)
def _algorithms(kind: str) -> tuple[Algorithm, ...]:
    return tuple(f for (of_kind, _), f in load_table("autoplan.cost_models", "COLLECTIVES").items() if of_kind == kind)


def _slow_start() -> float:
    from autoplan.cost_models import nvls

    return nvls.SLOW_START_FIT
