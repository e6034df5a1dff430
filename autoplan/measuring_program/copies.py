"""Times of the copies that stood in for collectives; they are taken off, since the hardware profile prices these."""

import statistics
import time
from typing import Any

import torch

from .replays import replayed_s
from .timing import HEAD_START, MIN_ROUNDS, RESOLUTION_S, Clock


def copies_s(seen: list[Any], clock: Clock) -> float:
    """Of one pass, in a stream."""
    if not seen:
        return 0.0
    copies = _Copies(seen, clock)
    found, ahead_s = [], 0.0
    for _ in range(2 + MIN_ROUNDS):  # the first warms up, the second tells how far the host must be ahead
        clock.wait()
        clock.hold(ahead_s)
        started_s, start = time.perf_counter(), clock.mark()
        copies.run()
        found.append((start, clock.mark()))
        ahead_s = HEAD_START * (time.perf_counter() - started_s)
    clock.wait()
    return statistics.median(clock.between_s(a, b) for a, b in found[2:])


def without_copies(whole_s: float, copied_s: float) -> float | None:
    """The time of a pass less that of its copies; None where these took longer than all of it, so one is wrong."""
    return max(0.0, whole_s - copied_s) if copied_s < whole_s + RESOLUTION_S else None


def without_graph_copies(whole_s: float | None, seen: list[Any], clock: Clock) -> float | None:
    """Likewise of a pass in a CUDA graph, whose copies are timed in one; None where one of both is not known."""
    if whole_s is None or not seen:
        return whole_s
    found = replayed_s([_Copies(seen, clock).run], clock)
    return without_copies(whole_s, statistics.median(seconds for (seconds,) in found)) if found else None


class _Copies:
    """Tensors like those that were seen: (shape of the target, that of the source, type)."""

    def __init__(self, seen: list[Any], clock: Clock) -> None:
        self._pairs = []
        for target, source, dtype in seen:
            whole = torch.zeros(target, dtype=dtype, device=clock.device)
            self._pairs.append((whole, torch.zeros(source, dtype=dtype, device=clock.device)))

    def run(self) -> None:
        for whole, part in self._pairs:
            whole.copy_(part)
