"""Answer: a search result together with what it is about, its derived figures, and its JSON form.

    answer_from_json(answer_to_json(answer)) == answer      (timelines are not kept)

The JSON text is the contract that `--format json` prints and that `plan.json` holds: a unit in every name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from itertools import zip_longest
from typing import Any

from autoplan.answers.intervals import (
    MEMORY_ERRORS,
    STEP_ERRORS,
    Errors,
    chance_above,
    interval,
    least_known,
    role_of_host,
)
from autoplan.cost.table import SOURCES
from autoplan.errors import InputError
from autoplan.graph import OpGraph
from autoplan.json_values import decode, encode, loads_finite
from autoplan.measured_profile.op_times import SegmentComparison
from autoplan.options import AS_COMPUTED, Options
from autoplan.parallel_plan import SCHEMA_VERSION, Breakdown, Estimate, Plan
from autoplan.plain_text import percent
from autoplan.search.result import Candidate, SearchResult, nearest_rejections
from autoplan.units import SECONDS_PER_HOUR

MAX_REJECTED = 10_000  # meshes in JSON that are not the answer; `rejected.csv` has all of them
RISKY = 0.05  # a chance that memory is short which reports name
_COMMUNICATION = (("tp", "exposed_tp_s"), ("dp", "exposed_dp_s"), ("pp", "exposed_pp_s"))


@dataclass(frozen=True, slots=True)
class WorkloadGroup:
    """One group of a mixed cluster: `n_hosts` hosts of `n_devices_per_host` devices `device`; see `Workload`."""

    hardware: str
    device: str
    n_hosts: int
    n_devices_per_host: int
    peak_flops_per_s: float | None


@dataclass(frozen=True, slots=True)
class Workload:
    """What a result is about: the figures a report needs that no plan holds.

    Attributes:
        model: name of the model file or module.
        device: name of the accelerator; `peak_flops_per_s` is its dense peak in the plan's precision.
        flops_per_sample: forward and backward FLOPs of the model itself, without recomputation.
        tokens_per_sample: None when the inputs are not token ids.
        price_usd_per_device_hour: None when unknown.
        segment_names: names of the graph's segments, in order.
        segment_modules: of those between blocks the modules that they call, in words; "" of blocks.
        provenance: (figure, where it comes from) pairs.
        values: (figure, value with its unit) pairs of the figures of `provenance` that are one number.
        ops_without_rule: operators that no cost rule knows: priced by their bytes, never split.
        objective: what was minimized, "time" or "cost".
        limits: what this kind of planning leaves out, and what was not tried, one sentence each.
        groups: of a mixed cluster; its `device` then names all of them, its price is their mean per device, and peaks
            are those of the groups.
    """

    model: str
    hardware: str
    device: str
    n_hosts: int
    n_devices: int
    n_parameters: int
    flops_per_sample: int | None
    tokens_per_sample: int | None
    peak_flops_per_s: float | None
    price_usd_per_device_hour: float | None
    segment_names: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    ops_without_rule: tuple[str, ...] = ()
    objective: str = "time"
    limits: tuple[str, ...] = ()
    groups: tuple[WorkloadGroup, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    segment_modules: tuple[str, ...] = ()

    @property
    def segment_texts(self) -> tuple[str, ...]:
        """`outer.0 (tokens, positions)`, `blocks.0`: each segment, with its modules where it is between blocks."""
        pairs = zip_longest(self.segment_names, self.segment_modules, fillvalue="")
        return tuple(f"{name} ({modules})" if modules else name for name, modules in pairs)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, so that it can be asked again with a change.

    Attributes:
        model: the model file or `hf:CONFIG.JSON`, as it was named.
        overrides: `key=value` texts, as after `--set`.
        hw: name or file of the hardware profile.
    """

    model: str
    overrides: tuple[str, ...]
    hw: str
    n_hosts: int
    options: Options


