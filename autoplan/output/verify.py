"""Run an emitted program: does it train like one process, and do time and memory come out as predicted?

The program checks itself (`train.py --check`) and profiles itself (`train.py --profile-steps`); this module starts it,
reads what it measured, and compares:

    step         median of the steps after warm-up
    peak memory  per pipeline rank, the largest of its ranks
    components   of the rank that the others waited for, as the estimate is that of the slowest rank; see `_COMPONENTS`

Step and allocated memory have a predicted interval and are judged by it.

Where there is one device of those planned for, one rank of each stage runs by itself (`train.py --alone`), and shows
the memory of training before the others are there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from autoplan.answers.answer import Answer, allocated_interval_bytes, interval_source, step_interval_s
from autoplan.answers.intervals import is_inside
from autoplan.errors import InputError, MeasureError, ToleranceError, UsageError
from autoplan.output.alone import N_BATCHES, run_alone
from autoplan.output.folder import launch_size, read_answer
from autoplan.parallel_plan import Estimate, Mesh
from autoplan.plain_text import WIDTH, text_table
from autoplan.processes import Start, start_process
from autoplan.units import format_bytes, format_seconds

STEP, PROFILED_STEP = "step", "profiled step"
ALLOCATED, RESERVED, NEEDED = "allocated", "reserved", "needed"
# component: (fields of the predicted `Breakdown`, what the profiled step says: a field, or an axis of `exposed_s`)
_COMPONENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "compute and recompute": (("compute_s", "recompute_s"), "compute_s"),
    "launch (device idle)": (("launch_s", "exposed_batch_copy_s"), "idle_s"),
    "exposed tp": (("exposed_tp_s",), "tp"),
    "exposed dp": (("exposed_dp_s",), "dp"),
    "exposed pp and bubble": (("exposed_pp_s", "bubble_s"), "pp"),
    "exposed, axis unknown": ((), "unknown"),
    "optimizer": (("optimizer_s",), "optimizer_s"),
}
_OF_PROFILED_STEP = (*_COMPONENTS, PROFILED_STEP)
# torchrun, but for its traceback where the program itself has said that it differs from one process, and for a banner
# that says it gives each of several processes one thread.
_TORCHRUN = """
import os, sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
if "--nproc-per-node=1" not in sys.argv:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    run.main()
except ChildFailedError as error:
    if error.get_first_failure()[1].exitcode != 8:
        raise
    sys.exit(8)
"""
N_BEFORE_REPLAYS = 3  # steps of a program with a CUDA graph: two as they come, and the one that is captured
COMPONENTS_NOTE = (
    "Kernels of recomputation cannot be told from others, nor a late transfer from a bubble. Compute slowed by "
    "communication is predicted as exposed and measured as compute. Idle beyond launch is any wait for the host."
)
ALONE_NOTE = (
    "Alone a rank sends nothing. What training holds is as among others; communicators are not there, nor what a step "
    "takes."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and measured, in seconds or bytes as `unit` says.

    Attributes:
        difference: predicted / measured - 1; of a component (predicted - measured) / measured profiled step, so that
            those of all components sum to that of the profiled step. None when it was not measured.
        interval: where the measured figure is expected; None for what has none.
    """

    what: str
    unit: str
    predicted: float
    measured: float | None
    difference: float | None
    interval: tuple[float, float] | None = None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured figure lies in the interval; None without one of both."""
        if self.interval is None or self.measured is None:
            return None
        return is_inside(self.measured, self.interval)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a run showed.

    Attributes:
        parity: whether loss, gradients and parameters agreed with one process; None when that was not checked.
        parity_dtype: in which that was; float32 where the model fails in float64. None when it was not checked.
        measured_step_s: None on other hardware than planned for, where a step time says nothing about the estimate.
        within_interval: whether step and allocated memory lie in the predicted intervals; None when not measured.
        interval_source: what the intervals rest on.
        comparisons: step, memory, and the components of the step.
        details: what the program reported; "alone" are the ranks that ran by themselves.
    """

    n_processes: int
    n_steps: int
    parity: bool | None
    predicted_step_s: float
    measured_step_s: float | None
    within_interval: bool | None
    interval_source: str
    comparisons: tuple[Comparison, ...]
    details: dict[str, Any]
    parity_dtype: str | None = None


