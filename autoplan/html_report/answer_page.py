"""An answer as one self-contained HTML page, and as the files beside it: charts as SVG, rows as CSV and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoplan.answers.answer import (
    RISKY,
    Answer,
    chance_short,
    interval_source,
    mfu,
    samples_per_s,
    segment_sources_text,
    step_interval_s,
    tokens_per_s,
    trust,
    with_confidence,
)
from autoplan.answers.comparisons import SensitivityRow
from autoplan.answers.intervals import COVERAGE
from autoplan.html_report.page import render
from autoplan.html_report.plan_charts import cost_usd, paid_text, plan_charts
from autoplan.html_report.plan_rows import (
    COMPUTED,
    MAX_REJECTIONS,
    breakdown_table,
    candidates_table,
    memory_table,
    plan_records,
    price_source,
    record_files,
    rejections_table,
    sensitivity_table,
    sources_table,
    stages_table,
)
from autoplan.html_report.png import chart_texts
from autoplan.html_report.provenance import KINDS, provenance_kind, trust_kind
from autoplan.html_report.table import Card, Table, cells
from autoplan.html_report.timeline import MemoryCurve
from autoplan.plain_text import percent, rate_text
from autoplan.plan_words import describe_mesh, lanes_of, plan_rows
from autoplan.report.plan import fix_text, shortage_text, tightest_bytes
from autoplan.report.rivals import no_faster_text
from autoplan.search.result import Candidate
from autoplan.units import GiB, format_seconds, format_share, format_usd


def plan_page(answer: Answer, *, memory: Sequence[MemoryCurve] = (), sensitivity: Sequence[SensitivityRow] = ()) -> str:
    """The page; `memory` is of `simulate.memory_over_time`, `sensitivity` of `planning.questions.sensitivity`."""
    result, has_plan = answer.result, answer.result.best is not None
    return render(
        "plan.html.jinja",
        workload=answer.workload,
        result=result,
        shortage="" if has_plan else shortage_text(answer),
        remedies=_remedies_table(answer),
        no_faster=no_faster_text(answer),
        notes=answer.notes,
        charts={chart.name: chart for chart in plan_charts(answer, memory=memory, sensitivity=sensitivity)},
        cards=_cards(answer, answer.best) if has_plan else (),
        plan=_decision(answer) if has_plan else (),
        basis=_basis(answer.best) if has_plan else "",
        kind=trust_kind(trust(answer.best.estimate)) if has_plan else "",
        candidates=candidates_table(answer) if has_plan else None,
        breakdown=breakdown_table(answer) if has_plan else None,
        memory=memory_table(answer) if has_plan else None,
        lane_name=lanes_of(answer.best.plan).name if has_plan else "",
        slowest=_slowest(answer.best) if has_plan else "",
        stages=stages_table(answer) if has_plan else None,
        sensitivity=sensitivity_table(sensitivity) if has_plan and sensitivity else None,
        rejections=rejections_table(answer),
        n_rejections_hidden=max(0, sum(result.rejected_by_reason.values()) - MAX_REJECTIONS),
        sources=sources_table(answer),
        kinds=_kinds_text(answer),
    )


def chart_files(
    answer: Answer,
    *,
    memory: Sequence[MemoryCurve] = (),
    sensitivity: Sequence[SensitivityRow] = (),
    has_png: bool = False,
) -> dict[str, str | bytes]:
    """The charts and rows of an answer as files of their own, by name."""
    charts = plan_charts(answer, memory=memory, sensitivity=sensitivity)
    records = plan_records(answer, memory=memory, sensitivity=sensitivity)
    return {**chart_texts(charts, has_png=has_png), **record_files(records)}


def _cards(answer: Answer, best: Candidate) -> tuple[Card, ...]:
    workload, estimate = answer.workload, best.estimate
    kind = trust_kind(trust(estimate))
    low_s, high_s = step_interval_s(best)
    interval_text = f"{format_seconds(low_s)} to {format_seconds(high_s)} with a chance of {COVERAGE:.0%}"
    tokens, share = tokens_per_s(workload, best), mfu(workload, best)
    samples = f"{rate_text(samples_per_s(best))} samples/s"
    rate = (samples, "throughput", "") if tokens is None else (f"{rate_text(tokens)} tokens/s", "throughput", samples)
    peak_bytes, limit_bytes = tightest_bytes(estimate)
    left, chance = f"{(limit_bytes - peak_bytes) / GiB:.1f} GiB left of {limit_bytes / GiB:.1f}", chance_short(estimate)
    left += f", too little with a chance of {chance:.0%}" if chance >= RISKY else ""
    mesh = best.plan.mesh
    cards = [
        Card(format_seconds(estimate.step_s), "a step", kind, interval_text),
        Card(rate[0], rate[1], kind, rate[2]),
        Card(
            "unknown" if share is None else format_share(share),
            "MFU",
            kind,
            "of the dense peak of the devices used",
        ),
        Card(
            f"{peak_bytes / GiB:.1f} GiB", "memory", kind, f"{lanes_of(best.plan).of(estimate.tightest_rank)}; {left}"
        ),
        Card(str(mesh.n_devices), "devices", "computed", f"of {workload.n_devices}; {describe_mesh(mesh)}"),
    ]
    cost = cost_usd(answer, best)
    if cost is not None:
        price = f"{format_usd(workload.price_usd_per_device_hour or 0.0)} per device-hour{paid_text(answer, best)}"
        cards.append(Card(format_usd(cost[0]), cost[1], provenance_kind(price_source(answer)), price))
    return tuple(cards)


def _slowest(best: Candidate) -> str:
    """The rank whose times are shown; nothing where all are alike, or where it is not known."""
    rank = best.estimate.slowest_rank
    return "" if rank is None or not best.estimate.has_several_ranks else lanes_of(best.plan).of(rank)


def _basis(best: Candidate) -> str:
    """What the interval of the step rests on."""
    sources = segment_sources_text(best.estimate)
    return interval_source(best) + (f"; {sources}" if sources else "")


def _decision(answer: Answer) -> list[tuple[str, str]]:
    fix = () if answer.request is None else answer.request.options.fix
    sure, unmet = with_confidence(answer.result), answer.result.unmet_confidence
    return [
        *plan_rows(answer.best.plan, answer.splits),
        *([("asked for", fix_text(fix))] if fix else []),
        *([("compared with plans that fit", sure.strip())] if sure else []),
        *([("memory", f"no plan was found that fits with {percent(unmet)} confidence")] if unmet else []),
    ]


def _kinds_text(answer: Answer) -> str:
    """`3 measured, 1 assumed`: how the figures of the hardware are known."""
    found = Counter(provenance_kind(source) for _, source in answer.workload.provenance)
    return ", ".join(f"{found[kind]} {kind}" for kind in KINDS if found[kind])


def _remedies_table(answer: Answer) -> Table:
    rows = [
        cells(
            item.change,
            f"{describe_mesh(item.mesh)}, recompute {item.recompute}",
            (format_seconds(item.step_s), item.step_s),
            (f"{item.peak_bytes / GiB:.1f} GiB", float(item.peak_bytes)),
        )
        for item in answer.result.remedies
    ]
    return Table(("change", "plan", "step", "peak memory"), tuple(rows), frozenset({2, 3}), COMPUTED)
