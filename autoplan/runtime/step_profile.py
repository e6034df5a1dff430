"""Where the time of one measured step goes, from the events of torch's profiler.

    step_s = compute_s + exposed communication + optimizer_s + idle_s

At every moment one thing counts, the first of these that is under way:

    optimizer      tied weights, gradient norm, clipping, optimizer: from their first kernel to their last
    compute        a kernel that computes, copies or fills
    communication  a kernel of a collective or transfer (of several, the one that began first): it is exposed
    idle           nothing: the device waits for the host

The kernel of a collective also runs while it waits for other ranks, so their lateness counts as communication.

On CPU the operators of the step's threads stand for kernels and gloo's calls for communication, whose group gloo does
not tell; a compiled region has no operators and counts as idle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

STEP_MARK = "training step"
OPTIMIZER_MARK = "gradient norm and optimizer"
UNKNOWN_AXIS = "unknown"

_US_PER_S = 1e6
_OPTIMIZER, _COMPUTE, _IDLE = "optimizer", "compute", "idle"
_RANKING = {_OPTIMIZER: 0, _COMPUTE: 1}
_COMMUNICATION = 2
_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_CPU_OPERATORS = ("aten::", "fsdp::")
# Part of the name of a collective, or of its kernel, in small letters only. All-to-all has no kernel of its own.
_KINDS = {
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "send": "send_recv",
    "recv": "send_recv",
}


class Span(NamedTuple):
    """A stretch of time in which the rank does `what`: "optimizer", "compute" or a kind of communication."""

    start_s: float
    stop_s: float
    what: str
    axis: str = UNKNOWN_AXIS


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where the time of one rank went; see the module docstring.

    Attributes:
        exposed_s: by mesh axis ("dp", "tp", "pp" or "unknown") and kind of communication.
        until_optimizer_s: from the start of the step to its optimizer; the rank the others wait for has the largest.
    """

    step_s: float
    compute_s: float
    exposed_s: Mapping[str, Mapping[str, float]]
    optimizer_s: float
    idle_s: float
    until_optimizer_s: float

    def __str__(self) -> str:
        exposed = ((f"{axis} {kind}", s) for axis, kinds in self.exposed_s.items() for kind, s in kinds.items())
        parts = [("compute", self.compute_s), *exposed, ("optimizer", self.optimizer_s), ("idle", self.idle_s)]
        return f"profiled step {self.step_s:.4f} s: " + ", ".join(f"{name} {part_s:.4f}" for name, part_s in parts)


def break_down(spans: Iterable[Span], *, start_s: float, stop_s: float) -> StepProfile:
    """The profile of a step from `start_s` to `stop_s` in which these spans ran; its parts sum to the step."""
    clipped = sorted(
        Span(max(start_s, span.start_s), min(stop_s, span.stop_s), span.what, span.axis)
        for span in spans
        if span.start_s < stop_s and span.stop_s > start_s
    )
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for what, axis, part_s in _counted(clipped, start_s=start_s, stop_s=stop_s):
        seconds[what, axis] += part_s
    exposed: dict[str, dict[str, float]] = {}
    for (what, axis), part_s in sorted(seconds.items()):
        if what not in (_OPTIMIZER, _COMPUTE, _IDLE):
            exposed.setdefault(axis, {})[what] = part_s
    begins = (span.start_s for span in clipped if span.what == _OPTIMIZER)
    return StepProfile(
        step_s=stop_s - start_s,
        compute_s=seconds[_COMPUTE, ""],
        exposed_s=exposed,
        optimizer_s=seconds[_OPTIMIZER, ""],
        idle_s=seconds[_IDLE, ""],
        until_optimizer_s=min(begins, default=stop_s) - start_s,
    )


