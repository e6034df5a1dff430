"""A run that can be stopped and goes on: options of the program, when to save, and being told to stop.

    start     load the newest complete checkpoint, or the given one, or initial weights
    steps     save every N of them, beside the training
    SIGTERM   finish the step, save, exit with 143: the same command goes on from there; after the last step, with 0
    SIGINT    the same with 130; what comes after it ends the process
    end       save, export the weights

Without a folder for checkpoints SIGINT saves nothing, and SIGTERM ends the process at once.
`--resume PATH` starts a run there. Its checkpoints remember PATH, so that the same command goes on from them, also
after an elastic restart; where the folder has newer ones of another run, it is refused.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .checkpoints.checkpoint import KEEP, Checkpoints, Stateful, checkpoint_at, load_checkpoint, newest_of
from .checkpoints.folder import n_steps_at, read_state
from .checkpoints.planner import CheckpointError
from .checkpoints.weight_files import check_export_name, export_model, load_initial_weights
from .input_pipeline.loading import TrainingData
from .number_options import whole_number
from .parallel import ParallelModel
from .process_group import from_first_rank
from .refusal import is_first_of_host
from .written_paths import named_path, written_file

STEPS_PER_SAVE = 100
EXIT_STOPPED = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT
# Within it a second signal is the first once more: a scheduler sends it to every process, and torchrun passes it on.
SAME_SIGNAL_S = 1.0
_ORIGIN = "resumed_from"  # in what a checkpoint holds of the run beside the model
LAST_SAVE_S = 300.0  # what a save under way has left when an error ends the run


def add_checkpoint_options(parser: ArgumentParser) -> None:
    """The options of `train.py` that this module reads."""
    count = whole_number(1)
    group = parser.add_argument_group(
        "checkpoints",
        "SIGTERM with --checkpoint-dir, or Ctrl-C: finish the step, save if there is a folder, exit with "
        f"{EXIT_STOPPED} or {EXIT_INTERRUPTED}; torchrun gives that 30 s, or those of TORCH_ELASTIC_SHUTDOWN_TIMEOUT. "
        "A second Ctrl-C: end at once",
    )
    group.add_argument("--checkpoint-dir", type=named_path, metavar="DIR", help="Save here, where all hosts can read.")
    every = f"Save after every N steps ({STEPS_PER_SAVE})."
    group.add_argument("--checkpoint-every", type=count, metavar="N", help=every)
    group.add_argument("--keep", type=count, metavar="K", help=f"Keep only the newest K checkpoints ({KEEP}).")
    group.add_argument(
        "--resume",
        metavar="auto|none|PATH",
        help="Go on from PATH, then from what that saved; or auto, the default: from the newest.",
    )
    group.add_argument("--init-from", type=Path, metavar="FILE", help="Start from safetensors or a state_dict.")
    group.add_argument("--export", type=written_file, metavar="FILE", help="Write the final weights as safetensors.")


@dataclass(slots=True)
class _Origin:
    """The PATH that a run was started from with `--resume`, which its checkpoints remember; None without one."""

    path: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.path = state_dict.get("path")


class TrainingRun:
    """What happens around the steps of a training run; every rank makes one and calls the same methods.

    An error inside its `with` is passed on as soon as the save under way is complete. Being told to stop in the last of
    `n_steps` changes nothing.

    Raises: CheckpointError when the options cannot be followed.
    """

    def __init__(
        self,
        model: ParallelModel,
        options: Namespace,
        *,
        data: TrainingData | None = None,
        n_steps: int | None = None,
    ) -> None:
        if options.export is not None:
            check_export_name(options.export)
        self._model, self._options, self._n_steps = model, options, n_steps
        self._origin = _Origin()
        self._extra: dict[str, Stateful] = {_ORIGIN: self._origin} | ({} if data is None else {"data": data})
        self._saved_step = -1
        self.was_stopped = False
        self._exit_stopped = EXIT_INTERRUPTED if options.checkpoint_dir is None else EXIT_STOPPED
        self._interrupted_s = math.inf
        self._checkpoints: Checkpoints | None = None
        if options.checkpoint_dir is not None:
            keep = options.keep or KEEP
            self._checkpoints = Checkpoints(model, options.checkpoint_dir, keep=keep, extra=self._extra)
            signal.signal(signal.SIGTERM, self._tell)
        signal.signal(signal.SIGINT, self._tell)
        self._start()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._checkpoints is not None:
            self._checkpoints.complete_within(LAST_SAVE_S)

    def ends_after(self, step: int) -> bool:
        """Save after a step if it is time to; whether the run was told to stop, on any rank."""
        self.was_stopped = self._model.stops and step + 1 != self._n_steps
        if self._checkpoints is not None:
            self._checkpoints.prepare()
            if self.was_stopped or (step + 1) % (self._options.checkpoint_every or STEPS_PER_SAVE) == 0:
                self._save()
        return self.was_stopped

    def finish(self) -> int:
        """Save what is not saved yet and export the weights; the exit code of the program."""
        if self._checkpoints is not None:
            self._save()
            self._checkpoints.close()
            if self.was_stopped:
                self._say(f"told to stop: saved after {self._model.n_steps} steps; the same command goes on from there")
        elif self.was_stopped and is_first_of_host():
            print(
                f"interrupted after {self._model.n_steps} steps; nothing was saved, as no --checkpoint-dir was given",
                file=sys.stderr,
                flush=True,
            )
        if self._options.export is not None and not self.was_stopped:
            export_model(self._model, self._options.export)
        return self._exit_stopped if self.was_stopped else 0

    def _start(self) -> None:
        path = from_first_rank(self._checkpoint_to_load)
        if path is not None:
            load_checkpoint(self._model, path, extra=self._extra)
            self._saved_step = self._model.n_steps if path.parent == self._options.checkpoint_dir else -1
            if self._given_path is not None:
                self._origin.path = self._given_path
            self._say(f"resumed from {path}: {self._model.n_steps} steps were done")
        elif self._options.init_from is not None:
            load_initial_weights(self._model, self._options.init_from)
            self._say(f"initial weights from {self._options.init_from}")

    def _checkpoint_to_load(self) -> Path | None:
        """Runs on rank 0."""
        folder, choice = self._options.checkpoint_dir, self._options.resume
        own = newest_of(folder) if folder is not None else None
        if choice in (None, "auto"):
            return own
        if choice == "none":
            is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            if own is not None and not is_restarted:
                raise CheckpointError(
                    f"--resume none: found {own}, expected an empty --checkpoint-dir\n"
                    "  fix: choose another --checkpoint-dir, or --resume auto to go on"
                )
            return own
        if own is not None and _origin_of(own) == self._given_path:
            return own
        path = checkpoint_at(Path(choice))
        if own is not None and n_steps_at(own) > (step := n_steps_at(path)):
            raise CheckpointError(
                f"--resume {choice}: found {own}, which is newer and was not saved by a run that --resume {choice} "
                f"began; expected none after step {step}\n"
                "  fix: choose another --checkpoint-dir, or --resume auto to go on from the newest"
            )
        return path

    @property
    def _given_path(self) -> str | None:
        """The PATH of `--resume`, wherever the program is started."""
        choice = self._options.resume
        return None if choice in (None, "auto", "none") else os.path.abspath(choice)

    def _save(self) -> None:
        assert self._checkpoints is not None
        if self._saved_step != self._model.n_steps:
            self._checkpoints.save()
            self._saved_step = self._model.n_steps

    def _tell(self, number: int, _: Any) -> None:
        """Of a second Ctrl-C torchrun makes a SIGTERM."""
        if time.monotonic() > self._interrupted_s + SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT and self._interrupted_s == math.inf:
            self._exit_stopped, self._interrupted_s = EXIT_INTERRUPTED, time.monotonic()
            if is_first_of_host():  # print() may be what is interrupted
                saves = "" if self._checkpoints is None else ", saves"
                os.write(2, f"Ctrl-C: finishes the step{saves} and ends; Ctrl-C again ends at once\n".encode())
        self._model.is_told_to_stop = True

    def _say(self, text: str) -> None:
        if self._model.mesh.rank == 0:
            print(text, file=sys.stderr, flush=True)


def _origin_of(checkpoint: Path) -> Any:
    """What `_Origin.path` was as a checkpoint was saved; None in those of other versions."""
    try:
        extra = read_state(checkpoint).get("extra")
    except CheckpointError:
        return None
    origin = extra.get(_ORIGIN) if isinstance(extra, dict) else None
    return origin.get("path") if isinstance(origin, dict) else None
