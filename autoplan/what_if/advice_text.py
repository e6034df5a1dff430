"""Advice as text: what to do, why, what was looked at beside it, and the clusters the figures are of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoplan.plain_text import WIDTH, folded
from autoplan.what_if.advice_facts import Advice, AdviceAnswer, speed_up
from autoplan.what_if.advice_rules import WORTH
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import WhatIfRow

INDENT = 4


def advice_text(answer: AdviceAnswer, *, width: int = WIDTH) -> str:
    """The rules that apply as numbered advice, then the others, then the rows."""
    applying = [rule for rule in answer.rules if rule.applies]
    others = [rule for rule in answer.rules if not rule.applies]
    parts = [_advice(applying, width=width) if applying else folded(f"Advice: {answer.verdict}.", width=width)]
    if others:
        parts.append("\n".join(["What else was looked at, and is not so", *_others(others, width=width)]))
    if answer.rows:
        parts += _clusters(answer.rows, width=width)
    return "\n\n".join(parts) + "\n"


def _advice(rules: Iterable[Advice], *, width: int) -> str:
    lines = ["Advice"]
    for number, rule in enumerate(rules, start=1):
        lines.append(folded(f"{number:>2}. {rule.advice}", width=width, indent=INDENT))
        lines.append(folded(f"    {rule.situation}: {rule.figures}", width=width, indent=INDENT))
    return "\n".join(lines)


def _others(rules: Iterable[Advice], *, width: int) -> Iterable[str]:
    return (folded(f"- {rule.situation}: {rule.figures}", width=width, indent=INDENT) for rule in rules)


def _clusters(rows: Sequence[WhatIfRow], *, width: int) -> Iterable[str]:
    """The table of the clusters that gain something over smaller ones; the others are one line."""
    shown = worth_showing(rows)
    yield whatif_table(shown, width=width).rstrip()
    left_out = [row for row in rows if row not in shown]
    if left_out:
        sizes: dict[str, list[str]] = {}
        for row in left_out:
            sizes.setdefault(row.hardware, []).append(str(row.n_hosts))
        names = "; ".join(f"{', '.join(counts)} x {name}" for name, counts in sizes.items())
        why = f"Left out, as less than {WORTH:.0%} faster than a smaller cluster"
        n_idle = sum(bool(row.n_idle_devices) for row in left_out)
        idle = f"; {n_idle} of these {len(left_out)} would leave devices idle" if n_idle else ""
        yield folded(f"{why}: {names}{idle}.", width=width)


def worth_showing(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """Rows without those that are hardly faster than one with as many devices or fewer; those without a plan stay."""
    kept: list[WhatIfRow] = []
    best: WhatIfRow | None = None
    for row in sorted(rows, key=lambda row: (row.n_devices, row.n_idle_devices or 0)):
        gain = None if best is None else speed_up(row, best)
        if gain is None or gain >= 1.0 + WORTH:
            kept.append(row)
            best = best if row.goodput is None else row
    return tuple(row for row in rows if row in kept)
