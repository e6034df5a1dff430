"""A predicted step beside a measured one, on made-up events in the form of both traces, and on a traced program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.launch import run_program

from autoplan.parallel_plan import TimelineEvent
from autoplan.report.chrome_trace import timeline_to_chrome_json
from autoplan.runtime.step_profile import OPTIMIZER_MARK, STEP_MARK

CHECKOUT = Path(__file__).parent.parent
sys.path.insert(0, str(CHECKOUT / "benchmarks"))
import compare_trace  # noqa: E402
import kernels_beside  # noqa: E402


def mark(name: str, start: float, stop: float, *, tid: int = 1, cat: str = "user_annotation") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": start, "dur": stop - start, "args": {}}


def kernel(name: str, start: float, stop: float, *, launched: float, tid: int = 1) -> list[dict]:
    """A kernel and where the host launched it."""
    number = {"correlation": kernel.count}
    kernel.count += 1
    launch = mark("cudaLaunchKernel", launched, launched + 1, tid=tid, cat="cuda_runtime") | {"args": number}
    return [launch, mark(name, start, stop, tid=7, cat="kernel") | {"args": number}]


kernel.count = 1

# The host is done with the step at 40; the device runs 2F0 from 10 to 30 with a gap of 5, receives until 60, runs 2B0
# from 60 to 90, of which the transfer of the next one hides 10, then the optimizer from 92 to 98 of 100.
PASSES = [
    mark(STEP_MARK, 0, 100),
    mark("PP:2F0", 0, 10),
    mark("PP:2SEND_F0", 10, 12),
    mark("PP:2B0", 12, 20),
    mark(OPTIMIZER_MARK, 30, 40),
    *kernel("gemm", 10, 20, launched=1),
    *kernel("gemm", 25, 30, launched=2),
    *kernel("ncclDevKernel_SendRecv", 30, 60, launched=11),
    *kernel("gemm", 60, 90, launched=13, tid=2),
    *kernel("ncclDevKernel_SendRecv", 80, 91, launched=14),
    *kernel("adam", 92, 98, launched=31),
]
KERNELS_BEFORE = kernel("gemm", -20, -10, launched=-30)


def test_every_moment_of_a_measured_step_counts_once_and_passes_know_their_gaps() -> None:
    found = compare_trace.measured_step({"traceEvents": [*KERNELS_BEFORE, *PASSES]})
    parts = {what: us for what, us in found.parts_us.items() if us}
    # transfers alone: 30-60 and 90-91; idle: 0-10, 20-25, 91-92, 98-100
    assert parts == {"forward": 15, "backward": 30, "transfers": 31, "optimizer": 6, "idle": 18}
    assert sum(parts.values()) == found.step_us == 100
    (forward, backward) = found.passes[2, "F"], found.passes[2, "B"]
    assert (forward.n, forward.busy_us, forward.gaps_us) == (1, 15, 5)
    assert (backward.n, backward.busy_us, backward.gaps_us) == (1, 30, 0)


def test_without_marks_of_passes_kernels_of_the_autograd_engine_are_the_backward_pass() -> None:
    engine = mark("autograd::engine::evaluate_function: MmBackward0", 12, 20, tid=2, cat="cpu_op")
    unmarked = [event for event in PASSES if not event["name"].startswith("PP:")]
    found = compare_trace.measured_step({"traceEvents": [*unmarked, engine]})
    assert (found.parts_us["forward"], found.parts_us["backward"]) == (15, 30)
    assert not found.passes


def test_a_predicted_trace_is_read_as_it_is_written_and_idle_is_what_its_boxes_leave() -> None:
    # rank 1: forward 3-5 s, backward 5-9 s, its gradient travels 9-10 s, optimizer 10-11 s; rank 0 ends at 12 s
    boxes = [("compute", "1F0", 3, 5), ("compute", "1B0", 5, 9), ("send gradients", "1B0", 9, 10)]
    boxes.append(("compute", "optimizer", 10, 11))
    events = [TimelineEvent(1, 1, stream, name, start_s=a, stop_s=b) for stream, name, a, b in boxes]
    events.append(TimelineEvent(0, 0, "compute", "optimizer", start_s=11, stop_s=12))
    found = compare_trace.predicted_steps(json.loads(timeline_to_chrome_json(tuple(events))))[1]
    seconds = {what: us / 1e6 for what, us in found.parts_us.items() if us}
    assert seconds == {"forward": 2, "backward": 4, "transfers": 1, "optimizer": 1, "idle": 4}
    assert found.step_us == 12e6
    text = "\n".join(compare_trace.table(found, found))
    assert "stage 1 forward, each of 1" in text and "+0.0%" in text


def test_ranks_of_one_pipeline_rank_follow_one_another() -> None:
    ranks = [{"distributedInfo": {"rank": rank, "world_size": 8}} for rank in range(8)]
    assert [compare_trace.rank_of(trace, n_ranks=2) for trace in ranks] == [0] * 4 + [1] * 4


@pytest.mark.nightly
def test_a_traced_program_has_the_passes_that_its_plan_predicts(tmp_path: Path) -> None:
    sizes = ["n_layers=4", "context=16", "width=32", "hidden=48", "n_heads=4", "vocabulary=64"]
    fix = "pp=2,dp=1,tp=1,schedule=interleaved,micro_batch=2,recompute=none,compile=off,loss=whole"
    plan = [sys.executable, "-m", "autoplan", "plan", str(CHECKOUT / "examples" / "llama.py"), "--hw", "h200_x4/2"]
    plan += [f"--set={size}" for size in sizes] + ["--global-batch", "8", "--precision", "fp32", "--fix", fix]
    subprocess.run([*plan, "--out", str(tmp_path / "program")], check=True, capture_output=True, timeout=120)
    run_program(tmp_path / "program", 2, "--steps", "3", "--device", "cpu", "--profile-steps", "2:3")
    predicted = compare_trace.predicted_steps(compare_trace.load(tmp_path / "program" / "trace.json.gz"))
    for rank in range(2):
        trace = compare_trace.load(tmp_path / "program" / "profile" / f"rank{rank}.json.gz")
        measured = compare_trace.measured_step(trace)
        assert sum(measured.parts_us.values()) == pytest.approx(measured.step_us)
        passes = {what: own.n for what, own in measured.passes.items()}
        assert passes == {what: own.n for what, own in predicted[rank].passes.items()}
        assert {stage % 2 for stage, _ in passes} == {compare_trace.rank_of(trace, n_ranks=2)} == {rank}
        assert all(own.busy_us > 0 for own in measured.passes.values())


def beside(*times: tuple[str, float, float]) -> dict:
    """A trace of kernels, by name, start and duration."""
    args = {"grid": [2, 66, 1]}
    return {"traceEvents": [mark(name, at, at + us, cat="kernel") | {"args": args} for name, at, us in times]}


def test_kernels_take_what_they_take_alone_and_what_longer_beside_those_of_nccl() -> None:
    # an element-wise kernel and a product in turns; NCCL's runs from the product at 5,100 to that at 7,100 us
    turn = (("add", 0, 50), ("nvjet_1", 100, 200))
    times = [(name, 1000.0 * i + at, us) for i in range(15) for name, at, us in turn]
    slowed = [(name, at, us + 160 if name == "nvjet_1" and 5100 <= at <= 7100 else us) for name, at, us in times]
    found = kernels_beside.kernels(beside(*slowed, ("ncclDevKernel_SendRecv", 5150.0, 2000.0)))
    product = next(kernel for kernel in found if kernel.is_product)
    assert (product.alone_us, product.grid) == (200.0, "2x66x1")
    # five kernels at either end of the trace have others around, each by itself, so they are left out
    assert list(kernels_beside.lines(found))[:3] == [
        "all kernels 3.0 ms, alone 2.5 (+19.2%)",
        "  products beside NCCL's 1.1 ms, alone 0.6 (+80.0%)",
        "  others beside NCCL's 0.1 ms, alone 0.1 (+0.0%)",
    ]


def test_a_trace_without_anything_beside_has_no_line_of_it() -> None:
    times = [("nvjet_1", 100.0 * i, 20.0) for i in range(20)]
    assert list(kernels_beside.lines(kernels_beside.kernels(beside(*times))))[0].endswith("(+0.0%)")
    assert not any("NCCL" in line for line in kernels_beside.lines(kernels_beside.kernels(beside(*times))))
