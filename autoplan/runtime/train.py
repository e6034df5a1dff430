"""The training loop, plain or checked: a generator of one record per step; evaluation between steps; the report."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .alone import speaks_for_all
from .dropout import without_dropout
from .input_pipeline.batches import Batch, global_batch, local_batch
from .input_pipeline.loading import TrainingData
from .input_pipeline.reading import START
from .metrics import EvaluationRecord, PlannedFigures, StepRecord, device_name, json_value
from .parallel import ParallelModel
from .parity import PlainTraining, compare, largest_difference
from .process_group import from_first_rank
from .step_profile import StepProfile
from .step_trace import StepTrace
from .written_paths import writing

# Python's collector looks through all objects whenever it likes, which stopped a step for 200 ms on one rank and so on
# all (H200, 2026-11-21). It runs between steps instead, on all ranks in the same one.
STEPS_PER_COLLECTION = 50
N_LAUNCHES = 1000  # timed, to tell how fast the host is
UNKNOWN = PlannedFigures()
# A TransformerEncoder with ReLU differed by 2e-3 in float32 so, and by 1e-17 in float64.
ROUNDED_OTHERWISE = "in {} a number near an edge, as of ReLU or of a choice of experts, may fall to either side"
MORE_EXACT = "  fix: --dtype float64, in which only an error differs"


def train_steps(
    model: ParallelModel,
    data: TrainingData,
    *,
    n_steps: int,
    planned: PlannedFigures = UNKNOWN,
    trace: StepTrace | None = None,
) -> Iterator[StepRecord]:
    """Train until the run has taken `n_steps`, with those before a resume; yields what each step took."""
    if 0 < n_steps <= model.n_steps and speaks_for_all(model.mesh.rank):
        print(
            f"--steps: found {n_steps}, and {model.n_steps} are done, so nothing is left to do\n"
            f"  fix: --steps {model.n_steps + 1} or more, which counts all steps of the run, to go on",
            file=sys.stderr,
        )
    if trace is not None and model.n_steps > trace.steps.start and speaks_for_all(model.mesh.rank):
        left = "the others are traced" if model.n_steps < trace.steps.stop else "none is traced"
        print(
            f"--profile-steps: found {trace.steps.start}:{trace.steps.stop}, and {model.n_steps} are done, so {left}",
            file=sys.stderr,
        )
    for line in planned.other_libraries() if speaks_for_all(model.mesh.rank) else ():
        print(line, file=sys.stderr)
    _tell_of_compiling(model, n_steps=n_steps)
    is_slow = model.mesh.device.type == "cpu" and model.config.precision in ("bf16", "fp16")
    if is_slow and speaks_for_all(model.mesh.rank):
        print(
            f"on a CPU, in {model.config.precision}, which most CPUs emulate slowly\n  fix: --dtype float32",
            file=sys.stderr,
        )
    if model.mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.mesh.device)
    gc.disable()
    model.is_left_alone = True
    first_step = model.n_steps
    try:
        for step in range(first_step, n_steps):
            if step % STEPS_PER_COLLECTION == 0:
                gc.collect()
            start_s = time.perf_counter()
            batch = next(data)
            data_wait_s = time.perf_counter() - start_s
            is_traced = trace.around(step) if trace is not None else nullcontext(False)
            with data.explaining(batch), is_traced as is_profiled:
                record = timed_step(model, batch, step, data_wait_s=data_wait_s, planned=planned)
            if step == first_step and torch.backends.cudnn.benchmark:
                _free_memory_of_trials(model.mesh.device)
            yield replace(record, is_profiled=is_profiled)
    finally:
        gc.enable()
        model.is_left_alone = False
        data.close()


def _free_memory_of_trials(device: torch.device) -> None:
    """Give back what cuDNN tried the algorithms of convolutions with, which none of these shapes needs again, and count
    peaks anew.

    It takes what an algorithm asks for, up to 8.8 GiB for one convolution of 512 images in 32 bits, or what is left.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _tell_of_compiling(model: ParallelModel, *, n_steps: int) -> None:
    if model.n_steps < n_steps and model.config.compile and speaks_for_all(model.mesh.rank):
        print("the first step compiles, and takes longest", file=sys.stderr)


def check_steps(
    model: ParallelModel, plain: PlainTraining, model_file: Any, *, n_steps: int, seed: int
) -> Iterator[StepRecord]:
    """Train beside plain training on the same random batches, until a step differs; yields what each step took.

    Both go without dropout.
    """
    if plain.has_dropout() and speaks_for_all(model.mesh.rank):
        print("compared without dropout, which draws other masks on each rank", file=sys.stderr)
    _tell_of_compiling(model, n_steps=n_steps)
    config, dp_rank = model.config, model.mesh.dp_rank
    for step in range(n_steps):
        batch = global_batch(model_file.make_batch, batch_size=config.global_batch_size, seed=seed, step=step)
        with without_dropout():
            record = timed_step(model, local_batch(batch, config=config, dp_rank=dp_rank), step)
            plain_loss = plain.step(batch, dp_rank=dp_rank)
        differences = compare(model, plain, loss=record.loss, plain_loss=plain_loss)
        tolerances = differences.tolerances(config, step=step, learning_rate=plain.learning_rate)
        is_wrong = differences.exceeds(tolerances)
        worst = largest_difference(model, plain, loss=differences.loss, tolerances=tolerances) if is_wrong else ""
        yield replace(record, differences=differences, is_wrong=is_wrong, differs_most_in=worst)
        if is_wrong:
            if config.precision != "fp64" and speaks_for_all(model.mesh.rank):
                more_exact = "" if config.fails_in_float64 else f"\n{MORE_EXACT}"
                print(ROUNDED_OTHERWISE.format(config.precision) + more_exact, file=sys.stderr)
            return


