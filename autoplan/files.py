"""Files and folders, written as a whole or not at all, and read back.

    files --> temporary folder beside the target --> MANIFEST.json last --> renamed to the target

A folder without MANIFEST.json is not one of ours, or was not finished; a reader refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from autoplan.errors import InputError, OutputError
from autoplan.parallel_plan import SCHEMA_VERSION

MANIFEST = "MANIFEST.json"
MAX_FILE_BYTES = 256 * 2**20
_MADE_BY_RUNNING = frozenset({"__pycache__"})


def check_target(target: Path, *, force: bool, option: str = "--out") -> None:
    """Refuse a target that could not be written, before time is spent on a search.

    An empty folder is written into. What autoplan wrote is replaced with `force`, and nothing else is.

    Raises: OutputError when the folder that it or its parents would be made in cannot be written, or something is there
        that may not be replaced.
    """
    parent = next(path for path in target.absolute().parents if os.path.lexists(path))
    check_writable(parent, target=target, option=option)
    if not os.path.lexists(target):
        return
    _check_replaceable(target, option=option)
    if not force and any(target.iterdir()):
        raise OutputError(
            f"{target}: already exists, nothing was changed\n  fix: choose another {option}, or add --force"
        )


def check_writable(folder: Path, *, target: Path, option: str) -> None:
    """Return when a file can be made in a folder, which is tried: permissions do not tell of /proc or a full disk.

    Raises: OutputError that says why `target` cannot be written.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        found = f"where nothing can be written ({error.strerror})" if folder.is_dir() else "which is no folder"
        raise OutputError(
            f"{target}: would be written into {folder}, {found}; nothing was changed\n"
            f"  expected: a folder that is there and can be written to\n  fix: choose another {option}"
        ) from error


def _unwritten(target: Path, error: OSError, *, option: str) -> OutputError:
    return OutputError(
        f"{target}: {error.strerror or error}; nothing was changed\n"
        f"  expected: a place that can be written to\n  fix: choose another {option}, or make room there"
    )


def write_folder(target: Path, files: Mapping[str, str | bytes], *, force: bool = False) -> None:
    """Write `files` (relative path -> content) as the folder `target`, with a manifest of their SHA-256 sums.

    The folder appears complete or not at all; with `force`, the old one stays until the new one is complete.

    Raises: OutputError when a name leaves the folder, or the target cannot be written.
    """
    for name in files:
        _check_name(name)
    check_target(target, force=force)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.absolute().parent))
    except OSError as error:
        raise _unwritten(target, error, option="--out") from error
    try:
        _write_files(scratch / "new", files)
        _swap(scratch, target)
    except OSError as error:
        raise _unwritten(target, error, option="--out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_page(path: Path, *, force: bool) -> None:
    """Refuse a page that could not be written, before time is spent on what it shows.

    Raises: OutputError when its folder cannot be written, or something is there and `force` is not set.
    """
    check_writable(path.absolute().parent, target=path, option="--html")
    if os.path.lexists(path) and not (force and path.is_file()):
        way = ", or add --force to replace it" if path.is_file() else ""
        raise OutputError(f"{path}: already exists, nothing was changed\n  fix: choose another --html{way}")


def write_page(path: Path, text: str, *, force: bool = False) -> None:
    """Write a page whole or not at all; with `force` an old one stays until the new one is there.

    Raises: OutputError when it cannot be written.
    """
    check_page(path, force=force)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.absolute().parent))
        try:
            _write_file(scratch / "page", text.encode())
            (scratch / "page").replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise _unwritten(path, error, option="--html") from error


def check_folder(folder: Path) -> None:
    """Check every file of an output folder against its manifest.

    Raises: InputError that names the file that is missing or was changed.
    """
    for name, sha256 in _manifest_sums(folder).items():
        path = folder / name
        if not path.is_file():
            missing = FileNotFoundError()
            raise InputError.unreadable(str(path), missing, expected="a complete output folder", fix="plan again")
        if _sha256(path.read_bytes()) != sha256:
            raise InputError.of(
                str(path),
                found="a file that was changed after it was written",
                expected=f"the SHA-256 sum of {MANIFEST}",
                fix="undo the change, or plan again; edited, train.py still runs, and plan.json is judged by"
                f" autoplan estimate MODEL --hw HW --plan {folder / 'plan.json'}",
            )


