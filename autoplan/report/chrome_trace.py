"""The predicted step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per pipeline rank, or per group of hosts where these share a batch unequally; one thread per stream, one
complete event ("X") per box, one counter ("C") for memory.
The format counts in microseconds.

Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.parallel_plan import TimelineEvent
from autoplan.plan_words import PIPELINE, Lanes
from autoplan.units import SECOND_UNITS

US_PER_S = 1 / SECOND_UNITS["us"]


def timeline_to_chrome_json(
    timeline: tuple[TimelineEvent, ...],
    *,
    memory: tuple[tuple[tuple[float, int], ...], ...] = (),
    lanes: Lanes = PIPELINE,
) -> str:
    """The trace as JSON text; `memory` is what `simulator.simulate.memory_over_time` returns."""
    streams = tuple(dict.fromkeys(event.stream for event in timeline))
    ranks = sorted({event.rank for event in timeline} | set(range(len(memory))))
    events = [
        *(_name("process_name", lanes.of(rank), pid=rank) for rank in ranks),
        *(
            _name("thread_name", stream, pid=rank, tid=streams.index(stream))
            for rank, stream in sorted({(event.rank, event.stream) for event in timeline})
        ),
        *(_box(event, tid=streams.index(event.stream)) for event in timeline),
        *(
            _counter(rank, time_s=time_s, allocated_bytes=allocated_bytes)
            for rank, curve in enumerate(memory)
            for time_s, allocated_bytes in curve
        ),
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _name(what: str, name: str, *, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _box(event: TimelineEvent, *, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.stream,
        "pid": event.rank,
        "tid": tid,
        "ts": event.start_s * US_PER_S,
        "dur": (event.stop_s - event.start_s) * US_PER_S,
        "args": {"stage": event.stage},
    }


def _counter(rank: int, *, time_s: float, allocated_bytes: int) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": "allocated_bytes",
        "pid": rank,
        "tid": 0,
        "ts": time_s * US_PER_S,
        "args": {"allocated_bytes": allocated_bytes},
    }
