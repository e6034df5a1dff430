"""What was measured of one host.

rates, times, overlap --host_file.profile_text--> my_box.toml          the hardware file
`-measured_json-----------> my_box.json          every single time, and what the fit makes of it
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from autoplan.measure_hardware.host_shares import ShardedPasses
from autoplan.measure_hardware.link_fit import CollectiveTime, LinkFit, fit_links


@dataclass(frozen=True, slots=True)
class Rate:
    """One timed op of a device.

    Attributes:
        what: "product bf16", "elementwise", "copy", "host to device", "device to host", "kernel", "launch",
            "collective_launch", "pipeline_action" or "pipeline_transfer".
        size: rows of the square matrices, or bytes of the tensor.
        amount: FLOPs of a product, else bytes moved (read and written, where it is memory of one device).
        seconds: of one call, on the slowest device.
        n_calls: back to back.
    """

    what: str
    size: int
    amount: int
    seconds: float
    n_calls: int

    @property
    def per_s(self) -> float:
        """FLOP/s or bytes/s."""
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class Together:
    """Seconds of products and collectives alone, and when started at once, to the end of the last."""

    compute_s: float
    communication_s: float
    together_s: float

    @property
    def exposed(self) -> float:
        """Share of the shorter of both that overlap does not hide: 0 is free, 1 is one after the other."""
        longer_s = max(self.compute_s, self.communication_s)
        return (self.together_s - longer_s) / min(self.compute_s, self.communication_s)


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Products and collectives at once, where the products take much longer alone, and where the collectives do."""

    compute_longer: Together
    communication_longer: Together


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """Everything measured in one run.

    Attributes:
        versions: of what the figures depend on, and the date: "torch 2.11, driver 580, NCCL 2.28, 2026-11-21".
        memory_source: who says how large the memory is.
        transport: over what the devices really talked, in words; empty for one device.
        link_kind: one of `[link_kind.*]` in shared.toml; None for one device.
        environment: (name, value) of the variables that steer the communication.
        times, sharded_passes: empty for one device.
        drift: how much faster or slower all links are at one time of this run than at another: the standard deviation
            of ln(times of a round / mean of the rounds). 0 for one device.
        overlap, overlap_of_shards: beside all-reduces, and beside all-gathers and reduce-scatters; None for one device.
    """

    device_name: str
    n_devices: int
    memory_bytes: int
    memory_source: str
    versions: str
    date: str
    rates: tuple[Rate, ...]
    transport: str = ""
    link_kind: str | None = None
    has_multicast: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    times: tuple[CollectiveTime, ...] = ()
    drift: float = 0.0
    overlap: OverlapTimes | None = None
    overlap_of_shards: OverlapTimes | None = None
    sharded_passes: tuple[ShardedPasses, ...] = ()

    def best(self, what: str) -> Rate | None:
        """The fastest of the rates of one sort."""
        return max((rate for rate in self.rates if rate.what == what), key=lambda rate: rate.per_s, default=None)

    def fit(self) -> LinkFit | None:
        """The figures of the host's links; None for one device."""
        if not self.times:
            return None
        return fit_links(self.times, n_devices=self.n_devices, has_multicast=self.has_multicast)


def measured_json(host: MeasuredHost) -> str:
    """Every measurement as JSON, in base units, beside what the fit makes of it."""
    values = asdict(host)
    values["rates"] = [{**asdict(rate), "per_s": rate.per_s} for rate in host.rates]
    values["environment"] = dict(host.environment)
    fit = host.fit()
    if fit is not None:
        values["fit"] = {key: value for key, value in asdict(fit).items() if key != "errors"}
        ratios = dict(fit.errors)
        values["times"] = [
            {
                **asdict(time),
                "bus_bytes_per_s": time.moved_bytes / time.seconds,
                "predicted_s": ratios[time] * time.seconds if time in ratios else None,
            }
            for time in host.times
        ]
    for overlap in (values["overlap"], values["overlap_of_shards"]):
        for together in (overlap or {}).values():
            together["exposed"] = Together(**together).exposed
    return json.dumps(values, indent=1) + "\n"
