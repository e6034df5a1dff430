"""Traces of some steps by torch's profiler: a file per rank for Perfetto, and where the time of the last step went."""

from __future__ import annotations

import gzip
import json
import warnings
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from .mesh import RankMesh
from .process_group import wait_for_all_ranks
from .refusal import OptionError
from .step_profile import STEP_MARK, StepProfile, profile_of_trace
from .written_paths import writing


def parse_steps(text: str) -> range:
    """The steps `A:B`, B exclusive.

    Raises: ArgumentTypeError for any other text.
    """
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise ArgumentTypeError(f"found {text!r}, expected A:B with A below B, such as 10:12")
    return range(int(first), int(stop))


class StepTrace:
    """Traces `steps`, each rank into `folder/rank0.json.gz` and so on; the step before them warms the profiler up.

    All ranks must trace the same steps. `n_steps` is how many the run has.

    Raises: OptionError when it has not all of `steps`; OutputError when the folder cannot be made.

    Attributes:
        steps: those to trace.
        found: where the time of the last of them went on this rank; None until then.
    """

    def __init__(self, steps: range, folder: Path, mesh: RankMesh, *, n_steps: int) -> None:
        if steps.stop > n_steps:
            raise OptionError(
                f"--profile-steps: found {steps.start}:{steps.stop}, expected steps below --steps = {n_steps}"
            )
        self.steps, self._path, self._mesh = steps, folder / f"rank{mesh.rank}.json.gz", mesh
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._profiler: profile | None = None
        self.found: StepProfile | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[bool]:
        """Trace the step inside if it is one of them; whether the profiler was on."""
        first = max(0, self.steps.start - 1)
        if not first <= step < self.steps.stop:
            yield False
            return
        if self._profiler is None:
            self._profiler = self._started(step)
        wait_for_all_ranks()
        with record_function(STEP_MARK):
            yield True
        self._profiler.step()
        if step == self.steps.stop - 1:
            self._profiler.stop()
            self._profiler = None

    def _started(self, step: int) -> profile:
        n_warmup = max(0, self.steps.start - step)
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():  # the first step of a run has none before it
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            steps = schedule(wait=0, warmup=n_warmup, active=self.steps.stop - step - n_warmup, repeat=1)
        profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)
        profiler.start()
        return profiler

    def _write(self, profiler: Any) -> None:
        with writing(self._path):
            profiler.export_chrome_trace(str(self._path))
        with gzip.open(self._path, "rt") as file:
            trace = json.loads(file.read(), strict=False)  # names of kernels may hold any character
        self.found = profile_of_trace(trace, axes=self._mesh.axes_of_groups())
