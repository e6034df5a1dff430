"""What to read from each chart: a sentence below it, with the figure that matters.

The keys are names of charts; a chart without one says all by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.answers.answer import Answer
from autoplan.answers.comparisons import SensitivityRow
from autoplan.html_report.svg import Chart
from autoplan.parallel_plan import Mesh
from autoplan.plan_words import BREAKDOWN_LABELS, lanes_of
from autoplan.report.plan import tightest_bytes
from autoplan.units import GiB, format_seconds
from autoplan.what_if.rows import WhatIfRow, pace, rate_unit


def with_readings(charts: Sequence[Chart], readings: Mapping[str, str]) -> tuple[Chart, ...]:
    """The charts, each with its sentence."""
    return tuple(replace(chart, reading=readings.get(chart.name, "")) for chart in charts)


def plan_readings(answer: Answer, sensitivity: Sequence[SensitivityRow] = ()) -> dict[str, str]:
    """Of the charts of a plan."""
    best, lanes = answer.best, lanes_of(answer.best.plan)
    estimate = best.estimate
    peak_bytes, limit_bytes = tightest_bytes(estimate)
    parts_s = {label: getattr(estimate.breakdown, field) for field, label in BREAKDOWN_LABELS}
    largest = max(parts_s, key=lambda label: parts_s[label])
    waiting = estimate.breakdown.bubble_s / estimate.step_s
    fullest = f"{lanes.of(estimate.tightest_rank)} needs {peak_bytes / GiB:.1f} of {limit_bytes / GiB:.1f} GiB"
    return {
        "mesh": _mesh_reading(best.plan.mesh),
        "timeline": f"A lane is one device of a {lanes.name}, time runs to the right. Where a lane is empty the device"
        f" waits for others: {waiting:.0%} of the step on the slowest. A box lasts as long as the host takes to launch"
        " its kernels, where that is longer.",
        "memory": f"Filled is what is allocated at that moment of the step; {fullest} at its peak.",
        "breakdown": f"A bar is one step of a plan, so shorter is better. Of the {format_seconds(estimate.step_s)} of"
        f" the chosen plan, {parts_s[largest] / estimate.step_s:.0%} are {largest}.",
        "memory_parts": f"A bar is the peak of one device, the red line what the device offers: {fullest}.",
        "candidates": "A point is a plan that fits: further left is faster, further down needs less memory. The large"
        " one is the chosen plan.",
        "sensitivity": _sensitivity_reading(sensitivity),
    }


def _mesh_reading(mesh: Mesh) -> str:
    axes = (
        (mesh.pp, f"a row holds one of {mesh.pp} parts of the layers"),
        (mesh.dp, f"boxes beside each other train on different samples ({mesh.dp} at once)"),
        (mesh.tp, f"the {mesh.tp} devices of a box share every layer"),
    )
    texts = [text for degree, text in axes if degree > 1]
    return "Each number is a device: " + "; ".join(texts) + "." if texts else "One device does everything."


def _sensitivity_reading(rows: Sequence[SensitivityRow]) -> str:
    gains = {row.change: row.gain for row in rows[1:] if row.gain is not None}
    if not gains:
        return ""
    best = max(gains, key=lambda change: gains[change])
    if gains[best] <= 0.0:
        return "A bar is how much faster a step gets with that change alone; none of them gains anything."
    return f"A bar is how much faster a step gets with that change alone; most is gained by {best}: {gains[best]:.2%}."


def sweep_readings(rows: Sequence[WhatIfRow]) -> dict[str, str]:
    """Of the charts of a sweep."""
    known = [row for row in rows if pace(row) is not None]
    if not known:
        return {}
    return {
        "scaling": f"Higher is faster, in {rate_unit(known)} of the whole cluster. A curve that falls below the dashed"
        " line gets less from each device added; upright lines are 90 % intervals.",
        "losses": _losses_reading(known),
        "cost": "A point is a cluster: further left trains sooner, further down costs less. Blue ones are worth"
        " choosing from; for each gray one another cluster is better in both.",
        "sensitivity": "A bar to the right is faster than that point, to the left slower, with one thing changed.",
    }


def _losses_reading(rows: Sequence[WhatIfRow]) -> str:
    shares = [dict(row.shares)["compute"] for row in rows if row.shares]
    if not shares:
        return ""
    span = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))
    return (
        f"A bar is all of the wall time of a point; compute is {span} of it here, the rest is what it costs to have it."
    )