def exit_code(records: Sequence[StepRecord]) -> int:
    """0, or 8 when a step differs from one process."""
    return 8 if any(record.is_wrong for record in records) else 0


def timed_step(
    model: ParallelModel,
    batch: Batch,
    step: int,
    *,
    data_wait_s: float = 0.0,
    planned: PlannedFigures = UNKNOWN,
) -> StepRecord:
    """Run one optimizer step and measure it; waits for the device, at the end also for the copy of the next batch."""
    device, learning_rate = model.mesh.device, model.learning_rate
    if device.type == "cuda":  # not for other streams: the next batch is copied beside the step
        torch.cuda.current_stream(device).synchronize()
    n_retries_before = _n_retries_for_memory(device)
    start_s = time.perf_counter()
    loss = model.step(batch)
    _wait_for(device)
    step_s = time.perf_counter() - start_s
    peaks = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else None
    samples_per_s = model.config.global_batch_size / (step_s + data_wait_s)
    return StepRecord(
        step=step,
        loss=loss.item(),
        grad_norm=model.grad_norm.item(),
        learning_rate=learning_rate,
        step_s=step_s,
        data_wait_s=data_wait_s,
        samples_per_s=samples_per_s,
        peak_allocated_bytes=None if peaks is None else peaks["allocated_bytes"]["all"]["peak"],
        peak_reserved_bytes=None if peaks is None else peaks["reserved_bytes"]["all"]["peak"],
        n_retries_for_memory=None if peaks is None else peaks["num_alloc_retries"] - n_retries_before,
        tokens_per_s=planned.tokens_per_s(samples_per_s),
        mfu=planned.mfu(samples_per_s, n_devices=model.config.n_ranks, device=device_name(device)),
        loss_scale=None if model.loss_scale is None else model.loss_scale.value,
        was_updated=model.was_updated,
    )


def _n_retries_for_memory(device: torch.device) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device)["num_alloc_retries"]) if device.type == "cuda" else 0


class Evaluation:
    """The mean loss of the first `n_batches` of `data`, or all, after every `every` steps; all ranks take part."""

    def __init__(self, model: ParallelModel, data: TrainingData, *, every: int, n_batches: int | None = None) -> None:
        self._model, self._data, self._every, self._n_batches = model, data, every, n_batches

    def after(self, step: int) -> EvaluationRecord | None:
        """The evaluation that is due after a step, if one is."""
        return self.run(step) if (step + 1) % self._every == 0 else None

    def run(self, step: int) -> EvaluationRecord:
        """Evaluate now; training goes on as if it had not been."""
        start_s = time.perf_counter()
        self._data.load_state_dict(asdict(START))
        found = [self._loss_and_weight(batch) for batch in islice(self._data, self._n_batches)]
        self._data.close()
        losses, weights = (torch.stack(column).double() for column in zip(*found, strict=True))
        loss = ((losses * weights).sum() / weights.sum()).item()
        return EvaluationRecord(step, loss, len(found), time.perf_counter() - start_s)

    def _loss_and_weight(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._data.explaining(batch):
            return self._model.evaluate(batch)


def write_records(
    path: Path, model: ParallelModel, records: Sequence[StepRecord], profile: StepProfile | None = None
) -> None:
    """Write all steps as JSON from rank 0, with peak memory and profiled step of every rank; all ranks must call it."""
    sizes: list[Any] = [None] * model.config.n_ranks
    peaks = (records[-1].peak_allocated_bytes, records[-1].peak_reserved_bytes) if records else (None, None)
    dist.all_gather_object(sizes, (*peaks, *_outside_and_offered_bytes(model.mesh.device)))
    profiles: list[Any] = [None] * model.config.n_ranks
    dist.all_gather_object(profiles, None if profile is None else asdict(profile))
    from_first_rank(lambda: _write_report(path, model, records, sizes, profiles if profile else None))


def _write_report(
    path: Path, model: ParallelModel, records: Sequence[StepRecord], sizes: Sequence[Any], profiles: Any
) -> None:
    report = {
        "schema_version": 1,
        "config": asdict(model.config),
        "device": device_name(model.mesh.device),
        "torch_version": torch.__version__,
        "launch_s": _launch_s(model.mesh.device),
        "steps": [json_value(asdict(record)) for record in records],
        "peak_allocated_bytes_per_rank": [allocated for allocated, *_ in sizes],
        "peak_reserved_bytes_per_rank": [reserved for _, reserved, *_ in sizes],
        "outside_allocator_bytes_per_rank": [outside for *_, outside, _ in sizes],
        "offered_bytes_per_rank": [offered for *_, offered in sizes],
        "profiled_step_per_rank": profiles,
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def _outside_and_offered_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Device memory in use besides the allocator's, and all that torch is offered, which is less than the driver tells.

    In use are context and communicators, and what other processes have on the device.
    """
    if device.type != "cuda":
        return None, None
    free_bytes, offered_bytes = torch.cuda.mem_get_info(device)
    return offered_bytes - free_bytes - torch.cuda.memory_reserved(device), offered_bytes


def _launch_s(device: torch.device) -> float:
    """How fast this host is: its time of one small op in eager mode, as `autoplan profile` measures it."""
    x = torch.zeros(64, device=device)
    for _ in range(N_LAUNCHES // 10):
        x.add_(1)
    _wait_for(device)
    start_s = time.perf_counter()
    for _ in range(N_LAUNCHES):
        x.add_(1)
    return (time.perf_counter() - start_s) / N_LAUNCHES


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
