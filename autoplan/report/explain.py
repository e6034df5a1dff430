"""Why a plan, as plain text: what its time is spent on, why not another one, and what would change the decision.

plan.json                          explain_report
+ a search with a fix              why_not_report
+ searches on better clusters      sensitivity_report
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from autoplan.answers.answer import Answer
from autoplan.answers.comparisons import SensitivityRow, WhyNot
from autoplan.answers.intervals import is_host_bound
from autoplan.plain_text import WIDTH, page, text_table
from autoplan.plan_words import BREAKDOWN_LABELS, lanes_of
from autoplan.report.figures import figures_text
from autoplan.report.memory_parts import memory_parts_table
from autoplan.report.ops import beside_ops_text, ops_text
from autoplan.report.plan import (
    breakdown_table,
    describe_plan,
    fix_text,
    heading_parts,
    memory_table,
    notes_text,
    plan_report,
    rejections_text,
    shortage_text,
    slowest_text,
    status_text,
    tightest_bytes,
)
from autoplan.report.rivals import AS_FAST, memory_risk, one_device_text, where_python_is_waited_for
from autoplan.search import GOOD_ENOUGH
from autoplan.search.result import Candidate
from autoplan.units import GiB, format_bytes, format_seconds

ROUNDED_DIGITS = 0.0005  # likewise in three digits, at the least
ROUNDED = 0.005  # likewise beside whole per cents


def explain_report(answer: Answer) -> str:
    """Why this plan: where its time goes, what each alternative and each plain recipe would cost instead."""
    if answer.result.best is None:
        return plan_report(answer)
    lines = [*heading_parts(answer), "Why this plan", _reasons(answer)]
    for candidate in answer.result.alternatives[:1]:
        title = "Why not the next best"
        lines += [title, describe_plan(candidate.plan), _difference(answer.best, candidate, other_name="next best")]
    if answer.result.baselines:
        recipes = [_baseline_line(answer.best, item) for item in answer.result.baselines]
        lines += ["Plain recipes", "\n".join(recipes)]
    word = lanes_of(answer.best.plan).word
    texts = dict(zip(answer.workload.segment_names, answer.workload.segment_texts, strict=False))
    lines += [breakdown_table(answer.best.estimate, word=word), ops_text(answer.ops, texts), _beside_ops(answer)]
    lines += [memory_parts_table(answer.best.estimate, word=word), memory_table(answer.best.estimate, word=word)]
    lines.append(notes_text(answer.notes))
    lines += [rejections_text(answer.result), _sources(answer)]
    return page(lines)


def _beside_ops(answer: Answer) -> str:
    """What computing is not in the ops, where one rank runs all of them."""
    mesh, compute_s = answer.best.plan.mesh, answer.best.estimate.breakdown.compute_s
    if mesh.pp > 1 or mesh.shares:
        return ""
    return beside_ops_text(answer.ops, n_micro_batches=mesh.n_micro_batches, compute_s=compute_s)


def why_not_report(why: WhyNot) -> str:
    """The best plan that has the fix, against the chosen one; or why there is none."""
    lines = [f"Why not {fix_text(why.fix)}"]
    instead = why.instead.result.best
    if instead is None:
        lines += [status_text(why.instead), shortage_text(why.instead)]
    elif instead.plan == why.chosen.plan:
        lines += ["The chosen plan has it.", describe_plan(why.chosen.plan)]
    else:
        is_unsure = why.instead.result.unmet_confidence is not None
        verdict = _verdict(why.chosen, instead, is_unsure=is_unsure)
        lines += [f"{textwrap.fill(f'{verdict}:', WIDTH)}\n{describe_plan(instead.plan)}", status_text(why.instead)]
        lines += [_difference(why.chosen, instead, other_name="instead")]
        lines += [notes_text(why.notes, title="It trains otherwise than the chosen plan")]
        lines += [notes_text(why.left_out, title="Only the chosen plan is not as one process here")]
    return page(lines)


def _verdict(chosen: Candidate, instead: Candidate, *, is_unsure: bool) -> str:
    ratio = instead.estimate.step_s / chosen.estimate.step_s - 1.0
    if -GOOD_ENOUGH <= ratio < AS_FAST:
        return "The best plan found that has it is as fast"
    if ratio >= 1.0:
        return f"The best plan found that has it takes {1.0 + ratio:.1f} times as long"
    if ratio > 0:
        return f"The best plan found that has it is {ratio:.1%} slower"
    if is_unsure:
        return f"The best plan found that has it is {-ratio:.1%} faster, but memory is less sure to suffice"
    return f"It is {-ratio:.1%} faster than the chosen plan, which was not the fastest: plan again, with more time"


def sensitivity_report(rows: Sequence[SensitivityRow]) -> str:
    """One line per change of the cluster: what it gains, and whether another plan would be chosen."""
    cells = []
    for row in rows:
        step = "-" if row.step_s is None else format_seconds(row.step_s)
        gain = "-" if row.gain is None else f"{row.gain:.2%}"
        cells.append((row.change, step, gain, row.plan_changes))
    table = text_table(("what would change the decision", "step", "gain", ""), cells, right=frozenset({1, 2}))
    return table + "\n"


def _reasons(answer: Answer) -> str:
    """The two largest parts of the step, and what the plan saves against the best plain recipe that fits."""
    best = answer.best
    parts = sorted(
        ((getattr(best.estimate.breakdown, name), label) for name, label in BREAKDOWN_LABELS), key=lambda part: -part[0]
    )
    shares = ", ".join(f"{label} {part_s / best.estimate.step_s:.0%}" for part_s, label in parts[:2] if part_s > 0)
    lines = [describe_plan(best.plan), f"  its step is {shares}"]
    if "launch" in shares and is_host_bound(best.estimate.breakdown.launch_s, best.estimate.step_s):
        lines.append(f"  launch: the device waits for Python, {where_python_is_waited_for(best)}")
    peak_bytes, limit_bytes = tightest_bytes(best.estimate)
    lines.append(f"  it needs {peak_bytes / GiB:.1f} of {limit_bytes / GiB:.1f} GiB")
    fitting = [item for item in answer.result.baselines if item.estimate.fits]
    if fitting:
        recipe = min(fitting, key=lambda item: item.estimate.step_s)
        ratio = recipe.estimate.step_s / best.estimate.step_s
        same = "as fast as" if abs(ratio - 1.0) < ROUNDED else f"{ratio:.2f} x as fast as"
        lines.append(f"  it is {same} the best plain recipe that fits ({recipe.baseline})")
    elif answer.result.baselines:
        lines.append("  none of the plain recipes fits")
    if answer.result.one_device is not None and best.plan.mesh.n_devices > 1:
        alone = one_device_text(answer)
        lines.append(f"  {alone}" if answer.result.one_device.step_s is None else f"  it is {alone}")
    return "\n".join(lines)


def _difference(best: Candidate, other: Candidate, *, other_name: str) -> str:
    """Component by component, what the other plan costs more (+) or less (-); memory is that of the fullest rank."""
    estimates = (best.estimate, other.estimate)
    parts = [(label, *(getattr(item.breakdown, name) for item in estimates)) for name, label in BREAKDOWN_LABELS]
    parts = [part for part in parts if part[1] or part[2]] + [("step", *(item.step_s for item in estimates))]
    rows = [(label, format_seconds(a), format_seconds(b), _signed_seconds(a, b)) for label, a, b in parts]
    one, two = (slowest_text(item.estimate, word=lanes_of(item.plan).word) for item in (best, other))
    rows += [("slowest", one or "-", two or "-", "")] if one or two else []
    a, b = (max(item.needed_bytes) for item in estimates)
    rows.append(("peak memory", format_bytes(a), format_bytes(b), _signed(b - a, format_bytes)))
    return text_table(("", "chosen", other_name, "difference"), rows, right=frozenset({1, 2, 3}))


def _baseline_line(best: Candidate, item: Candidate) -> str:
    plan = describe_plan(item.plan).replace("\n", "\n      ")
    peak_bytes, limit_bytes = tightest_bytes(item.estimate)
    short_bytes = peak_bytes - limit_bytes
    if short_bytes > 0:
        return f"  {item.baseline}: does not fit, by {short_bytes / GiB:.1f} GiB\n      {plan}"
    slower = item.estimate.step_s / best.estimate.step_s - 1
    short = "".join(f"; {line}" for line in memory_risk(item.estimate)) if not item.estimate.fits else ""
    word = "slower" if slower > 0 else "faster"
    cost = "as fast" if abs(slower) < ROUNDED else f"{abs(slower):.0%} {word}"
    return f"  {item.baseline}: {format_seconds(item.estimate.step_s)} a step, {cost}{short}\n      {plan}"


def _sources(answer: Answer) -> str:
    if not answer.workload.provenance:
        return ""
    return "Sources\n\n" + figures_text(answer.workload.provenance, dict(answer.workload.values))


def _signed_seconds(before_s: float, after_s: float) -> str:
    """The difference; none where the digits that are shown of both cannot tell them apart."""
    is_seen = abs(after_s - before_s) > ROUNDED_DIGITS * max(before_s, after_s)
    return _signed(after_s - before_s if is_seen else 0.0, format_seconds)


def _signed(amount: float, text: Callable[[float], str]) -> str:
    sign = "+" if amount > 0 else "-" if amount < 0 else ""
    return sign + text(abs(amount))
