"""Checkpoints of a training run: saved beside the training, found again, loaded under any plan.

    save   copy this rank's boxes to host memory  |  on a thread: write them, complete and rename the folder, remove old
           beside the next step, see host_copies.py
    load   every rank reads the boxes that overlap its own, from whichever ranks wrote them

No rank ever holds a whole model for it: host memory takes one copy of what the rank itself holds, which is kept for the
next save. See folder.py for what is on disk, state.py for what is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..config import Config
from ..parallel import ParallelModel
from ..process_group import from_first_rank
from ..seeds import resumed_seed
from ..stages.pieces import Piece
from .folder import (
    MANIFEST,
    SCHEMA_VERSION,
    check_complete,
    check_undamaged,
    damaged_files,
    newest_complete,
    publish,
    read_state,
    remove_old,
    remove_unfinished,
    start_writing,
)
from .folder_lock import lock_folder, unlock_folder
from .host_copies import HostCopies
from .planner import CheckpointError, IndexReader, RankCheckpointError, read_pieces, write_pieces
from .state import (
    MODEL,
    Values,
    buffer_pieces,
    compression_pieces,
    compression_to_fill,
    gathered,
    has_compression,
    load_optimizer_state,
    merged,
    optimizer_options,
    optimizer_pieces,
    optimizer_state_to_fill,
    parameter_pieces,
    random_pieces,
    restore_random,
    restored_groups,
)

KEEP = 3
WRITE_TIMEOUT_S = 3600.0
_MAX_NAMED = 5
_MESH_FIELDS = ("pp", "dp", "zero_shard_degree", "tp")


class Stateful(Protocol):
    """Something else that a run must remember, such as the place in a dataset; its state must be JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class _RankState:
    """What one rank adds to the JSON of a checkpoint."""

    groups: list[dict[str, Any]]
    values: Values


