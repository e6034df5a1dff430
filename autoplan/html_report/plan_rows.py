"""The rows of an answer: tables to be shown, and records for a spreadsheet, with a unit in every name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoplan.answers.answer import (
    Answer,
    chance_short,
    mfu,
    samples_per_s,
    short_words,
    step_interval_s,
    tokens_per_s,
    trust,
)
from autoplan.answers.comparisons import SensitivityRow
from autoplan.html_report.plan_charts import cost_usd, named_candidates
from autoplan.html_report.provenance import provenance_kind, trust_kind
from autoplan.html_report.table import Cell, Table, Value, cells, records_csv
from autoplan.html_report.timeline import MemoryCurve
from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.plan_words import BREAKDOWN_LABELS, describe_mesh, lanes_of, mesh_values, recompute_text
from autoplan.report.plan import reason_text, tightest_bytes
from autoplan.report.stages import span_text
from autoplan.search.fixed_values import is_as_fixed
from autoplan.search.result import Candidate, nearest_rejections
from autoplan.units import GiB, format_seconds, format_share, format_usd

COMPUTED = "computed"
MAX_REJECTIONS = 200
MOMENTS = "memory_over_time"

Record = dict[str, Value]


def price_source(answer: Answer) -> str:
    """Where the price of a device comes from; empty where there is none."""
    sources = (source for name, source in answer.workload.provenance if name.endswith("price_per_device_hour"))
    return next(sources, "")


def candidates_table(answer: Answer) -> Table:
    """The chosen plan, the alternatives and the plain recipes."""
    named = named_candidates(answer)
    cost = None if answer.result.best is None else cost_usd(answer, answer.best)
    header = ("candidate", "plan", "recompute", "step", "to the chosen", "MFU", "memory", "left")
    return Table(
        header=(*header, *(() if cost is None else (f"cost of {cost[1]}, whole hosts",))),
        rows=tuple(_candidate_row(answer, name, item, with_cost=cost is not None) for name, item in named),
        numeric=frozenset(range(3, len(header) + 1)),
        kind=COMPUTED,
    )


def _candidate_row(answer: Answer, name: str, item: Candidate, *, with_cost: bool) -> tuple[Cell, ...]:
    estimate = item.estimate
    peak_bytes, limit_bytes = tightest_bytes(estimate)
    fix = () if answer.request is None else answer.request.options.fix
    unasked = "not what --fix asks for" if item.baseline and not is_as_fixed(item.plan, fix) else ""
    row = [
        Cell(", ".join(filter(None, (name, unasked, short_words(estimate))))),
        Cell(describe_mesh(item.plan.mesh)),
        Cell(recompute_text(item.plan)),
    ]
    if estimate.fits_as_computed:
        share, slower = mfu(answer.workload, item), estimate.step_s / answer.best.estimate.step_s - 1
        row += cells(
            (format_seconds(estimate.step_s), estimate.step_s),
            (f"{slower:+.1%}", slower),
            ("-", None) if share is None else (format_share(share), share),
            kind=trust_kind(trust(estimate)),
        )
    else:
        row += cells("does not fit", "-", "-")
    left_bytes = limit_bytes - peak_bytes
    row += cells((f"{peak_bytes / GiB:.1f} GiB", peak_bytes), (f"{left_bytes / GiB:.1f} GiB", left_bytes))
    if with_cost:
        cost = cost_usd(answer, item)
        kind = provenance_kind(price_source(answer))
        row.append(Cell("-") if cost is None else Cell(format_usd(cost[0]), cost[0], kind))
    return tuple(row)


def breakdown_table(answer: Answer) -> Table:
    """Where the step of the chosen plan goes."""
    breakdown = answer.best.estimate.breakdown
    parts = [(label, getattr(breakdown, field)) for field, label in BREAKDOWN_LABELS]
    rows = [
        cells(label, (format_seconds(part_s), part_s), (f"{part_s / breakdown.total_s:.1%}", part_s))
        for label, part_s in parts
        if part_s > 0
    ]
    return Table(("part", "time", "share"), tuple(rows), frozenset({1, 2}), trust_kind(trust(answer.best.estimate)))


def stages_table(answer: Answer) -> Table:
    """What each stage holds; of a batch that groups share, what each group recomputes of the one stage."""
    names, plan = answer.workload.segment_texts, answer.best.plan
    rows = []
    for index, stage in enumerate(plan.stages):
        n_segments, n_recomputed = stage.stop - stage.start, len(stage.recomputed)
        span = span_text(stage, names)
        rows.append(cells((str(index), index), span, (str(n_segments), n_segments), (str(n_recomputed), n_recomputed)))
    return Table(
        ("group" if plan.mesh.shares else "stage", "from and to", "segments", "recomputed"),
        tuple(rows),
        frozenset({0, 2, 3}),
        COMPUTED,
    )


def memory_table(answer: Answer) -> Table:
    """The memory of each lane, by part."""
    estimate = answer.best.estimate
    parts = tuple(part for part, _ in estimate.memory_parts_bytes[0]) if estimate.memory_parts_bytes else ()
    rows = []
    for rank, sizes in enumerate(estimate.memory_parts_bytes):
        known = dict(sizes)
        every = [
            *(known.get(part, 0) for part in parts),
            estimate.allocated_bytes[rank],
            estimate.allocator_bytes[rank],
            estimate.needed_bytes[rank],
            estimate.limit_bytes(rank),
        ]
        rows.append(cells((str(rank), rank), *((f"{size / GiB:.2f}", float(size)) for size in every)))
    header = (
        lanes_of(answer.best.plan).word,
        *(part.replace("_", " ") for part in parts),
        "allocated",
        "reserved",
        "needed",
        "limit",
    )
    return Table(header, tuple(rows), frozenset(range(len(header))), COMPUTED)


def rejections_table(answer: Answer) -> Table:
    """The nearest of the meshes that are not the answer, and why."""
    rows = [
        cells(describe_mesh(item.mesh), reason_text(item.reason, answer.result), item.detail)
        for item in nearest_rejections(answer.result.rejected, most=MAX_REJECTIONS)
    ]
    return Table(("plan", "reason", "detail"), tuple(rows))


def sources_table(answer: Answer) -> Table:
    """Every figure of the hardware, its value, what kind of knowledge it is, and where it comes from."""
    values, pairs = dict(answer.workload.values), answer.workload.provenance
    rows = [cells(name, values.get(name, ""), provenance_kind(source), source) for name, source in pairs]
    return Table(("figure", "value", "kind", "source"), tuple(rows))


def sensitivity_table(rows: Sequence[SensitivityRow]) -> Table:
    """What each betterment of the cluster is worth."""
    shown = [
        cells(
            row.change,
            ("-", None) if row.step_s is None else (format_seconds(row.step_s), row.step_s),
            ("-", None) if row.gain is None else (f"{row.gain:.2%}", row.gain),
            row.plan_changes,
        )
        for row in rows
    ]
    return Table(("change", "step", "gain", "plan"), tuple(shown), frozenset({1, 2}), COMPUTED)


# ------------------------------------------------------------------------------------------- for a spreadsheet


def plan_records(
    answer: Answer, *, memory: Sequence[MemoryCurve] = (), sensitivity: Sequence[SensitivityRow] = ()
) -> dict[str, list[Record]]:
    """Records by the name of their file; those of one name have equal keys."""
    if answer.result.best is None:
        return {}
    found: dict[str, list[Record]] = {
        "candidates": [_candidate_record(answer, name, item) for name, item in named_candidates(answer)],
        "memory": _memory_records(answer),
    }
    if memory:
        found[MOMENTS] = [
            {"rank": rank, "time_s": time_s, "allocated_bytes": size}
            for rank, curve in enumerate(memory)
            for time_s, size in curve
        ]
    if sensitivity:
        found["sensitivity"] = [asdict(row) for row in sensitivity]
    return found


def record_files(records: dict[str, list[Record]]) -> dict[str, str]:
    """Each list of records as a CSV file, and all but those of a moment each as one JSON file; none without records."""
    if not records:
        return {}
    lists = {name: rows for name, rows in records.items() if name != MOMENTS}
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **lists}
    files = {f"{name}.csv": records_csv(rows) for name, rows in records.items()}
    return {**files, "rows.json": json.dumps(content, indent=1, allow_nan=False) + "\n"}


def _candidate_record(answer: Answer, name: str, item: Candidate) -> Record:
    estimate, plan = item.estimate, item.plan
    peak_bytes, limit_bytes = tightest_bytes(estimate)
    low_s, high_s = step_interval_s(item)
    cost = cost_usd(answer, item)
    return {
        "name": name,
        **mesh_values(plan.mesh),
        "recompute": plan.recompute,
        "precision": plan.precision,
        "fits": estimate.fits,
        "chance_short_of_memory": chance_short(estimate),
        "step_s": estimate.step_s,
        "step_low_s": low_s,
        "step_high_s": high_s,
        "bound_s": item.bound_s,
        "samples_per_s": samples_per_s(item),
        "tokens_per_s": tokens_per_s(answer.workload, item),
        "mfu": mfu(answer.workload, item),
        "peak_bytes": peak_bytes,
        "limit_bytes": limit_bytes,
        "cost_usd": None if cost is None else cost[0],
        "cost_of": None if cost is None else cost[1],
        **{field: getattr(estimate.breakdown, field) for field, _ in BREAKDOWN_LABELS},
        "slowest_rank": estimate.slowest_rank,
    }


def _memory_records(answer: Answer) -> list[Record]:
    estimate = answer.best.estimate
    return [
        {
            "rank": rank,
            **{f"{part}_bytes": size for part, size in parts},
            "allocated_bytes": estimate.allocated_bytes[rank],
            "reserved_bytes": estimate.allocator_bytes[rank],
            "needed_bytes": estimate.needed_bytes[rank],
            "limit_bytes": estimate.limit_bytes(rank),
        }
        for rank, parts in enumerate(estimate.memory_parts_bytes)
    ]
