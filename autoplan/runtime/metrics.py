"""What is measured of each step, and where it goes: lines on stdout, a JSONL file, TensorBoard.

    samples per s   global batch / (step + wait for data)
    MFU             samples per s x FLOPs per sample / (devices x peak FLOPs per s of one)

MFU counts the FLOPs of the model, forward and backward, without recomputation; it is given only on the planned device.
"""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .alone import speaks_for_all
from .parity import Differences
from .refusal import OptionError
from .written_paths import writing

GIB = 2**30
BAR_WIDTH = 10


@dataclass(frozen=True, slots=True)
class PlannedFigures:
    """Figures of the plan that turn seconds into tokens per second and MFU; None where the plan does not know.

    Attributes:
        flops_per_sample: of the model, forward and backward.
        peak_flops_per_s: of one device in the plan's precision.
        device: the name of the planned device, as torch gives it.
        libraries: (package, version) of those that the model is made of, with which it was planned.
    """

    flops_per_sample: int | None = None
    tokens_per_sample: int | None = None
    peak_flops_per_s: float | None = None
    device: str = ""
    libraries: tuple[tuple[str, str], ...] = ()

    def other_libraries(self) -> Iterator[str]:
        """A line for each that is installed here in another version."""
        for name, version in self.libraries:
            try:
                found = metadata.version(name)
            except metadata.PackageNotFoundError:
                found = "none"
            if found != version:
                yield (
                    f"{name}: found {found}, planned with {version}, so time and memory may be others than predicted"
                    f"\n  fix: pip install {name}=={version}, or plan again with the one found"
                )

    def tokens_per_s(self, samples_per_s: float) -> float | None:
        """None when samples have no tokens."""
        return None if self.tokens_per_sample is None else samples_per_s * self.tokens_per_sample

    def mfu(self, samples_per_s: float, *, n_devices: int, device: str) -> float | None:
        """Model FLOPs utilization; None on another device than planned."""
        if self.flops_per_sample is None or self.peak_flops_per_s is None or device != self.device:
            return None
        return samples_per_s * self.flops_per_sample / (n_devices * self.peak_flops_per_s)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        learning_rate: of the first parameter group.
        step_s: without `data_wait_s`, which the step before it waited for its batch.
        peak_allocated_bytes, peak_reserved_bytes: of this rank since training began (the construction of the model left
            out, but for what the allocator still holds of it), or since the first step, where cuDNN tried algorithms in
            that; None on CPU.
        n_retries_for_memory: how often this rank found no free memory in the step, waited for the device, gave back all
            that was not in use, and asked again; None on CPU.
        loss_scale: under fp16, of the next step.
        was_updated: whether the parameters changed; under fp16 an overflow leaves them.
        is_profiled: whether torch's profiler slowed it down.
        differences: from plain training, when it was checked.
        is_wrong: whether they are above the tolerance.
        differs_most_in: the tensor that does then, and by how much.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    data_wait_s: float
    samples_per_s: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    n_retries_for_memory: int | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    loss_scale: float | None = None
    was_updated: bool = True
    is_profiled: bool = False
    differences: Differences | None = None
    is_wrong: bool = False
    differs_most_in: str = ""

    def __str__(self) -> str:
        parts = [
            f"step {self.step:5d}",
            f"loss {self.loss:.6f}",
            f"grad norm {self.grad_norm:.4f}",
            f"lr {self.learning_rate:.2e}",
            f"{self.step_s:.4f} s",
            f"{self.samples_per_s:.1f} samples/s"
            if self.tokens_per_s is None
            else f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.peak_allocated_bytes is not None:
            parts.append(f"{self.peak_allocated_bytes / GIB:.2f} GiB")
        if self.n_retries_for_memory:
            parts.append(f"short of memory {self.n_retries_for_memory} times")
        parts.append(f"data {1e3 * self.data_wait_s:.1f} ms")
        if not self.was_updated:
            parts.append(f"overflow: no update, loss scale now {self.loss_scale:g}")
        if self.differences is not None:
            d = self.differences
            parts.append(f"max difference: loss {d.loss:.1e} gradient {d.gradient:.1e} parameter {d.parameter:.1e}")
            parts[-1] += f" buffer {d.buffer:.1e}"
        if self.is_wrong:
            parts.append(f"DIFFERS from one process, most in {self.differs_most_in}")
        return "  ".join(parts)

    def scalars(self) -> dict[str, float | None]:
        """What is worth a curve."""
        gib = None if self.peak_allocated_bytes is None else self.peak_allocated_bytes / GIB
        return {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/loss_scale": self.loss_scale,
            "speed/step_s": self.step_s,
            "speed/data_wait_s": self.data_wait_s,
            "speed/samples_per_s": self.samples_per_s,
            "speed/tokens_per_s": self.tokens_per_s,
            "speed/mfu": self.mfu,
            "memory/peak_allocated_gib": gib,
        }


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation, after `step`: the mean loss over `n_batches` global batches."""

    step: int
    eval_loss: float
    n_batches: int
    eval_s: float

    def __str__(self) -> str:
        return (
            f"step {self.step:5d}  evaluation loss {self.eval_loss:.6f}  {self.n_batches} batches  {self.eval_s:.4f} s"
        )

    def scalars(self) -> dict[str, float | None]:
        """What is worth a curve."""
        return {"eval/loss": self.eval_loss}


Record = StepRecord | EvaluationRecord


class MetricLog:
    """Where rank 0 writes records, one after the other; other ranks write nothing.

    On a terminal a step replaces the line of the step before it, behind a bar of how many of `n_steps` are done and the
    time that the others take at the pace so far; elsewhere each has a line. `jsonl` gets a JSON object
    per record, appended at once. A run that goes on from a checkpoint repeats the steps after it: of two lines of a
    step the last counts. Not-a-number and infinity, which JSON has not, become null.
    """

    def __init__(
        self, *, rank: int, jsonl: Path | None = None, tensorboard: Path | None = None, n_steps: int | None = None
    ) -> None:
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise OptionError(
                f"--tensorboard {tensorboard}: the package tensorboard is not installed\n"
                "  fix: pip install tensorboard, or write --log-jsonl FILE"
            )
        self._is_silent = not speaks_for_all(rank)
        self._jsonl = _Lines(jsonl) if jsonl is not None and rank == 0 else None
        self._curves = _Curves(tensorboard) if tensorboard is not None and rank == 0 else None
        self._n_steps = n_steps
        self._first: tuple[int, float] | None = None  # the first step that was shown, and when
        self._is_terminal = sys.stdout.isatty()
        self._has_open_line = False

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end_line()
        if self._jsonl is not None:
            self._jsonl.close()
        if self._curves is not None:
            self._curves.close()

    def write(self, record: Record) -> None:
        """Give one record to all of them."""
        if self._is_silent:
            return
        self._show(record)
        if self._jsonl is not None:
            self._jsonl.add(json.dumps(json_value(asdict(record))))
        if self._curves is not None:
            self._curves.add(record)

    def say(self, text: str) -> None:
        """Print something else, on a line of its own."""
        if not self._is_silent:
            self._end_line()
            print(text, flush=True)

    def _show(self, record: Record) -> None:
        is_passing = isinstance(record, StepRecord) and record.was_updated and record.differences is None
        if not (self._is_terminal and is_passing):
            self.say(str(record))
            return
        width = shutil.get_terminal_size().columns
        progress = self._progress(record.step)
        text = progress + str(record).removeprefix(f"step {record.step:5d}  " if progress else "")
        print("\r" + text[: width - 1].ljust(width - 1), end="", flush=True)
        self._has_open_line = True

    def _progress(self, step: int) -> str:
        """`[####------] 40/100  0:01:30 left  `, the time from the second step on; nothing where no end is known."""
        if not self._n_steps:
            return ""
        now_s, n_done = time.monotonic(), step + 1
        first_step, first_s = self._first = self._first or (step, now_s)
        bar = ("#" * (BAR_WIDTH * n_done // self._n_steps)).ljust(BAR_WIDTH, "-")
        left = ""
        if step > first_step:
            left_s = (now_s - first_s) / (step - first_step) * (self._n_steps - n_done)
            left = f"  {timedelta(seconds=round(left_s))} left"
        return f"[{bar}] {n_done}/{self._n_steps}{left}  "

    def _end_line(self) -> None:
        if self._has_open_line:
            print(flush=True)
            self._has_open_line = False


class _Lines:
    """A file to append to; a last line that a killed run left unfinished is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                with path.open("r+b") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
            self._file = path.open("ab", buffering=0)  # what a full disk did not take is not tried again on close

    def add(self, line: str) -> None:
        rest = memoryview(line.encode() + b"\n")
        with writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


class _Curves:
    """A folder for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer: Any = SummaryWriter(str(folder))

    def add(self, record: Record) -> None:
        with writing(self._folder):
            for name, value in record.scalars().items():
                if value is not None:
                    self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def json_value(value: Any) -> Any:
    """Not-a-number and infinity, which JSON has not, as null."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device_name(device: torch.device) -> str:
    """The name of the accelerator, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
