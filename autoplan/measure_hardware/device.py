"""Measures one device: matrix products, elementwise ops and copies at a sustained rate, and what starting an op costs.

Every process measures its own device at the same time as all others, because devices of a host share power, cooling
and memory; the slowest of them counts, because a synchronous job runs at its pace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoplan.measure_hardware.measured_host import Rate
from autoplan.runtime.float32_products import set_float32_products
from autoplan.units import GiB, MiB

Slowest = Callable[[float], float]
Call = Callable[[], object]

SUSTAINED_S = 0.5
# Products draw more power than a GPU may have for long. On an H100 they ran at 705 TFLOP/s for 0.75 s, then between 603
# and 700 in waves of about a second, 666 on average (benchmarks/results/settling_h100_2026-11-26.jsonl).
SETTLING_S, SUSTAINED_PRODUCT_S = 3.0, 1.5
N_LAUNCHES = 2000
N_GRAPH_KERNELS = 1000
N_SMALL = 64
# One enqueued call takes the host less than this; `_sleep` counts cycles of a clock that no device exceeds by much.
CALL_S, SLEEP_CLOCK_HZ = 1.5e-4, 2e9
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Load:
    """How much a kind of device is given to do."""

    product_sizes: tuple[tuple[str, tuple[int, ...]], ...]
    elementwise_bytes: int
    copy_bytes: int


LOADS = {
    "cuda": Load(
        product_sizes=(
            ("bf16", (2048, 4096, 8192, 16384)),
            ("fp16", (4096, 8192)),
            ("tf32", (4096, 8192)),
            ("fp32", (4096,)),
        ),
        elementwise_bytes=2 * GiB,
        copy_bytes=256 * MiB,
    ),
    "cpu": Load(
        product_sizes=(("fp32", (256, 512)), ("bf16", (256,))), elementwise_bytes=64 * MiB, copy_bytes=64 * MiB
    ),
}


def time_calls(call: Call, *, n_calls: int, device: torch.device) -> float:
    """Seconds of one of `n_calls` calls back to back, after one that is not timed (in which ranks may meet).

    A CUDA device is kept waiting until the host has enqueued the calls, so that the host's own time does not count.
    """
    if device.type == "cpu":
        call()
        start_s = time.perf_counter()
        for _ in range(n_calls):
            call()
        return (time.perf_counter() - start_s) / n_calls
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    head_start(min(n_calls + 1, 1000) * CALL_S)
    call()
    start.record()
    for _ in range(n_calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / n_calls


def head_start(seconds: float) -> None:
    """Keep the CUDA device waiting for about this long."""
    torch.cuda._sleep(round(seconds * SLEEP_CLOCK_HZ))  # type: ignore[no-untyped-call]


def sustained(call: Call, *, device: torch.device, slowest: Slowest, least_s: float = SUSTAINED_S) -> tuple[float, int]:
    """(seconds of one call, calls) when repeated back to back for `least_s` or longer."""
    n_calls, seconds = 3, slowest(time_calls(call, n_calls=3, device=device))
    while n_calls * seconds < least_s:
        n_calls = math.ceil(1.1 * least_s / seconds)
        seconds = slowest(time_calls(call, n_calls=n_calls, device=device))
    return seconds, n_calls


def device_rates(device: torch.device, slowest: Slowest) -> tuple[Rate, ...]:
    """All rates of this process's device; every process must call it at the same time."""
    load = LOADS[device.type]
    if device.type == "cuda":  # clocks settle
        sustained(product_call("fp16", 4096, device), device=device, slowest=slowest, least_s=SETTLING_S)
    products = [
        _product(precision, size, device, slowest)
        for precision, sizes in load.product_sizes
        if _has(precision, device)
        for size in sizes
    ]
    memory = [_elementwise(load.elementwise_bytes, device, slowest), _copy(load.elementwise_bytes, device, slowest)]
    if device.type == "cpu":
        return (*products, *memory, _launch(device, slowest))
    transfers = [_transfer(what, load.copy_bytes, device, slowest) for what in ("host to device", "device to host")]
    torch.cuda.empty_cache()
    return (*products, *memory, *transfers, _kernel(device, slowest), _launch(device, slowest))


def _has(precision: str, device: torch.device) -> bool:
    """Whether the device multiplies in this precision by itself; older GPUs only imitate the newer ones."""
    return device.type == "cpu" or precision in ("fp16", "fp32") or torch.cuda.get_device_capability(device)[0] >= 8


def product_call(precision: str, size: int, device: torch.device) -> Call:
    """A square matrix product of random numbers (constant ones need less power, and so run faster)."""
    left, right, result = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(3))
    return lambda: torch.mm(left, right, out=result)


def _product(precision: str, size: int, device: torch.device, slowest: Slowest) -> Rate:
    """A square matrix product at a sustained rate."""
    set_float32_products(precision)
    least_s = SUSTAINED_PRODUCT_S if device.type == "cuda" else SUSTAINED_S
    seconds, n_calls = sustained(product_call(precision, size, device), device=device, slowest=slowest, least_s=least_s)
    set_float32_products("fp32")
    return Rate(f"product {precision}", size, 2 * size**3, seconds, n_calls)


def _elementwise(n_bytes: int, device: torch.device, slowest: Slowest) -> Rate:
    x = torch.ones(n_bytes // 4, device=device)
    result = torch.empty_like(x)
    seconds, n_calls = sustained(lambda: torch.mul(x, 2, out=result), device=device, slowest=slowest)
    return Rate("elementwise", n_bytes, 2 * n_bytes, seconds, n_calls)


def _copy(n_bytes: int, device: torch.device, slowest: Slowest) -> Rate:
    x = torch.ones(n_bytes // 4, device=device)
    result = torch.empty_like(x)
    seconds, n_calls = sustained(lambda: result.copy_(x), device=device, slowest=slowest)
    return Rate("copy", n_bytes, 2 * n_bytes, seconds, n_calls)


def _transfer(what: str, n_bytes: int, device: torch.device, slowest: Slowest) -> Rate:
    """Between pinned memory of the host and the device, all devices at once."""
    on_host = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    source, target = (on_host, on_device) if what == "host to device" else (on_device, on_host)
    seconds, n_calls = sustained(lambda: target.copy_(source, non_blocking=True), device=device, slowest=slowest)
    return Rate(what, n_bytes, n_bytes, seconds, n_calls)


def _kernel(device: torch.device, slowest: Slowest) -> Rate:
    """The shortest kernel: many in one graph, so that the host launches once."""
    x = torch.zeros(N_SMALL, device=device)
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks for events
        for _ in range(N_GRAPH_KERNELS):
            x.add_(1)
    seconds = slowest(time_calls(graph.replay, n_calls=10, device=device)) / N_GRAPH_KERNELS
    return Rate("kernel", N_SMALL, 8 * N_SMALL, seconds, 10 * N_GRAPH_KERNELS)


def _launch(device: torch.device, slowest: Slowest) -> Rate:
    """Host time of one small op in eager mode (on a CPU, all of its time)."""
    x = torch.zeros(N_SMALL, device=device)
    for _ in range(100):
        x.add_(1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(N_LAUNCHES):
        x.add_(1)
    seconds = slowest((time.perf_counter() - start_s) / N_LAUNCHES)
    return Rate("launch", N_SMALL, 8 * N_SMALL, seconds, N_LAUNCHES)
