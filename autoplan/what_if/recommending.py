"""Recommend: of the clusters looked at, the cheapest that meets a deadline, or the fastest within a budget.

    looked at   each hardware with 1, 2, 3, 4, 6, 8, 12, ... hosts; under a deadline from `least_hosts` on, the fewest
                whose peak FLOPs could meet it, until two more than the first that does; under a budget all
    best        min cost among those that meet the deadline; among those within the budget min time, or the cheapest
                that takes at most `TOLERANCE` longer
    alternatives   the best of each other hardware, then other sizes of the same that are faster or cheaper by `WORTH`
    searched    quickly; under search "full" the most promising again in full
    idle hosts  a plan that leaves whole hosts idle is one of the fewer hosts that it uses, and counts as that alone

That no cluster looked at meets what was asked is no proof that none does: the answer says what was looked at.

What would change the answer follows without another search; see `answer_changes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from autoplan.analysis.model_flops import flops_per_sample
from autoplan.answers.answer import tokens_per_sample
from autoplan.checks.options import parse_fix
from autoplan.errors import UsageError
from autoplan.hardware import HardwareProfile, hardware_names, load_hardware_profile
from autoplan.hardware.cluster import load_hardware
from autoplan.plain_text import count
from autoplan.planning.problem import default_global_batch
from autoplan.units import WALL_TIME_UNITS, parse_quantity
from autoplan.what_if.answer_changes import Limit, Swing, changes, much_cheaper, swings, varied
from autoplan.what_if.asking import Progress, ask, assumptions_of, clusters_of, continued, trace_all
from autoplan.what_if.points import QUICK_PLANS, combinations
from autoplan.what_if.prices import read_prices, rent_price
from autoplan.what_if.question import Question, check_single, checked_question
from autoplan.what_if.report_text import assumption_texts
from autoplan.what_if.rows import WhatIfRow
from autoplan.what_if.sweep import INTERRUPTED

# One batch for clusters of every size, since they train the same model: what `plan` takes on 64 devices.
DEFAULT_GLOBAL_BATCH = default_global_batch(64)
N_ALTERNATIVES = 3
WORTH = 0.01  # of time or cost: what another size of the same hardware must gain to be named
N_PAST_DEADLINE = 2  # host counts looked at beyond the first that meets the deadline
MAX_SECONDS = 1e12
MAX_USD = 1e15


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An answer; `best` is None when no cluster looked at meets what was asked.

    Attributes:
        max_hosts: the most that were asked for.
        passed_over: the fastest within the budget, where that is another one.
        much_cheaper: within the budget, one that may be as fast by the interval of the best, and costs much less.
        alternatives: the next best that meet it, of other hardware or another number of hosts.
        nearest: when nothing meets it, the cluster that misses it by least.
        n_looked_at: clusters.
        looked_at: which these are and how they were searched, one sentence each.
        changes: what would change the answer, one sentence each.
        swings: likewise, one assumption each, the largest effect first.
        assumptions: with their dates.
    """

    wanted: str
    max_hosts: int
    best: WhatIfRow | None
    passed_over: WhatIfRow | None
    alternatives: tuple[WhatIfRow, ...]
    nearest: WhatIfRow | None
    n_looked_at: int
    looked_at: tuple[str, ...]
    changes: tuple[str, ...]
    assumptions: tuple[str, ...]
    limit: Limit
    swings: tuple[Swing, ...] = ()
    is_interrupted: bool = False
    much_cheaper: WhatIfRow | None = None

    @property
    def is_beyond_peak_rates(self) -> bool:
        """Whether nothing was worth looking at: no cluster so large meets the deadline."""
        return self.n_looked_at == 0 and self.limit.deadline_s is not None and not self.is_interrupted


