"""Run one rank of each stage of an emitted program by itself, one after another, on one device of those planned for."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.errors import MeasureError
from autoplan.parallel_plan import Mesh
from autoplan.processes import Start

MEASURED = ("peak_allocated_bytes_per_rank", "peak_reserved_bytes_per_rank")
N_BATCHES = 4  # different ones, drawn before the first step


def run_alone(
    folder: Path, mesh: Mesh, *, device: str, n_steps: int, start: Start, progress: Callable[[str], None]
) -> dict[str, Any]:
    """What the first rank of each pipeline rank, or share of the batch, measured of its memory, as a report of all.

    Ranks that did not run have None: on another device than the planned one all but the first. `progress` is told of
    each rank that starts.
    Raises: MeasureError when one does not run on this device.
    """
    reports: dict[int, dict[str, Any]] = {}
    for rank in mesh.pipeline_rank_bounds[:-1]:
        progress(f"running rank {rank} of {mesh.n_devices} of {folder} alone, for {n_steps} steps")
        reports[rank] = _report(folder, rank, n_steps=n_steps, start=start)
        if reports[rank]["device"] != device:
            break
    found: dict[str, Any] = {name: reports[0][name] for name in ("device", "torch_version")} | {"alone": list(reports)}
    for name in MEASURED:
        of_rank = {rank: report[name][rank] for rank, report in reports.items()}
        found[name] = [of_rank.get(rank) for rank in range(mesh.n_devices)]
    return found


def _report(folder: Path, rank: int, *, n_steps: int, start: Start) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "result.json"
        command = [sys.executable, "train.py", "--device", "cuda", "--alone", str(rank), "--steps", str(n_steps)]
        code = start([*command, "--repeat-batches", str(N_BATCHES), "--out-json", str(path)], folder)
        if code:
            raise MeasureError(
                f"{folder}/train.py --alone {rank} ended with exit code {code}; its output is above\n"
                "  fix: where it is out of memory, the plan needs more than it says: --fix recompute=full, or more "
                "devices; else mend what it says"
            )
        report: dict[str, Any] = json.loads(path.read_text())
        return report
