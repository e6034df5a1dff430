"""Checkpoints in a folder: written whole or not at all, found again, and the old ones removed.

    DIR/step-00000200.part/   while it is being written
    DIR/.in-use               locked by the job that saves there, see folder_lock.py
    DIR/step-00000200/        complete: MANIFEST.json, with size and CRC-32 of each file, was written last; then renamed

All ranks must see the same folder. A `.part` folder is left behind by a program that was killed while writing; the next
one removes it. One that cannot be written whole is removed at once.

Sizes are compared where a checkpoint is looked for, checksums before it is read. They are taken of what is written, by
the threads that write it beside the training: 4.2 GB/s a core; four threads on two busy cores then write 0.75 GB/s to
memory instead of 1.1, and 1.2 GB/s to a disk instead of 1.5 (2026-11-23).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .planner import N_THREADS, CheckpointError

MANIFEST = "MANIFEST.json"
STATE = "state.json"
SCHEMA_VERSION = 2
MAX_JSON_BYTES = 2**30
MAX_NAMED = 5
_BLOCK_BYTES = 2**24
_PART = ".part"
_COMPLETE = re.compile(r"step-(\d{8,})")
_DOOMED = ".old.part"
_UNFINISHED = re.compile(r"step-\d{8,}(\.old)?\.part")


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, or None, and what is wrong with each newer one."""

    path: Path | None
    passed_over: tuple[str, ...] = ()


def complete_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is once it is complete."""
    return folder / f"step-{step:08d}"


def start_writing(folder: Path, step: int) -> Path:
    """An empty folder for a checkpoint that is being written; one process calls it."""
    path = complete_path(folder, step)
    part = path.with_name(path.name + _PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def publish(part: Path, *, state: Mapping[str, Any], sizes: Mapping[str, int], checksums: Mapping[str, int]) -> Path:
    """Complete a checkpoint whose tensors are written, with size and CRC-32 of its files; one process calls it.

    What cannot be completed, as on a full disk, is removed.
    """
    try:
        _write_synced(part / STATE, state)
        every_size = {**sizes, STATE: (part / STATE).stat().st_size}
        every_checksum = {**checksums, STATE: _checksum(part / STATE)}
        manifest = {"schema_version": SCHEMA_VERSION, "bytes": every_size, "crc32": every_checksum}
        _write_synced(part / MANIFEST, manifest)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    target = part.with_name(part.name.removesuffix(_PART))
    if target.exists():
        _remove(target)
    part.rename(target)
    _sync(target.parent)
    return target


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed program was writing; one process calls it, while none writes."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(newest: Path, *, keep: int) -> None:
    """Remove the checkpoints of fewer steps than `newest` beside it, but for `keep - 1`; what cannot be removed stays.

    Those of more steps stay too: they were passed over as incomplete, or are of another run.
    """
    found = _complete(newest.parent)
    for path in found[found.index(newest) + keep :]:
        _remove(path)


def newest_complete(folder: Path) -> Found:
    """The newest checkpoint of a folder that holds all that it should."""
    passed_over = []
    for path in _complete(folder):
        try:
            check_complete(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return Found(path, tuple(passed_over))
    return Found(None, tuple(passed_over))


def check_complete(path: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises: CheckpointError when a file is missing or has another size than was written.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: found no {MANIFEST}, expected a complete checkpoint\n  fix: choose another one")
    sizes = read_json(path / MANIFEST).get("bytes")
    if not isinstance(sizes, dict) or STATE not in sizes:
        raise CheckpointError(f"{path / MANIFEST}: bytes: found {type(sizes).__name__}, expected the size of each file")
    for name, expected in sizes.items():
        file = path / name
        found = file.stat().st_size if Path(name).name == name and file.is_file() else None
        if found != expected:
            what = "no file" if found is None else f"{found} bytes"
            raise CheckpointError(f"{file}: found {what}, expected {expected} bytes\n  fix: choose another checkpoint")


def damaged_files(path: Path, *, rank: int, n_ranks: int) -> list[str]:
    """Names of the files of a complete checkpoint that hold other bytes than were written, of this rank's part of them.

    A rank takes the files of the same rank, which it is likely to read next. Checkpoints of earlier versions have no
    checksums.
    """
    manifest = read_json(path / MANIFEST)
    checksums = manifest.get("crc32") or {}
    own = [name for name in manifest["bytes"] if name in checksums and _written_by(name) % n_ranks == rank]
    with ThreadPoolExecutor(N_THREADS) as threads:
        found = threads.map(_checksum, [path / name for name in own])
        return [name for name, checksum in zip(own, found, strict=True) if checksum != checksums[name]]


def check_undamaged(path: Path, damaged: Iterable[str]) -> None:
    """Raises: CheckpointError that names the damaged files of a checkpoint, and an older one to go on from."""
    names = sorted(damaged)
    if names:
        before = _complete(path.parent)
        older = [other for other in before[before.index(path) + 1 :] if _is_complete(other)] if path in before else []
        fix = f"remove {path}, and go on from {older[0]}" if older else "use another checkpoint"
        raise CheckpointError(
            f"{path}: damaged: other bytes than were written are in {', '.join(names[:MAX_NAMED])}"
            f"{f' and {len(names) - MAX_NAMED} more files' if len(names) > MAX_NAMED else ''}\n  fix: {fix}"
        )


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors.

    Raises: CheckpointError when it is not of a version that this program reads.
    """
    state = read_json(path / STATE)
    if state.get("schema_version") != SCHEMA_VERSION:
        found = state.get("schema_version")
        raise CheckpointError(
            f"{path / STATE}: schema_version: found {found!r}, expected {SCHEMA_VERSION}\n"
            "  fix: go on with the program that saved it, or choose another checkpoint"
        )
    return state


def n_steps_at(path: Path) -> int:
    """How many steps were done when a checkpoint was saved.

    Raises: CheckpointError when it does not say so.
    """
    run = read_state(path).get("run")
    n_steps = run.get("n_steps") if isinstance(run, dict) else None
    if not isinstance(n_steps, int):
        raise CheckpointError(
            f"{path / STATE}: run.n_steps: found {n_steps!r}, expected a number\n  fix: choose another checkpoint"
        )
    return n_steps


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; it may come from anyone."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: found more than {MAX_JSON_BYTES} bytes, expected a small JSON file")
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: found no readable JSON ({error})\n  fix: choose another checkpoint") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: found a {type(value).__name__}, expected a JSON object")
    return value


def _is_complete(path: Path) -> bool:
    try:
        check_complete(path)
    except CheckpointError:
        return False
    return True


def _written_by(name: str) -> int:
    """The rank that wrote a file."""
    match = re.match(r"__(\d+)_", name)
    return int(match[1]) if match else 0


def _checksum(path: Path) -> int | None:
    """The CRC-32 of a file; None where it cannot be read."""
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
    except OSError:
        return None
    return checksum


def _complete(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, newest first."""
    paths = [path for path in (folder.iterdir() if folder.is_dir() else ()) if _COMPLETE.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def _remove(path: Path) -> None:
    """Remove a complete checkpoint; a half-removed one is not taken for complete."""
    doomed = path.with_name(path.name + _DOOMED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_synced(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
