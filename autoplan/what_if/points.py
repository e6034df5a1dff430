"""Points of a sweep: one model on one cluster, and the best plan there.

    points         every combination of hardware, hosts, model arguments, precision, batch and links
    solve_point    Problem -> PointResult

A search is "quick" or "full". A quick one looks at `PLAIN_SCHEDULE` only: one stage per rank, under 1f1b, or under
gpipe where there are fewer micro-batches than pipeline ranks. Bounds are arithmetic there: a tenth of the time, and the
proof is of that space; a sweep then judges a mesh under 1f1b under all (`all_schedules`). Limits are of processor time,
so that what else the machine does changes no answer but near the limit: the user's, or `QUICK_TIME_LIMIT_S` from the
first plan on, and `DEFAULT_TIME_LIMIT_S` where there is none and for mixed clusters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autoplan.answers.answer import (
    Answer,
    chance_short,
    mfu,
    samples_per_s,
    step_interval_s,
    tokens_per_s,
    tokens_per_sample,
)
from autoplan.checks.options import FIX_VALUES
from autoplan.cost.parameters import element_bytes
from autoplan.errors import InputError, UsageError
from autoplan.hardware.cluster import device_names, mean_price_usd_per_device_hour
from autoplan.options import PLAIN_SCHEDULE, Options
from autoplan.parallel_plan import Plan
from autoplan.plan_words import describe_mesh, groups_text
from autoplan.planning.deciding import decide
from autoplan.planning.problem import Problem
from autoplan.search.fixed_values import value_of
from autoplan.search.result import SearchResult

QUICK_SCHEDULE = ("schedule", PLAIN_SCHEDULE)
QUICK_PLANS = "plans under schedule 1f1b, or gpipe with few micro-batches, and the best mesh under 1f1b then under all"
QUICK_TIME_LIMIT_S = 1.0  # of processor time; most searches end before it with a proof
SEARCHES = ("quick", "full")
SCALINGS = ("strong", "weak")
Overrides = tuple[tuple[str, Any], ...]
Fix = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster and one workload.

    Attributes:
        hw: name or file of the hardware profile.
        overrides: arguments of build_model.
        network_scale: factor on the bandwidth of all links between hosts.
        host_link: kind of link inside the host in place of its own; "" keeps that; see `other_links`.
        n_nics: network ports of a host; None keeps its own.
    """

    hw: str
    n_hosts: int
    global_batch: int
    precision: str
    overrides: Overrides = ()
    network_scale: float = 1.0
    host_link: str = ""
    n_nics: int | None = None


@dataclass(frozen=True, slots=True)
class PointResult:
    """The best plan found for a point; every figure that no plan gives is None.

    Attributes:
        status: of the search, or "unusable" when the cluster cannot train the model as asked; see `detail`.
        gap: share of the step that a better plan of the space searched might save.
        fix: what `autoplan plan --fix` takes to get this plan.
        chance_short_of_memory: with what chance the memory of its plan falls short, by earlier errors of peaks.
        unmet_confidence: the confidence in memory with which no plan was found; None where this plan has it.
        breakdown: (part, seconds) pairs that sum to `step_s`.
        model_state_bytes: weights and optimizer state of the whole model, which is what a checkpoint holds.
        price_usd_per_device_hour: that hardware profiles name, on average over devices.
    """

    status: str
    device: str
    n_hosts: int
    n_devices: int
    model_state_bytes: int
    tokens_per_sample: int | None
    price_usd_per_device_hour: float | None
    detail: str = ""
    gap: float | None = None
    plan: str | None = None
    fix: str | None = None
    n_used_devices: int | None = None
    step_s: float | None = None
    step_s_interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    breakdown: tuple[tuple[str, float], ...] = ()
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    chance_short_of_memory: float | None = None
    unmet_confidence: float | None = None


def points(
    clusters: Sequence[tuple[str, int]],
    *,
    global_batches: Sequence[int],
    precisions: Sequence[str],
    overrides: Sequence[Overrides] = ((),),
    network_scales: Sequence[float] = (1.0,),
    host_links: Sequence[str] = ("",),
    nics: Sequence[int | None] = (None,),
    scaling: str = "strong",
) -> tuple[Point, ...]:
    """Every combination, once. Under weak scaling a batch is that of the least hosts and grows with them."""
    fewest = min(n_hosts for _, n_hosts in clusters)
    found = []
    for (hw, n_hosts), model, precision, batch, scale, link, n_nics in product(
        clusters, overrides, precisions, global_batches, network_scales, host_links, nics
    ):
        grown = batch * n_hosts // fewest if scaling == "weak" else batch
        found.append(Point(hw, n_hosts, grown, precision, model, scale, link, n_nics))
    return tuple({repr(point): point for point in found}.values())


