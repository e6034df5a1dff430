"""Times of a call on one device.

    round = forward of n copies, then backward of n copies; each copy has weights of its own, as layers have
    forward_s = median over rounds of (time between CUDA events / n), while the device is kept busy

Before that, rounds run for as long (`Clock.seconds`), so that clocks settle under load. Where the device may be waiting
for the host, it is made to wait until the host is ahead. If it then takes less, that is its own time, and the host's is
what they took together; so the longer of the two is always what was seen under load. About 1,000 launches fit ahead: of
a call with more, such as 36 blocks of convolutions, the times of its kernels are added up instead.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .values import random_strided

MIN_ROUNDS, MAX_ROUNDS = 7, 400
RESOLUTION_S = 2e-5
# An interval shows the host where the device alone takes less than this share of it, and less than the host alone (a
# device that was let rest runs faster for a while); below the other share it cannot.
HOST_BOUND, MAYBE_HOST_BOUND = 0.9, 0.4
SLEEP_CYCLES_PER_S = 2e9
HEAD_START = 2.0  # how long the device is made to wait, of what the host takes
HELD_UP = 0.75  # of that wait, which clocks above `SLEEP_CYCLES_PER_S` shorten
N_LAUNCHES = 1000
Pair = tuple[float, float]  # forward and backward
Loss = Callable[[Any], torch.Tensor]  # of the outputs
Kernels = Callable[["Call"], Pair]  # adds up the device time of the kernels of both passes


class Clock:
    """Times rounds on one device, for `seconds` after as long a time to settle."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.is_cuda, self.seconds = device, device.type == "cuda", seconds

    def launch_s(self) -> float:
        """How fast this host is now: its time of one small op in eager mode (on a CPU, all of its time)."""
        x = torch.zeros(64, device=self.device)
        for _ in range(N_LAUNCHES // 10):
            x.add_(1)
        self.wait()
        start_s = time.perf_counter()
        for _ in range(N_LAUNCHES):
            x.add_(1)
        return (time.perf_counter() - start_s) / N_LAUNCHES

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """The moment at which the device gets here."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def hold(self, seconds: float) -> None:
        """Make the device wait, so that the host gets ahead of it."""
        if self.is_cuda and seconds:
            torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds between two marks."""
        return float(first.elapsed_time(second)) / 1e3 if self.is_cuda else float(second - first)

    def rounds(self, run: "Round", count: int, *, ahead_s: float = 0.0) -> list[Pair]:
        """The device time of `count` rounds in a row; with `ahead_s` the device waits that long before each."""
        marks = []
        for _ in range(count):
            self.hold(ahead_s)
            start = self.mark()
            run.forward()
            middle = self.mark()
            run.backward()
            marks.append((start, middle, self.mark()))
        self.wait()
        return [(self.between_s(a, b), self.between_s(b, c)) for a, b, c in marks]


class Round:
    """Forward passes of some calls, then their backward passes in the opposite order."""

    def __init__(self, calls: "list[Call]") -> None:
        self.calls = calls
        self._results: list[list[torch.Tensor]] = []

    def forward(self) -> None:
        self._results = [call.forward() for call in self.calls]

    def backward(self) -> None:
        for call in reversed(self.calls):
            call.backward(self._results.pop())

    def shortest(self) -> "Round":
        """The least of it that can be run by itself."""
        return Round(self.calls[:1])


class Call:
    """One copy of a module with its weights, and what it is called with.

    Attributes:
        inputs: the tensors among its arguments, each once.
        kept_once: those that exist once for all blocks, such as rotary tables.
        gradient_strides: of the gradients of the results; None where they lie in memory as the results.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Sequence[Any],
        named: dict[str, Any],
        *,
        loss: Loss | None = None,
        kept_once: Sequence[torch.Tensor] = (),
        gradient_strides: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.module, self.kept_once = module, kept_once
        self.inputs = list({id(t): t for t in (*tensors_of(arguments), *tensors_of(named))}.values())
        self._arguments, self._named, self._loss = tuple(arguments), named, loss
        self._gradients: list[torch.Tensor] | None = None
        self.gradient_strides = gradient_strides
        self._leaves = [t for t in (*module.parameters(), *self.inputs) if t.requires_grad]

    def forward(self) -> list[torch.Tensor]:
        """The results that have a gradient."""
        outputs = self.module(*self._arguments, **self._named)
        if self._loss is not None:
            outputs = self._loss(outputs)
        return [output for output in tensors_of(outputs) if output.requires_grad and not output.is_leaf]

    def backward(self, results: list[torch.Tensor]) -> None:
        """Gradients of weights and inputs, from random gradients of the results."""
        for leaf in self._leaves:
            leaf.grad = None
        if not results:
            return
        if self._gradients is None:
            self._gradients = self._random_gradients(results)
        torch.autograd.backward(results, self._gradients)

    def _random_gradients(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        strides = self.gradient_strides
        if strides is None or [len(one) for one in strides] != [result.dim() for result in results]:
            strides = [result.stride() for result in results]
        return [
            random_strided(result.shape, one, like=result) if result.dim() else torch.ones_like(result)
            for result, one in zip(results, strides, strict=True)
        ]

    def gradient_bytes(self, *, of_weights: bool) -> int:
        """Bytes of the gradients of weights, or of those of the results."""
        if not of_weights:
            return sum(map(n_bytes, self._gradients or ()))
        return sum(n_bytes(p.grad) for p in self.module.parameters() if p.grad is not None)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def n_bytes(tensor: torch.Tensor) -> int:
    """The size of its elements."""
    return tensor.numel() * tensor.element_size()


def round_times(run: Round, clock: Clock, kernels_s: Kernels | None = None) -> dict[str, float]:
    """Medians and spreads of device and host time per copy; `kernels_s` is for rounds that may be long."""
    n_copies = len(run.calls) or 1
    clock.rounds(run, 2)
    started_s, n_settling = time.perf_counter(), 0
    while time.perf_counter() - started_s < clock.seconds or n_settling < 3:
        clock.rounds(run, 3)
        n_settling += 3
    round_s = (time.perf_counter() - started_s) / n_settling
    found = clock.rounds(run, min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(clock.seconds / round_s))))
    host_s = _host_s(run, clock)
    times: dict[str, float] = {}
    alone, n_alone = _ahead(run, clock, kernels_s, host_s=host_s, loaded=found) if clock.is_cuda else ([], 1)
    for way, name in enumerate(("forward", "backward")):
        loaded_s = _median(found, way) / n_copies
        alone_s = _median(alone, way) / n_alone if alone else loaded_s
        waits = alone_s < min(HOST_BOUND * loaded_s, host_s[way] / n_copies)
        times[f"{name}_s"] = alone_s if waits else loaded_s
        times[f"{name}_spread"] = _spread(alone if waits else found, way)
        times[f"host_{name}_s"] = loaded_s if waits else min(host_s[way] / n_copies, loaded_s)
    return {**times, "n_rounds": len(found)}


def _ahead(
    run: Round, clock: Clock, kernels_s: Kernels | None, *, host_s: Pair, loaded: list[Pair]
) -> tuple[list[Pair], int]:
    """Device times while the host is ahead, where it may be what the device waits for; and of how many copies."""
    loaded_s = _median(loaded, 0), _median(loaded, 1)
    if not any(host > MAYBE_HOST_BOUND * device for host, device in zip(host_s, loaded_s, strict=True)):
        return [], 1
    short = run.shortest()
    n_short = len(short.calls) or 1
    share = n_short / (len(run.calls) or 1)
    ahead_s = HEAD_START * share * max(sum(host_s), sum(loaded_s))
    if kernels_s is not None and is_held_up(short, clock, ahead_s=ahead_s):
        added_up = [kernels_s(short.calls[0]) for _ in range(MIN_ROUNDS)]
        return (added_up if all(map(all, added_up)) else []), 1
    return clock.rounds(short, 2 * MIN_ROUNDS, ahead_s=ahead_s), n_short


def is_held_up(run: Round, clock: Clock, *, ahead_s: float) -> bool:
    """Whether the host cannot hand over a round while the device waits for so long, since no more fits in its queue.

    Else it takes about `ahead_s / HEAD_START`. It may be late for another reason once.
    """
    found_s = []
    for _ in range(2):
        clock.wait()
        clock.hold(ahead_s)
        start_s = time.perf_counter()
        run.forward()
        run.backward()
        found_s.append(time.perf_counter() - start_s)
    clock.wait()
    return min(found_s) > HELD_UP * ahead_s


def _host_s(run: Round, clock: Clock) -> Pair:
    """How long the host takes to hand one round to the device; nothing where they are one."""
    if not clock.is_cuda:
        return 0.0, 0.0
    found = []
    for _ in range(MIN_ROUNDS):
        clock.wait()
        start_s = time.perf_counter()
        run.forward()
        middle_s = time.perf_counter()
        run.backward()
        found.append((middle_s - start_s, time.perf_counter() - middle_s))
    clock.wait()
    return _median(found, 0), _median(found, 1)


def _median(rounds: list[Pair], way: int) -> float:
    return statistics.median(pair[way] for pair in rounds)


def _spread(rounds: list[Pair], way: int) -> float:
    """The range of the middle four fifths, over the median; 0 for times that a clock cannot resolve."""
    values = sorted(pair[way] for pair in rounds)
    cut = len(values) // 10 + 1
    middle, median_s = values[cut:-cut] or values, statistics.median(values)
    return (middle[-1] - middle[0]) / median_s if median_s > RESOLUTION_S else 0.0
