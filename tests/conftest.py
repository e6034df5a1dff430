"""Shared toys: an answer with round figures, on two pipeline ranks of 10 GiB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings

from autoplan.answers.answer import Answer, Workload
from autoplan.parallel_plan import OUTSIDE_ALLOCATOR, Breakdown, Estimate, Mesh, Plan, StagePlan, TimelineEvent
from autoplan.search.result import Candidate, Rejection, Remedy, SearchResult
from autoplan.units import GiB

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run; `pytest --hypothesis-profile nightly` draws others, and more.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("repeatable")

WORKLOAD = Workload(
    model="toy.py",
    hardware="toy_x4",
    device="Toy 1T",
    n_hosts=1,
    n_devices=4,
    n_parameters=1_500_000,
    flops_per_sample=10**12,
    tokens_per_sample=100,
    peak_flops_per_s=1e13,
    price_usd_per_device_hour=2.0,
    segment_names=("outer.0", "blocks.0", "blocks.1", "outer.1"),
    provenance=(("peak", "toy data sheet"),),
)
MESH = Mesh(pp=2, dp=2, tp=1, zero_stage=1, zero_shard_degree=2, micro_batch_size=1, n_micro_batches=4)
# 0.8 + 0 + 0 + 0.1 + 0 + 0.5 + 0.1 + 0.1 = 1.6 s
BREAKDOWN = Breakdown(
    compute_s=0.8,
    recompute_s=0.0,
    exposed_tp_s=0.0,
    exposed_dp_s=0.1,
    exposed_pp_s=0.0,
    bubble_s=0.5,
    optimizer_s=0.1,
    launch_s=0.1,
)
TIMELINE = (
    TimelineEvent(rank=0, stage=0, stream="compute", name="0F0", start_s=0.0, stop_s=0.4),
    TimelineEvent(rank=1, stage=1, stream="compute", name="1B0", start_s=0.4, stop_s=1.2),
    TimelineEvent(rank=1, stage=1, stream="communication", name="reduce", start_s=1.2, stop_s=1.6),
)


def make_estimate(*, breakdown: Breakdown = BREAKDOWN, peaks_gib: tuple[float, float] = (5.0, 8.0)) -> Estimate:
    needed = tuple(round(peak * GiB) for peak in peaks_gib)
    return Estimate(
        step_s=breakdown.total_s,
        breakdown=breakdown,
        allocated_bytes=tuple(size - GiB for size in needed),
        needed_bytes=needed,
        memory_parts_bytes=tuple((("state", size - GiB), (OUTSIDE_ALLOCATOR, GiB)) for size in needed),
        memory_limit_bytes=10 * GiB,
        slowest_rank=1,
        timeline=TIMELINE,
    )


def make_candidate(*, mesh: Mesh = MESH, estimate: Estimate | None = None, baseline: str = "") -> Candidate:
    estimate = estimate or make_estimate()
    stages = (StagePlan(0, 2), StagePlan(2, 4, recomputed=(2,)))
    return Candidate(Plan(mesh, stages, graph_hash="abc", hardware="toy_x4"), estimate, estimate.step_s, baseline)


def make_answer() -> Answer:
    """The chosen plan takes 1.6 s, the next best 2.0 s, DDP needs 12.5 of 10 GiB, FSDP takes 3.2 s."""
    slower = make_estimate(breakdown=replace(BREAKDOWN, bubble_s=0.9))
    too_big = make_estimate(peaks_gib=(12.5, 12.5))
    fsdp = make_estimate(breakdown=replace(BREAKDOWN, exposed_dp_s=1.7))
    data_parallel = Mesh(dp=4, micro_batch_size=2)
    result = SearchResult(
        status="optimal",
        best=make_candidate(),
        alternatives=(make_candidate(mesh=replace(MESH, schedule="gpipe"), estimate=slower),),
        baselines=(
            make_candidate(mesh=data_parallel, estimate=too_big, baseline="DDP"),
            make_candidate(
                mesh=replace(data_parallel, zero_stage=3, zero_shard_degree=4), estimate=fsdp, baseline="FSDP"
            ),
        ),
        rejected=(
            Rejection(data_parallel, "memory", "stage 0 needs 12.5 GiB, device has 10.0 GiB", short_bytes=2 * GiB),
            Rejection(replace(MESH, schedule="gpipe"), "slower", "2.0 s a step", step_s=2.0),
        ),
        bound_s=1.6,
        n_meshes=5,
        search_s=0.5,
    )
    return Answer(WORKLOAD, result)


def make_infeasible() -> Answer:
    """One mesh, which lacks 86.2 GiB; with ZeRO 3, or with 2 hosts, it would fit."""
    detail = "stage 0 needs 96.2 GiB, device has 10.0 GiB: 86.20 GiB short"
    rejected = (Rejection(MESH, "memory", detail, short_bytes=round(86.2 * GiB), stage=0),)
    remedies = (
        Remedy("zero=3 instead of zero=1", (("zero", "3"),), 1, replace(MESH, zero_stage=3), "none", 2.5, 9 * GiB),
        Remedy("2 hosts instead of 1", (("zero", "1"),), 2, replace(MESH, dp=4), "none", 1.5, 8 * GiB),
    )
    result = SearchResult(
        "infeasible", None, (), (), rejected, None, 1, 0.1, nearest_fix=remedies[0].change, remedies=remedies
    )
    return Answer(WORKLOAD, result)


@pytest.fixture
def answer() -> Answer:
    return make_answer()


@pytest.fixture
def infeasible() -> Answer:
    return make_infeasible()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
