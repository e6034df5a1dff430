"""Times of the parts of a CUDA graph, replayed.

In a graph kernels follow each other faster than in a stream, and never wait for the host: blocks of ResNet-152 take up
to 30 % less, those of BERT-large up to 12 % (H100, torch 2.11). So a round is captured as programs capture their
passes, with events between its parts.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .timing import MIN_ROUNDS, Clock, Round

N_IN_A_ROW = 4  # replays between two looks at the events, so that the device hardly rests


def graph_times(run: Round, clock: Clock) -> dict[str, float | None]:
    """The median of either pass per copy, as fields of a result line; None where a round cannot be captured."""
    found = replayed_s([run.forward, run.backward], clock)
    if not found:
        return {"graph_forward_s": None, "graph_backward_s": None}
    forward_s, backward_s = (statistics.median(seconds) / len(run.calls) for seconds in zip(*found, strict=True))
    return {"graph_forward_s": forward_s, "graph_backward_s": backward_s}


def replayed_s(parts: Sequence[Callable[[], None]], clock: Clock) -> list[tuple[float, ...]]:
    """Seconds of each part in every round that was looked at; empty where no device can capture them."""
    if not clock.is_cuda or _waits(parts):
        return []
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(clock.device)
    events = [_event() for _ in range(len(parts) + 1)]
    hidden = importlib.import_module("runtime.stages.cuda_graph").hidden_capture
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), hidden():
            events[0].record()
            for part, event in zip(parts, events[1:], strict=True):
                part()
                event.record()
    except RuntimeError:  # torch.OutOfMemoryError too
        torch.cuda.set_stream(stream)
        _replace_random_numbers(clock.device)
        return []
    found: list[tuple[float, ...]] = []
    started_s = time.perf_counter()
    while len(found) < MIN_ROUNDS or time.perf_counter() - started_s < clock.seconds:
        for _ in range(N_IN_A_ROW):
            graph.replay()
        clock.wait()
        found.append(tuple(clock.between_s(a, b) for a, b in zip(events, events[1:], strict=False)))
    return found[len(found) // 2 :]


def _replace_random_numbers(device: torch.device) -> None:
    """Torch takes the generator of a capture that failed for captured, and draws no more from it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


def _waits(parts: Sequence[Callable[[], None]]) -> bool:
    """Whether the host waits for the device in them, which a capture does not survive."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in parts:
            part()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False
