"""Advice as text: what to do, why, what was looked at beside it, and the clusters the figures are of."""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.plain_text import WIDTH, folded
from autoplan.what_if.advice_rules import Advice, AdviceAnswer
from autoplan.what_if.row_text import whatif_table

INDENT = 4


def advice_text(answer: AdviceAnswer, *, width: int = WIDTH) -> str:
    """The rules that apply as numbered advice, then the others, then the rows."""
    applying = [rule for rule in answer.rules if rule.applies]
    others = [rule for rule in answer.rules if not rule.applies]
    parts = [_advice(applying, width=width) if applying else folded(f"Advice: {answer.verdict}.", width=width)]
    if others:
        parts.append("\n".join(["What else was looked at, and is not so", *_others(others, width=width)]))
    if answer.rows:
        parts.append(whatif_table(answer.rows, width=width).rstrip())
    return "\n\n".join(parts) + "\n"


def _advice(rules: Iterable[Advice], *, width: int) -> str:
    lines = ["Advice"]
    for number, rule in enumerate(rules, start=1):
        lines.append(folded(f"{number:>2}. {rule.advice}", width=width, indent=INDENT))
        lines.append(folded(f"    {rule.situation}: {rule.figures}", width=width, indent=INDENT))
    return "\n".join(lines)


def _others(rules: Iterable[Advice], *, width: int) -> Iterable[str]:
    return (folded(f"- {rule.situation}: {rule.figures}", width=width, indent=INDENT) for rule in rules)
