"""Solved tensor-parallel layouts on disk: solving takes a second, reading them again milliseconds.

An entry belongs to all that its programs depend on: the graph, the text of the rules and of autoplan itself, the
version of the solver, and what the caller names (degree, micro-batch, precision, the figures that are read of the
cluster). So another number of hosts, another network, memory or price finds the same entry.

    <user cache>/autoplan/layouts/<hash of key>.json      {"key": text, "layouts_sha256": ..., "layouts": text}
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from autoplan.parallel_plan import SegmentSharding
from autoplan.user_cache import cache_entry, file_sha256, package_version, read_checked, user_files, write_checked

Layouts = dict[str, tuple[SegmentSharding, ...]]  # by boundary, as `shard_graph` gives them


def cached_layouts(named: Sequence[str], rule_files: Sequence[str], solve: Callable[[], Layouts]) -> Layouts:
    """The layouts that `solve` finds, from the cache or solved now. A damaged or foreign entry is replaced.

    `named` is what they depend on besides these rules, autoplan and the solver.
    """
    key = "\n".join((*named, *rule_hashes(rule_files), own_hash(), package_version("ortools")))
    entry = cache_entry("layouts", hashlib.sha256(key.encode()).hexdigest())
    found = _read(entry, key)
    if found is None:
        found = solve()
        write_checked(entry, "layouts", _to_json(found), key=key)
    return found


@cache
def own_hash() -> str:
    """Of every module of autoplan: whoever changes one pays a second.

    `__path__` says too much: of an editable install it names the whole checkout.
    """
    folders = [Path(str(import_module(name).__file__)).parent for name in ("autoplan", "autoplan.cost_models")]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def rule_hashes(rule_files: Sequence[str]) -> list[str]:
    """Of the files, and of every module of the user's that is loaded, since a file may import any of them."""
    if not rule_files:
        return []
    return [*(file_sha256(Path(file)) for file in rule_files), *user_files(set(sys.modules)).values()]


def _to_json(layouts: Layouts) -> str:
    table = {boundary: [[s.kind, s.values, s.uses] for s in found] for boundary, found in layouts.items()}
    return json.dumps(table, separators=(",", ":"))


def _read(entry: Path, key: str) -> Layouts | None:
    found = read_checked(entry, "layouts", key=key)
    try:
        return None if found is None else _from_json(json.loads(found[0]))
    except (ValueError, TypeError, AttributeError):
        return None


def _from_json(table: dict[str, Any]) -> Layouts:
    return {
        boundary: tuple(
            SegmentSharding(kind, tuple(map(tuple, values)), tuple(map(tuple, uses))) for kind, values, uses in found
        )
        for boundary, found in table.items()
    }
