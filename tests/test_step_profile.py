"""The break-down of a measured step, on made-up spans and on made-up events in the form of torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.runtime.step_profile import OPTIMIZER_MARK, STEP_MARK, Span, break_down, profile_of_trace


def test_only_communication_beside_which_nothing_computes_is_exposed() -> None:
    # 0-4 compute, 2-6 gather (4-6 exposed), 6-7 nothing, 7-8 reduce (exposed), 8-10 optimizer
    spans = [
        Span(0.0, 4.0, "compute"),
        Span(2.0, 6.0, "all_gather", "dp"),
        Span(7.0, 8.0, "all_reduce", "tp"),
        Span(8.0, 10.0, "optimizer"),
    ]
    found = break_down(spans, start_s=0.0, stop_s=10.0)
    assert (found.compute_s, found.optimizer_s, found.idle_s) == (4.0, 2.0, 1.0)
    assert found.exposed_s == {"dp": {"all_gather": 2.0}, "tp": {"all_reduce": 1.0}}
    assert (found.step_s, found.until_optimizer_s) == (10.0, 8.0)


def test_of_two_exposed_collectives_the_one_that_began_first_counts() -> None:
    # 1-5 gather of dp, 3-8 reduction of tp: 4 s and what is left of it, 3 s
    spans = [Span(3.0, 8.0, "all_reduce", "tp"), Span(1.0, 5.0, "all_gather", "dp")]
    found = break_down(spans, start_s=0.0, stop_s=8.0)
    assert found.exposed_s == {"dp": {"all_gather": 4.0}, "tp": {"all_reduce": 3.0}}
    assert found.idle_s == 1.0


def test_kernels_within_the_optimizer_and_pauses_between_them_are_the_optimizer() -> None:
    spans = [Span(1.0, 5.0, "optimizer"), Span(1.0, 2.0, "all_reduce"), Span(3.0, 5.0, "compute")]
    found = break_down(spans, start_s=0.0, stop_s=5.0)
    assert (found.optimizer_s, found.compute_s, found.idle_s) == (4.0, 0.0, 1.0)
    assert found.exposed_s == {}


def test_what_ran_outside_of_the_step_does_not_count() -> None:
    found = break_down([Span(0.0, 3.0, "compute"), Span(9.0, 12.0, "compute")], start_s=2.0, stop_s=10.0)
    assert (found.compute_s, found.idle_s) == (2.0, 6.0)  # 2-3 and 9-10


KINDS = st.sampled_from(["compute", "optimizer", "all_gather", "send_recv"])
TIMES = st.floats(0.0, 20.0)


@given(st.lists(st.tuples(TIMES, TIMES, KINDS)))
def test_parts_always_sum_to_the_step(drawn: list[tuple[float, float, str]]) -> None:
    spans = [Span(min(a, b), max(a, b), what, "dp") for a, b, what in drawn]
    found = break_down(spans, start_s=5.0, stop_s=15.0)
    exposed_s = sum(part_s for kinds in found.exposed_s.values() for part_s in kinds.values())
    assert found.compute_s + found.optimizer_s + found.idle_s + exposed_s == pytest.approx(10.0)


# ---------------------------------------------------------------- events of the profiler


def event(category: str, name: str, start_us: float, stop_us: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": stop_us - start_us, "args": arguments}


def launch(correlation: int, at_us: float) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", at_us, at_us + 1.0, correlation=correlation)


def kernel(correlation: int, name: str, start_us: float, stop_us: float, group: str = "", collective: str = ""):
    names = {"Process Group Name": group, "Collective name": collective} if group else {}
    return event("kernel", name, start_us, stop_us, correlation=correlation, **names)


def test_kernels_are_told_apart_by_name_group_and_launch() -> None:
    # The host runs ahead: it enters the optimizer at 100 us, the device gets there at 700 us.
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", STEP_MARK, 0.0, 1000.0),
        event("gpu_user_annotation", STEP_MARK, 20.0, 900.0),
        event("user_annotation", OPTIMIZER_MARK, 100.0, 150.0),
        *(launch(number, 10.0 * number) for number in range(1, 7)),
        *(launch(7, 110.0), launch(8, 120.0)),
        kernel(1, "gemm", 20.0, 300.0),
        kernel(2, "ncclDevKernel_AllGather_RING_LL", 250.0, 350.0, "3", "_allgather_base"),  # 50 us exposed
        kernel(3, "ncclDevKernel_SendRecv", 350.0, 420.0, "5", "alltoall_base"),
        kernel(4, "ncclDevKernel_SendRecv", 420.0, 500.0),
        event("gpu_memcpy", "Memcpy DtoD", 500.0, 550.0, correlation=5),
        kernel(6, "ncclDevKernel_ReduceScatter_Sum_bf16", 550.0, 700.0, "9", "_reduce_scatter_base"),
        kernel(7, "ncclDevKernel_AllReduce_Sum_f64", 700.0, 720.0, "0", "allreduce"),
        kernel(8, "multi_tensor_apply", 760.0, 900.0),
    ]
    found = profile_of_trace({"traceEvents": events}, axes={"3": "dp", "5": "tp"})
    us = 1e-6
    assert found.step_s == pytest.approx(1000 * us)
    assert found.compute_s == pytest.approx((280 + 50) * us)
    assert found.exposed_s["dp"] == pytest.approx({"all_gather": 50 * us})
    assert found.exposed_s["tp"] == pytest.approx({"all_to_all": 70 * us})
    assert found.exposed_s["pp"] == pytest.approx({"send_recv": 80 * us})  # no group was told
    assert found.exposed_s["unknown"] == pytest.approx({"reduce_scatter": 150 * us})  # no group of the mesh
    assert found.optimizer_s == pytest.approx(200 * us)
    assert found.idle_s == pytest.approx((20 + 100) * us)
    assert found.until_optimizer_s == pytest.approx(700 * us)


def test_without_a_device_operators_and_calls_of_gloo_count() -> None:
    events = [
        event("user_annotation", STEP_MARK, 0.0, 100.0),
        event("cpu_op", "aten::mm", 0.0, 30.0),
        event("cpu_op", "c10d::allreduce_", 30.0, 35.0),
        event("user_annotation", "gloo:all_reduce", 32.0, 60.0),
        event("user_annotation", OPTIMIZER_MARK, 70.0, 100.0),
        event("cpu_op", "aten::add_", 75.0, 90.0),
    ]
    found = profile_of_trace({"traceEvents": events}, axes={})
    assert found.compute_s == pytest.approx(30e-6)
    assert found.exposed_s["unknown"] == pytest.approx({"all_reduce": 28e-6})
    assert found.optimizer_s == pytest.approx(30e-6)
    assert found.idle_s == pytest.approx(12e-6)  # 30-32 and 60-70
