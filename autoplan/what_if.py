"""What-if: the same model on other hardware, one whole search per row.

rows = hardware x host counts;  time to train = samples / (samples per second);  cost = device-hours x price
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.answer import Answer, device_hours, mfu, samples_per_s, step_interval_s, tokens_per_s
from autoplan.errors import UsageError
from autoplan.parallel_plan import SCHEMA_VERSION
from autoplan.report import describe_mesh, groups_text, rate_text, text_table
from autoplan.search import GOOD_ENOUGH
from autoplan.units import format_seconds


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One cluster; every figure that is unknown, or that no plan gives, is None.

    Attributes:
        status: of the search, or "unusable" when the cluster cannot train the model as asked; see `detail`.
        global_batch: samples of one step, the same for every row.
        train_s: seconds to train on the samples or tokens asked for.
        device_hours: of all devices of the cluster, idle ones included, since whole hosts are paid for.
        cost_usd: `device_hours` x the price of a device-hour.
        n_idle_devices: devices that the plan leaves idle.
        detail: why there is no plan.
    """

    hardware: str
    n_hosts: int
    n_devices: int
    global_batch: int
    status: str
    plan: str | None = None
    step_s: float | None = None
    step_s_interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    train_s: float | None = None
    device_hours: float | None = None
    cost_usd: float | None = None
    n_idle_devices: int | None = None
    detail: str = ""


def compare(
    clusters: Sequence[tuple[str, int]],
    *,
    solve: Callable[[str, int], Answer],
    global_batch: int,
    n_samples: float | None = None,
    n_tokens: float | None = None,
    prices_usd_per_device_hour: Mapping[str, float] | None = None,
) -> tuple[WhatIfRow, ...]:
    """One row per (hardware, number of hosts); `solve` is a whole search for one of them.

    Raises: UsageError when tokens are asked for and the model reads none.
    """
    prices = prices_usd_per_device_hour or {}
    unknown = sorted(set(prices) - {hardware for hardware, _ in clusters})
    if unknown:
        raise UsageError(f"--price {unknown[0]}: no such name among --hw\n  fix: use the name exactly as in --hw")
    rows = []
    for hardware, n_hosts in clusters:
        answer = solve(hardware, n_hosts)
        wanted = _n_samples(answer, n_samples=n_samples, n_tokens=n_tokens)
        workload = answer.workload
        n_hosts = workload.n_hosts if workload.groups else n_hosts
        row = WhatIfRow(hardware, n_hosts, workload.n_devices, global_batch, answer.result.status)
        rows.append(_filled(row, answer, n_samples=wanted, price=prices.get(hardware)))
    return tuple(rows)


def _n_samples(answer: Answer, *, n_samples: float | None, n_tokens: float | None) -> float | None:
    if n_tokens is None:
        return n_samples
    tokens_per_sample = answer.workload.tokens_per_sample
    if tokens_per_sample is None:
        raise UsageError("--tokens: this model does not read tokens\n  fix: use --samples instead")
    return n_tokens / tokens_per_sample


def _filled(row: WhatIfRow, answer: Answer, *, n_samples: float | None, price: float | None) -> WhatIfRow:
    workload, best = answer.workload, answer.result.best
    if best is None:
        return replace(row, detail=answer.result.why_nothing)
    price = workload.price_usd_per_device_hour if price is None else price
    hours = None if n_samples is None else device_hours(workload, best, n_samples=n_samples)
    return replace(
        row,
        plan=describe_mesh(best.plan.mesh) + (f"; ranks: {groups_text(best.plan)}" if best.plan.groups else ""),
        step_s=best.estimate.step_s,
        step_s_interval=step_interval_s(best),
        samples_per_s=samples_per_s(best),
        tokens_per_s=tokens_per_s(workload, best),
        mfu=mfu(workload, best),
        train_s=None if n_samples is None else n_samples / samples_per_s(best),
        device_hours=hours,
        cost_usd=None if hours is None or price is None else hours * price,
        n_idle_devices=workload.n_devices - best.plan.mesh.n_devices,
    )


def whatif_table(rows: Sequence[WhatIfRow]) -> str:
    """The rows as text, the fastest (of equal ones the smallest) and the cheapest marked, then the plan of each."""
    fastest = _fastest(rows)
    cheapest = min((row.cost_usd for row in rows if row.cost_usd is not None), default=None)
    header = ("hardware", "hosts", "step", "samples/s", "MFU", "time to train", "cost USD", "")
    cells = []
    for row in rows:
        marks = []
        if row is fastest:
            marks.append("fastest")
        elif row in _as_fast(rows):
            marks.append("as fast")
        if row.cost_usd is not None and row.cost_usd == cheapest:
            marks.append("cheapest")
        cells.append((*_cells(row), ", ".join(marks)))
    table = text_table(header, cells, right=frozenset({1, 2, 3, 4, 5, 6}))
    notes = [f"{row.hardware} x {row.n_hosts}: {row.plan or row.detail or row.status}{_idle(row)}" for row in rows]
    batch = f"global batch: {rows[0].global_batch} samples on every cluster" if rows else ""
    return table + "\n\n" + "\n".join([batch, *notes]) + "\n"


def _idle(row: WhatIfRow) -> str:
    return f"; {row.n_idle_devices} of {row.n_devices} devices idle" if row.n_idle_devices else ""


def _fastest(rows: Sequence[WhatIfRow]) -> WhatIfRow | None:
    """Of the rows that are as fast as any, the one with the fewest devices."""
    return min(_as_fast(rows), key=lambda row: row.n_devices, default=None)


def _as_fast(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """The rows than which none is faster, by more than a search leaves open."""
    most = max((row.samples_per_s or 0.0 for row in rows), default=0.0)
    return tuple(row for row in rows if row.samples_per_s and row.samples_per_s >= (1.0 - GOOD_ENOUGH) * most)


def whatif_to_dict(rows: Sequence[WhatIfRow]) -> dict[str, Any]:
    """The rows as JSON values."""
    names = tuple(WhatIfRow.__dataclass_fields__)
    return {"schema_version": SCHEMA_VERSION, "rows": [{name: getattr(row, name) for name in names} for row in rows]}


def _cells(row: WhatIfRow) -> tuple[str, ...]:
    if row.step_s is None or row.samples_per_s is None:
        return (row.hardware, str(row.n_hosts), row.status, "n/a", "n/a", "n/a", "n/a")
    return (
        row.hardware,
        str(row.n_hosts),
        format_seconds(row.step_s),
        rate_text(row.samples_per_s),
        "n/a" if row.mfu is None else f"{row.mfu:.0%}",
        "n/a" if row.train_s is None else format_seconds(row.train_s),
        "n/a" if row.cost_usd is None else f"{row.cost_usd:,.2f}" if row.cost_usd < 1000 else f"{row.cost_usd:,.0f}",
    )
