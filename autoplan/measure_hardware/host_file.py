"""The hardware file that a measured host becomes; the schema is that of `autoplan.hardware_profiles`.

    MeasuredHost --profile_text--> my_box.toml          what `autoplan hw validate` accepts and plans use

Peaks and memory bandwidth are the data sheet's where a shipped hardware profile knows the device by its name, else the
best that was measured. What could not be measured is left out, and a comment says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from autoplan import units
from autoplan.hardware import HardwareProfile, LinkTier, hardware_names, load_hardware_profile
from autoplan.hardware.fields import (
    DEVICE_FIELDS,
    HOST_FIELDS,
    HOST_LINK_FIELDS,
    OVERLAP_FIELDS,
    PEAK,
    PEAK_PRECISIONS,
    SHARDING_FIELDS,
    Quantity,
)
from autoplan.hardware.file import link_kind_rate
from autoplan.measure_hardware.host_shares import sharding_host
from autoplan.measure_hardware.link_fit import LinkFit
from autoplan.measure_hardware.measured_host import MeasuredHost, OverlapTimes
from autoplan.measure_hardware.nccl_log import HOST_MEMORY, UNKNOWN_LINK

NETWORK = "ethernet_10g"
NO_KERNEL = "a CPU runs an op itself; its start is in `launch`"


def profile_text(host: MeasuredHost) -> str:
    """The hardware file of a measured host."""
    sheet = data_sheet(host.device_name)
    lines = [*_head(host), *_device(host, sheet), "", *_peaks(host, sheet), "", *_sharding(host), *_host(host)]
    fit = host.fit()
    if fit is not None:
        lines += ["", *_link(host, fit, sheet)]
    return "\n".join(lines) + "\n"


def data_sheet(device_name: str) -> HardwareProfile | None:
    """The first shipped hardware profile with a device of this name."""
    profiles = (load_hardware_profile(name) for name in hardware_names())
    return next((hardware for hardware in profiles if hardware.device.name == device_name), None)


# --- sections --------------------------------------------------------------------------------------------------


def _head(host: MeasuredHost) -> Iterator[str]:
    steering = "".join(f", {name}={value}" for name, value in host.environment)
    talk = f", {host.transport}{steering}" if host.transport else ""
    yield f"description = {_quoted(f'{host.n_devices}x {host.device_name}, measured on {host.date}{talk}')}"
    yield "# Links between hosts were not measured; NAME+NETWORK chooses another network of shared.toml."
    yield f"default_network = {_quoted(NETWORK)}"
    yield ""


def _device(host: MeasuredHost, sheet: HardwareProfile | None) -> Iterator[str]:
    yield "[device]"
    yield f"name = {_quoted(host.device_name)}"
    yield _figure("memory", f"{host.memory_bytes // units.MiB} MiB", host.memory_source)
    elementwise, copy = host.best("elementwise"), host.best("copy")
    assert elementwise is not None and copy is not None
    bandwidth, source = elementwise.per_s, f"x * 2 over {units.format_bytes(elementwise.size)}, {host.versions}"
    if sheet is not None:
        bandwidth, source = sheet.device.memory_bytes_per_s, _source(sheet, "device.memory_bandwidth")
    yield _figure("memory_bandwidth", _rate(bandwidth), source)
    yield _matmul_efficiency(host, sheet)
    copied = f"x * 2 over {units.format_bytes(elementwise.size)}: {_rate(elementwise.per_s)}, copy: {_rate(copy.per_s)}"
    yield _ratio("memory_efficiency", elementwise.per_s / bandwidth, f"{copied}, {host.versions}")
    yield _seconds("launch", host, f"x.add_(1) {{seconds}}, host time in eager mode, {host.versions}")
    if host.best("collective_launch") is not None:
        yield _seconds("collective_launch", host, f"all-reduce of 64 elements {{seconds}}, host time, {host.versions}")
    for key, what in (("pipeline_action", "an action of a pipeline"), ("pipeline_transfer", "a transfer of an action")):
        if host.best(key) is not None:
            yield _seconds(key, host, f"{what} {{seconds}}, host time, blocks of 8 small layers, {host.versions}")
    to_device = host.best("host to device")
    if to_device is not None:
        source = f"{units.format_bytes(to_device.size)} from page-locked memory to all {host.n_devices} devices at once"
        quantity = DEVICE_FIELDS["host_copy_rate"]
        yield _in_range(
            "host_copy_rate", to_device.per_s, quantity, _rate(to_device.per_s), f"{source}, {host.versions}"
        )
    if host.best("kernel") is None:
        yield f"# kernel is left out: {NO_KERNEL}"
    else:
        yield _seconds("kernel", host, f"1000 kernels of 64 elements in one graph, {host.versions}")


def _matmul_efficiency(host: MeasuredHost, sheet: HardwareProfile | None) -> str:
    """Best sustained product against the bf16 (else fp16, else fp32) peak."""
    peaks = _peak_rates(host, sheet)
    timed = [precision for precision in ("bf16", "fp16", "fp32") if host.best(f"product {precision}")]
    precision = next(precision for precision in timed if precision in peaks)
    products = [rate for rate in host.rates if rate.what == f"product {precision}"]
    best = max(products, key=lambda rate: rate.per_s)
    others = ", ".join(f"{rate.size}: {_flops(rate.per_s)}" for rate in products)
    shape = " x ".join([str(best.size)] * 3)
    seconds = f"{best.seconds * best.n_calls:.1f} s back to back on each of {host.n_devices} at once"
    source = f"{shape} in {precision}, {seconds}: {_flops(best.per_s)} of {_flops(peaks[precision])} ({others})"
    return _ratio("matmul_efficiency", best.per_s / peaks[precision], f"{source}, {host.versions}")


def _peak_rates(host: MeasuredHost, sheet: HardwareProfile | None) -> dict[str, float]:
    if sheet is not None:
        return dict(sheet.device.peak_flops_per_s)
    best = {precision: host.best(f"product {precision}") for precision in PEAK_PRECISIONS}
    return {precision: rate.per_s for precision, rate in best.items() if rate is not None}


def _peaks(host: MeasuredHost, sheet: HardwareProfile | None) -> Iterator[str]:
    yield "[device.peak]"
    for precision, peak in _peak_rates(host, sheet).items():
        measured = host.best(f"product {precision}")
        achieved = f"best product {_flops(measured.per_s)} at {measured.size}, {host.versions}" if measured else ""
        if sheet is None:
            yield _in_range(precision, peak, PEAK, _flops(peak), f"no data sheet known; {achieved}")
        else:
            source = _source(sheet, f"device.peak.{precision}")
            yield _figure(precision, _flops(peak), f"{source}; measured: {achieved}" if achieved else source)


def _sharding(host: MeasuredHost) -> Iterator[str]:
    if not host.sharded_passes:
        return
    yield "[device.sharding]"
    n_blocks = ", ".join(str(n) for n in sorted({passes.n_parameters for passes in host.sharded_passes}))
    source = f"fully_shard on {host.n_devices} devices, blocks of {n_blocks} small parameters, {host.versions}"
    found = sharding_host(host.sharded_passes)
    for key, quantity in SHARDING_FIELDS.items():
        seconds = max(getattr(found, f"{key}_s"), quantity.low)
        yield _in_range(key, seconds, quantity, _short_seconds(seconds), source)
    yield ""


def _host(host: MeasuredHost) -> Iterator[str]:
    yield "[host]"
    yield f"n_devices = {host.n_devices}"
    if host.overlap is None or host.overlap_of_shards is None:
        yield "# exposed_when_overlapped is left out: one device has nobody to talk to"
        return
    yield from _overlap("all-reduces", host.overlap, host)
    yield from (f"shards.{line}" for line in _overlap("all-gathers and reduce-scatters", host.overlap_of_shards, host))


def _overlap(what: str, times: OverlapTimes, host: MeasuredHost) -> Iterator[str]:
    for key, found in zip(OVERLAP_FIELDS, (times.compute_longer, times.communication_longer), strict=True):
        alone = f"products of {units.format_seconds(found.compute_s)}"
        alone += f" and {what} of {units.format_seconds(found.communication_s)}"
        together = f"took {units.format_seconds(found.together_s)} together"
        yield _ratio(key, found.exposed, f"{alone} {together}; {host.versions}")


def _link(host: MeasuredHost, fit: LinkFit, sheet: HardwareProfile | None) -> Iterator[str]:
    assert host.link_kind is not None
    over = f"{host.transport}, {host.versions}"
    reduce_rates = dict(fit.all_reduce_bytes_per_s)
    fitted_times = [time for time, _ in fit.errors]
    sizes = [time.size_bytes for time in fitted_times]
    spread = f"{units.format_bytes(min(sizes))} to {units.format_bytes(max(sizes))}"
    worst, ratio = fit.worst
    fitted = (
        f"fit to {len(fitted_times)} times of {', '.join(dict.fromkeys(time.kind for time in fitted_times))} over "
        f"{' and '.join(str(n) for n in sorted({time.n_devices for time in host.times}))} devices, {spread}: "
        f"median error {fit.median_error:.0%}, worst {ratio - 1:+.0%} ({worst.kind} of {worst.n_devices}, "
        f"{units.format_bytes(worst.size_bytes)}); {over}"
    )
    kind, rate, rate_source = _link_rate(host, fit, sheet)
    yield "[host_link]"
    yield f"kind = {_quoted(kind)}"
    if sheet is not None and sheet.n_hosts_joined > 1 and kind.startswith("nvlink"):
        yield f"n_hosts = {sheet.n_hosts_joined}  # as in the profile {sheet.name}: not measured"
    if rate is None:
        yield "# rate_per_device_one_direction is left out: it is that of the kind"
    else:
        yield _figure("rate_per_device_one_direction", _rate(rate), rate_source)
    yield _figure("latency_per_step", _short_seconds(fit.latency_s), fitted)
    yield _figure("half_rate_size", f"{fit.half_rate_bytes / units.KiB:.4g} KiB", "the same fit")
    drift, source = f"{100 * host.drift:.3g} %", f"standard deviation of all times from round to round, {over}"
    yield _in_range("drift", host.drift, HOST_LINK_FIELDS["drift"], drift, source)
    largest = units.format_bytes(max(t.size_bytes for t in host.times if t.n_devices == host.n_devices))
    reduced = f"the all-gather's, for all-reduces did not run as a ring, {over}"
    if fit.multicast_bytes_per_s is None:
        reduced = f"all-reduce of {host.n_devices} devices, up to {largest}, {over}"
    yield _figure("all_reduce_bus_rate", _rate(reduce_rates[host.n_devices]), reduced)
    kinds = {"all_gather": f"all-gather and reduce-scatter of {host.n_devices} devices"}
    kinds |= {"all_to_all": f"all-to-all of {host.n_devices} devices", "send": "transfers between two devices"}
    for name, kind_rate in fit.kind_bytes_per_s:
        yield _figure(f"{name}_bus_rate", _rate(kind_rate), f"{kinds[name]}, up to {largest}, {over}")
    if fit.multicast_bytes_per_s is not None:
        yield _figure("multicast_all_reduce_bus_rate", _rate(fit.multicast_bytes_per_s), f"all-reduce, {over}")
    smaller = {n: rate for n, rate in reduce_rates.items() if n < host.n_devices}
    if smaller:
        yield ""
        yield "[host_link.all_reduce_bus_rate_of_group]"
    for n, group_rate in smaller.items():
        yield _figure(str(n), _rate(group_rate), f"{host.n_devices // n} groups of {n} at once, {over}")
    yield from ("", *_times(host, over))


def _times(host: MeasuredHost, over: str) -> Iterator[str]:
    """Every time that was measured, by kind and group."""
    groups: dict[tuple[str, int], list[str]] = {}
    for time in host.times:
        text = f"{_quoted(_size(time.size_bytes))} = {_quoted(_short_seconds(time.seconds))}"
        groups.setdefault((time.kind, time.n_devices), []).append(text)
    yield "[host_link.times]"
    source = f"means of several rounds, groups of a size side by side, {over}"
    yield f"source = {_quoted(source)}"
    for (kind, n_devices), texts in groups.items():
        yield f"{kind}.{n_devices} = {{ {', '.join(texts)} }}"


def _link_rate(host: MeasuredHost, fit: LinkFit, sheet: HardwareProfile | None) -> tuple[str, float | None, str]:
    """(kind, rate of one device in one direction, its source).

    The data sheet's, where the devices talked over the link it describes; None for that of the kind; where no sheet
    knows the link, the fastest that was measured. A link faster than its kind can be is of no known kind.
    """
    assert host.link_kind is not None
    over = f"{host.transport}, {host.versions}"
    bus_rates = [rate for _, rate in (*fit.all_reduce_bytes_per_s, *fit.kind_bytes_per_s)]
    tier: LinkTier | None = sheet.host_link if sheet is not None else None
    is_of_sheet = tier is not None and tier.name == host.link_kind.rstrip("0123456789")
    if sheet is not None and tier is not None and is_of_sheet and max(bus_rates) <= tier.bytes_per_s:
        return host.link_kind, tier.bytes_per_s, _source(sheet, "host_link.rate_per_device_one_direction")
    known = link_kind_rate(host.link_kind)
    if known is not None and max(bus_rates) <= known:
        return host.link_kind, None, ""
    kind = UNKNOWN_LINK if known is not None else host.link_kind
    if kind == HOST_MEMORY:
        copies = [rate.per_s for rate in host.rates if rate.what in ("host to device", "device to host")]
        return kind, max(*bus_rates, *copies), f"pinned copy between host and all devices at once, {host.versions}"
    return kind, max(bus_rates), f"no data sheet known; the fastest collective, {over}"


# --- figures ---------------------------------------------------------------------------------------------------


def _figure(key: str, value: str, source: str) -> str:
    return f"{key} = {{ value = {_quoted(value)}, source = {_quoted(source)} }}"


def _in_range(key: str, value: float, quantity: Quantity, text: str, source: str) -> str:
    """The figure, or a comment where the loader would not believe it."""
    if quantity.low <= value <= quantity.high:
        return _figure(key, text, source)
    return f"# {key} is left out: {text} is outside what is plausible ({source})"


def _ratio(key: str, value: float, source: str) -> str:
    """A share in percent; one outside the schema's range is written as the nearest in it, and the source says so."""
    quantity = {**DEVICE_FIELDS, **HOST_FIELDS}[key]
    kept = min(max(value, quantity.low), quantity.high)
    note = "" if kept == value else f"measured {value:.1%}; "
    return _figure(key, f"{kept * 100:.1f} %", note + source)


def _seconds(key: str, host: MeasuredHost, source: str) -> str:
    rate = host.best(key)
    assert rate is not None
    text = _short_seconds(rate.seconds)
    return _in_range(key, rate.seconds, DEVICE_FIELDS[key], text, source.format(seconds=text))


def _short_seconds(seconds: float) -> str:
    return f"{_digits(seconds * 1e6)} us"


def _size(n_bytes: int) -> str:
    """Without a rest, in the largest unit that leaves none."""
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "B") if n_bytes % units.BYTE_UNITS[unit] == 0)
    return f"{n_bytes / units.BYTE_UNITS[unit]:.0f} {unit}"


def _rate(bytes_per_s: float) -> str:
    return f"{_digits(bytes_per_s / units.GB)} GB/s"


def _flops(flops_per_s: float) -> str:
    return f"{_digits(flops_per_s / units.TFLOP)} TFLOP/s"


def _digits(value: float) -> str:
    """Four significant digits, without an exponent."""
    text = f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _source(hardware: HardwareProfile, field: str) -> str:
    return dict(hardware.sources)[field]


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False)
