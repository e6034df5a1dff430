"""Device time of each op of a call, from a few profiled passes.

    forward_s   of the ops that the module calls, each with all that it calls in turn
    backward_s  of the nodes of autograd that these ops have made (by their sequence numbers), summed gradients included

A sum over ops is less than the time of the call: what the device does between kernels is no op's. On CPU the operators
themselves are timed.
"""

import bisect
import itertools
import os
from collections import defaultdict
from typing import Any

from torch.profiler import ProfilerActivity, profile

from .timing import Call, Clock, Pair

N_PASSES = 3
ENGINE_MARK = "autograd::engine::evaluate_function: "
S_PER_US = 1e-6
Key = tuple[str, tuple[tuple[int, ...], ...]]


def op_times(call: Call, clock: Clock) -> list[dict[str, Any]]:
    """Per op and shapes of its tensors: how many calls there are, and their time in one pass; the longest first."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it tells of every start and stop otherwise
    call.backward(call.forward())
    clock.wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.is_cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(N_PASSES):
            call.backward(call.forward())
        clock.wait()
    events = [
        event for event in profiler.events() or () if event.device_type.name == "CPU" and event.cpu_parent is None
    ]
    return _by_op(sorted(events, key=lambda event: event.time_range.start), is_cuda=clock.is_cuda)


def kernels_s(call: Call, clock: Clock) -> Pair:
    """Device time of the kernels of a forward and of a backward pass."""
    rows = op_times(call, clock)
    return sum(row["forward_s"] for row in rows), sum(row["backward_s"] for row in rows)


def _by_op(events: list[Any], *, is_cuda: bool) -> list[dict[str, Any]]:
    called = [event for event in events if not event.name.startswith(ENGINE_MARK)]
    numbers = list(itertools.accumulate((event.sequence_nr for event in called), max))
    seconds: defaultdict[Key, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in called:
        own = seconds[_key(event)]
        own[0] += 1
        own[1] += _seconds(event, is_cuda)
    for event in events:
        if event.name.startswith(ENGINE_MARK):
            place = bisect.bisect_right(numbers, event.sequence_nr) - 1
            is_of_op = event.sequence_nr >= 0 and place >= 0
            seconds[_key(called[place]) if is_of_op else (_node_name(event), ())][2] += _seconds(event, is_cuda)
    rows = [
        {
            "op": name,
            "shapes": [list(shape) for shape in shapes],
            "n_calls": n_calls / N_PASSES,
            "forward_s": forward_s / N_PASSES,
            "backward_s": backward_s / N_PASSES,
        }
        for (name, shapes), (n_calls, forward_s, backward_s) in seconds.items()
        if forward_s + backward_s > 0
    ]
    return sorted(rows, key=lambda row: -row["forward_s"] - row["backward_s"])


def _key(event: Any) -> Key:
    return event.name, tuple(tuple(shape) for shape in event.input_shapes or () if shape)


def _node_name(event: Any) -> str:
    return str(event.name.removeprefix(ENGINE_MARK))


def _seconds(event: Any, is_cuda: bool) -> float:
    return S_PER_US * float(event.device_time_total if is_cuda else event.cpu_time_total)