def recommend(
    question: Question,
    *,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    max_hosts: int = 256,
    n_jobs: int = 1,
    today: date | None = None,
    progress: Progress = lambda done, total: None,
) -> Recommendation:
    """The best cluster of `question.hw` with up to `max_hosts` hosts; `question.hosts` is not looked at.

    Raises: UsageError unless exactly one of deadline and budget, and tokens or samples, are given, and for hardware
        without a price; InputError for what a what-if cannot be asked.
    """
    limit = _limit(deadline_s, budget_usd)
    check_single(question, where="recommend")
    if question.n_tokens is None and question.n_samples is None:
        raise UsageError("recommend: found no amount\n  expected: --tokens or --samples\n  fix: --tokens 300e9")
    today = today or date.today()
    question = checked_question(question, where="recommend")
    batch_source = "given" if question.global_batches else "default"
    (batch,) = question.global_batches or (DEFAULT_GLOBAL_BATCH,)
    question = replace(question, global_batches=(batch,))
    _check_prices(question, today)
    asked = replace(question, conditions=varied(question.conditions[0]))
    looked_at, is_interrupted = _look(asked, limit, max_hosts=max_hosts, n_jobs=n_jobs, today=today, progress=progress)
    if question.search == "full" and not is_interrupted:
        looked_at, is_interrupted = _again(asked, looked_at, limit, n_jobs=n_jobs, today=today)
    found = _without_idle_hosts(looked_at)
    rows = _as_assumed(found)
    met = limit.ranked(rows)
    priced = [row for row in rows if limit.excess(row) is not None]
    nearest = None if met else min(priced, key=lambda row: limit.excess(row) or 0.0, default=None)
    best, quickest = (met[0], limit.quickest(met)) if met else (None, None)
    return Recommendation(
        wanted=limit.text(),
        max_hosts=max_hosts,
        best=best,
        passed_over=quickest if best and quickest and limit.score(quickest) < limit.score(best) else None,
        alternatives=_alternatives(met),
        nearest=nearest,
        n_looked_at=len(_as_assumed(looked_at)),
        looked_at=_looked_at(
            question, _as_assumed(looked_at), limit, max_hosts=max_hosts, is_interrupted=is_interrupted
        ),
        changes=changes(best, _alternatives(met), nearest, limit),
        limit=limit,
        swings=() if best is None else swings(best, rows, _by_condition(found), limit),
        assumptions=(
            f"global batch {batch} ({batch_source}) on every cluster, since all train the same model",
            f"at most {max_hosts} hosts of each kind",
            *assumption_texts(assumptions_of(question, today=today)),
        ),
        is_interrupted=is_interrupted,
        much_cheaper=None if best is None else much_cheaper(best, met, limit),
    )