@dataclass(frozen=True, slots=True)
class Answer:
    """A search result and the workload it answers for.

    Attributes:
        notes: what the best plan changes in the meaning of the model, one sentence each; see `analysis.semantics`.
        request: what was asked; None when that cannot be asked again.
        ops: of the segments of the best plan, as measured and as computed; none where they were not measured.
        splits: what its tensor-parallel ranks split, one phrase each; see `tensor_parallel.split_names`.
        fails_in_float64: whether the program cannot be compared in float64; see `analysis.mixed_operands`.
    """

    workload: Workload
    result: SearchResult
    notes: tuple[str, ...] = ()
    request: Request | None = None
    ops: tuple[SegmentComparison, ...] = ()
    splits: tuple[str, ...] = ()
    fails_in_float64: bool = False

    @property
    def best(self) -> Candidate:
        """The chosen plan; ask only when there is one."""
        assert self.result.best is not None
        return self.result.best


def trust(estimate: Estimate) -> str:
    """How the times of the segments were found, by the one that is known least; of `intervals.STEP_ERRORS`."""
    return least_known(estimate.segment_sources)


def step_interval_s(candidate: Candidate) -> tuple[float, float]:
    """Between which two step times the truth is expected; see `intervals`."""
    return interval(candidate.estimate.step_s, step_errors(candidate), drift=candidate.estimate.drift)


def step_errors(candidate: Candidate) -> Errors:
    """How far steps of plans that run so are off."""
    estimate, is_graph = candidate.estimate, candidate.plan.mesh.cuda_graph
    role = role_of_host(estimate.breakdown.launch_s, estimate.step_s, is_graph=is_graph)
    return STEP_ERRORS[trust(estimate), role]


def may_be_no_faster_than_one(answer: Answer) -> bool:
    """Whether what the step takes on one device alone lies within the interval of the plan's on several, or below."""
    best, alone = answer.result.best, answer.result.one_device
    if best is None or best.plan.mesh.n_devices == 1 or alone is None or alone.step_s is None:
        return False
    return alone.step_s <= step_interval_s(best)[1]


def allocated_interval_bytes(candidate: Candidate) -> tuple[tuple[int, int], ...]:
    """Per pipeline rank, between which two sizes its peak of allocated memory is expected; see `intervals`."""
    errors = memory_errors(candidate.estimate)
    bounds = (interval(n_bytes, errors) for n_bytes in candidate.estimate.allocated_bytes)
    return tuple((round(low), round(high)) for low, high in bounds)


def memory_errors(estimate: Estimate) -> Errors:
    """How far peaks of memory that were found so are off."""
    return MEMORY_ERRORS[trust(estimate)]


def chance_short(estimate: Estimate) -> float:
    """With what chance the pipeline rank that is closest to its limit allocates more than its devices have room for.

    What a rank needs beside what it allocates is taken as it is predicted.
    """
    errors = memory_errors(estimate)
    ranks = zip(estimate.allocated_bytes, estimate.needed_bytes, strict=True)
    return max(
        chance_above(max(1, allocated + estimate.limit_bytes(rank) - needed), allocated, errors)
        for rank, (allocated, needed) in enumerate(ranks)
    )


def with_confidence(result: SearchResult) -> str:
    """` with 95% confidence`, after "fits", of the plans found; nothing where they fit as computed."""
    return f" with {percent(result.memory_confidence)} confidence" if result.memory_confidence > AS_COMPUTED else ""


def short_words(estimate: Estimate) -> str:
    """`short 26%`: with what chance memory falls short of a plan that fits as computed, but not with its margin."""
    return f"short {chance_short(estimate):.0%}" if estimate.fits_as_computed and not estimate.fits else ""


def interval_source(candidate: Candidate) -> str:
    """Where the interval of the step comes from."""
    drift = candidate.estimate.drift
    of_links = f", and {drift:.1%} for links whose speed varies" if drift else ""
    return f"{trust(candidate.estimate)}: {step_errors(candidate)}{of_links}"


def segment_sources_text(estimate: Estimate) -> str:
    """`30 segments measured, 2 scaled`; nothing without a measured profile."""
    counts = [(estimate.segment_sources.count(source), source) for source in SOURCES]
    texts = [f"{count} {source}" for count, source in counts if count]
    return f"segments: {', '.join(texts)}" if texts else ""


def samples_per_s(candidate: Candidate) -> float:
    """Samples of all data-parallel ranks together."""
    return candidate.plan.mesh.global_batch_size / candidate.estimate.step_s


def tokens_per_s(workload: Workload, candidate: Candidate) -> float | None:
    """None when the model does not read tokens."""
    if workload.tokens_per_sample is None:
        return None
    return workload.tokens_per_sample * samples_per_s(candidate)