def verify_folder(
    folder: Path,
    *,
    n_steps: int,
    device: str,
    is_alone: bool = False,
    start: Start = start_process,
    progress: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Check the folder, run its program for `n_steps`, and compare; `progress` is told when it starts.

    On CPU the program runs in float64 (see `_parity_dtype`) beside one plain process and must agree with it, processes
    of all hosts on this one. On CUDA it is timed for at least two steps, after `N_BEFORE_REPLAYS` more where it has a
    CUDA graph, and then profiled for two more. With `is_alone` one GPU shows the memory of one rank after another.

    Raises: InputError for a damaged folder, ToleranceError when the program disagrees with one process, MeasureError
        when it does not run on this device, UsageError for ranks alone on a CPU, where there is no such memory.
    """
    answer = read_answer(folder)
    if not folder.is_dir():
        expected, fix = "a folder that plan --out wrote", "name the folder that the plan is in"
        raise InputError.of(str(folder), found="a plan alone", expected=expected, fix=fix)
    if is_alone and device != "cuda":
        raise UsageError(
            f"--alone: found --device {device}; expected: cuda, whose memory it shows\n"
            "  fix: add --device cuda, on one GPU of those planned for"
        )
    n_before = N_BEFORE_REPLAYS if device == "cuda" and answer.best.plan.mesh.cuda_graph else 0
    n_processes, n_hosts = answer.best.plan.mesh.n_devices, launch_size(answer)["n_hosts"]
    if is_alone:
        _check_device_count(1, folder, "for one rank at a time")
        mesh, planned, n_alone = answer.best.plan.mesh, answer.workload.device, n_before + n_steps
        details = run_alone(folder, mesh, device=planned, n_steps=n_alone, start=start, progress=progress)
        return _compare(answer, details, n_steps=n_steps, n_before=n_before)
    if device == "cuda":
        if n_hosts > 1:
            raise InputError(
                f"{folder}: the plan runs on {n_hosts} hosts; verify starts one\n"
                "  fix: start launch/torchrun.sh on each host, plan for one host, add --alone to see the memory of one "
                "rank after another, or verify --device cpu"
            )
        n_steps = max(n_steps, 2)  # the first is warm-up
        _check_device_count(n_processes, folder, "as planned")
    progress(f"running {folder} for {n_steps} steps on {device}")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "result.json"
        command = _command(n_processes, n_before + n_steps, device, report, dtype=_parity_dtype(answer))
        code = start(command, folder)
        details = json.loads(report.read_text()) if report.is_file() else {}
    wrong = next((step for step in details.get("steps", ()) if step.get("is_wrong")), None)
    if wrong is not None:
        raise ToleranceError(
            f"{folder}: the program does not train like one process; its output is above\n"
            f"  found: in step {wrong['step']} it differs most in {wrong['differs_most_in']}" + _noted(answer)
        )
    if code:
        raise MeasureError(
            f"{folder}/train.py ended with exit code {code} on {device}; its output is above\n"
            "  fix: mend what the first rank that failed says; autoplan doctor lists the devices of this machine"
        )
    return _compare(answer, details, n_steps=n_steps, n_before=n_before)


def _check_device_count(expected: int, folder: Path, why: str) -> None:
    from autoplan.runtime.planned_devices import n_gpus

    if (found := n_gpus()) < expected:
        raise MeasureError(
            f"{folder}: found {found} GPUs on this machine\n  expected: {expected}, {why}\n"
            "  fix: run it where they are; add --alone, for the memory of one rank after another on one GPU; or verify "
            "--device cpu, which compares the program with one process"
        )


def _noted(answer: Answer) -> str:
    """What the plan changes by itself, one line each."""
    return "".join(f"\n  the plan's note: {note}" for note in answer.notes)


def _was_compared(details: dict[str, Any]) -> bool:
    """Whether the program got as far as a comparison with one process."""
    return any(step.get("differences") for step in details.get("steps", ()))


def _parity_dtype(answer: Answer) -> str:
    """In which the program is compared with one process: the most exact one that the model can compute in."""
    return "float32" if answer.fails_in_float64 else "float64"


def _command(n_processes: int, n_steps: int, device: str, report: Path, *, dtype: str) -> list[str]:
    launcher = [sys.executable, "-c", _TORCHRUN, "--standalone", f"--nproc-per-node={n_processes}"]
    launcher += ["train.py", "--device", device, "--out-json", str(report)]
    if device == "cpu":
        return [*launcher, "--steps", str(n_steps), "--dtype", dtype, "--check"]
    # the step before the traced one is slow, too: it warms the profiler up
    traced = ["--profile-steps", f"{n_steps + 1}:{n_steps + 2}", "--profile-dir", str(report.parent / "profile")]
    return [*launcher, "--steps", str(n_steps + 2), "--repeat-batches", str(N_BATCHES), *traced]


def _compare(answer: Answer, details: dict[str, Any], *, n_steps: int, n_before: int) -> Verification:
    """Measured figures against the prediction, on the planned hardware; elsewhere only the prediction."""
    best = answer.best
    measured = details if details.get("device") == answer.workload.device else {}
    step_s = _measured_step_s(measured, n_before=n_before)
    comparisons = (
        _comparison(STEP, "s", best.estimate.step_s, step_s, step_interval_s(best)),
        *_memory(answer, measured),
        *_components(best.estimate, measured.get("profiled_step_per_rank") or ()),
    )
    judged = [item.is_inside for item in comparisons if item.is_inside is not None]
    return Verification(
        n_processes=best.plan.mesh.n_devices,
        n_steps=n_steps,
        parity=True if _was_compared(details) else None,
        predicted_step_s=best.estimate.step_s,
        measured_step_s=step_s,
        within_interval=all(judged) if judged else None,
        interval_source=interval_source(best),
        comparisons=comparisons,
        details=details,
        parity_dtype=_parity_dtype(answer) if _was_compared(details) else None,
    )


def _comparison(
    what: str, unit: str, predicted: float, measured: float | None, interval: tuple[float, float] | None = None
) -> Comparison:
    return Comparison(what, unit, predicted, measured, predicted / measured - 1 if measured else None, interval)


def _measured_step_s(measured: Mapping[str, Any], *, n_before: int) -> float | None:
    """The median without those before replays and the first third of the others, at least one, which are warm-up."""
    times_s = [step["step_s"] for step in measured.get("steps", ()) if not step.get("is_profiled")][n_before:]
    counted_s = times_s[max(1, len(times_s) // 3) :]
    return median(counted_s) if counted_s else None


def _memory(answer: Answer, measured: Mapping[str, Any]) -> Iterator[Comparison]:
    """Memory of each pipeline rank: allocated, what the allocator reserved, and that with what lies outside of it.

    What torch is not offered of a device is needed too, by the estimate, and so here.
    """
    estimate, mesh = answer.best.estimate, answer.best.plan.mesh
    allocated = _per_pipeline_rank(measured.get("peak_allocated_bytes_per_rank"), mesh)
    reserved_by_rank = measured.get("peak_reserved_bytes_per_rank") or ()
    outside_by_rank = measured.get("outside_allocator_bytes_per_rank") or ()
    reserved = _per_pipeline_rank(reserved_by_rank, mesh)
    offered_by_rank = measured.get("offered_bytes_per_rank") or ()
    withheld = [None if n is None else max(0, estimate.memory_limit_bytes - n) for n in offered_by_rank]
    needed = _per_pipeline_rank(list(map(_sum, reserved_by_rank, outside_by_rank, withheld)), mesh)
    intervals = allocated_interval_bytes(answer.best)
    for rank, predicted in enumerate(estimate.allocated_bytes):
        yield _comparison(_of_rank(ALLOCATED, rank, mesh), "bytes", predicted, allocated[rank], intervals[rank])
    for rank, predicted in enumerate(estimate.allocator_bytes):
        yield _comparison(_of_rank(RESERVED, rank, mesh), "bytes", predicted, reserved[rank])
    for rank, predicted in enumerate(estimate.needed_bytes):
        yield _comparison(_of_rank(NEEDED, rank, mesh), "bytes", predicted, needed[rank])


def _sum(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _per_pipeline_rank(sizes: Sequence[int | None] | None, mesh: Mesh) -> list[int | None]:
    """The largest of the ranks of each pipeline rank, or share of the batch; ranks are numbered as `Mesh` says."""
    parts = [(sizes or ())[start:end] for start, end in pairwise(mesh.pipeline_rank_bounds)]
    return [max((size for size in part if size is not None), default=None) for part in parts]


def _of_rank(what: str, rank: int, mesh: Mesh) -> str:
    if mesh.shares:
        return f"{what}, share {rank}"
    return f"{what}, pp rank {rank}" if mesh.pp > 1 else what


def _components(estimate: Estimate, profiles: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """The parts of the step, without those that are zero on both sides, then the step that they sum to."""
    if not profiles:
        return
    slowest = max(profiles, key=lambda profile: float(profile["until_optimizer_s"]))
    step_s = float(slowest["step_s"])
    for what, (names, place) in _COMPONENTS.items():
        predicted_s = sum((getattr(estimate.breakdown, name) for name in names), 0.0)
        exposed_s = slowest["exposed_s"].get(place, {}).values()
        measured_s = float(slowest[place]) if place in slowest else float(sum(exposed_s))
        if predicted_s or measured_s:
            yield Comparison(what, "s", predicted_s, measured_s, (predicted_s - measured_s) / step_s)
    yield _comparison(PROFILED_STEP, "s", estimate.step_s, step_s)


def verification_text(found: Verification) -> str:
    """What the run showed, as text."""
    rows = [("processes", str(found.n_processes)), ("steps", str(found.n_steps))]
    alone = found.details.get("alone")
    if alone is not None:
        ranks = ", ".join(map(str, alone))
        rows[0] = "ranks, one after another", f"{ranks} of {found.n_processes}"
    if found.parity is not None:
        rows.append(("loss, gradients, parameters equal one process with these micro-batches", "yes"))
    measured = [item for item in found.comparisons if item.measured is not None]
    whole = [item for item in measured if item.what not in _OF_PROFILED_STEP]
    parts = [item for item in measured if item.what in _OF_PROFILED_STEP]
    tables = [text_table(("verify", ""), rows)]
    if whole:
        tables += [_table(whole, "difference", "expected"), found.interval_source]
    if parts:
        tables += [_table(parts, "of the step", ""), COMPONENTS_NOTE]
    if found.parity_dtype == "float32":
        tables.append("Compared in float32, not in float64: forward casts numbers to it that it computes with weights.")
    if found.parity is not None and found.n_processes == 1:
        tables.append("The plan uses one device, so one process was compared with one: plan --fix dp=2 spreads it.")
    if found.measured_step_s is None:
        tables.append(ALONE_NOTE if alone and whole else _not_measured(found))
    return "\n\n".join(text if "\n" in text else textwrap.fill(text, WIDTH) for text in tables) + "\n"


def _not_measured(found: Verification) -> str:
    """Why step, memory and components are not there."""
    device = found.details.get("device") or "this device"
    return (
        f"Run on {device}. The step ({format_seconds(found.predicted_step_s)} predicted), its parts and memory can be "
        "seen on the planned device alone: times are not compared."
    )


def _table(items: Sequence[Comparison], difference: str, expected: str) -> str:
    header = ("", "predicted", "measured", difference, expected)
    return text_table(header, map(_cells, items), right=frozenset({1, 2, 3}))


def outside_text(found: Verification) -> str:
    """Which figures lie outside of their interval, for an error; nothing if none does."""
    outside = [item for item in found.comparisons if item.is_inside is False]
    return "; ".join(f"{item.what} {_quantity(item, item.measured)}, expected {_expected(item)}" for item in outside)


def _cells(item: Comparison) -> tuple[str, ...]:
    difference = "-" if item.difference is None else f"{item.difference:+.1%}"
    predicted, measured = _quantity(item, item.predicted), _quantity(item, item.measured)
    return item.what, predicted, measured, difference, _expected(item) + (" OUTSIDE" if item.is_inside is False else "")


def _expected(item: Comparison) -> str:
    if item.interval is None:
        return ""
    return " to ".join(_quantity(item, bound) for bound in item.interval)


def _quantity(item: Comparison, value: float | None) -> str:
    if value is None:
        return "-"
    return format_bytes(value) if item.unit == "bytes" else format_seconds(value)
