"""Answers as plain text: the plan table, the breakdown, memory, and what would make something fit.

Every function returns text of at most 80 columns, without colour codes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from autoplan.answers.answer import (
    Answer,
    chance_short,
    mfu,
    samples_per_s,
    segment_sources_text,
    short_words,
    step_errors,
    step_interval_s,
    tokens_per_s,
    trust,
    with_confidence,
)
from autoplan.answers.intervals import COMPUTED
from autoplan.parallel_plan import Estimate, Mesh, Plan
from autoplan.plain_text import WIDTH, count, folded, page, percent, rate_text, si_count, text_table
from autoplan.plan_words import (
    BREAKDOWN_LABELS,
    CAPTURED,
    COMPILED,
    KEPT,
    describe_mesh,
    dp_text,
    groups_text,
    kind_of_ranks,
    lanes_of,
    micro_batches_text,
    plan_rows,
    recompute_text,
    said_of_all,
    unlike_words,
    words_beside,
)
from autoplan.report.rivals import no_faster_text, rivals_text
from autoplan.report.stages import stages_text
from autoplan.search import GOOD_ENOUGH
from autoplan.search.fixed_values import is_as_fixed
from autoplan.search.meshes import (
    MAX_MICRO_BATCHES,
    data_parallel_degrees,
    is_deeper,
    least_micro_batch_size,
    nearest_shared_batch,
)
from autoplan.search.result import Candidate, Remedy, SearchResult
from autoplan.units import GiB, format_seconds, format_share

BAR_WIDTH = 24
N_REJECTED_SHOWN = 8
CHOSEN = "<- chosen"
KEPT_MARK = "*"  # of what is recomputed with its attention kept
_STATUS = {
    "optimal": "optimal: no other plan {of_these} is {better} (gap 0, proved)",
    "infeasible": "infeasible: it is proved that no plan {of_these} fits",
    "unknown": "unknown: stopped before any plan was found",
    "given": "given: this plan was scored as it is, nothing was searched",
}
_REASONS = {  # why a mesh is not the answer, after a number; see `Rejection.reason`
    "memory": "too large for the memory",
    "bound": "proved slower, without working out a plan",
    "slower": "worked out, and slower",
    "time limit": "not looked at",
}
_STOPPED = {  # why a search ended before its proof; see `SearchResult.stopped_by`
    "time limit": "stopped at the time limit",
    "interrupted": "was interrupted",
    "stalled": "ended with combinations whose bounds would not rise any further",
    "": f"ended when no plan could be better by more than {GOOD_ENOUGH:.1%}",
}


def plan_report(answer: Answer) -> str:
    """The whole result of a search: what was asked, the table of plans, and the chosen plan in detail."""
    parts = heading_parts(answer)
    if answer.result.best is None:
        parts += [shortage_text(answer), large_batch_text(answer), _remedies(answer), rejections_text(answer.result)]
    else:
        word = lanes_of(answer.best.plan).word
        parts += [plan_table(answer), _speed(answer), breakdown_table(answer.best.estimate, word=word)]
        parts += [memory_table(answer.best.estimate, word=word), stages_text(answer), notes_text(answer.notes)]
    return page(parts)


def program_header(answer: Answer, *, launch_line: str) -> str:
    """What an emitted train.py opens with: how to start it, the plan, the estimate."""
    plan, estimate = answer.best.plan, answer.best.estimate
    peak, limit = (n_bytes / GiB for n_bytes in tightest_bytes(estimate))
    return "\n".join(
        [
            f"{answer.workload.model} on {answer.workload.hardware}, {count(plan.mesh.n_devices, 'device')}.",
            "",
            f"    {launch_line}",
            "",
            text_table(("", ""), plan_rows(plan, answer.splits), show_header=False),
            "",
            f"Estimate: {format_seconds(estimate.step_s)} a step, {rate_text(samples_per_s(answer.best))} samples/s, "
            f"{peak:.1f} GiB of {limit:.1f} GiB.",
            *(["", notes_text(answer.notes)] if answer.notes else []),
        ]
    )


def tightest_bytes(estimate: Estimate) -> tuple[int, int]:
    """What the pipeline rank with the least memory left needs, and what its devices offer."""
    rank = estimate.tightest_rank
    return estimate.needed_bytes[rank], estimate.limit_bytes(rank)


def plan_table(answer: Answer) -> str:
    """The chosen plan, the best of other meshes, and the plain recipes, one row each.

    Where the chosen plan is compiled or a CUDA graph, a line says so of all of them, and those that are not are marked.
    """
    result = answer.result
    shown = [(answer.best, CHOSEN)]
    shown += [(item, "") for item in result.alternatives if item.plan != answer.best.plan]
    meshes = [item.plan.mesh for item, _ in shown]
    rows = [_plan_row(answer, candidate, note, meshes) for candidate, note in shown]
    rows += [_plan_row(answer, item, item.baseline, ()) for item in result.baselines]
    header = ("dp", "tp", "pp", "ZeRO", "micro", "schedule", "recompute", "step", "MFU", "GiB", "")
    below = [*_marks(answer, [item.plan for item, _ in shown]), _beside_fix(answer)]
    for word, otherwise in said_of_all(answer.best.plan.mesh).items():
        has_others = any(otherwise in row[-1] for row in rows)
        below.append(f"all of them {_OF_ALL[word]}{f', but for those marked {otherwise}' if has_others else ''}")
    lines = (textwrap.fill(line, WIDTH) for line in below if line)
    table = text_table(header, rows, right=frozenset({0, 1, 2, 7, 8, 9}), phrases_of=len(f"{CHOSEN},"))
    return "\n".join([table, *lines])


_OF_ALL = {COMPILED: "compiled", CAPTURED: "with their passes as a CUDA graph"}


def _marks(answer: Answer, plans: Sequence[Plan]) -> Iterator[str]:
    """What the marks of a table say, where it has them; a recipe may fall short, and keeps no attention."""
    if any(short_words(item.estimate) for item in answer.result.baselines):
        yield f"short N%: memory falls short with that chance, so it does not fit{with_confidence(answer.result)}"
    if any(plan.mesh.keeps_attention for plan in plans):
        yield f"{KEPT_MARK} {KEPT}: recomputed except for its fused attention"


def _beside_fix(answer: Answer) -> str:
    """Which recipes are not what was fixed."""
    fix = _fix(answer)
    names = [item.baseline for item in answer.result.baselines if not is_as_fixed(item.plan, fix)]
    return f"for comparison, without {fix_text(fix)}: {', '.join(names)}" if names else ""


def _plan_row(answer: Answer, candidate: Candidate, note: str, others: Sequence[Mesh]) -> tuple[str, ...]:
    plan, estimate, mesh = candidate.plan, candidate.estimate, candidate.plan.mesh
    share = mfu(answer.workload, candidate)
    zero = str(mesh.zero_stage)
    if mesh.zero_stage and mesh.zero_shard_degree != mesh.dp:
        zero += f"/{mesh.zero_shard_degree}"
    beside = (word for word in words_beside(plan, answer.best.plan) if word != KEPT)  # which has a mark
    return (
        dp_text(mesh),
        str(mesh.tp),
        str(mesh.pp) if mesh.shares else "+".join(str(own.n_ranks) for own in plan.groups) or str(mesh.pp),
        zero,
        micro_batches_text(mesh),
        mesh.schedule.removesuffix("_v").replace("_", " ") if mesh.pp > 1 else "-",
        plan.recompute + KEPT_MARK * mesh.keeps_attention,
        format_seconds(estimate.step_s) if estimate.fits_as_computed else "too big",
        "-" if share is None or not estimate.fits_as_computed else format_share(share),
        f"{tightest_bytes(estimate)[0] / GiB:.1f}",
        ", ".join(filter(None, (note, short_words(estimate), *beside, *unlike_words(mesh, others)))),
    )


def slowest_text(estimate: Estimate, *, word: str = "rank") -> str:
    """Of which rank the times are: `rank 3`; nothing where all are alike, or where it is not known."""
    is_told = estimate.has_several_ranks and estimate.slowest_rank is not None
    return f"{word} {estimate.slowest_rank}" if is_told else ""


def breakdown_table(estimate: Estimate, *, word: str = "rank") -> str:
    """Where the step time of the slowest rank goes, with a bar for each part that is not zero."""
    breakdown, rows = estimate.breakdown, []
    total_s = breakdown.total_s
    for name, label in BREAKDOWN_LABELS:
        part_s = getattr(breakdown, name)
        if part_s > 0:
            share = part_s / total_s
            rows.append((label, format_seconds(part_s), f"{share:.1%}", "#" * round(share * BAR_WIDTH)))
    rows.append(("step", format_seconds(total_s), "100.0%", ""))
    title = ", ".join(filter(None, ("where the time goes", slowest_text(estimate, word=word))))
    return text_table((title, "", "", ""), rows, right=frozenset({1, 2}))


def memory_table(estimate: Estimate, *, word: str = "rank") -> str:
    """Peak memory of each rank of the pipeline: allocated, reserved by torch's allocator, and needed, of the limit.

    Of several ranks also what is `state` of it: parameters and optimizer state.
    """
    states = [dict(parts)["state"] for parts in estimate.memory_parts_bytes] if estimate.has_several_ranks else []
    bar_width = BAR_WIDTH + len("rank") - len(word) - (len("  state  ") if states else 0)
    rows = []
    sizes = zip(estimate.allocated_bytes, estimate.allocator_bytes, estimate.needed_bytes, strict=True)
    for rank, (allocated, reserved, needed) in enumerate(sizes):
        limit_bytes = estimate.limit_bytes(rank)
        share = needed / limit_bytes
        bar = "#" * min(round(share * bar_width), bar_width)
        note = "" if needed <= limit_bytes else f" short of {(needed - limit_bytes) / GiB:.1f} GiB"
        rows.append(
            (
                str(rank),
                *(f"{n_bytes / GiB:.2f}" for n_bytes in (*states[rank : rank + 1], allocated, reserved, needed)),
                f"{share:.0%}",
                f"[{bar:<{bar_width}}]{of_limit(limit_bytes) if estimate.rank_limits_bytes else ''}{note}",
            )
        )
    of_all = "its device" if estimate.rank_limits_bytes else f"{estimate.memory_limit_bytes / GiB:.1f}"
    header = (word, *["state"] * bool(states), "allocated", "reserved", "needed", "share", f"GiB, of {of_all}")
    return text_table(header, rows, right=frozenset(range(len(header) - 1)))


def of_limit(limit_bytes: int) -> str:
    """` of 80.0 GiB`."""
    return f" of {limit_bytes / GiB:.1f} GiB"


def notes_text(notes: Sequence[str], *, title: str = "Not as in one process") -> str:
    """What a plan changes in the meaning of the model; nothing when it changes nothing."""
    if not notes:
        return ""
    return "\n".join([title, *(textwrap.fill(f"- {note}", WIDTH, subsequent_indent="  ") for note in notes)])


def describe_plan(plan: Plan) -> str:
    """Mesh, recomputation and a chunked loss on one line, or on two when one is too short."""
    kept = recompute_text(plan) + ", chunked loss" * (plan.loss == "chunked")
    line = f"{describe_mesh(plan.mesh)}, {kept}"
    line = line if len(line) <= WIDTH - 8 else f"{describe_mesh(plan.mesh)},\n{kept}"
    return f"{line},\n{kind_of_ranks(plan)}: {groups_text(plan)}" if plan.groups else line


def heading_parts(answer: Answer) -> list[str]:
    """What every report opens with: model and cluster, the status, what one device does, and what was left out."""
    no_faster = folded(no_faster_text(answer))
    return [_heading(answer), status_text(answer), no_faster, _limits(answer), _without_rule(answer)]


def _heading(answer: Answer) -> str:
    workload = answer.workload
    hosts = count(workload.n_hosts, "host")
    lines = [
        f"{workload.model}: {si_count(workload.n_parameters)} parameters on {workload.hardware}",
        f"{hosts}, {count(workload.n_devices, 'device')} ({workload.device})",
    ]
    if answer.result.best is not None and answer.request is not None and answer.request.options.global_batch is None:
        source = "that of the plan" if answer.result.status == "given" else "the default; see --global-batch"
        lines.append(f"global batch {answer.best.plan.mesh.global_batch_size}, {source}")
    return "\n".join([*lines, *_default_context(answer)])


def _default_context(answer: Answer) -> list[str]:
    """How long samples of a Hugging Face model are, where nobody said so."""
    request, n_tokens = answer.request, answer.workload.tokens_per_sample
    if request is None or n_tokens is None or not request.model.startswith("hf:"):
        return []
    is_given = any(text.startswith("context=") for text in request.overrides)
    return [] if is_given else [f"{n_tokens} tokens a sample, the default; see --set context=N"]


def status_text(answer: Answer) -> str:
    """What is proved of the answer, of which plans, and what the search took."""
    result = answer.result
    if result.status == "optimal" and result.n_meshes == 1 and _fix(answer):
        these, fits = _of_these(answer), _that_fits(result)
        fastest = f"given: there is one combination {these}, and this is its fastest plan{fits}"
        return "\n".join([*_unmet(answer), textwrap.fill(fastest, WIDTH)])
    if result.status == "infeasible" and result.n_meshes == 0:
        return textwrap.fill(f"infeasible: there is no plan {_of_these(answer)}", WIDTH)
    if result.status == "feasible":
        status = f"feasible: the search {_STOPPED[result.stopped_by]};\n{_worst_case(answer)}"
    else:
        status = _STATUS[result.status].format(
            better=_word(answer, "faster", "cheaper"), of_these=_of_these(answer) + _that_fits(result)
        )
    if result.status == "given" or result.n_meshes == 0:
        return status
    if _is_beyond(answer):
        status += (
            f"\nits {answer.best.plan.mesh.n_chunks} stages per rank are more than the space has: "
            f"other such plans may be {_word(answer, 'faster', 'cheaper')}"
        )
    tried = count(result.n_meshes, "combination")
    if result.status == "unknown":
        tried = f"{result.n_meshes - result.rejected_by_reason.get('time limit', 0)} of {tried}"
    considered = f"{tried} considered in {format_seconds(result.search_s)}"
    return "\n".join([*_unmet(answer), *(textwrap.fill(line, WIDTH) for line in status.splitlines()), considered])


def _that_fits(result: SearchResult) -> str:
    """What else is true of the plans that are compared, where some margin of memory is asked for."""
    sure = with_confidence(result)
    return f" that fits{sure}" if sure else ""


def _unmet(answer: Answer) -> list[str]:
    """Where memory suffices for no plan with the confidence asked for: that, and what it is for the chosen one."""
    result = answer.result
    if result.unmet_confidence is None:
        return []
    nothing = "it is proved that nothing" if result.unmet_status == "infeasible" else "nothing was found that"
    these = f" {_of_these(answer)}" if _fix(answer) else ""
    chance = f"its memory falls short with a chance of {chance_short(answer.best.estimate):.0%}"
    sure = f"{percent(result.unmet_confidence)} confidence"
    text = f"{nothing}{these} fits with {sure}; this plan fits as computed, {chance}"
    return textwrap.wrap(text, WIDTH)


def _is_beyond(answer: Answer) -> bool:
    """Whether the chosen plan has more stages per rank than the space."""
    best = answer.result.best
    return best is not None and is_deeper(best.plan.mesh) and "stages_per_rank" not in dict(_fix(answer))


def _worst_case(answer: Answer) -> str:
    """How far the plan is from the best one at the most: step time / bound - 1 (the gap is 1 - bound / step time)."""
    if not answer.result.bound_s:
        return "nothing is proved of how good its plan is"
    excess = max(0.0, answer.best.estimate.step_s / answer.result.bound_s - 1.0)
    share = f"{excess:.1%}" if excess >= GOOD_ENOUGH else f"{excess:.2%}"
    better = _word(answer, "slower", "dearer")
    return f"its plan is at most {share} {better} than any other {_of_these(answer)}{_that_fits(answer.result)}"


def _word(answer: Answer, of_time: str, of_cost: str) -> str:
    return of_time if answer.workload.objective == "time" else of_cost


def _of_these(answer: Answer) -> str:
    """Which plans a statement is about: `of the space`, or `with tp=2, zero=1` where that was fixed.

    Of what was fixed the space has all plans, but for tensor-parallel layouts: those solved for some micro-batch sizes.
    """
    fix = dict(_fix(answer))
    if not fix:
        return "of the space"
    best = answer.result.best
    has_all = best is None or best.plan.mesh.tp == 1 or "micro_batch" in fix
    return ("" if has_all else "of the space ") + f"with {fix_text(_fix(answer))}"


def _fix(answer: Answer) -> tuple[tuple[str, str], ...]:
    return () if answer.request is None else answer.request.options.fix


def fix_text(fix: Iterable[tuple[str, str]]) -> str:
    """What was fixed, as it is written on the command line."""
    return ", ".join(f"{name}={value}" for name, value in fix)


def _limits(answer: Answer) -> str:
    return "\n".join(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in answer.workload.limits)


def _without_rule(answer: Answer) -> str:
    names = answer.workload.ops_without_rule
    if not names:
        return ""
    text = f"priced by bytes and never split, no rule: {', '.join(names)}"
    way = "to add one: `autoplan rule MODEL > my_rules.py` finds what can be split, `--rules my_rules.py` uses it"
    return "\n".join(textwrap.fill(line, WIDTH) for line in (text, way))


def _speed(answer: Answer) -> str:
    candidate = answer.best
    low_s, high_s = step_interval_s(candidate)
    rate = f"{rate_text(samples_per_s(candidate))} samples/s"
    tokens = tokens_per_s(answer.workload, candidate)
    if tokens is not None:
        rate += f", {rate_text(tokens)} tokens/s"
    n_idle = answer.workload.n_devices - candidate.plan.mesh.n_devices
    lines = [
        f"step {format_seconds(candidate.estimate.step_s)} "
        f"({trust(candidate.estimate)}: {format_seconds(low_s)} to {format_seconds(high_s)}), {rate}",
        *([step_errors(candidate).words] if trust(candidate.estimate) == COMPUTED else []),
        describe_plan(candidate.plan),
        *([textwrap.fill(f"tensor parallel: {'; '.join(answer.splits)}", WIDTH)] if answer.splits else []),
        *filter(None, [segment_sources_text(candidate.estimate)]),
        *rivals_text(answer),
    ]
    if n_idle:
        is_of_time = answer.workload.objective == "time"
        is_proved = is_of_time and answer.result.status == "optimal" and not _is_beyond(answer)
        faster = (f"faster plan {_of_these(answer)}" if _fix(answer) else "faster plan") + _that_fits(answer.result)
        lines.append(f"{count(n_idle, 'device')} left idle" + (f": no {faster} uses them" if is_proved else ""))
    return "\n".join(lines)


def reason_text(reason: str, result: SearchResult) -> str:
    """Why a mesh is not the answer, after a number."""
    sure = with_confidence(result)
    return f"too large to fit{sure}" if reason == "memory" and sure else _REASONS.get(reason, reason)


def rejections_text(result: SearchResult) -> str:
    """How many meshes fell to each reason, and the nearest misses of memory."""
    rejected, counts = result.rejected, result.rejected_by_reason
    if not rejected:
        return ""
    lines = [f"Not chosen, of {count(sum(counts.values()), 'combination')}:"]
    lines += [f"  {number} {reason_text(reason, result)}" for reason, number in sorted(counts.items())]
    near = sorted((i for i in rejected if i.short_bytes is not None), key=lambda item: item.short_bytes or 0)
    misses = dict.fromkeys(
        f"  {describe_mesh(item.mesh)}:\n      {item.detail}" for item in near
    )  # layouts may be equal
    lines += list(misses)[:N_REJECTED_SHOWN]
    return "\n".join(lines)


def shortage_text(answer: Answer) -> str:
    """Why there is no plan: how much memory is short at least, and on which stage of the nearest plan found."""
    result = answer.result
    if result.n_meshes == 0:  # not one mesh divides devices and batch: the text lists what would
        return "\n".join(
            textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in result.nearest_fix.splitlines()
        )
    if result.closest is None:
        return ""
    least_bytes = min(item.short_bytes for item in result.rejected if item.short_bytes is not None)
    is_told = result.status == "infeasible" and least_bytes > 0.01 * GiB
    at_least = f": every plan lacks at least {least_bytes / GiB:.2f} GiB" if is_told else ""
    short = f"Device memory is what is short{at_least}. The nearest found:"
    return "\n".join([textwrap.fill(short, WIDTH), describe_mesh(result.closest.mesh), result.closest.detail])


def large_batch_text(answer: Answer) -> str:
    """Where there is no plan, and every micro-batch that the batch can be cut into is large: that, and what helps."""
    workload = answer.workload
    batch = None if answer.request is None else answer.request.options.global_batch
    if answer.result.best is not None or batch is None or workload.groups:  # groups share a batch unevenly
        return ""
    n_devices, per_host = workload.n_devices, workload.n_devices // workload.n_hosts
    degrees = data_parallel_degrees(batch, n_devices=n_devices, n_devices_per_host=per_host)
    n_samples = least_micro_batch_size(batch, dp_degrees=degrees)
    near = nearest_shared_batch(batch, n_devices=n_devices)
    n_of_near = least_micro_batch_size(near, dp_degrees=(n_devices,)) if near else n_samples
    other = "A smaller --global-batch or more devices make them smaller."
    if n_of_near < n_samples:
        other = f"With --global-batch {near} they may have {count(n_of_near, 'sample')}."
    text = (
        f"A global batch of {batch} is cut into at most {MAX_MICRO_BATCHES} micro-batches a rank and step, all of one"
        f" size: none has fewer than {n_samples} samples. {other}"
    )
    return textwrap.fill(text, WIDTH, break_on_hyphens=False) if n_samples > 1 else ""


def _remedies(answer: Answer) -> str:
    remedies = answer.result.remedies
    if not remedies:
        return ""
    lines = ["What would fit, the smallest change first, each found by searching again"]
    for item in remedies:
        lines.append(
            textwrap.fill(
                f"{item.change}: {_remedy_figures(item)}", WIDTH, initial_indent="  ", subsequent_indent="      "
            )
        )
        plan = f"{describe_mesh(item.mesh)}, recompute {item.recompute}"
        lines.append(textwrap.fill(plan, WIDTH, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)


def _remedy_figures(remedy: Remedy) -> str:
    return f"{format_seconds(remedy.step_s)} a step, {remedy.peak_bytes / GiB:.1f} GiB"
