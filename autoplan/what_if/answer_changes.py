"""What would change a recommendation, without another search.

    changes    the price at which an alternative would be as good, the deadline or budget at which the best fails
    swings     a tornado: one assumption at a time goes to its low and its high end, the largest effect first

A swing of the price, or of the step, is of all clusters of the best hardware, between the ends of their intervals.
What else is assumed swings for all clusters at once, by the factors of `FACTORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoplan.search import GOOD_ENOUGH
from autoplan.units import format_seconds, format_usd
from autoplan.what_if.conditions import Condition, Reliability
from autoplan.what_if.rows import WhatIfRow

LOW, HIGH = "low", "high"
TOLERANCE = 0.02  # within a budget: of the time to train, what is not worth more money
MUCH_COST = 0.25  # of the answer's: how much less another one that may be as fast must cost to be named
# Assumption -> (factor, field): how far nobody would wonder to find it off.
FACTORS: Mapping[str, tuple[float, str]] = {
    "time between failures": (4.0, "device_mtbf_s"),
    "time to restart": (3.0, "restart_s"),
    "rate of saving checkpoints": (4.0, "checkpoint_bytes_per_s_per_host"),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """What is asked for: exactly one of a latest time and a most money."""

    deadline_s: float | None
    budget_usd: float | None

    def is_met(self, row: WhatIfRow) -> bool:
        """Whether a row has the totals, and they meet it."""
        return self.excess(row) is not None and (self.excess(row) or 0.0) <= 1.0

    def excess(self, row: WhatIfRow) -> float | None:
        """What the row takes / what is allowed; None without totals."""
        if row.train_s is None or row.cost_usd is None:
            return None
        return row.train_s / self.deadline_s if self.deadline_s is not None else row.cost_usd / (self.budget_usd or 1.0)

    def score(self, row: WhatIfRow) -> tuple[float, float, int]:
        """Lower is better: cost under a deadline, time within a budget."""
        assert row.train_s is not None and row.cost_usd is not None
        figures = (row.cost_usd, row.train_s) if self.deadline_s is not None else (row.train_s, row.cost_usd)
        return (*figures, row.n_devices)

    def ranked(self, rows: Iterable[WhatIfRow]) -> list[WhatIfRow]:
        """Those that meet it, the best first; within a budget that is the cheapest that is about as fast as any."""
        met = sorted((row for row in rows if self.is_met(row)), key=self.score)
        if self.budget_usd is None or not met:
            return met
        fast = (row for row in met if self.score(row)[0] <= (1.0 + TOLERANCE) * self.score(met[0])[0])
        best = min(fast, key=lambda row: (row.cost_usd, self.score(row)))
        return [best, *(row for row in met if row is not best)]

    def quickest(self, met: Sequence[WhatIfRow]) -> WhatIfRow:
        """Of those that take the least time, up to what a search leaves open, the one with the fewest devices."""
        least_s = min(row.train_s for row in met if row.train_s is not None)
        near = (row for row in met if row.train_s is not None and row.train_s * (1.0 - GOOD_ENOUGH) <= least_s)
        return min(near, key=lambda row: (row.n_devices, self.score(row)))

    def text(self) -> str:
        """`within 14 d`, `for at most 100,000 USD`."""
        if self.deadline_s is not None:
            return f"within {format_seconds(self.deadline_s)}"
        return f"for at most {format_usd(self.budget_usd or 0.0)}"


def much_cheaper(best: WhatIfRow, met: Iterable[WhatIfRow], limit: Limit) -> WhatIfRow | None:
    """Within a budget the cheapest that may be as fast as the best, by its interval, where it costs much less."""
    if limit.budget_usd is None or best.train_s_interval is None or best.cost_usd is None:
        return None
    up_to_s, up_to_usd = best.train_s_interval[1], (1.0 - MUCH_COST) * best.cost_usd
    near = (row for row in met if row.train_s is not None and row.train_s <= up_to_s)
    cheapest = min(near, key=lambda row: (row.cost_usd, row.train_s), default=best)
    return cheapest if cheapest.cost_usd is not None and cheapest.cost_usd <= up_to_usd else None


@dataclass(frozen=True, slots=True)
class Swing:
    """The answer when one assumption goes to its low, and to its high end.

    Attributes:
        assumption: in words, with how far it goes.
        low, high: what the best cluster takes then: US dollars under a deadline, seconds within a budget.
        low_answer, high_answer: the cluster that is best then; None where none meets what was asked.
    """

    assumption: str
    low: float
    high: float
    low_answer: str | None
    high_answer: str | None


def varied(condition: Condition) -> tuple[Condition, ...]:
    """The condition, and those in which one thing is assumed to be lower or higher."""
    found = [condition]
    for name, (factor, field) in FACTORS.items():
        for end, by in ((LOW, 1.0 / factor), (HIGH, factor)):
            value = getattr(condition.reliability, field) * by
            reliability: Reliability = replace(condition.reliability, **{field: value})
            found.append(replace(condition, words=f"{name}: {end}", reliability=reliability))
    return tuple(found)


def swings(
    best: WhatIfRow, rows: Sequence[WhatIfRow], others: Mapping[str | None, Sequence[WhatIfRow]], limit: Limit
) -> tuple[Swing, ...]:
    """Of the price and the step of the best, and of what `others` holds: rows by the words of `varied`."""
    found = [
        _swing(
            f"price of {best.hardware}", best, [_each(rows, best, partial(_dearer, end=end)) for end in (0, 1)], limit
        ),
        _swing(
            f"step on {best.hardware}", best, [_each(rows, best, partial(_slower, end=end)) for end in (0, 1)], limit
        ),
    ]
    for name, (factor, _) in FACTORS.items():
        pair = [others.get(f"{name}: {end}", ()) for end in (LOW, HIGH)]
        if all(pair):
            found.append(_swing(f"{name}, / {factor:g} and x {factor:g}", best, pair, limit))
    return tuple(sorted((swing for swing in found if swing is not None), key=_size, reverse=True))


def _swing(name: str, best: WhatIfRow, pair: Sequence[Sequence[WhatIfRow]], limit: Limit) -> Swing | None:
    figures, answers = [], []
    for rows in pair:
        own = next((row for row in rows if _key(row) == _key(best)), None)
        if own is None or own.train_s is None or own.cost_usd is None:
            return None
        first = next(iter(limit.ranked(rows)), None)
        figures.append(limit.score(own)[0])
        answers.append(None if first is None else cluster_name(first))
    return Swing(name, figures[0], figures[1], answers[0], answers[1])


def _each(
    rows: Sequence[WhatIfRow], best: WhatIfRow, other: Callable[[WhatIfRow], WhatIfRow | None]
) -> list[WhatIfRow]:
    """The rows, with others for those of the same hardware; without any where one of them is unknown."""
    found = [other(row) if row.hardware == best.hardware and row.cost_usd is not None else row for row in rows]
    known = [row for row in found if row is not None]
    return known if len(known) == len(found) else []


def _dearer(row: WhatIfRow, *, end: int) -> WhatIfRow | None:
    """The row at one end of its price; None where it has one price only."""
    usd = row.cost_usd_interval
    return None if usd is None or usd[0] == usd[1] else replace(row, cost_usd=usd[end])


def _slower(row: WhatIfRow, *, end: int) -> WhatIfRow | None:
    """The row where the whole run takes as long as at one end of its interval, and costs as much more."""
    if row.train_s_interval is None or row.train_s is None or row.cost_usd is None:
        return None
    train_s = row.train_s_interval[end]
    return replace(row, train_s=train_s, cost_usd=row.cost_usd * train_s / row.train_s)


def _key(row: WhatIfRow) -> tuple[str, int]:
    return row.hardware, row.n_hosts


def _size(swing: Swing) -> float:
    return abs(swing.high - swing.low)


def swing_cells(swing: Swing, best: WhatIfRow, limit: Limit) -> tuple[str, str, str, str]:
    """Of a table: the assumption, both ends, and what the answer becomes."""
    text: Callable[[float], str] = format_usd if limit.deadline_s is not None else format_seconds
    said = []
    for end, answer in ((LOW, swing.low_answer), (HIGH, swing.high_answer)):
        if answer != cluster_name(best):
            said.append(f"{end}: {answer or 'none meets it'}")
    return swing.assumption, text(swing.low), text(swing.high), "; ".join(said) or "same answer"


def changes(
    best: WhatIfRow | None, alternatives: Sequence[WhatIfRow], nearest: WhatIfRow | None, limit: Limit
) -> tuple[str, ...]:
    """What would change the answer, one sentence each."""
    if best is None:
        return () if nearest is None else (_missed(nearest, limit),)
    texts = [_margin(best, limit)]
    if best.train_s_interval is not None and limit.deadline_s is not None:
        worst_s = best.train_s_interval[1]
        verdict = (
            "still meets it" if worst_s <= limit.deadline_s else "then misses it: take more hosts, or measure first"
        )
        texts.append(f"at the slow end of its interval it takes {format_seconds(worst_s)} and {verdict}")
    texts += [text for row in alternatives if (text := _break_even(best, row, limit))]
    return tuple(texts)


def _margin(best: WhatIfRow, limit: Limit) -> str:
    assert best.train_s is not None and best.cost_usd is not None
    if limit.deadline_s is not None:
        return f"a deadline below {format_seconds(best.train_s)} needs another cluster"
    return f"a budget below {format_usd(best.cost_usd)} needs another cluster"


def _missed(nearest: WhatIfRow, limit: Limit) -> str:
    assert nearest.train_s is not None and nearest.cost_usd is not None
    if limit.deadline_s is not None:
        return f"a deadline of {format_seconds(nearest.train_s)} would be met by {cluster_name(nearest)}"
    return f"a budget of {format_usd(nearest.cost_usd)} would do, on {cluster_name(nearest)}"


def _break_even(best: WhatIfRow, other: WhatIfRow, limit: Limit) -> str:
    """At which price the other one would be as good; only prices of other devices are free to move."""
    if limit.deadline_s is None or other.hardware == best.hardware:
        return ""
    assert best.cost_usd is not None and other.device_hours is not None and other.usd_per_device_hour is not None
    usd = best.cost_usd / other.device_hours
    return f"{other.hardware} would be as cheap at {usd:.2f} USD per device-hour, not {other.usd_per_device_hour:.2f}"


def cluster_name(row: WhatIfRow) -> str:
    """`2 x dgx_h100_x8 (16 devices)`."""
    return f"{row.n_hosts} x {row.hardware} ({row.n_devices} devices)"
