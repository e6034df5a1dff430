"""The Perfetto trace: what a reader of the file sees."""

import json

from autoplan.parallel_plan import TimelineEvent
from autoplan.report.chrome_trace import timeline_to_chrome_json

TIMELINE = (
    TimelineEvent(rank=0, stage=0, stream="compute", name="0F0", start_s=0.0, stop_s=0.5),
    TimelineEvent(rank=0, stage=0, stream="send activations", name="0F0", start_s=0.5, stop_s=0.75),
    TimelineEvent(rank=1, stage=1, stream="compute", name="1F0", start_s=0.75, stop_s=1.25),
)


def events_of(text, phase):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_boxes_are_in_microseconds_on_the_row_of_their_rank_and_stream():
    boxes = events_of(timeline_to_chrome_json(TIMELINE), "X")
    assert [(b["name"], b["pid"], b["tid"], b["ts"], b["dur"]) for b in boxes] == [
        ("0F0", 0, 0, 0.0, 500_000.0),
        ("0F0", 0, 1, 500_000.0, 250_000.0),
        ("1F0", 1, 0, 750_000.0, 500_000.0),
    ]
    assert boxes[2]["args"] == {"stage": 1}


def test_ranks_and_streams_have_names():
    names = events_of(timeline_to_chrome_json(TIMELINE), "M")
    assert [(n["name"], n["pid"], n["tid"], n["args"]["name"]) for n in names] == [
        ("process_name", 0, 0, "pipeline rank 0"),
        ("process_name", 1, 0, "pipeline rank 1"),
        ("thread_name", 0, 0, "compute"),
        ("thread_name", 0, 1, "send activations"),
        ("thread_name", 1, 0, "compute"),
    ]


def test_memory_is_a_counter_of_each_rank():
    counters = events_of(timeline_to_chrome_json(TIMELINE, memory=(((0.0, 10), (0.5, 20)), ((0.75, 30),))), "C")
    assert [(c["pid"], c["ts"], c["args"]["allocated_bytes"]) for c in counters] == [
        (0, 0.0, 10),
        (0, 500_000.0, 20),
        (1, 750_000.0, 30),
    ]


def test_empty_timeline_is_a_valid_trace():
    assert json.loads(timeline_to_chrome_json(())) == {"traceEvents": [], "displayTimeUnit": "ms"}