def check_file(path: Path, *, expected: str) -> None:
    """Return when there is a file.

    Raises: InputError that says what is there instead.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return
    except OSError as error:
        raise InputError.unreadable(str(path), error, expected=expected) from error
    raise InputError.unreadable(str(path), IsADirectoryError(), expected=expected)


def read_text_file(path: Path) -> str:
    """The text of a file that autoplan wrote or was given.

    Raises: InputError when it cannot be read, or is too large to be one of these.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError.of(str(path), found="a huge file", expected="a text of autoplan", fix="check the path")
        return path.read_text()
    except OSError as error:
        raise InputError.unreadable(str(path), error, expected="a text file") from error
    except UnicodeDecodeError as error:
        raise InputError.of(str(path), found="no text", expected="a text file", fix="check the path") from error


def _manifest_sums(folder: Path) -> dict[str, str]:
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError.of(
            str(folder),
            found=f"no {MANIFEST}",
            expected="a complete output folder",
            fix="name one that plan --out wrote, or write this one again",
        )
    try:
        sums = json.loads(read_text_file(path))["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError.of(str(path), found="damaged text", expected="a manifest", fix="plan again") from error
    if not isinstance(sums, dict) or not all(isinstance(item, str) for item in sums.values()):
        raise InputError.of(f"{path}: sha256", found=type(sums).__name__, expected="file sums", fix="plan again")
    for name in sums:
        _check_name(name)
    return sums


def _check_name(name: str) -> None:
    """Refuse a file name that leaves the folder."""
    path = PurePosixPath(name)
    is_plain = name and not path.is_absolute() and ".." not in path.parts and str(path) == name
    if not is_plain or name == MANIFEST or "\\" in name or "\0" in name:
        raise OutputError(f"{name!r} is not a file name inside the output folder; nothing was written")


def _check_replaceable(target: Path, *, option: str) -> None:
    """Only what autoplan wrote is ever replaced; a checkpoint or note beside it is never lost."""
    if target.is_symlink() or not target.is_dir():
        found = "a link" if target.is_symlink() else "a file"
        raise OutputError(f"{target}: {found}, not a folder; nothing was changed\n  fix: choose another {option}")
    if target.samefile(Path()):
        raise OutputError(
            f"{target}: the current folder, which is not replaced; nothing was changed\n"
            f"  fix: choose another {option}, such as {target / 'plan'}"
        )
    if not any(target.iterdir()):
        return
    try:
        ours = {*_manifest_sums(target), MANIFEST}
    except InputError as error:
        raise OutputError(
            f"{target}: was not written by autoplan (no readable {MANIFEST}), nothing was changed\n"
            f"  fix: choose another {option}"
        ) from error
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target)
        if path.is_file() and name.as_posix() not in ours and not _MADE_BY_RUNNING.intersection(name.parts):
            raise OutputError(
                f"{target}: holds {name}, which autoplan did not write; nothing was changed\n"
                f"  fix: move it away, or choose another {option}"
            )


def _write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    sums = {}
    for name, content in sorted(files.items()):
        body = content.encode() if isinstance(content, str) else content
        _write_file(folder / name, body)
        sums[name] = _sha256(body)
    manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "sha256": sums}
    _write_file(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    folder.chmod(0o755)


def _write_file(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    if path.suffix == ".sh":
        path.chmod(0o755)


def _swap(scratch: Path, target: Path) -> None:
    """Put `scratch/new` in the place of `target`; on failure the old folder is back where it was.

    A process killed between the two renames leaves the old folder, whole, as `.NAME.xxxx.part/old` beside the target.
    """
    if not os.path.lexists(target):
        (scratch / "new").rename(target)
        return
    target.rename(scratch / "old")
    try:
        (scratch / "new").rename(target)
    except BaseException:
        (scratch / "old").rename(target)
        raise


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