def mfu(workload: Workload, candidate: Candidate) -> float | None:
    """Model FLOPs / (step time x peak of the devices the plan uses); None when FLOPs or peak are unknown."""
    peak_flops_per_s = _peak_flops_per_s(workload, candidate.plan)
    if workload.flops_per_sample is None or peak_flops_per_s is None:
        return None
    return workload.flops_per_sample * samples_per_s(candidate) / peak_flops_per_s


def _peak_flops_per_s(workload: Workload, plan: Plan) -> float | None:
    """Of the devices the plan uses, together."""
    if not plan.groups:
        return None if workload.peak_flops_per_s is None else workload.peak_flops_per_s * plan.mesh.n_devices
    peaks = [workload.groups[own.group].peak_flops_per_s for own in plan.groups]
    known = [n * peak for n, peak in zip(plan.n_devices_of_groups, peaks, strict=True) if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def tokens_per_sample(graph: OpGraph) -> int | None:
    """Token ids in one sample of the first input; None when the model does not read tokens.

    A token input is int64 of shape [batch, seq].
    """
    spec = graph.inputs[0].spec
    if spec.dtype != "int64" or len(spec.shape) != 2:
        return None
    return spec.n_elements(1)


def device_hours(workload: Workload, candidate: Candidate, *, n_samples: float) -> float:
    """Device-hours to train on `n_samples`; whole hosts are paid for, also where a plan leaves devices idle."""
    return n_samples / samples_per_s(candidate) * workload.n_devices / SECONDS_PER_HOUR


def breakdown_by_axis_s(breakdown: Breakdown) -> dict[str, Any]:
    """The breakdown with exposed communication by mesh axis; all numbers in it sum to the step time."""
    return {
        "compute": breakdown.compute_s,
        "exposed_comm": {axis: getattr(breakdown, name) for axis, name in _COMMUNICATION},
        "bubble": breakdown.bubble_s,
        "optimizer": breakdown.optimizer_s,
        "recompute": breakdown.recompute_s,
        "launch": breakdown.launch_s,
        "exposed_batch_copy": breakdown.exposed_batch_copy_s,
    }


def answer_to_json(answer: Answer) -> str:
    """The answer as JSON text."""
    return json.dumps(answer_to_dict(answer), indent=2, allow_nan=False)


def answer_to_dict(answer: Answer) -> dict[str, Any]:
    """The answer as JSON values: the summary first, then everything needed to read it back."""
    result = answer.result
    is_whole = len(result.rejected) <= MAX_REJECTED
    counts = result.rejected_counts if is_whole else tuple(result.rejected_by_reason.items())
    return {
        "schema_version": SCHEMA_VERSION,
        "status": result.status,
        "gap": result.gap,
        **_summary(answer),
        "memory_confidence": result.memory_confidence,
        "unmet_confidence": result.unmet_confidence,
        "unmet_status": result.unmet_status,
        "bound_s": result.bound_s,
        "provenance": dict(answer.workload.provenance),
        "n_meshes": result.n_meshes,
        "search_s": result.search_s,
        "first_plan_s": result.first_plan_s,
        "nearest_fix": result.nearest_fix,
        "remedies": encode(result.remedies),
        "closest": encode(result.closest) if result.best is None else None,
        "stopped_by": result.stopped_by,
        "ops_without_rule": list(answer.workload.ops_without_rule),
        "notes": list(answer.notes),
        "splits": list(answer.splits),
        "fails_in_float64": answer.fails_in_float64,
        "request": encode(answer.request),
        "ops": encode(answer.ops),
        "workload": encode(answer.workload),
        "best": encode(result.best),
        "alternatives": encode(result.alternatives),
        "baselines": encode(result.baselines),
        "one_device": encode(result.one_device),
        "may_be_no_faster_than_one_device": may_be_no_faster_than_one(answer),
        "rejected_counts": encode(counts),
        "rejected": encode(result.rejected if is_whole else nearest_rejections(result.rejected, most=MAX_REJECTED)),
    }


def _summary(answer: Answer) -> dict[str, Any]:
    """The flat figures of the chosen plan; each is null when there is no plan."""
    best = answer.result.best
    return {key: None if best is None else figure(answer.workload, best) for key, figure in _SUMMARY.items()}


def _limit_bytes_per_stage(candidate: Candidate) -> list[int]:
    estimate = candidate.estimate
    return [estimate.limit_bytes(rank) for rank in range(len(estimate.needed_bytes))]


def _segment_sources(workload: Workload, candidate: Candidate) -> dict[str, str]:
    return dict(zip(workload.segment_names, candidate.estimate.segment_sources, strict=False))


# `..._per_stage` has one figure for each pipeline rank: all stages of a rank share its devices.
_SUMMARY: dict[str, Callable[[Workload, Candidate], Any]] = {
    "plan": lambda workload, best: plan_to_dict(best.plan),
    "step_s": lambda workload, best: best.estimate.step_s,
    "step_s_interval": lambda workload, best: list(step_interval_s(best)),
    "step_s_interval_source": lambda workload, best: interval_source(best),
    "samples_per_s": lambda workload, best: samples_per_s(best),
    "tokens_per_s": tokens_per_s,
    "tokens_or_samples_per_s": lambda workload, best: tokens_per_s(workload, best) or samples_per_s(best),
    "mfu": mfu,
    "peak_bytes_per_stage": lambda workload, best: list(best.estimate.needed_bytes),
    "allocated_bytes_per_stage": lambda workload, best: list(best.estimate.allocated_bytes),
    "allocated_bytes_interval_per_stage": lambda workload, best: [*map(list, allocated_interval_bytes(best))],
    "chance_short_of_memory": lambda workload, best: chance_short(best.estimate),
    "memory_limit_bytes": lambda workload, best: best.estimate.memory_limit_bytes,
    "memory_limit_bytes_per_stage": lambda workload, best: _limit_bytes_per_stage(best),
    "breakdown_s": lambda workload, best: breakdown_by_axis_s(best.estimate.breakdown),
    "breakdown_of_rank": lambda workload, best: best.estimate.slowest_rank,
    "segment_sources": _segment_sources,
}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The decision in short: degrees, batch, schedule, recomputation and stages."""
    decision: dict[str, Any] = encode(plan.mesh)
    names = ("recompute", "loss", "precision", "batch_norm", "loss_average", "grad_compression", "powersgd_rank")
    decision.update({name: getattr(plan, name) for name in names})
    decision["stages"] = encode(plan.stages)
    decision["groups"] = encode(plan.groups)
    return decision


def answer_from_json(text: str, *, where: str = "plan.json") -> Answer:
    """The answer that `answer_to_json` wrote.

    Raises: InputError naming the field that is missing, unknown or of the wrong type.
    """
    content = _parse(text, where)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError.of(
            f"{where}: schema_version",
            found=version,
            expected=f"{SCHEMA_VERSION}",
            fix="make the plan again with this version of autoplan",
        )
    missing = sorted({*_NEEDED_KEYS, "workload", "notes", "request"} - set(content))
    if missing:
        raise InputError.of(where, found="no " + ", ".join(missing), expected="a whole plan.json", fix="plan again")
    result = {key: content[key] for key in _RESULT_KEYS if key in content}
    return Answer(
        workload=decode(Workload, content["workload"], f"{where}: workload"),
        result=decode(SearchResult, result, where),
        notes=decode(tuple[str, ...], content["notes"], f"{where}: notes"),
        request=decode(Request | None, content["request"], f"{where}: request"),
        ops=decode(tuple[SegmentComparison, ...], content.get("ops", []), f"{where}: ops"),
        splits=decode(tuple[str, ...], content.get("splits", []), f"{where}: splits"),
        fails_in_float64=decode(bool, content.get("fails_in_float64", False), f"{where}: fails_in_float64"),
    )


def plan_from_dict(content: object, *, where: str) -> Plan:
    """The plan that stands in a plan.json under "best"."""
    plan: Plan = decode(Plan, content, where)
    return plan


_RESULT_KEYS = tuple(field.name for field in fields(SearchResult))
_NEEDED_KEYS = tuple(field.name for field in fields(SearchResult) if field.default is MISSING)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        content = loads_finite(text)
    except (ValueError, RecursionError) as error:
        raise InputError.of(
            where,
            found=str(error),
            expected="the JSON text that autoplan wrote: the folder of plan --out, or its plan.json",
            fix="name it, or plan again",
        ) from error
    if not isinstance(content, dict):
        raise InputError.of(where, found=type(content).__name__, expected="a JSON object", fix="plan again")
    return content