def combinations(sweeps: Sequence[tuple[str, Sequence[Any]]], *, fixed: Overrides = ()) -> tuple[Overrides, ...]:
    """Every combination of swept model arguments, each with the fixed ones."""
    names = [name for name, _ in sweeps]
    kept = [pair for pair in fixed if pair[0] not in names]
    return tuple((*kept, *zip(names, values, strict=True)) for values in product(*(values for _, values in sweeps)))


def searched(options: Options, *, search: str, time_limit_s: float | None = None) -> Options:
    """The options of a search of this kind; what the user has fixed stays, as does a time limit that is given."""
    options = replace(options, top=1, time_limit_s=options.time_limit_s if time_limit_s is None else time_limit_s)
    if search == "full":
        return options
    names = {name for name, _ in options.fix}
    fix = options.fix if names & {"schedule", "stages_per_rank"} else (*options.fix, QUICK_SCHEDULE)
    return replace(options, fix=fix, time_limit_s=QUICK_TIME_LIMIT_S if time_limit_s is None else time_limit_s)


def solve_point(problem: Problem, *, patience_s: float | None = None) -> PointResult:
    """A whole search; a cluster that cannot train the model so is a result that says why.

    A search that is without any plan at its time limit goes on for as long as `patience_s`; see `search.search`.

    Raises: KeyboardInterrupt when the search was interrupted.
    """
    try:
        answer = decide(problem, clock=time.process_time, patience_s=patience_s)
    except UsageError:
        raise
    except InputError as error:
        return unusable(problem, str(error))
    if answer.result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return _result(problem, answer)


def unusable(problem: Problem, why: str) -> PointResult:
    """The result of a point that cannot be searched."""
    return _filled(problem, SearchResult("unusable", None, (), (), (), bound_s=None, n_meshes=0, search_s=0.0), why)


def _filled(problem: Problem, result: SearchResult, detail: str) -> PointResult:
    hardware, size = problem.hardware, element_bytes(problem.options.precision, problem.graph.n_optimizer_states)
    return PointResult(
        status=result.status,
        device=device_names(hardware),
        n_hosts=hardware.n_hosts,
        n_devices=hardware.n_devices,
        model_state_bytes=problem.graph.n_parameters() * (size.master + size.optimizer),
        tokens_per_sample=tokens_per_sample(problem.graph),
        price_usd_per_device_hour=mean_price_usd_per_device_hour(hardware),
        detail=detail,
        gap=result.gap,
    )


def _result(problem: Problem, answer: Answer) -> PointResult:
    why = answer.result.why_nothing or "the search stopped before it found a plan"
    found = _filled(problem, answer.result, why if answer.result.best is None else "")
    best = answer.result.best
    if best is None:
        return found
    estimate = best.estimate
    rank = estimate.tightest_rank
    return replace(
        found,
        plan=describe_mesh(best.plan.mesh) + (f"; ranks: {groups_text(best.plan)}" if best.plan.groups else ""),
        fix=fix_of(best.plan, problem.options.fix),
        n_used_devices=best.plan.mesh.n_devices,
        step_s=estimate.step_s,
        step_s_interval=step_interval_s(best),
        samples_per_s=samples_per_s(best),
        tokens_per_s=tokens_per_s(answer.workload, best),
        mfu=mfu(answer.workload, best),
        breakdown=tuple((name, getattr(estimate.breakdown, name)) for name in estimate.breakdown.__dataclass_fields__),
        peak_bytes=estimate.needed_bytes[rank],
        memory_limit_bytes=estimate.limit_bytes(rank),
        chance_short_of_memory=chance_short(estimate),
        unmet_confidence=answer.result.unmet_confidence,
    )


def fix_of(plan: Plan, asked: Fix = ()) -> str:
    """What `--fix` takes to get this plan again: every choice it has, and what was asked for beyond these."""
    values = {name: value for name in FIX_VALUES if (value := value_of(name, plan)) is not None}
    parts = [f"{name}={value}" for name, value in values.items() if not _is_implied(name, value, plan)]
    return ",".join((*parts, *(f"{name}={value}" for name, value in asked if name not in values)))


def _is_implied(name: str, value: str, plan: Plan) -> bool:
    """Whether the other choices leave nothing to choose here, or `--fix` takes no such value."""
    mesh = plan.mesh
    return {
        "shard": mesh.zero_stage == 0,
        "micro_batch": len({share.micro_batch_size for share in mesh.all_shares}) > 1,
        "schedule": mesh.pp == 1,
        "stages_per_rank": mesh.n_chunks == 1,
        "keep_attention": plan.recompute == "none" or (value == "on" and bool(plan.groups)),
        "cuda_graph": value == "on" and bool(plan.groups),
    }.get(name, False)
