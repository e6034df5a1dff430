"""Traced graphs on disk: tracing takes seconds, reading the graph again milliseconds.

An entry belongs to the text of the model file, the `--set` values, the versions of torch and transformers, and the
text of the modules that trace. It also lists every other file of the user's that the trace imported, with its hash; if
one has changed, the entry is stale.

    <user cache>/autoplan/graphs/<key>.json      {"files": {path: sha256}, "graph_sha256": ..., "graph": text}
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoplan.graph import OpGraph, graph_from_json, graph_to_json
from autoplan.user_cache import cache_entry, file_sha256, package_version, read_checked, user_files, write_checked

_HERE = Path(__file__).parent
TRACERS = (
    *sorted(_HERE.glob("*.py")),
    _HERE.parent / "graph.py",
    _HERE.parent / "tensor_parallel" / "expert_rows.py",
)


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
