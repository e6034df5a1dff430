"""Traced graphs on disk: tracing takes seconds, reading the graph again milliseconds.

An entry belongs to the text of the model file, the `--set` values, the versions of torch and transformers, and the
text of the modules that trace. It also lists every other file of the user's that the trace imported, with its hash; if
one has changed, the entry is stale.

    <user cache>/autoplan/graphs/<key>.json      {"files": {path: sha256}, "graph_sha256": ..., "graph": text}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from autoplan.graph import OpGraph, graph_from_json, graph_to_json

_HERE = Path(__file__).parent
TRACERS = (*sorted(_HERE.glob("*.py")), _HERE.parent / "graph.py")


def cached_graph(path: Path, overrides: Mapping[str, Any], trace: Callable[[], OpGraph], *, way: str = "") -> OpGraph:
    """The graph of a model file, from the cache or traced now. A damaged or stale entry is replaced.

    `way` tells graphs apart that are made of one file in different ways.

    A cache folder that cannot be written only costs the next trace.
    """
    entry = cache_entry("graphs", _key(path, overrides, way))
    found = _read(entry)
    if found is not None:
        return found
    graph = trace()
    write_checked(entry, "graph", graph_to_json(graph), files=user_files(set(sys.modules)))
    return graph


def cache_entry(folder: str, key: str) -> Path:
    """Where the entry of a key lies in one folder of the user's cache."""
    return Path(user_cache_dir("autoplan")) / folder / f"{key}.json"


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
    elsewhere = tuple(path + os.sep for path in (*paths, str(_HERE.parent)))
    files = {}
    for name in sorted(module_names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.split(".")[0] != "autoplan" and not file.startswith(elsewhere):
            files[file] = file_sha256(Path(file))
    return files


def _key(path: Path, overrides: Mapping[str, Any], way: str) -> str:
    parts = [
        way,
        package_version("torch"),
        package_version("transformers"),
        *map(file_sha256, TRACERS),
    ]
    parts += [str(path.resolve()), file_sha256(path)]
    parts += [f"{name}={value!r}" for name, value in sorted(overrides.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read(entry: Path) -> OpGraph | None:
    found = read_checked(entry, "graph")
    if found is None:
        return None
    text, record = found
    try:
        is_fresh = all(file_sha256(Path(file)) == digest for file, digest in record["files"].items())
        return graph_from_json(text) if is_fresh else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