def _counted(spans: Sequence[Span], *, start_s: float, stop_s: float) -> Iterator[tuple[str, str, float]]:
    """(what counts, its axis, for how long), moment after moment; `spans` are in order of their start."""
    moments = sorted({start_s, stop_s, *(span.start_s for span in spans), *(span.stop_s for span in spans)})
    coming = iter(spans)
    after = next(coming, None)
    running: list[tuple[int, Span]] = []
    for now_s, then_s in pairwise(moments):
        while after is not None and after.start_s <= now_s:
            heapq.heappush(running, (_RANKING.get(after.what, _COMMUNICATION), after))
            after = next(coming, None)
        while running and running[0][1].stop_s <= now_s:
            heapq.heappop(running)
        first = running[0][1] if running else Span(now_s, then_s, _IDLE)
        is_communication = bool(running) and running[0][0] == _COMMUNICATION
        yield first.what, first.axis if is_communication else "", then_s - now_s


def profile_of_trace(trace: Mapping[str, Any], *, axes: Mapping[str, str]) -> StepProfile:
    """The profile of the step in a trace of torch's profiler (Chrome's format, times in microseconds).

    `axes` has the mesh axis of each process group, by the name of the group. The last step in the trace counts.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    step = _marked(events, STEP_MARK)
    optimizer = _marked(events, OPTIMIZER_MARK)
    on_device = [event for event in events if event.get("cat") in _DEVICE_EVENTS]
    spans = _device_spans(on_device, events, optimizer, axes) if on_device else _host_spans(events, optimizer)
    start_s, stop_s = _times_s(step)
    return break_down(spans, start_s=start_s, stop_s=stop_s)


def _marked(events: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The last stretch of the host that has this mark; the device has one of the same name, of another category."""
    marked = (event for event in events if event["name"] == name and event.get("cat") == "user_annotation")
    return max(marked, key=lambda event: float(event["ts"]))


def _times_s(event: Mapping[str, Any]) -> tuple[float, float]:
    start_us = float(event["ts"])
    return start_us / _US_PER_S, (start_us + float(event["dur"])) / _US_PER_S


def _device_spans(
    on_device: Sequence[Mapping[str, Any]],
    events: Iterable[Mapping[str, Any]],
    optimizer: Mapping[str, Any],
    axes: Mapping[str, str],
) -> Iterator[Span]:
    """What the device does; the optimizer has the kernels that were launched under its mark."""
    launched_s = {
        event["args"]["correlation"]: _times_s(event)[0]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    start_s, stop_s = _times_s(optimizer)
    of_optimizer = []
    for event in on_device:
        times_s, arguments = _times_s(event), event.get("args", {})
        if start_s <= launched_s.get(arguments.get("correlation"), -1.0) <= stop_s:
            of_optimizer.append(times_s)
        kind = _kind(event["name"], arguments)
        if kind is None:
            yield Span(*times_s, _COMPUTE)
        else:
            yield Span(*times_s, kind, axes.get(arguments.get("Process Group Name", ""), _usual_axis(kind)))
    if of_optimizer:
        yield Span(min(s for s, _ in of_optimizer), max(s for _, s in of_optimizer), _OPTIMIZER)


def _host_spans(events: Iterable[Mapping[str, Any]], optimizer: Mapping[str, Any]) -> Iterator[Span]:
    yield Span(*_times_s(optimizer), _OPTIMIZER)
    for event in events:
        name = event["name"]
        if name.startswith("gloo:"):
            kind = _known_kind(name) or name.removeprefix("gloo:")
            yield Span(*_times_s(event), kind, _usual_axis(kind))
        elif event.get("cat") == "cpu_op" and name.startswith(_CPU_OPERATORS):
            yield Span(*_times_s(event), _COMPUTE)


def _kind(name: str, arguments: Mapping[str, Any]) -> str | None:
    """The kind of communication of a kernel; None of one that computes."""
    if not name.lower().startswith("nccl"):
        return None
    return _known_kind(str(arguments.get("Collective name", ""))) or _known_kind(name) or "other"


def _known_kind(name: str) -> str | None:
    letters = "".join(filter(str.isalpha, name.lower()))
    return next((kind for part, kind in _KINDS.items() if part in letters), None)


def _usual_axis(kind: str) -> str:
    """The axis of a call whose process group is not told: only pipelines send and receive."""
    return "pp" if kind == "send_recv" else UNKNOWN_AXIS
