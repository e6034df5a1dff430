"""The charts of an answer: mesh, step over time, where it goes, memory, candidates, and what would change them."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.answers.answer import Answer, device_hours
from autoplan.answers.comparisons import SensitivityRow
from autoplan.html_report.charts import Bar, Point, Swing, pareto_chart, stacked_bars, tornado_chart
from autoplan.html_report.mesh_chart import mesh_chart
from autoplan.html_report.palette import BREAKDOWN_SERIES, WAITING
from autoplan.html_report.readings import plan_readings, with_readings
from autoplan.html_report.svg import Chart
from autoplan.html_report.timeline import MemoryCurve, memory_chart, timeline_chart
from autoplan.parallel_plan import Estimate
from autoplan.plain_text import count
from autoplan.plan_words import BREAKDOWN_LABELS, Lanes, describe_mesh, lanes_of, recompute_text
from autoplan.report.plan import tightest_bytes
from autoplan.search.result import Candidate
from autoplan.units import BILLION, MILLION, GiB, format_seconds, format_usd

MAX_BREAKDOWNS = 12
MAX_RANKS = 16  # whose memory is drawn by parts
N_PARTS = 7  # of memory that have a colour of their own


def named_candidates(answer: Answer) -> list[tuple[str, Candidate]]:
    """(what it is, candidate): the chosen plan first, then alternatives, then plain recipes."""
    result = answer.result
    named = [] if result.best is None else [("chosen", result.best)]
    named += [(f"alternative {number}", item) for number, item in enumerate(result.alternatives, start=1)]
    return named + [(item.baseline or "plain recipe", item) for item in result.baselines]


def cost_usd(answer: Answer, candidate: Candidate) -> tuple[float, str] | None:
    """(US dollars, of what): of a billion tokens, or of a million samples; None without a price."""
    workload = answer.workload
    if workload.price_usd_per_device_hour is None or not candidate.estimate.fits_as_computed:
        return None
    n_tokens = workload.tokens_per_sample
    n_samples, unit = (MILLION, "a million samples") if n_tokens is None else (BILLION / n_tokens, "a billion tokens")
    return device_hours(workload, candidate, n_samples=n_samples) * workload.price_usd_per_device_hour, unit


def paid_text(answer: Answer, candidate: Candidate) -> str:
    """`; whole hosts are paid for, 4 devices of them idle`, where that is so."""
    n_idle = answer.workload.n_devices - candidate.plan.mesh.n_devices
    return f"; whole hosts are paid for, {count(n_idle, 'device')} of them idle" if n_idle else ""


def plan_charts(
    answer: Answer, *, memory: Sequence[MemoryCurve] = (), sensitivity: Sequence[SensitivityRow] = ()
) -> tuple[Chart, ...]:
    """Every chart there are figures for; none without a plan.

    `memory` is what `simulate.memory_over_time` returns, `sensitivity` what `planning.questions.sensitivity` does.
    """
    if answer.result.best is None:
        return ()
    best, lanes = answer.best, lanes_of(answer.best.plan)
    charts = [mesh_chart(best.plan.mesh, n_devices_per_host=_n_devices_per_host(answer))]
    if best.estimate.timeline:
        charts.append(timeline_chart(best.estimate.timeline, step_s=best.estimate.step_s, lanes=lanes))
    if memory:
        charts.append(memory_chart(memory, best.estimate, lanes=lanes))
    charts += [_breakdown_chart(answer), _memory_parts_chart(best.estimate, lanes), _candidates_chart(answer)]
    if sensitivity:
        charts.append(_sensitivity_chart(sensitivity))
    return with_readings(charts, plan_readings(answer, sensitivity))


def _n_devices_per_host(answer: Answer) -> int | None:
    workload = answer.workload
    return None if answer.best.plan.groups else workload.n_devices // workload.n_hosts


def _breakdown_chart(answer: Answer) -> Chart:
    fitting = [(name, item) for name, item in named_candidates(answer) if item.estimate.fits]
    bars, used = [], set()
    for name, item in fitting[:MAX_BREAKDOWNS]:
        parts = []
        for field, label in BREAKDOWN_LABELS:
            part_s = getattr(item.estimate.breakdown, field)
            if part_s > 0:
                used.add(field)
                told = f"{label}: {format_seconds(part_s)}, {part_s / item.estimate.step_s:.1%} of the step"
                parts.append((BREAKDOWN_SERIES[field], part_s, told))
        mesh = item.plan.mesh
        bars.append(
            Bar(
                f"{name}: dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp}",
                tuple(parts),
                _step_text(item),
                f"{name}: {describe_mesh(mesh)}, {recompute_text(item.plan)}",
            )
        )
    series = [(BREAKDOWN_SERIES[field], label) for field, label in BREAKDOWN_LABELS if field in used]
    return stacked_bars(
        bars,
        name="breakdown",
        title_text="Where the step goes",
        series=series,
        text=format_seconds,
        x_name="time of a step",
    )


def _step_text(candidate: Candidate) -> str:
    return format_seconds(candidate.estimate.step_s)


def _memory_parts_chart(estimate: Estimate, lanes: Lanes) -> Chart:
    """The parts of the peak of each lane, of those with the least memory left where there are many."""
    ranks = range(len(estimate.needed_bytes))
    tight = sorted(ranks, key=lambda rank: estimate.needed_bytes[rank] - estimate.limit_bytes(rank), reverse=True)
    series_of = _part_series(estimate)
    shown = sorted(tight[:MAX_RANKS])
    bars = []
    for rank in shown:
        parts = tuple(
            (series_of[part], float(size), f"{part.replace('_', ' ')}: {size / GiB:.2f} GiB")
            for part, size in estimate.memory_parts_bytes[rank]
            if size > 0
        )
        total = f"{estimate.needed_bytes[rank] / GiB:.1f} of {estimate.limit_bytes(rank) / GiB:.1f} GiB"
        bars.append(Bar(f"{lanes.name} {rank}", parts, total, lanes.of(rank)))
    names: dict[int, list[str]] = {}
    for part, number in series_of.items():
        names.setdefault(number, []).append(part.replace("_", " "))
    series = [
        (number, ", ".join(parts)) for number, parts in sorted(names.items(), key=lambda item: item[0] == WAITING)
    ]
    return stacked_bars(
        bars,
        name="memory_parts",
        title_text="Memory at the peak, by part",
        series=series,
        text=lambda n_bytes: f"{n_bytes / GiB:.0f} GiB",
        x_name="memory of one device at its peak",
        limits=[float(estimate.limit_bytes(rank)) for rank in shown],
        unit=float(GiB),
    )


def _part_series(estimate: Estimate) -> dict[str, int]:
    """A colour for each of the largest parts, and one for all others, in the order of the parts."""
    totals: dict[str, int] = {}
    for parts in estimate.memory_parts_bytes:
        for part, size in parts:
            totals[part] = totals.get(part, 0) + size
    present = [part for part, size in totals.items() if size > 0]
    largest = sorted(present, key=lambda part: -totals[part])[:N_PARTS]
    colours = iter(number for number in range(N_PARTS + 1) if number != WAITING)
    return {part: next(colours) if part in largest else WAITING for part in present}


def _candidates_chart(answer: Answer) -> Chart:
    points = []
    for name, item in named_candidates(answer):
        if not item.estimate.fits:
            continue
        peak_bytes, _ = tightest_bytes(item.estimate)
        told = f"{name}: {_step_text(item)}, {peak_bytes / GiB:.1f} GiB; {describe_mesh(item.plan.mesh)}, "
        told += recompute_text(item.plan)
        cost = cost_usd(answer, item)
        told += "" if cost is None else f"; {format_usd(cost[0])} for {cost[1]}{paid_text(answer, item)}"
        points.append(Point(name, item.estimate.step_s, peak_bytes / GiB, told, is_chosen=item is answer.best))
    return pareto_chart(
        points,
        name="candidates",
        title_text="Step time against memory",
        x_name="step time",
        y_name="memory of the fullest rank",
        x_text=format_seconds,
        y_text=lambda size: f"{size:.3g} GiB",
    )


def _sensitivity_chart(rows: Sequence[SensitivityRow]) -> Chart:
    swings = []
    for row in rows[1:]:  # the first is the cluster as it is
        if row.gain is not None and row.step_s is not None:
            told = f"{row.change}: step {format_seconds(row.step_s)}, gain {row.gain:.2%}, {row.plan_changes}"
            swings.append(Swing(row.change, min(row.gain, 0.0), max(row.gain, 0.0), told))
    return tornado_chart(
        swings,
        name="sensitivity",
        title_text="What a better cluster is worth",
        text=lambda gain: f"{gain:.2%}",
        x_name="less time for a step",
    )
