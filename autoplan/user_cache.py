"""The user's cache folder: entries that are written whole or not at all, and what they are checked against.

    <user cache>/autoplan/<folder>/<key>.json      write_entry, write_checked --> read_entry, read_checked

A folder that cannot be written only costs the work again; an entry that is damaged is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

_HERE = Path(__file__).parent


def cache_folder() -> Path:
    """Where this user keeps what autoplan need not do twice; it may not exist yet."""
    return Path(user_cache_dir("autoplan"))


def cache_entry(folder: str, key: str) -> Path:
    """Where the entry of a key lies in one folder of the user's cache."""
    return cache_folder() / folder / f"{key}.json"


def write_entry(entry: Path, record: dict[str, Any]) -> None:
    """Write an entry, whole or not at all; a folder that cannot be written is left as it is."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent, prefix=entry.stem)
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file)
        os.replace(name, entry)


def read_entry(entry: Path) -> dict[str, Any] | None:
    """What `write_entry` wrote; None where there is nothing to read."""
    try:
        record = json.loads(entry.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_checked(entry: Path, name: str, text: str, **others: Any) -> None:
    """Write a text with its hash, and what else belongs to it."""
    write_entry(entry, {**others, f"{name}_sha256": _sha256(text), name: text})


def read_checked(entry: Path, name: str, **expected: Any) -> tuple[str, dict[str, Any]] | None:
    """The text that `write_checked` wrote, and the record; None where it is damaged, or another one than expected."""
    record = read_entry(entry) or {}
    text = record.get(name)
    if not isinstance(text, str) or record.get(f"{name}_sha256") != _sha256(text):
        return None
    return (text, record) if all(record.get(key) == value for key, value in expected.items()) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, "missing" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def package_version(package: str) -> str:
    """The installed version of a package, "none" where it is not installed: a checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def user_files(module_names: set[str]) -> dict[str, str]:
    """Files of loaded modules that no package manager installed, with their hashes."""
    paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    elsewhere = tuple(path + os.sep for path in (*paths, str(_HERE)))
    files = {}
    for name in sorted(module_names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.split(".")[0] != "autoplan" and not file.startswith(elsewhere):
            files[file] = file_sha256(Path(file))
    return files
