"""Measures the links of a host: every collective by size and group, and what overlap costs computing and communicating.

Groups of one size run side by side, as the groups of a mesh axis do. Sizes rise until a call gets slow. Slow links are
not equally slow all the time (sockets of one host by 10 % from minute to minute), so all is timed in several rounds,
between which something else is measured; a program pays the mean of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist

from autoplan.hardware.fields import PAIR_KINDS
from autoplan.measure_hardware.device import CALL_S, N_SMALL, Call, head_start, product_call, time_calls
from autoplan.measure_hardware.link_fit import CollectiveTime
from autoplan.measure_hardware.measured_host import OverlapTimes, Rate, Together
from autoplan.runtime.tensor_parallel.collectives import all_reduce
from autoplan.units import GiB, KiB, MiB

GROWTH = 4
N_COLLECTIVES = 200
LARGEST_BYTES = {"cuda": GiB, "cpu": 16 * MiB}
SLOWEST_CALL_S = 0.25
BATCH_S, MOST_CALLS = 0.02, 100
OVERLAP_S, N_OVERLAPS = 0.06, 5
LEAST_OVERLAPPED = 4
LONGER = 3  # times as long the one of compute and communication that is to end last, however the other slows it
# What overlaps: products that fill the device, and a gradient bucket or parameter shard of common size.
OVERLAP_LOADS = {"cuda": ("bf16", 4096, 64 * MiB), "cpu": ("fp32", 256, 4 * MiB)}
# Newer names of torch, and those they replace.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process among those of the host.

    Attributes:
        group_of_size: for each size of group, ascending up to `n_ranks`, the process group of torch that this rank is
            in; its ranks are consecutive.
    """

    rank: int
    n_ranks: int
    device: torch.device
    group_of_size: tuple[tuple[int, Any], ...]

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks; every rank must ask."""
        if self.n_ranks == 1:
            return seconds
        value = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


def collective_launch(ranks: Ranks) -> Rate:
    """Host time to start one collective as programs do it, with its autograd function (on a CPU, all of its time)."""
    x = torch.zeros(N_SMALL, device=ranks.device, requires_grad=True)
    for _ in range(20):
        all_reduce(x, dist.group.WORLD)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    start_s = time.perf_counter()
    for _ in range(N_COLLECTIVES):
        all_reduce(x, dist.group.WORLD)
    seconds = ranks.slowest((time.perf_counter() - start_s) / N_COLLECTIVES)
    return Rate("collective_launch", N_SMALL, 8 * N_SMALL, seconds, N_COLLECTIVES)


# --- one collective at a time ----------------------------------------------------------------------------------


def link_times(ranks: Ranks) -> tuple[CollectiveTime, ...]:
    """One round: every collective, in every group size; every process must call it at the same time."""
    times = []
    for n_devices, group in ranks.group_of_size:
        for kind in (kind for kind in COLLECTIVE_CALLS if n_devices == 2 or kind not in PAIR_KINDS):
            times += _sweep(kind, n_devices, group, ranks)
    return tuple(times)


def _sweep(kind: str, n_devices: int, group: Any, ranks: Ranks) -> list[CollectiveTime]:
    """One collective by size; the next size is left out when it would take longer than `SLOWEST_CALL_S`."""
    times: list[CollectiveTime] = []
    size_bytes = 64 * KiB
    while size_bytes <= LARGEST_BYTES[ranks.device.type] and not (
        times and times[-1].seconds * GROWTH > SLOWEST_CALL_S
    ):
        n_elements = size_bytes // 4 // n_devices**2 * n_devices**2
        call = COLLECTIVE_CALLS[kind](n_elements, n_devices, group, ranks.device)
        seconds, n_calls = time_collective(call, ranks)
        times.append(CollectiveTime(kind, n_devices, n_elements * 4, seconds, n_calls))
        size_bytes *= GROWTH
    return times


def time_collective(call: Call, ranks: Ranks) -> tuple[float, int]:
    """(seconds of one call on the slowest rank, calls), after a call that shows how many make a batch."""
    once_s = ranks.slowest(time_calls(call, n_calls=1, device=ranks.device))
    n_calls = min(max(1, round(BATCH_S / once_s)), MOST_CALLS)
    return ranks.slowest(time_calls(call, n_calls=n_calls, device=ranks.device)), n_calls


def mean_of_rounds(rounds: Sequence[Sequence[CollectiveTime]]) -> tuple[tuple[CollectiveTime, ...], float]:
    """(mean over the rounds of every collective that is in all of them, `MeasuredHost.drift`)."""
    found: dict[tuple[str, int, int], list[CollectiveTime]] = {}
    for timed in (timed for own in rounds for timed in own):
        found.setdefault((timed.kind, timed.n_devices, timed.size_bytes), []).append(timed)
    means = {
        key: replace(of_key[0], seconds=fmean(t.seconds for t in of_key), n_calls=sum(t.n_calls for t in of_key))
        for key, of_key in found.items()
        if len(of_key) == len(rounds)
    }
    paces = [
        fmean(math.log(of_key[place].seconds / means[key].seconds) for key, of_key in found.items() if key in means)
        for place in range(len(rounds))
    ]
    return tuple(means.values()), stdev(paces) if len(paces) > 1 else 0.0


def _average() -> Any:
    """Keeps a tensor of ones as it is, over and over; gloo has no average."""
    return dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.MAX


def _all_reduce(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    full, op = torch.ones(n_elements, device=device), _average()
    return lambda: dist.all_reduce(full, op=op, group=group)


def _all_gather(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    full = torch.ones(n_elements, device=device)
    part = torch.ones(n_elements // n_devices, device=device)
    return lambda: _all_gather_tensor(full, part, group=group)


def _reduce_scatter(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    full, op = torch.ones(n_elements, device=device), _average()
    part = torch.ones(n_elements // n_devices, device=device)
    return lambda: _reduce_scatter_tensor(part, full, op=op, group=group)


def _all_to_all(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    source, target = (torch.ones(n_elements // n_devices, device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(target, source, group=group)


def _broadcast(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    full = torch.ones(n_elements, device=device)
    return lambda: dist.broadcast(full, group=group, group_src=0)


def _send(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    """From the first rank of the pair to the second."""
    tensor = torch.ones(n_elements, device=device)
    if dist.get_rank(group) == 0:
        return lambda: dist.send(tensor, group=group, group_dst=1)
    return lambda: dist.recv(tensor, group=group, group_src=0)


def _sendrecv(n_elements: int, n_devices: int, group: Any, device: torch.device) -> Call:
    """Both ranks of the pair to the other one, as many elements each."""
    sent, received = (torch.ones(n_elements, device=device) for _ in range(2))
    other = dist.get_process_group_ranks(group)[1 - dist.get_rank(group)]

    def call() -> None:
        ops = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, received, other, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call


COLLECTIVE_CALLS: dict[str, Callable[[int, int, Any, torch.device], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
    "sendrecv": _sendrecv,
}


# --- overlap ---------------------------------------------------------------------------------------------------


def overlap_times(ranks: Ranks) -> tuple[OverlapTimes, OverlapTimes]:
    """(beside all-reduces, beside all-gathers and reduce-scatters in turns) over the whole host."""
    n_elements = OVERLAP_LOADS[ranks.device.type][2] // 4 // ranks.n_ranks * ranks.n_ranks
    full = torch.ones(n_elements, device=ranks.device)
    part = torch.ones(n_elements // ranks.n_ranks, device=ranks.device)
    reduce = partial(dist.all_reduce, full, op=_average())
    gather, scatter = (
        partial(_all_gather_tensor, full, part),
        partial(_reduce_scatter_tensor, part, full, op=_average()),
    )
    return _overlap_with((reduce,), ranks), _overlap_with((gather, scatter), ranks)


def _overlap_with(calls: tuple[Call, ...], ranks: Ranks) -> OverlapTimes:
    """Products and these calls in turns, alone and together: `OVERLAP_S` of one, `LONGER` times that of the other."""
    precision, size, _ = OVERLAP_LOADS[ranks.device.type]
    product = product_call(precision, size, ranks.device)
    run = _run_on_cpu if ranks.device.type == "cpu" else _run_on_cuda

    def slowest(n_products: int, n_calls: int) -> float:
        return ranks.slowest(run(product, n_products, [calls[i % len(calls)] for i in range(n_calls)]))

    def together(n_products: int, n_calls: int) -> Together:
        """The median of some, each with both alone beside it: a device gets slower and faster from second to second."""
        found = [
            Together(slowest(n_products, 0), slowest(0, n_calls), slowest(n_products, n_calls))
            for _ in range(N_OVERLAPS)
        ]
        return sorted(found, key=lambda each: each.exposed)[N_OVERLAPS // 2]

    slowest(3, 2)  # warm
    call_s = slowest(0, LEAST_OVERLAPPED) / LEAST_OVERLAPPED
    n_calls = max(LEAST_OVERLAPPED, round(OVERLAP_S / call_s))
    n_products = max(LEAST_OVERLAPPED, round(n_calls * call_s / (slowest(20, 0) / 20)))
    slowest(10 * n_products, 0)  # hot
    return OverlapTimes(together(LONGER * n_products, n_calls), together(n_products, LONGER * n_calls))


def _run_on_cuda(product: Call, n_products: int, calls: Sequence[Call]) -> float:
    """Seconds from a common start to the end of both, each on a stream of its own.

    Both are enqueued in turns: a queue that is full keeps the host waiting, and the other would run empty.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    head_start(min(n_products + len(calls) + 2, 1000) * CALL_S)
    dist.all_reduce(torch.ones(1, device="cuda"))  # the ranks meet
    start.record()
    side.wait_event(start)
    waiting = iter(calls)
    for is_product in _in_turns(n_products, len(calls)):
        if is_product:
            product()
            continue
        with torch.cuda.stream(side):
            next(waiting)()
    main.wait_stream(side)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3


def _in_turns(n_products: int, n_calls: int) -> list[bool]:
    """True for each product and False for each call, evenly mixed."""
    places = [((i + 1) / n_products, True) for i in range(n_products)]
    places += [((i + 1) / n_calls, False) for i in range(n_calls)]
    return [is_product for _, is_product in sorted(places)]


def _run_on_cpu(product: Call, n_products: int, calls: Sequence[Callable[..., Any]]) -> float:
    """Seconds from a common start to the end of both; the calls run on gloo's own threads."""
    dist.barrier()
    start_s = time.perf_counter()
    works = [call(async_op=True) for call in calls]
    for _ in range(n_products):
        product()
    for work in works:
        work.wait()
    return time.perf_counter() - start_s
