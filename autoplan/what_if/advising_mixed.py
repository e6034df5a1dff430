"""Advise on a mixed cluster: should its groups train one model together, or the best of them alone?

gain     = samples/s of all groups together / samples/s of the fastest group alone
apart    = samples/s of all groups together / sum of the samples/s of each alone, on trainings of their own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from autoplan.errors import UsageError
from autoplan.hardware.cluster import groups_alone, load_cluster
from autoplan.plain_text import count
from autoplan.planning.problem import default_global_batch
from autoplan.units import format_seconds
from autoplan.what_if.advice_facts import LITTLE, STOPPED, Advice, AdviceAnswer, as_fast_as, speed_up
from autoplan.what_if.asking import Progress, ask, continued
from autoplan.what_if.question import Question
from autoplan.what_if.rows import WhatIfRow, off_by


def advise_mixed(
    question: Question,
    *,
    deadline_s: float | None,
    n_jobs: int,
    today: date | None,
    progress: Progress,
) -> AdviceAnswer:
    """The groups together and each alone, on the same global batch.

    Raises: UsageError for other hardware beside the cluster.
    """
    if len(question.hw) > 1:
        raise UsageError.of("--hw", found=", ".join(question.hw), expected="one cluster", fix="name one file")
    file = question.hw[0]
    clusters = [(file, 1), *groups_alone(file)]
    batches = question.global_batches or (default_global_batch(load_cluster(file).n_devices),)
    rows: list[WhatIfRow] = []
    for name, n_hosts in clusters:
        asked = replace(question, hw=(name,), hosts=(n_hosts,), global_batches=batches)
        told = continued(progress, n_before=len(rows), n_all=len(clusters))
        answer = ask(asked, n_jobs=n_jobs, today=today, progress=told)
        if answer.sweep.is_interrupted:
            return AdviceAnswer(STOPPED, (), tuple(rows), is_interrupted=True)
        rows += answer.rows
    rules = mixed_rules(rows[0], rows[1:], deadline_s=deadline_s)
    return AdviceAnswer("; ".join(rule.advice for rule in rules if rule.applies), rules, tuple(rows))


def mixed_rules(together: WhatIfRow, alone: Sequence[WhatIfRow], *, deadline_s: float | None) -> tuple[Advice, ...]:
    """What the rows say: all groups together, and each alone."""
    known = [row for row in alone if row.goodput is not None]
    best = max(known, key=lambda row: speed_up(row, known[0]) or 0.0, default=None)
    gain = None if best is None else speed_up(together, best)
    return (
        _train_together(together, best, gain),
        _train_apart(together, known, gain),
        _late(together, best, deadline_s),
    )


def _train_together(together: WhatIfRow, best: WhatIfRow | None, gain: float | None) -> Advice:
    idle = "" if not together.n_idle_devices else f"; {count(together.n_idle_devices, 'device')} of the cluster idle"
    figures = together.detail or f"{together.plan}{idle}"
    if best is None or gain is None:
        is_possible = together.step_s is not None
        text = "train on all groups together: no group alone holds it" if is_possible else _not_together(together, best)
        return Advice("groups of different devices", True, text, figures)
    name = f"{best.n_hosts} x {best.hardware}"
    if gain > 1.0 + LITTLE:
        text = f"train on all groups together: {gain:.2f} times as fast as {name} alone"
        if as_fast_as(best, than=together):
            assert together.step_s is not None and best.step_s is not None
            steps = f"{format_seconds(best.step_s)} and {format_seconds(together.step_s)} a step"
            text += f", or no faster: {steps}, off by {off_by(together)}"
    else:
        text = f"train on {name} alone, and give the other hosts other work: together is {gain:.2f} times as fast"
    return Advice("groups of different devices", True, text, f"together: {figures}; {name}: {best.plan}")


def _not_together(together: WhatIfRow, best: WhatIfRow | None) -> str:
    """What to do where all groups together have no plan: what cannot be asked of one of them is no lack of memory."""
    alone = "" if best is None else f"train on {best.n_hosts} x {best.hardware} alone"
    if together.status != "unusable":
        return alone or "nothing fits: add hosts"
    shared = _shared_precision(together)
    ways = [f"pass --precision {shared}" if shared else "", alone]
    return ", or ".join(filter(None, ways)) or "ask for something else: the groups cannot train it so"


def _shared_precision(together: WhatIfRow) -> str:
    """The fastest precision that all groups have, where one of them lacks that asked for; "" else."""
    peaks = [dict(group.device.peak_flops_per_s) for group in load_cluster(together.hardware).groups]
    shared = [name for name in peaks[0] if all(name in own for own in peaks)]
    if together.precision in shared:
        return ""
    return max(shared, key=lambda name: min(own[name] for own in peaks), default="")


def _train_apart(together: WhatIfRow, known: Sequence[WhatIfRow], gain: float | None) -> Advice:
    """Several trainings, one on each group, do more than one on all."""
    shares = [found for row in known if (found := speed_up(row, together))] if gain is not None else []
    total = sum(shares)
    return Advice(
        "there are several trainings to run",
        total > 1.0 + LITTLE,
        f"run one on each group: {total:.2f} times the samples of one on all",
        "not all groups have a plan"
        if not shares
        else f"groups alone: {', '.join(f'{share:.2f}' for share in shares)} of the samples per second together",
    )


def _late(together: WhatIfRow, best: WhatIfRow | None, deadline_s: float | None) -> Advice:
    times = [row.train_s for row in (together, best) if row is not None and row.train_s is not None]
    return Advice(
        "all groups together miss the deadline",
        deadline_s is not None and min(times, default=deadline_s + 1.0) > deadline_s,
        "ask for a later deadline, more hosts, or fewer samples",
        "no deadline was given"
        if deadline_s is None
        else f"at best {format_seconds(min(times))}"
        if times
        else "no plan",
    )
