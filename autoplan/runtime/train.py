"""The training loop, plain or checked: one record per step, and what is printed and written of it.

`profile_step` runs one more step under torch's profiler and says where its time goes.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .data import Batch, dataset_batches, global_batch, local_batch, synthetic_batches
from .parallel import ParallelModel
from .parity import Differences, PlainTraining, compare
from .step_profile import STEP_MARK, StepProfile, profile_of_trace

GIB = 2**30
# Python's collector looks through all objects whenever it likes, which stopped a step for 200 ms on one rank and so on
# all (H200, 2026-11-21). It runs between steps instead, on all ranks in the same one.
STEPS_PER_COLLECTION = 50


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes: of this rank since training began (the construction of the model left
            out, but for what the allocator still holds of it); None on CPU.
        differences: from plain training, when it was checked.
        is_wrong: whether they are above the tolerance.
    """

    step: int
    loss: float
    grad_norm: float
    step_s: float
    samples_per_s: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    differences: Differences | None = None
    is_wrong: bool = False

    def __str__(self) -> str:
        text = (
            f"step {self.step:5d}  loss {self.loss:.6f}  grad norm {self.grad_norm:.4f}  "
            f"{self.step_s:.4f} s  {self.samples_per_s:.1f} samples/s"
        )
        if self.peak_allocated_bytes is not None:
            text += f"  {self.peak_allocated_bytes / GIB:.2f} GiB"
        if self.differences is not None:
            d = self.differences
            text += f"  max difference: loss {d.loss:.1e} gradient {d.gradient:.1e} parameter {d.parameter:.1e}"
            text += f" buffer {d.buffer:.1e}"
            text += "  DIFFERS from one process" if self.is_wrong else ""
        return text


def train_steps(model: ParallelModel, model_file: Any, *, n_steps: int, seed: int) -> Iterator[StepRecord]:
    """Train until the run has taken `n_steps`, on the model file's dataset or random batches; yields what each took."""
    if model.mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.mesh.device)
    gc.disable()
    try:
        for step, batch in enumerate(
            _batches_of_steps(model, model_file, n_steps=n_steps, seed=seed), start=model.n_steps
        ):
            if step % STEPS_PER_COLLECTION == 0:
                gc.collect()
            yield timed_step(model, batch, step)
    finally:
        gc.enable()


def _batches_of_steps(model: ParallelModel, model_file: Any, *, n_steps: int, seed: int) -> Iterator[Batch]:
    """The batches of the steps that are left, until the run has taken `n_steps`."""
    return islice(_batches(model, model_file, seed), max(0, n_steps - model.n_steps))


def _batches(model: ParallelModel, model_file: Any, seed: int) -> Iterator[Batch]:
    """The batches of this rank, from where the run is."""
    config, dp_rank = model.config, model.mesh.dp_rank
    if hasattr(model_file, "build_dataset"):
        dataset = model_file.build_dataset()
        return dataset_batches(dataset, config=config, dp_rank=dp_rank, seed=seed, n_seen=model.n_samples)
    first_step = model.n_steps
    return synthetic_batches(model_file.make_batch, config=config, dp_rank=dp_rank, seed=seed, first_step=first_step)


def check_steps(
    model: ParallelModel, plain: PlainTraining, model_file: Any, *, n_steps: int, seed: int
) -> Iterator[StepRecord]:
    """Train beside plain training on the same random batches, until a step differs; yields what each step took."""
    if plain.has_dropout() and model.mesh.rank == 0:
        print("the model has dropout, which draws differently in every process: expect differences", file=sys.stderr)
    config, dp_rank = model.config, model.mesh.dp_rank
    for step in range(n_steps):
        batch = global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=seed, step=step)
        record = timed_step(model, local_batch(batch, config=config, dp_rank=dp_rank), step)
        differences = compare(model, plain, loss=record.loss, plain_loss=plain.step(batch, dp_rank=dp_rank))
        is_wrong = differences.exceeds(config, step=step, learning_rate=plain.learning_rate)
        yield replace(record, differences=differences, is_wrong=is_wrong)
        if is_wrong:
            return


def exit_code(records: Sequence[StepRecord]) -> int:
    """0, or 8 when a step differs from one process."""
    return 8 if any(record.is_wrong for record in records) else 0


def timed_step(model: ParallelModel, batch: Batch, step: int) -> StepRecord:
    """Run one optimizer step and measure it; waits for the device."""
    device = model.mesh.device
    _wait_for(device)
    start_s = time.perf_counter()
    loss = model.step(batch)
    _wait_for(device)
    step_s = time.perf_counter() - start_s
    on_cuda = device.type == "cuda"
    return StepRecord(
        step=step,
        loss=loss.item(),
        grad_norm=model.grad_norm.item(),
        step_s=step_s,
        samples_per_s=model.config.global_batch_size / step_s,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if on_cuda else None,
    )


def profile_step(model: ParallelModel, model_file: Any, *, seed: int) -> StepProfile:
    """Run two more steps under torch's profiler, the first to warm it up; where the time of the second one went.

    All ranks must call it. It trains on.
    """
    device = model.mesh.device
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for batch in islice(_batches(model, model_file, seed), 2):
        with torch.profiler.profile(activities=activities) as profiler:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
            _wait_for(device)
            with torch.profiler.record_function(STEP_MARK):
                model.step(batch)
                _wait_for(device)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(), strict=False)  # names of kernels may hold any character
    return profile_of_trace(trace, axes=model.mesh.axes_of_groups())


def write_records(
    path: Path, model: ParallelModel, records: Sequence[StepRecord], profile: StepProfile | None = None
) -> None:
    """Write all steps as JSON from rank 0, with peak memory and profiled step of every rank; all ranks must call it."""
    peaks: list[Any] = [None] * model.config.n_ranks
    own = (records[-1].peak_allocated_bytes, records[-1].peak_reserved_bytes) if records else (None, None)
    dist.all_gather_object(peaks, own)
    profiles: list[Any] = [None] * model.config.n_ranks
    dist.all_gather_object(profiles, None if profile is None else asdict(profile))
    if model.mesh.rank != 0:
        return
    report = {
        "schema_version": 1,
        "config": asdict(model.config),
        "device": _device_name(model.mesh.device),
        "torch_version": torch.__version__,
        "steps": [asdict(record) for record in records],
        "peak_allocated_bytes_per_rank": [allocated for allocated, _ in peaks],
        "peak_reserved_bytes_per_rank": [reserved for _, reserved in peaks],
        "profiled_step_per_rank": None if profile is None else profiles,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
