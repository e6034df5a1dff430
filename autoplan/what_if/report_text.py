"""The whole answer of a what-if as text: its rows, how they were searched, and what they rest on, with dates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoplan.options import AS_COMPUTED
from autoplan.plain_text import WIDTH, count, percent
from autoplan.units import GB, SECONDS_PER_HOUR, format_seconds
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.points import QUICK_PLANS
from autoplan.what_if.row_text import bullets, names_of, whatif_table
from autoplan.what_if.rows import Assumptions, WhatIfRow, may_be_far_off, share_above_bound


def whatif_report(answer: WhatIf, *, search: str, width: int = WIDTH) -> str:
    """The table, and what it rests on."""
    sweep = answer.sweep
    searched = f"{QUICK_PLANS}; --search full looks at all schedules" if search == "quick" else "all plans"
    notes = [
        "; ".join([f"searched: {searched}", *_worst_cases(answer.rows)]),
        f"{count(len(sweep.results), 'point')}, {sweep.n_kept} known before; {sweep.processor_s:.3g} processor seconds",
        *assumption_texts(answer.assumptions),
    ]
    return f"{whatif_table(answer.rows, width=width)}\nIt rests on\n{bullets(notes, width=width)}\n"


def _worst_cases(rows: Sequence[WhatIfRow]) -> Iterator[str]:
    """How far plans are from the best ones at the most; those that may be far off have names."""
    proved = [(more, row) for row in rows if (more := share_above_bound(row)) is not None]
    near = [more for more, row in proved if not may_be_far_off(row)]
    if near:
        yield f"a plan is at most {max(near):.1%} slower than any other of these"
    far = sorted(((more, row) for more, row in proved if may_be_far_off(row)), key=lambda pair: pair[0], reverse=True)
    names = names_of([row for _, row in far], among=rows)
    if names:
        others = f", those of {count(len(names) - 1, 'other point')} marked gap by less" if names[1:] else ""
        yield f"{'but ' if near else ''}that of {names[0]} by up to {far[0][0]:.0%}{others}"


def assumption_texts(given: Assumptions) -> tuple[str, ...]:
    """What the totals rest on, with dates."""
    reliability, money = given.condition.reliability, given.condition.money
    spares = f", {count(reliability.n_spare_hosts, 'spare host')}" if reliability.n_spare_hosts else ""
    checkpoint = (
        f"{reliability.checkpoint_bytes_per_s_per_host / GB:.3g} GB/s per host to save"
        if reliability.checkpoint_s is None
        else f"{format_seconds(reliability.checkpoint_s)} for a checkpoint"
    )
    prices = "prices: " + ", ".join(
        [
            *(["--price"] if given.given_usd else []),
            *([given.prices.where] if given.prices is not None else []),
            f"hardware profiles, and {given.shipped.where} (each with its date)",
        ]
    )
    sure = f"memory: plans that fit with {percent(given.memory_confidence)} confidence, by the errors of earlier peaks"
    return (
        *([sure] if given.memory_confidence > AS_COMPUTED else []),
        f"failures: one per device in {reliability.device_mtbf_s / SECONDS_PER_HOUR:,.0f} h, restart "
        f"{format_seconds(reliability.restart_s)}, {checkpoint}{spares}",
        f"{prices}; rent: {money.rent.replace('_', '-')}; totals as of {given.today.isoformat()}",
        "device-hours and cost are of whole hosts: of devices that a plan leaves idle and of spare hosts too",
        f"power: that of the board x load {money.load:.0%} x PUE {money.pue:g}"
        + ("" if money.host_power_w else ", hosts themselves not counted"),
    )
