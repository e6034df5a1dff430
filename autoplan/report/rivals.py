"""Why the chosen plan, in a line each: the next best mesh, the best plain recipe, one device, and what they lose by;
with what chance its memory falls short, where that is worth a line; and whether one device alone may be as fast.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.answers.answer import (
    RISKY,
    Answer,
    chance_short,
    may_be_no_faster_than_one,
    memory_errors,
    step_errors,
    step_interval_s,
    trust,
    with_confidence,
)
from autoplan.answers.intervals import STEP_ERRORS, WAITED_FOR, is_host_bound
from autoplan.parallel_plan import Estimate
from autoplan.plain_text import rate_text
from autoplan.plan_words import (
    BREAKDOWN_LABELS,
    KEPT,
    choice_words,
    dp_text,
    micro_batches_text,
    recompute_text,
    said_of_all,
    unlike_words,
    words_beside,
    zero_text,
)
from autoplan.search import GOOD_ENOUGH
from autoplan.search.result import Candidate
from autoplan.units import GiB, format_seconds

HARDLY = 0.25  # of a step
HALF = 0.5  # of a step
MUCH = 0.25  # of what a part of a step grows by
# Names of --fix that one device alone has, too; see `search.one_device`.
_ON_ONE_DEVICE = ("compile", "cuda_graph", "generated", "keep_attention", "loss", "memory_format")
AS_FAST = 0.0005  # share of a step, which no digit of a per cent shows


def rivals_text(answer: Answer) -> list[str]:
    """`next best: dp 2, tp 1, pp 4, ZeRO 0, 8x1, gpipe, +0.5%: launch +385 us`; likewise the best recipe that fits."""
    best, result = answer.best, answer.result
    loss, value = _measures(answer)
    lines = []
    for item in result.alternatives[:1]:
        lines.append(f"next best: {_degrees(item, than=best)}, {loss(best, item)}")
        if value(item) < value(best) * (1.0 + step_errors(best).rms):
            lines.append(f"the next best may be faster: {_off_by(best)}")
    recipes = [item for item in result.baselines if item.estimate.fits and item.plan != best.plan]
    if recipes and not best.baseline:
        recipe = min(recipes, key=value)
        lines.append(f"best plain recipe: {recipe.baseline}, {loss(best, recipe)}")
    if result.one_device is not None and best.plan.mesh.n_devices > 1:
        lines.append(one_device_text(answer))
    return [*lines, *memory_risk(best.estimate), *host_risk(best)]


def _off_by(best: Candidate) -> str:
    return f"{trust(best.estimate)} steps are off by {step_errors(best).rms:.1%}"


def host_risk(best: Candidate) -> list[str]:
    """`computes in 5% of the step, and waits for Python: estimates are then off by 17%`; nothing above a quarter.

    Nothing is said where another part of the step is larger. With a CUDA graph the device waits outside of the passes:
    `waits for Python in 72% of the step (in the optimizer and between steps), as long as its host takes`, from half on.
    """
    estimate, parts = best.estimate, best.estimate.breakdown
    if best.plan.mesh.cuda_graph:
        waits = parts.launch_s / estimate.step_s
        said = f"waits for Python in {waits:.0%} of the step ({where_python_is_waited_for(best)})"
        return [f"{said}, as long as its host takes"] if waits >= HALF else []
    if parts.launch_s < max(getattr(parts, name) for name, _ in BREAKDOWN_LABELS):
        return []
    share = (parts.compute_s + parts.recompute_s + parts.optimizer_s) / estimate.step_s
    if share > HARDLY or not is_host_bound(parts.launch_s, estimate.step_s):
        return []
    off = STEP_ERRORS[trust(estimate), WAITED_FOR].rms
    return [f"computes in {share:.0%} of the step, and waits for Python: estimates are then off by {off:.0%}"]


def where_python_is_waited_for(best: Candidate) -> str:
    """What `launch` is spent in."""
    return ", ".join(["in the passes"] * (not best.plan.mesh.cuda_graph) + ["in the optimizer and between steps"])


def memory_risk(estimate: Estimate) -> list[str]:
    """`memory falls short with a chance of 29%: uncalibrated peaks are off by 4.1%`; nothing where that is unlikely."""
    chance = chance_short(estimate)
    if chance < RISKY:
        return []
    off = f"{trust(estimate)} peaks are off by {memory_errors(estimate).rms:.1%}"
    return [f"memory falls short with a chance of {chance:.0%}: {off}"]


def _measures(answer: Answer) -> tuple[Callable[[Candidate, Candidate], str], Callable[[Candidate], float]]:
    """What a plan loses in words, and what was minimized."""
    return (_loss, _step_s) if answer.workload.objective == "time" else (_loss_of_cost, _device_s)


def no_faster_text(answer: Answer) -> str:
    """`2 devices are perhaps no faster than one: 2.19 ms a step, up to 2.74 ms, against 2.23 ms`, where that is so."""
    if not may_be_no_faster_than_one(answer):
        return ""
    best, alone = answer.best, answer.result.one_device
    assert alone is not None and alone.step_s is not None
    step_s, alone_text = best.estimate.step_s, format_seconds(alone.step_s)
    devices = f"{best.plan.mesh.n_devices} devices are"
    if alone.step_s < step_s * (1.0 - GOOD_ENOUGH):
        return f"{devices} slower than one: {format_seconds(step_s)} a step against {alone_text}"
    up_to = format_seconds(step_interval_s(best)[1])
    return f"{devices} perhaps no faster than one: {format_seconds(step_s)} a step, up to {up_to}, against {alone_text}"


def _times_as_fast(ratio: float) -> str:
    """`1.8 x as fast as`, `1.003 x as fast as`: in as many digits as tell it from 1."""
    if abs(ratio - 1.0) < AS_FAST:
        return "as fast as"
    return f"{ratio:.4g} x as fast as" if abs(ratio - 1.0) < 10 * AS_FAST else f"{rate_text(ratio)} x as fast as"


def one_device_text(answer: Answer) -> str:
    """`7.6 x as fast as one device, with compile=off (143 s)`, or how much it needs at the least."""
    result, fix = answer.result, () if answer.request is None else answer.request.options.fix
    alone = result.one_device
    assert alone is not None
    held = [f"{name}={value}" for name, value in fix if name in _ON_ONE_DEVICE]
    name = ", with ".join(["one device", *filter(None, [", ".join(held)])])
    if alone.step_s is None:
        needed, limit = alone.needed_bytes / GiB, alone.memory_limit_bytes / GiB
        sure = with_confidence(result) if alone.needed_bytes <= alone.memory_limit_bytes else ""
        return f"{name}: does not fit{sure}: {needed:.1f} GiB or more of {limit:.1f} GiB"
    return f"{_times_as_fast(alone.step_s / answer.best.estimate.step_s)} {name} ({format_seconds(alone.step_s)})"


def _degrees(item: Candidate, *, than: Candidate) -> str:
    mesh = item.plan.mesh
    parts = [f"dp {dp_text(mesh)}, tp {mesh.tp}, pp {mesh.pp}, {zero_text(mesh)}", micro_batches_text(mesh)]
    schedule = [mesh.schedule] * (mesh.pp > 1)
    own, others = choice_words(item.plan), choice_words(than.plan)
    choices = [word for word in words_beside(item.plan, than.plan) if word not in others]
    said = said_of_all(than.plan.mesh)
    lacking = [word for word in others if word not in own and word not in said]
    choices += [f"not {word}" for word in lacking if word != KEPT]
    choices += ["attention not kept"] * (KEPT in lacking and any(stage.recomputed for stage in item.plan.stages))
    recompute = [recompute_text(item.plan)] * (recompute_text(item.plan) != recompute_text(than.plan))
    return ", ".join([*parts, *schedule, *choices, *recompute, *unlike_words(mesh, [than.plan.mesh])])


def _step_s(item: Candidate) -> float:
    return item.estimate.step_s


def _device_s(item: Candidate) -> float:
    return item.estimate.step_s * item.plan.mesh.n_devices


def _loss_of_cost(best: Candidate, item: Candidate) -> str:
    """`cost +2.8%, step -87.2%`: what was minimized, and what came of the step."""
    dearer, slower = (value(item) / value(best) - 1.0 for value in (_device_s, _step_s))
    text = f"cost {dearer:+.1%}, step {slower:+.1%}"
    return f"{text}, but not what --fix asks for" if dearer < -GOOD_ENOUGH else text


def _loss(best: Candidate, item: Candidate) -> str:
    """By how much a plan is slower, and the part of its step that grows most; what the others save, if they do."""
    slower = item.estimate.step_s / best.estimate.step_s - 1.0
    if abs(slower) < AS_FAST:
        return "as fast"
    if slower < -GOOD_ENOUGH:  # a recipe is priced whatever is fixed
        return f"{slower:+.1%}, but not what --fix asks for"
    if slower < 0:  # within the gap of the search
        return f"{slower:+.2%}, but less simple"
    parts = [
        (getattr(item.estimate.breakdown, field) - getattr(best.estimate.breakdown, field), label)
        for field, label in BREAKDOWN_LABELS
    ]
    more_s, label = max(parts)
    if more_s <= 0 or slower <= 0:
        return f"{slower:+.1%}"
    saved_s = more_s - (item.estimate.step_s - best.estimate.step_s)
    others = f", others -{format_seconds(saved_s)}" if saved_s > MUCH * more_s else ""
    return f"{slower:+.1%}: {label} +{format_seconds(more_s)}{others}"
