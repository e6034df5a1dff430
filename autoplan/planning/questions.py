"""Questions about an answer, each settled by searching again: why not another plan, what would change the decision.

    why_not        the best plan that has a fix        against the chosen one
    sensitivity    the best plan on a cluster that is a little better, for each of `betterments`

Both plans are judged now, so that an old plan.json is not compared with the figures of another version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.answers.answer import Answer
from autoplan.answers.comparisons import Fix, SensitivityRow, WhyNot
from autoplan.checks.options import parse_overrides
from autoplan.errors import InputError
from autoplan.hardware.cluster import Cluster, Hardware, load_hardware
from autoplan.options import DEFAULT_TIME_LIMIT_S, Options
from autoplan.plan_words import plan_rows
from autoplan.planning.deciding import decide, judge, score
from autoplan.planning.problem import Problem, check_hardware, checked, make_problem
from autoplan.search.result import Candidate
from autoplan.tracing.hugging_face import PREFIX
from autoplan.units import GB, GiB

if TYPE_CHECKING:
    from autoplan.hardware import HardwareProfile
    from autoplan.parallel_plan import Plan

SENSITIVITY_TIME_LIMIT_S = 20.0  # of all searches together
MORE_MEMORY_BYTES = GiB
MORE_LINK_BYTES_PER_S = GB
MORE_COMPUTE = 1.01


def asked_again(answer: Answer, *, folder: Path | None = None) -> Problem:
    """The problem that an answer was given to; the model is read from the graph cache where it has not changed.

    When the model file is not where it was, the copy in `folder`, the output folder of the answer, stands for it.

    Raises: InputError when there is nothing to ask again; PlanMismatchError when the model is another one now.
    """
    request = answer.request
    if request is None or answer.result.best is None:
        raise InputError.of(
            "the plan", found="no plan, or not what was asked for it", expected="an answer of plan", fix="plan again"
        )
    options = replace(request.options, memory_confidence=answer.result.memory_confidence)  # as was met
    model, overrides = request.model, parse_overrides(request.overrides)
    if folder is not None and not Path(model.removeprefix(PREFIX)).exists():
        # the copy of an hf: model holds the values it was built with
        model, overrides = str(folder / "model.py"), {} if model.startswith(PREFIX) else overrides
    problem = make_problem(model, hw=request.hw, hosts=request.n_hosts, overrides=overrides, options=_quick(options))
    score(problem, answer.best.plan)
    return problem


def judged_again(problem: Problem, answer: Answer) -> Answer:
    """The answer with its plan judged now: the estimate carries its timeline, which no plan.json keeps."""
    best = replace(answer.best, estimate=judge(problem, answer.best.plan))
    return replace(answer, result=replace(answer.result, best=best))


def check_why_not(answer: Answer, fix: Fix) -> None:
    """Return when `why_not` may be asked with this, as far as that is known before the model is traced again.

    Raises: UsageError for a name or a value that no plan has.
    """
    request = answer.request
    if request is not None:
        check_hardware(load_hardware(request.hw, n_hosts=request.n_hosts), _options_with(request.options, fix))


def why_not(problem: Problem, answer: Answer, *, fix: Fix) -> WhyNot:
    """The best plan that has `fix`, in the place of what was fixed of the same names and beside the rest."""
    options = _options_with(problem.options, fix)
    chosen = _judged(problem, answer.best.plan)
    instead = decide(replace(problem, options=replace(options, top=0)))
    more = tuple(note for note in instead.notes if note not in answer.notes)
    return WhyNot(fix, chosen, instead, more, tuple(note for note in answer.notes if note not in instead.notes))


def sensitivity(
    problem: Problem,
    answer: Answer,
    *,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[SensitivityRow, ...]:
    """The cluster as it is, then one row per betterment, each a whole search; all within `SENSITIVITY_TIME_LIMIT_S`.

    The chosen plan is always a candidate, so nothing gets worse. Where it was not proved the best, a search may find
    a plan that is better on the cluster as it is, too: then the first row shows it, and gains are measured from it.
    """
    chosen, deadline_s = _judged(problem, answer.best.plan), clock() + SENSITIVITY_TIME_LIMIT_S
    changes = tuple(betterments(problem.hardware, is_measured=problem.measured is not None))
    found: list[tuple[str, Candidate | None]] = []
    for number, (change, hardware) in enumerate(changes):
        share_s = (deadline_s - clock()) / (len(changes) - number)
        progress(f"searching with {change}")
        found.append((change, _best_on(replace(problem, hardware=hardware), chosen.plan, time_limit_s=share_s)))
    others = [_judged(problem, item.plan) for _, item in found if item is not None and item.plan != chosen.plan]
    fitting = [chosen, *(item for item in others if item.estimate.fits)]
    now = min(fitting, key=lambda item: _cost(problem, item))
    rows = [_row(problem, "as it is", now, before=chosen, chosen=chosen.plan)]
    return (*rows, *(_row(problem, change, item, before=now, chosen=chosen.plan) for change, item in found))


def betterments(hardware: Hardware, *, is_measured: bool = False) -> Iterator[tuple[str, Hardware]]:
    """(what is better, the cluster with it); measured times of segments do not follow the peak of the device."""
    if not isinstance(hardware, Cluster):
        yield from _host_betterments(hardware, is_measured=is_measured)
        return
    for index, group in enumerate(hardware.groups):
        for change, better in _host_betterments(group, is_measured=is_measured):
            groups = (*hardware.groups[:index], better, *hardware.groups[index + 1 :])
            yield f"{group.name}: {change}", replace(hardware, groups=groups)


def _host_betterments(hardware: HardwareProfile, *, is_measured: bool) -> tuple[tuple[str, HardwareProfile], ...]:
    device = hardware.device
    memory = replace(device, memory_bytes=device.memory_bytes + MORE_MEMORY_BYTES)
    peaks = tuple((precision, MORE_COMPUTE * rate) for precision, rate in device.peak_flops_per_s)
    compute = [("1 % more compute", replace(hardware, device=replace(device, peak_flops_per_s=peaks)))]
    links = []
    for index, tier in enumerate(hardware.links):
        faster = tier.at_rate(tier.bytes_per_s + MORE_LINK_BYTES_PER_S)
        tiers = (*hardware.links[:index], faster, *hardware.links[index + 1 :])
        n_joined = min(tier.n_devices, hardware.n_devices)
        links.append((f"+1 GB/s of {tier.name} ({n_joined} devices)", replace(hardware, links=tiers)))
    return (("+1 GiB of memory", replace(hardware, device=memory)), *links, *([] if is_measured else compute))


def _options_with(options: Options, fix: Fix) -> Options:
    kept = tuple(pair for pair in options.fix if pair[0] not in dict(fix))
    return checked(replace(options, fix=(*kept, *fix)))


def _quick(options: Options) -> Options:
    limit_s = DEFAULT_TIME_LIMIT_S if options.time_limit_s is None else options.time_limit_s
    return replace(options, require_optimal=False, time_limit_s=limit_s)


def _judged(problem: Problem, plan: Plan) -> Candidate:
    estimate = judge(problem, plan)
    return Candidate(plan, estimate, bound_s=0.0)


def _cost(problem: Problem, item: Candidate) -> float:
    n_devices = item.plan.mesh.n_devices if problem.options.objective == "cost" else 1
    return item.estimate.step_s * n_devices


def _best_on(problem: Problem, chosen: Plan, *, time_limit_s: float) -> Candidate | None:
    """The best of the plan found and the chosen one; None without time.

    Raises: KeyboardInterrupt when the search was interrupted.
    """
    if time_limit_s <= 0.0:
        return None
    limit_s = min(time_limit_s, problem.options.time_limit_s or time_limit_s)
    quick = replace(problem, options=replace(problem.options, time_limit_s=limit_s, top=0))
    result = decide(quick, warm_start=chosen).result
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    candidates = [_judged(problem, chosen), *([] if result.best is None else [result.best])]
    return min((item for item in candidates if item.estimate.fits), key=lambda item: _cost(problem, item), default=None)


def _row(problem: Problem, change: str, item: Candidate | None, *, before: Candidate, chosen: Plan) -> SensitivityRow:
    if item is None:
        return SensitivityRow(change, None, None, "no time left to search")
    gain = 1.0 - _cost(problem, item) / _cost(problem, before)
    return SensitivityRow(change, item.estimate.step_s, gain, plan_changes(chosen, item.plan))


def plan_changes(before: Plan, after: Plan) -> str:
    """`tensor parallel 1 -> 2, ZeRO stage 1 over 8 ranks -> none`, or that nothing or only the stages differ."""
    if before == after:
        return "same plan"
    old, new = dict(plan_rows(before)), dict(plan_rows(after))
    pairs = {name: (old.get(name, "as usual"), new.get(name, "as usual")) for name in old | new}  # rows of choices
    changes = [f"{name} {one} -> {other}" for name, (one, other) in pairs.items() if one != other]
    return "plan changes: " + (", ".join(changes) or "other layers per stage")
