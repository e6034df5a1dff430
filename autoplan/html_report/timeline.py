"""The step over time: what each lane does (`timeline_chart`), and what it holds (`memory_chart`); see `Lanes`.

Both have the same lanes and the same axis of time, so that they can be read one above the other. A page stays small
and a picture readable whatever the plan: a lane with more boxes, or a curve with more points, than its share of
`MAX_BOXES` or `MAX_POINTS` is drawn by `coarse`, or by the maxima of equal parts of the step, which hide no peak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.html_report.scales import Axis, time_ticks, x_axis
from autoplan.html_report.svg import LEGEND_ROW, Chart, element, label, legend, line, number, title
from autoplan.parallel_plan import Estimate, TimelineEvent
from autoplan.plan_words import PIPELINE, Lanes
from autoplan.units import GiB, format_seconds

WIDTH = 960
LEFT, RIGHT = 76, 132
LANES_TOP = 8
MAX_BOXES = 30_000
MAX_TITLED_BOXES = 800
MAX_POINTS = 9_000
MIN_LABEL_LANE = 20
TEXT_HEIGHT = 15
AXIS_HEIGHT = 24

MemoryCurve = tuple[tuple[float, int], ...]

# kind: (series, what it is); in the order of the legend
KINDS = {
    "F": (0, "forward"),
    "B": (6, "backward"),
    "I": (6, "backward"),
    "W": (1, "backward, for weights"),
    "optimizer": (7, "optimizer"),
    "communication": (3, "tensor- and data-parallel communication"),
    "transfer": (4, "transfer between stages"),
}
# stream: (share of the lane above it, its own share)
_STREAMS = {"compute": (0.0, 0.62), "communication": (0.64, 0.15), "transfer": (0.81, 0.15)}
_ACTION = re.compile(r"\d+([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Box:
    """Something of `kind` that lasts from `start_s` to `stop_s`; `label` is short, `title` is shown on hover."""

    start_s: float
    stop_s: float
    kind: str
    label: str = ""
    title: str = ""


def timeline_chart(events: Iterable[TimelineEvent], *, step_s: float, lanes: Lanes = PIPELINE) -> Chart:
    """What each lane does in the predicted step: computation above, communication and transfers below it."""
    rows: dict[tuple[int, str], list[Box]] = {}
    shown = (event for event in events if event.stream != "copy")  # of the next batch, beside all else
    for event in sorted(shown, key=lambda event: (event.rank, event.start_s)):
        stream = event.stream if event.stream in _STREAMS else "transfer"
        rows.setdefault((event.rank, stream), []).append(_box(event, stream, lanes))
    n_ranks = 1 + max((rank for rank, _ in rows), default=-1)
    lane, time = _lane_height(n_ranks), Axis(0.0, step_s, LEFT, WIDTH - RIGHT)
    is_titled = sum(map(len, rows.values())) <= MAX_TITLED_BOXES
    n_most = max(1, MAX_BOXES // max(1, len(rows)))
    parts = [_frame(n_ranks, lane, time, lanes.word)]
    for (rank, stream), boxes in rows.items():
        above, share = _STREAMS[stream]
        top, height = LANES_TOP + lane * (rank + above), lane * share
        n_buckets = max(1, n_most // len({box.kind for box in boxes}))
        drawn = boxes if len(boxes) <= n_most else coarse(boxes, span_s=step_s, n_buckets=n_buckets)
        parts.append(_row(drawn, time, top=top, height=height, is_titled=is_titled))
    kinds = {box.kind for boxes in rows.values() for box in boxes}
    below, height = _legend(kinds, top=LANES_TOP + lane * n_ranks + AXIS_HEIGHT)
    is_coarse = any(len(boxes) > n_most for boxes in rows.values())
    return Chart(
        name="timeline",
        title="The predicted step",
        summary=f"What each of {n_ranks} {lanes.plural} does during a step of {format_seconds(step_s)}.",
        width=WIDTH,
        height=height,
        body="".join([*parts, below]),
        note="Boxes too narrow to see are drawn together; trace.json.gz has each of them." if is_coarse else "",
    )


def coarse(boxes: Sequence[Box], *, span_s: float, n_buckets: int) -> list[Box]:
    """In each part of the span one box per kind, one after the other, as wide as what there is of the kind."""
    held: dict[int, dict[str, float]] = {}
    for box in boxes:
        for bucket, part_s in _parts(box.start_s, box.stop_s, span_s=span_s, n_buckets=n_buckets):
            kinds = held.setdefault(bucket, {})
            kinds[box.kind] = kinds.get(box.kind, 0.0) + part_s
    found = []
    for bucket, kinds in sorted(held.items()):
        start_s = bucket * span_s / n_buckets
        for kind, part_s in kinds.items():
            found.append(Box(start_s, start_s + part_s, kind))
            start_s += part_s
    return found


def memory_chart(curves: Sequence[MemoryCurve], estimate: Estimate, *, lanes: Lanes = PIPELINE) -> Chart:
    """What each lane has allocated over the step, what it reserves, and its limit, the top of its lane."""
    n_ranks = len(curves)
    lane, time = _lane_height(n_ranks) * 1.4, Axis(0.0, estimate.step_s, LEFT, WIDTH - RIGHT)
    thin = "" if lane >= MIN_LABEL_LANE else " thin"
    parts = [_frame(n_ranks, lane, time, lanes.word)]
    n_most = max(2, MAX_POINTS // max(1, n_ranks))
    for rank, curve in enumerate(curves):
        needed, limit_bytes = estimate.needed_bytes[rank], estimate.limit_bytes(rank)
        bottom = LANES_TOP + lane * (rank + 1)
        level = Axis(0, max(limit_bytes, needed), bottom, bottom - lane * 0.86)
        points = curve if len(curve) <= n_most else peaks(curve, span_s=estimate.step_s, n_buckets=n_most)
        most = max((size for _, size in curve), default=0)
        told = f"{lanes.of(rank)}: at most {most / GiB:.1f} GiB allocated, {needed / GiB:.1f} needed"
        told += f" of {limit_bytes / GiB:.1f} GiB"
        parts.append(element("path", title(told), css="f0", d=_area(points, time, level)))
        parts.append(line(time.start, level.at(needed), time.stop, level.at(needed), css=f"l3 dashed{thin}"))
        parts.append(line(time.start, level.at(limit_bytes), time.stop, level.at(limit_bytes), css=f"limit{thin}"))
        if _is_labelled(rank, lane):
            y = min(bottom, level.at(limit_bytes) + TEXT_HEIGHT - 2)
            parts.append(label(time.stop + 8, y, f"{needed / GiB:.1f} of {limit_bytes / GiB:.1f} GiB", css="soft"))
    top = LANES_TOP + lane * n_ranks + AXIS_HEIGHT
    keys = [label(LEFT, top + 12, "Filled: allocated. Dashed: needed at the peak. Red: what the device offers.")]
    return Chart(
        name="memory",
        title="Memory over the step",
        summary=f"Allocated memory of each of {n_ranks} {lanes.plural} during a step, below what its device offers.",
        width=WIDTH,
        height=int(top + LEGEND_ROW + 4),
        body="".join([*parts, *keys]),
    )


def peaks(curve: MemoryCurve, *, span_s: float, n_buckets: int) -> MemoryCurve:
    """At most one point per part of the span: the most that is held at any time in it."""
    most: dict[int, int] = {}
    stops_s = (*(time_s for time_s, _ in curve[1:]), span_s)
    for (start_s, size), stop_s in zip(curve, stops_s, strict=True):
        for bucket, _ in _parts(start_s, stop_s, span_s=span_s, n_buckets=n_buckets):
            most[bucket] = max(most.get(bucket, 0), size)
    return tuple((bucket * span_s / n_buckets, size) for bucket, size in sorted(most.items()))


def _parts(start_s: float, stop_s: float, *, span_s: float, n_buckets: int) -> Iterable[tuple[int, float]]:
    """The parts of the span that something touches, and how long it lasts in each."""
    bucket_s = span_s / n_buckets
    first, last = (min(int(time_s / bucket_s), n_buckets - 1) for time_s in (start_s, stop_s))
    for bucket in range(first, last + 1):
        from_s = start_s if bucket == first else bucket * bucket_s
        until_s = stop_s if bucket == last else (bucket + 1) * bucket_s
        if until_s > from_s or first == last:
            yield bucket, until_s - from_s


def _lane_height(n_ranks: int) -> int:
    """Lanes get lower as they become more, so that 64 of them still fit a screen or two."""
    return next((height for most, height in ((3, 52), (8, 34), (16, 24), (32, 16)) if n_ranks <= most), 10)


def _is_labelled(rank: int, lane: float) -> bool:
    """As many lanes as there is room for have a label."""
    every = next(count for count in (1, 2, 4, 8, 16) if lane * count >= TEXT_HEIGHT)
    return rank % every == 0


def _frame(n_ranks: int, lane: float, time: Axis, word: str) -> str:
    """Stripes, labels of lanes, and the axis of time."""
    bottom = LANES_TOP + lane * n_ranks
    parts = [
        element("rect", css="band", x=LEFT, y=LANES_TOP + lane * rank, width=time.stop - LEFT, height=lane)
        for rank in range(0, n_ranks, 2)
    ]
    parts.append(x_axis(time, time_ticks(time.high), top=LANES_TOP, bottom=bottom, text=format_seconds))
    parts += [
        label(LEFT - 8, LANES_TOP + lane * rank + (lane + 9) / 2, f"{word} {rank}", css="end")
        for rank in range(n_ranks)
        if _is_labelled(rank, lane)
    ]
    return "".join(parts)


def _box(event: TimelineEvent, stream: str, lanes: Lanes) -> Box:
    match = _ACTION.fullmatch(event.name) if stream == "compute" else None
    kind = match[1] if match else "optimizer" if stream == "compute" else stream
    told = f"{lanes.word} {event.rank}, stage {event.stage}, {event.stream}: {event.name}, "
    told += f"{format_seconds(event.stop_s - event.start_s)} from {format_seconds(event.start_s)} on"
    return Box(event.start_s, event.stop_s, kind, match[2] if match else "", told)


def _row(boxes: Sequence[Box], time: Axis, *, top: float, height: float, is_titled: bool) -> str:
    """Boxes of one rank and stream: one by one with their titles, or those of each series as one thick dashed line."""
    if is_titled:
        return "".join(_rectangle(box, time, top=top, height=height) for box in boxes)
    strokes: dict[int, list[str]] = {}
    for box in boxes:
        x, width = _extent(box, time)
        strokes.setdefault(KINDS[box.kind][0], []).append(f"M{number(x)} 0h{number(width)}")
    paths = [
        element("path", css=f"l{series}", d="".join(moves), stroke_width=height) for series, moves in strokes.items()
    ]
    return element("g", *paths, transform=f"translate(0 {number(top + height / 2)})")


def _rectangle(box: Box, time: Axis, *, top: float, height: float) -> str:
    x, width = _extent(box, time)
    series = KINDS[box.kind][0]
    told = title(box.title)
    drawn = element("rect", told, css=f"f{series}", x=x, y=top, width=width, height=height)
    if box.label and height >= MIN_LABEL_LANE * _STREAMS["compute"][1] and width >= 9 * len(box.label):
        drawn += label(x + width / 2, top + (height + 8) / 2, box.label, css=f"t{series} middle small")
    return drawn


def _extent(box: Box, time: Axis) -> tuple[float, float]:
    """Where a box begins, and how wide it is; a gap keeps it apart from the next one where there is room."""
    x, stop = time.at(box.start_s), time.at(box.stop_s)
    return x, max(stop - x - (0.75 if stop - x > 3 else 0.0), 0.1)


def _legend(kinds: set[str], *, top: float) -> tuple[str, int]:
    """The legend, and where the chart ends below it."""
    shown = dict.fromkeys(entry for kind, entry in KINDS.items() if kind in kinds)
    drawn, height = legend(shown, x=LEFT, y=top, width=WIDTH - LEFT)
    return drawn, int(top + height)


def _area(curve: MemoryCurve, time: Axis, level: Axis) -> str:
    """The outline of what lies below a curve of steps."""
    if not curve:
        return f"M{number(time.start)} {number(level.start)}"
    moves = [f"M{number(time.at(curve[0][0]))} {number(level.start)}"]
    for time_s, size in curve:
        moves.append(f"H{number(time.at(time_s))}V{number(level.at(size))}")
    return "".join([*moves, f"H{number(time.stop)}V{number(level.start)}Z"])