class Checkpoints:
    """The checkpoints of one run in a folder that all ranks see; every rank builds one and calls the same methods.

    `extra` names what else to save and load. At most one save is under way; the next waits for it.

    Raises: CheckpointError when the folder cannot be written, is another job's or of another one of these objects that
        is not closed, or is not the same on every rank.
    """

    def __init__(
        self, model: ParallelModel, folder: str | Path, *, keep: int = KEEP, extra: Mapping[str, Stateful] | None = None
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep: found {keep}, expected 1 or more checkpoints")
        self.folder = Path(folder).absolute()
        self._model, self._keep, self._extra = model, keep, dict(extra or {})
        self._group = host_group(model.config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None
        self._prepared: Future[None] | None = None
        self._copies = HostCopies(model.mesh.device)
        self._lock = _prepare_folder(self.folder, self._group, is_first=model.mesh.rank == 0)

    def prepare(self) -> None:
        """Set host memory aside for the first save, on the thread; once the optimizer has taken a step."""
        if self._prepared is None and self._model.mesh.device.type == "cuda":
            pieces = self._lasting_pieces()[0]
            self._prepared = self._thread.submit(self._copies.reserve, pieces)

    def save(self) -> None:
        """Start to save the run as it is now.

        It returns at once: the next update of the model waits until all is copied to host memory. Whoever changes
        parameters in another way calls the model's `wait_for_copies` before.

        Raises: CheckpointError when the save before this one failed.
        """
        self.wait()
        if self._prepared is not None:
            self._prepared.result()
        lasting, values = self._lasting_pieces()
        copies, copied = self._copies.start(lasting, self._passing_pieces())
        self._model.hold_update(copied)
        own = _RankState(optimizer_options(self._model), values)
        self._under_way = self._thread.submit(self._write, copies, own, self._run_state())

    def wait(self) -> Path | None:
        """Wait until the save that is under way is complete; its folder.

        Raises: CheckpointError when it failed; the checkpoints before it are untouched.
        """
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.result()
        except (Exception, CheckpointError) as error:
            kind = type(error) if isinstance(error, CheckpointError) else RankCheckpointError
            raise kind(f"a checkpoint could not be written; those before it are untouched\n{error}") from error

    def complete_within(self, limit_s: float) -> Path | None:
        """Give the save that is under way so long to be complete; its folder, or None. For a run that ends in error."""
        if self._under_way is None:
            return None
        if not self._under_way.done():
            print(f"an error ends the run once the save under way is complete, or in {limit_s:g} s", file=sys.stderr)
        try:
            return self._under_way.result(timeout=limit_s)
        except (Exception, CheckpointError) as error:
            print(
                f"the checkpoint under way is lost: {str(error) or type(error).__name__}", file=sys.stderr, flush=True
            )
            return None

    def newest(self) -> Path | None:
        """The newest complete checkpoint of the folder, the same on every rank."""
        found: Path | None = from_first_rank(lambda: newest_of(self.folder))
        return found

    def load(self, path: str | Path) -> None:
        """As `load_checkpoint`, with the same `extra` as is saved."""
        load_checkpoint(self._model, path, extra=self._extra)

    def close(self) -> None:
        """Complete what is under way."""
        self.wait()
        self._thread.shutdown()
        self._copies.close()
        unlock_folder(self._lock)
        self._lock = None

    def _run_state(self) -> dict[str, Any]:
        return {
            "plan": asdict(self._model.config),
            "torch_version": torch.__version__,
            "run": self._model.run_state(),
            "extra": {name: value.state_dict() for name, value in self._extra.items()},
        }

    def _lasting_pieces(self) -> tuple[list[Piece], Values]:
        """What only an update changes, and what of it is not a tensor."""
        pieces, values = optimizer_pieces(self._model)
        return parameter_pieces(self._model) + pieces, values

    def _passing_pieces(self) -> list[Piece]:
        is_first = self._model.mesh.dp_rank == self._model.mesh.tp_rank == 0
        pieces = random_pieces(self._model)[0] + compression_pieces(self._model)
        return pieces + (buffer_pieces(self._model) if is_first else [])

    def _write(self, pieces: Sequence[Piece], own: _RankState, run_state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; runs on the thread, on all ranks together."""
        self._copies.wait()
        step = run_state["run"]["n_steps"]
        part: Path = self._from_first(lambda: start_writing(self.folder, step))
        checksums = merged(gathered(write_pieces(part, pieces, group=self._group), self._group))
        ranks = gathered(own, self._group)
        sizes = merged(gathered(_own_sizes(part, self._model.mesh.rank), self._group))

        def complete() -> Path:
            optimizer = {"groups": _all_groups(ranks), "values": merged(rank.values for rank in ranks)}
            state = {"schema_version": SCHEMA_VERSION, **run_state, "optimizer": optimizer}
            target = publish(part, state=state, sizes=sizes, checksums=checksums)
            remove_old(target, keep=self._keep)
            return target

        written: Path = self._from_first(complete)
        return written

    def _from_first(self, make: Callable[[], Any]) -> Any:
        return from_first_rank(make, group=self._group, failure=CheckpointError)


def newest_of(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder; what is wrong with newer ones goes to stderr."""
    found = newest_complete(folder)
    for line in found.passed_over:
        print(f"passed over {line}", file=sys.stderr)
    return found.path


def checkpoint_at(path: Path) -> Path:
    """A checkpoint itself, or the newest complete one of a folder.

    Raises: CheckpointError when there is none.
    """
    found = path if (path / MANIFEST).is_file() else newest_of(path)
    if found is None:
        raise CheckpointError(f"{path}: found no complete checkpoint\n  fix: give a folder that holds step-...")
    return found


def load_checkpoint(model: ParallelModel, path: str | Path, *, extra: Mapping[str, Stateful] | None = None) -> None:
    """Go on from a checkpoint, of any plan for the same model; every rank must call it.

    Raises: CheckpointError when it is incomplete, damaged or of another model, and then nothing was changed; or when a
        file of it cannot be read.
    """
    path = Path(path)
    check_complete(path)
    with passing_host_group(model.config) as group:
        own_damaged = damaged_files(path, rank=model.mesh.rank, n_ranks=model.config.n_ranks)
        check_undamaged(path, chain.from_iterable(gathered(own_damaged, group)))
    state, reader = read_state(path), IndexReader(path)
    saved = reader.tensors()
    check_shapes(model.whole.shapes, saved_shapes(saved), where=str(path))
    try:
        optimizer, run, extra_state = state["optimizer"], state["run"], state["extra"]
        groups = restored_groups(model, optimizer["groups"])
        filled, pieces = optimizer_state_to_fill(model, saved, optimizer["values"])
        is_same_mesh = all(state["plan"][field] == getattr(model.config, field) for field in _MESH_FIELDS)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: state.json is not what a program of this kind writes: {error!r}") from error
    compressed, compressed_pieces = compression_to_fill(model, saved, state["plan"])
    own_random, generators = random_pieces(model)
    has_random = is_same_mesh and all(piece.key in saved for piece in own_random)
    pieces += parameter_pieces(model) + buffer_pieces(model) + compressed_pieces + (own_random if has_random else [])
    model.wait_for_copies()
    read_together(reader, pieces, model.config)
    load_optimizer_state(model, filled, groups)
    model.load_run_state(run)
    for own, remembered in zip(filter(None, model.compressed), compressed, strict=False):
        own.load(remembered)
    if not compressed and (any(model.compressed) or has_compression(saved)) and model.mesh.rank == 0:
        print(_dropped(path), file=sys.stderr)
    for name, value in (extra or {}).items():
        if name in extra_state:
            value.load_state_dict(extra_state[name])
    if has_random:
        restore_random(model, generators)
    else:
        torch.manual_seed(resumed_seed(torch.initial_seed(), n_steps=model.n_steps))


def _dropped(path: Path) -> str:
    return (
        f"{path}: of another plan, so what compressed reductions had lost of gradients is dropped, and their steps are "
        "counted from 0"
    )


def read_together(reader: IndexReader, pieces: Sequence[Piece], config: Config) -> None:
    """Fill the pieces of every rank from a checkpoint; all ranks must call it."""
    with passing_host_group(config) as group, torch.no_grad():
        read_pieces(reader, pieces, group=group)


@contextmanager
def passing_host_group(config: Config) -> Iterator[ProcessGroup | None]:
    """A `host_group` that is needed once; where an error leaves, the process group ends with it."""
    group = host_group(config)
    yield group
    if group is not None:
        dist.destroy_process_group(group)


def host_group(config: Config) -> ProcessGroup | None:
    """A group of all ranks over host memory, apart from the group that trains; None for one rank."""
    if config.n_ranks == 1:
        return None
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))
    return group


def saved_shapes(saved: Mapping[str, TensorStorageMetadata]) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the model's tensors in a checkpoint, by name."""
    return {key.removeprefix(MODEL): tuple(entry.size) for key, entry in saved.items() if key.startswith(MODEL)}


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Compare the model's tensors with those of a file.

    Raises: CheckpointError that names the first ones that are missing, unknown, or of another shape.
    """
    wrong = [f"{name}: not in it" for name in expected if name not in found]
    wrong += [f"{name}: in it, but not in the model" for name in found if name not in expected]
    wrong += [
        f"{name}: found shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        rest = [f"and {len(wrong) - _MAX_NAMED} more"] if len(wrong) > _MAX_NAMED else []
        lines = "\n".join(f"  {line}" for line in wrong[:_MAX_NAMED] + rest)
        raise CheckpointError(f"{where}: is of another model\n{lines}\n  fix: choose one of this model")


def _prepare_folder(folder: Path, group: ProcessGroup | None, *, is_first: bool) -> int | None:
    """Make the folder, remove what a killed run left, and see that all ranks have the same one; on rank 0 its lock."""
    mark = folder / ".ranks-meet-here"
    lock: int | None = None

    def prepare() -> None:
        nonlocal lock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder)
            remove_unfinished(folder)
            mark.touch()
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error.strerror}\n  fix: choose another") from error

    from_first_rank(prepare, group=group, failure=CheckpointError)
    is_seen = all(gathered(mark.exists(), group))
    if is_first:
        mark.unlink(missing_ok=True)
    if not is_seen:
        unlock_folder(lock)
        raise CheckpointError(
            f"{folder}: found on some hosts only, expected one folder that all ranks see\n"
            "  fix: choose one on a shared file system"
        )
    return lock


def _own_sizes(part: Path, rank: int) -> dict[str, int]:
    """The files that a rank wrote, with their sizes; the first rank wrote the index too."""
    own = [path for path in part.iterdir() if path.name.startswith(f"__{rank}_")]
    own += [part / ".metadata"] if rank == 0 else []
    return {path.name: path.stat().st_size for path in own}


def _all_groups(ranks: Sequence[_RankState]) -> list[dict[str, Any]]:
    """The groups of all ranks; those with the same options are one."""
    found: list[dict[str, Any]] = []
    for group in (group for rank in ranks for group in rank.groups if group["parameters"]):
        same = next((other for other in found if other["options"] == group["options"]), None)
        if same is None:
            found.append({"parameters": dict.fromkeys(group["parameters"]), "options": group["options"]})
        else:
            same["parameters"].update(dict.fromkeys(group["parameters"]))
    return [{"parameters": list(group["parameters"]), "options": group["options"]} for group in found]