def _as_assumed(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """The rows without those in which something else is assumed."""
    return tuple(row for row in rows if not row.condition)


def _without_idle_hosts(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """The rows whose plans use every host that is paid for."""
    return tuple(row for row in rows if not row.n_idle_hosts)


def _by_condition(rows: Sequence[WhatIfRow]) -> dict[str | None, list[WhatIfRow]]:
    found: dict[str | None, list[WhatIfRow]] = {}
    for row in rows:
        found.setdefault(row.condition, []).append(row)
    return found


def candidates() -> tuple[str, ...]:
    """Shipped hardware that has a price, of equal devices the one with most of them in a host."""
    profiles = [load_hardware_profile(name) for name in hardware_names()]
    shipped = read_prices()
    best: dict[str, HardwareProfile] = {}
    for hardware in profiles:
        device = hardware.device.name
        price = rent_price(
            device,
            "on_demand",
            given_usd=None,
            own=None,
            shipped=shipped,
            profile_usd=hardware.price_usd_per_device_hour,
        )
        other = best.get(device)
        if price is not None and (other is None or other.n_devices_per_host < hardware.n_devices_per_host):
            best[device] = hardware
    return tuple(hardware.name for hardware in best.values())


def host_counts(least: int, most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two and the middle between them, from the last up to `least` on."""
    counts = sorted({2**k for k in range(21)} | {3 * 2**k for k in range(20)})
    first = max((count for count in counts if count <= least), default=1)
    return tuple(count for count in counts if first <= count <= most)


def least_hosts(hardware: HardwareProfile, *, precision: str, n_flops: float, deadline_s: float) -> int:
    """Hosts whose peak rate does the work in time; none can do it with fewer."""
    peak = dict(hardware.device.peak_flops_per_s).get(precision)
    return 1 if peak is None else max(1, math.ceil(n_flops / (peak * hardware.n_devices_per_host * deadline_s)))


def parse_deadline(text: str) -> float:
    """Seconds of `14d`, `36 h`.

    Raises: UsageError for what is no time.
    """
    try:
        seconds = parse_quantity(text, WALL_TIME_UNITS)
    except ValueError as error:
        raise UsageError(f"--deadline: found {text!r}\n  expected: a time such as 14d or 36h\n  fix: {error}") from None
    return seconds


def parse_budget(text: str) -> float:
    """US dollars of `100000`, `100000 USD`.

    Raises: UsageError for what is no amount.
    """
    try:
        return parse_quantity(text.replace(",", ""), {"": 1.0, "USD": 1.0})
    except ValueError as error:
        raise UsageError.of(
            "--budget", found=text, expected="US dollars, above 0", fix="write --budget 100000, for instance"
        ) from error


def _limit(deadline_s: float | None, budget_usd: float | None) -> Limit:
    if (deadline_s is None) == (budget_usd is None):
        raise UsageError(
            "recommend: expected one of --deadline and --budget\n  fix: --deadline 14d for the cheapest cluster that"
            " meets it, --budget 100000 for the fastest"
        )
    for name, value, most in (("--deadline", deadline_s, MAX_SECONDS), ("--budget", budget_usd, MAX_USD)):
        if value is not None and not 0.0 < value <= most:
            raise UsageError(f"{name}: found {value:g}\n  expected: above 0, up to {most:g}")
    return Limit(deadline_s, budget_usd)


def _check_prices(question: Question, today: date) -> None:
    given = assumptions_of(question, today=today)
    rent = given.condition.money.rent
    for name, _ in clusters_of(question.hw, (1,)):
        hardware = load_hardware(name)
        if not isinstance(hardware, HardwareProfile):
            raise UsageError.of(
                "hardware", found=name, expected="one kind of host", fix="compare it with autoplan whatif"
            )
        price = rent_price(
            hardware.device.name,
            rent,
            given_usd=dict(question.given_usd).get(name),
            own=given.prices,
            shipped=given.shipped,
            profile_usd=hardware.price_usd_per_device_hour,
        )
        if price is None:
            raise UsageError(
                f"hardware {name}: found no {rent.replace('_', '-')} price of {hardware.device.name}\n"
                f"  expected: a price, since the answer is a price\n  fix: --price {name}=2.50, or --prices FILE"
            )


def _look(
    question: Question,
    limit: Limit,
    *,
    max_hosts: int,
    n_jobs: int,
    today: date,
    progress: Progress,
) -> tuple[tuple[WhatIfRow, ...], bool]:
    """Rows of the clusters worth looking at, searched quickly, two host counts of each hardware at a time."""
    left = {name: list(_counts(question, name, limit, max_hosts)) for name in question.hw}
    done: dict[str, list[WhatIfRow]] = {name: [] for name in question.hw}
    n_done, n_all = 0, sum(map(len, left.values()))
    while any(left.values()):
        for name, counts in left.items():
            if not counts:
                continue
            batch, left[name] = counts[: 2 * n_jobs], counts[2 * n_jobs :]
            asked = replace(question, hw=(name,), hosts=tuple(batch), search="quick")
            told = continued(progress, n_before=n_done, n_all=n_all)
            answer = ask(asked, n_jobs=n_jobs, today=today, progress=told)
            done[name] += answer.rows
            n_done += len(batch)
            if answer.sweep.is_interrupted:
                return tuple(row for rows in done.values() for row in rows), True
            if _is_enough(_as_assumed(done[name]), limit):
                n_all -= len(left[name])
                left[name] = []
    return _on_fewer_hosts(question, [row for rows in done.values() for row in rows], n_jobs=n_jobs, today=today)


def _on_fewer_hosts(
    question: Question, rows: Sequence[WhatIfRow], *, n_jobs: int, today: date
) -> tuple[tuple[WhatIfRow, ...], bool]:
    """The rows, and the plan of each that leaves hosts idle on the others alone, where none there is faster."""
    found = {(row.hardware, row.n_hosts, row.condition): row for row in rows}
    for row in _as_assumed(rows):
        if not row.n_idle_hosts or row.fix is None:
            continue
        fix = dict(question.options.fix) | dict(parse_fix([row.fix]))
        one = replace(question, hw=(row.hardware,), hosts=(row.n_hosts - row.n_idle_hosts,))
        one = replace(one, options=replace(question.options, fix=tuple(fix.items())))
        answer = ask(one, n_jobs=n_jobs, today=today)
        if answer.sweep.is_interrupted:
            return tuple(found.values()), True
        for own in answer.rows:
            key = (own.hardware, own.n_hosts, own.condition)
            found[key] = _faster(own, found.get(key))
    names = list(dict.fromkeys(row.hardware for row in rows))
    return tuple(sorted(found.values(), key=lambda row: (names.index(row.hardware), row.n_hosts))), False


def _faster(row: WhatIfRow, before: WhatIfRow | None) -> WhatIfRow:
    if before is None or before.step_s is None:
        return row
    return row if row.step_s is not None and row.step_s < before.step_s else before


def _counts(question: Question, name: str, limit: Limit, max_hosts: int) -> tuple[int, ...]:
    if limit.deadline_s is None:
        return host_counts(1, max_hosts)
    hardware = load_hardware_profile(name)
    model = combinations(question.sweeps, fixed=question.overrides)[0]
    graph = next(iter(trace_all(question, [model]).values()))
    n_samples = question.n_samples
    n_tokens_per_sample = tokens_per_sample(graph)
    if question.n_tokens is not None and n_tokens_per_sample is not None:
        n_samples = question.n_tokens / n_tokens_per_sample
    assert n_samples is not None
    n_flops = n_samples * flops_per_sample(graph, rule_files=question.options.rules)
    precision = question.precisions[0]
    return host_counts(
        least_hosts(hardware, precision=precision, n_flops=n_flops, deadline_s=limit.deadline_s), max_hosts
    )


def _is_enough(rows: Sequence[WhatIfRow], limit: Limit) -> bool:
    """Whether more hosts of this kind are of no use: under a deadline dearer; within a budget beyond it for good."""
    met = [index for index, row in enumerate(rows) if limit.is_met(row)]
    if limit.deadline_s is not None:
        return bool(met) and len(rows) > met[0] + N_PAST_DEADLINE
    last = [row for row in rows if limit.excess(row) is not None][-N_PAST_DEADLINE:]
    rising = len(last) == N_PAST_DEADLINE and (last[0].cost_usd or 0.0) <= (last[1].cost_usd or 0.0)
    return rising and not any(limit.is_met(row) for row in last)


def _again(
    question: Question, rows: tuple[WhatIfRow, ...], limit: Limit, *, n_jobs: int, today: date
) -> tuple[tuple[WhatIfRow, ...], bool]:
    """The most promising rows searched in full, the others as they were, as are those that an interrupt left out."""
    priced = [row for row in _without_idle_hosts(_as_assumed(rows)) if limit.excess(row) is not None]
    met = limit.ranked(priced)
    missed = sorted((row for row in priced if not limit.is_met(row)), key=lambda row: limit.excess(row) or 0.0)
    promising = [*met[: 1 + N_ALTERNATIVES], *missed[: 1 if met else 2]]
    found: dict[tuple[str, int, str | None], WhatIfRow] = {}
    is_interrupted = False
    for row in promising:
        one = replace(question, hw=(row.hardware,), hosts=(row.n_hosts,))
        answer = ask(one, n_jobs=n_jobs, today=today)
        is_interrupted = answer.sweep.is_interrupted
        if is_interrupted:
            break
        found.update({(row.hardware, row.n_hosts, again.condition): again for again in answer.rows})
    searched = tuple(found.get((row.hardware, row.n_hosts, row.condition), row) for row in rows)
    if is_interrupted:
        return searched, True
    return _on_fewer_hosts(question, searched, n_jobs=n_jobs, today=today)


def _looked_at(
    question: Question, rows: Sequence[WhatIfRow], limit: Limit, *, max_hosts: int, is_interrupted: bool
) -> tuple[str, ...]:
    """The host counts of each hardware, why some has none, and what was searched."""
    texts = []
    for name in question.hw:
        own = [row for row in rows if row.hardware == name and row.status != INTERRUPTED]
        counts = [str(row.n_hosts) for row in own]
        none = "not looked at"
        if limit.deadline_s is not None and not is_interrupted:
            none += f": the peak rate of {count(max_hosts, 'host')} does not meet the deadline"
        refused = "" if any(row.step_s for row in own) else next((f": {row.detail}" for row in own if row.detail), "")
        hosts = "host" if counts == ["1"] else "hosts"
        texts.append(f"{name}: {', '.join(counts)} {hosts}{refused}" if counts else f"{name}: {none}")
    how = f"{QUICK_PLANS}, each for a short time"
    again = "; the most promising again, of all plans" if question.search == "full" else "; --search full looks at more"
    return (*texts, how + again)


def _alternatives(met: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """The best of each other hardware first, then other sizes of the same."""
    if not met:
        return ()
    firsts: dict[str, WhatIfRow] = {}
    for row in met[1:]:
        if row.hardware != met[0].hardware:
            firsts.setdefault(row.hardware, row)
    others = [row for row in met[1:] if row.hardware == met[0].hardware and _gains(row, met[0])]
    return tuple([*firsts.values(), *others][:N_ALTERNATIVES])


def _gains(row: WhatIfRow, best: WhatIfRow) -> bool:
    """Whether a row is faster or cheaper than the best by enough to be named."""
    pairs = ((row.train_s, best.train_s), (row.cost_usd, best.cost_usd))
    return any(own is not None and than is not None and own < (1.0 - WORTH) * than for own, than in pairs)
