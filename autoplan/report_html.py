"""An answer as one self-contained HTML file: no script, no external request, everything escaped.

The timeline is inline SVG: one row per pipeline rank and stream, one box per action, time to the right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from autoplan.answer import (
    Answer,
    interval_source,
    mfu,
    samples_per_s,
    segment_sources_text,
    step_interval_s,
    tokens_per_s,
)
from autoplan.parallel_plan import Breakdown, Estimate, TimelineEvent
from autoplan.report import (
    BREAKDOWN_LABELS,
    REASONS,
    describe_mesh,
    plan_rows,
    rate_text,
    recompute_text,
    shortage_text,
)
from autoplan.search.result import Candidate, Rejection, Remedy
from autoplan.units import GiB, format_seconds

CHART_WIDTH = 960
ROW_HEIGHT = 22
MAX_EVENTS = 4000
MAX_REJECTIONS = 200
_ACTION = re.compile(r"\d+([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle of the timeline; `kind` picks its colour, `title` is shown on hover."""

    x: float
    y: int
    width: float
    kind: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The timeline: row labels from the top, boxes, and its height in pixels."""

    rows: tuple[str, ...]
    boxes: tuple[Box, ...]
    height: int
    n_hidden: int


def html_report(answer: Answer) -> str:
    """The whole report; its timeline is there when the estimate of the best plan has one."""
    environment = Environment(
        loader=PackageLoader("autoplan", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    best = answer.result.best
    return template.render(
        workload=answer.workload,
        result=answer.result,
        limits=answer.workload.limits,
        shortage=shortage_text(answer) if best is None else "",
        remedies=[(item.change, *_remedy_cells(item)) for item in answer.result.remedies],
        notes=answer.notes,
        chosen=None if best is None else _chosen(answer, best),
        candidates=_candidate_rows(answer),
        rejections=[_rejection_row(item) for item in answer.result.rejected[:MAX_REJECTIONS]],
        n_rejections_hidden=max(0, len(answer.result.rejected) - MAX_REJECTIONS),
    )


def _remedy_cells(remedy: Remedy) -> tuple[str, str, str]:
    mesh = f"{describe_mesh(remedy.mesh)}, recompute {remedy.recompute}"
    return mesh, format_seconds(remedy.step_s), f"{remedy.peak_bytes / GiB:.1f} GiB"


def timeline_chart(events: Iterable[TimelineEvent], *, step_s: float) -> Chart:
    """Boxes of the predicted step, scaled so that `step_s` fills the chart."""
    shown = sorted(events, key=lambda event: (event.rank, event.stream, event.start_s))
    n_hidden = max(0, len(shown) - MAX_EVENTS)
    shown = shown[:MAX_EVENTS]
    keys = sorted(
        {(event.rank, event.stream) for event in shown}, key=lambda key: (key[0], key[1] != "compute", key[1])
    )
    row_of = {key: index for index, key in enumerate(keys)}
    boxes = tuple(
        _box(event, row=row_of[event.rank, event.stream], pixels_per_s=CHART_WIDTH / step_s) for event in shown
    )
    rows = tuple(f"rank {rank} {stream}" for rank, stream in keys)
    return Chart(rows=rows, boxes=boxes, height=ROW_HEIGHT * len(rows), n_hidden=n_hidden)


def _box(event: TimelineEvent, *, row: int, pixels_per_s: float) -> Box:
    match = _ACTION.fullmatch(event.name)
    width = (event.stop_s - event.start_s) * pixels_per_s
    return Box(
        x=round(event.start_s * pixels_per_s, 2),
        y=row * ROW_HEIGHT,
        width=round(max(width, 0.25), 2),
        kind=match[1] if match else "other",
        label=match[2] if match and width > 14 else "",
        title=f"{event.name}: {format_seconds(event.stop_s - event.start_s)} from {format_seconds(event.start_s)}",
    )


def _chosen(answer: Answer, best: Candidate) -> dict[str, object]:
    """What the template shows of the chosen plan."""
    low_s, high_s = step_interval_s(best)
    share, tokens = mfu(answer.workload, best), tokens_per_s(answer.workload, best)
    return {
        "step": format_seconds(best.estimate.step_s),
        "interval": f"{format_seconds(low_s)} to {format_seconds(high_s)}",
        "interval_source": interval_source(best.estimate),
        "segment_sources": segment_sources_text(best.estimate),
        "samples": f"{rate_text(samples_per_s(best))} samples/s",
        "tokens": "" if tokens is None else f"{rate_text(tokens)} tokens/s",
        "mfu": "unknown" if share is None else f"{share:.1%}",
        "plan": plan_rows(best.plan),
        "breakdown": _breakdown_rows(best.estimate.breakdown),
        "memory": _memory_rows(best.estimate),
        "memory_limit": _limits_text(best.estimate),
        "chart": timeline_chart(best.estimate.timeline, step_s=best.estimate.step_s),
        "chart_width": CHART_WIDTH,
        "row_height": ROW_HEIGHT,
        "stages": _stage_rows(answer, best),
    }


def _stage_rows(answer: Answer, best: Candidate) -> list[tuple[str, str, str]]:
    names = answer.workload.segment_names
    rows = []
    for index, stage in enumerate(best.plan.stages):
        first, last = stage.start, stage.stop - 1
        span = f"{names[first]} to {names[last]}" if last < len(names) else f"segments {first} to {last}"
        rows.append((str(index), span, str(len(stage.recomputed))))
    return rows


def _breakdown_rows(breakdown: Breakdown) -> list[tuple[str, str, float]]:
    """(label, time, percent of the step) of every part that is not zero."""
    parts = ((label, getattr(breakdown, name)) for name, label in BREAKDOWN_LABELS)
    return [(label, format_seconds(part_s), 100 * part_s / breakdown.total_s) for label, part_s in parts if part_s > 0]


def _limits_text(estimate: Estimate) -> str:
    limits = dict.fromkeys(map(estimate.limit_bytes, range(len(estimate.reserved_bytes))))
    return " or ".join(f"{limit_bytes / GiB:.1f} GiB" for limit_bytes in limits)


def _memory_rows(estimate: Estimate) -> list[dict[str, object]]:
    """Per pipeline rank: its parts as (name, GiB, percent of the limit), and the total."""
    rows = []
    for rank, (reserved, parts) in enumerate(zip(estimate.reserved_bytes, estimate.memory_parts_bytes, strict=True)):
        limit_bytes = estimate.limit_bytes(rank)
        shown = [(name, f"{size / GiB:.2f} GiB", 100 * size / limit_bytes) for name, size in parts if size > 0]
        total = f"{reserved / GiB:.1f} GiB, {reserved / limit_bytes:.0%}"
        rows.append({"rank": rank, "parts": shown, "total": total})
    return rows


def _candidate_rows(answer: Answer) -> list[tuple[str, ...]]:
    """(name, plan, recompute, step, MFU, peak memory) of the chosen plan, alternatives and plain recipes."""
    result = answer.result
    named = [] if result.best is None else [("chosen", result.best)]
    named += [("alternative", item) for item in result.alternatives]
    named += [(item.baseline or "plain recipe", item) for item in result.baselines]
    return [(name, *_candidate_cells(answer, item)) for name, item in named]


def _candidate_cells(answer: Answer, item: Candidate) -> tuple[str, ...]:
    estimate, share = item.estimate, mfu(answer.workload, item)
    return (
        describe_mesh(item.plan.mesh),
        recompute_text(item.plan),
        format_seconds(estimate.step_s) if estimate.fits else "does not fit",
        "-" if share is None or not estimate.fits else f"{share:.1%}",
        f"{max(estimate.reserved_bytes) / GiB:.1f} GiB",
    )


def _rejection_row(item: Rejection) -> tuple[str, str, str]:
    return describe_mesh(item.mesh), REASONS.get(item.reason, item.reason), item.detail
