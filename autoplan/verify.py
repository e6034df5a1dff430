"""Run an emitted program: does it train like one process, and as fast as predicted?

The program checks itself (`train.py --check`); this module starts it, reads what it measured, and compares.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autoplan.answer import Answer, step_interval_s
from autoplan.errors import InputError, MeasureError, ToleranceError
from autoplan.output_folder import launch_size, read_answer
from autoplan.report import text_table
from autoplan.units import format_seconds

Start = Callable[[Sequence[str], Path], int]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a run showed.

    Attributes:
        parity: whether loss, gradients and parameters agreed with one process; None when that was not checked.
        measured_step_s: None on other hardware than planned for, where a step time says nothing about the estimate.
        within_interval: whether the measured step lies in the predicted interval; None when not measured.
        details: what the program reported.
    """

    n_processes: int
    n_steps: int
    parity: bool | None
    predicted_step_s: float
    predicted_step_s_interval: tuple[float, float]
    measured_step_s: float | None
    within_interval: bool | None
    details: dict[str, Any]


def start_process(command: Sequence[str], folder: Path) -> int:
    """Run a command in a folder, its output going to stderr; returns its exit code."""
    return subprocess.run(command, cwd=folder, stdout=sys.stderr.fileno(), check=False).returncode


def verify_folder(folder: Path, *, n_steps: int, device: str, start: Start = start_process) -> Verification:
    """Check the folder, run its program for `n_steps`, and compare.

    On CPU the program runs in float64 beside one plain process and must agree with it; on CUDA it is timed.

    Raises: InputError for a damaged folder, ToleranceError when the program disagrees with one process, MeasureError
        when it does not run on this device.
    """
    answer = read_answer(folder)
    size = launch_size(answer)
    if size["n_hosts"] > 1:
        raise InputError(
            f"{folder}: the plan runs on {size['n_hosts']} hosts; verify starts one\n"
            "  fix: start launch/torchrun.sh on each host with --check, or plan for one host"
        )
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "result.json"
        code = start(_command(size["n_devices_per_host"], n_steps, device, report), folder)
        details = json.loads(report.read_text()) if report.is_file() else {}
    if code and _was_compared(details):
        raise ToleranceError(f"{folder}: the program does not train like one process; its output is above")
    if code:
        raise MeasureError(
            f"{folder}/train.py ended with exit code {code} on {device}; its output is above\n"
            "  fix: autoplan doctor lists the devices of this machine"
        )
    return _compare(answer, details, n_steps=n_steps)


def _was_compared(details: dict[str, Any]) -> bool:
    """Whether the program got as far as a comparison with one process; the launcher hides its exit code."""
    return any(step.get("differences") for step in details.get("steps", ()))


def _command(n_processes: int, n_steps: int, device: str, report: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_processes}"]
    program = ["train.py", "--steps", str(n_steps), "--device", device, "--out-json", str(report)]
    return [*launcher, *program, *(["--dtype", "float64", "--check"] if device == "cpu" else [])]


def _compare(answer: Answer, details: dict[str, Any], *, n_steps: int) -> Verification:
    """On the planned hardware, the median step against the prediction; the first step is warm-up."""
    low_s, high_s = step_interval_s(answer.best)
    times_s = [step["step_s"] for step in details.get("steps", ())][1:]
    is_planned_device = details.get("device") == answer.workload.device
    measured_s = median(times_s) if times_s and is_planned_device else None
    return Verification(
        n_processes=answer.best.plan.mesh.n_devices,
        n_steps=n_steps,
        parity=True if _was_compared(details) else None,
        predicted_step_s=answer.best.estimate.step_s,
        predicted_step_s_interval=(low_s, high_s),
        measured_step_s=measured_s,
        within_interval=None if measured_s is None else low_s <= measured_s <= high_s,
        details=details,
    )


def verification_text(found: Verification) -> str:
    """What the run showed, as text."""
    low_s, high_s = found.predicted_step_s_interval
    rows = [("processes", str(found.n_processes)), ("steps", str(found.n_steps))]
    if found.parity is not None:
        rows.append(("loss, gradients and parameters equal one process", "yes" if found.parity else "NO"))
    rows.append(
        (
            "predicted step",
            f"{format_seconds(found.predicted_step_s)} ({format_seconds(low_s)} to {format_seconds(high_s)})",
        )
    )
    if found.measured_step_s is None:
        rows.append(("measured step", "not on the planned hardware"))
    else:
        place = "inside" if found.within_interval else "OUTSIDE"
        rows.append(("measured step", f"{format_seconds(found.measured_step_s)}, {place} the interval"))
    return text_table(("verify", ""), rows) + "\n"
