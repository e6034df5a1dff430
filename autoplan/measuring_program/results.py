"""Results: the lines of the output file, and what earlier runs of this machine measured, of any model.

    measured.json     one line per result, appended as soon as it is there; an interrupted run goes on behind the last
    cache (SQLite)    key -> figures; a region that another model or file has, too, is not measured again

The key of a region is its content, which holds its shapes, its layouts, micro-batch size and precision; how it runs,
and the key of the generated code, or the text of model.py where code of it runs; device, driver and torch; how long it
was measured for, and the texts of this package. A cache that cannot be read or written costs time, and nothing else.
Only good measurements are kept in it: noisy ones, and what did not run, are tried again.
"""

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

OPS = "ops"  # what a line is about that has the ops of a segment
GENERATED, OWN = "generated", "own"  # whose module it is
MEMORY_FORMATS = CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
PATIENCE_S = 10.0  # while another process writes
_ENVIRONMENT = ("device", "torch", "driver")
_IDENTITY = ("what", "content", "assignment", "tp", "code", "micro_batch_size", "precision", *_ENVIRONMENT)
_OF_TASK = frozenset(
    {*_IDENTITY, "schema_version", "model", "segment", "boundary", "compiled", "memory_format", "module"}
)
Row = dict[str, Any]


def key_of(row: Row) -> tuple[Any, ...]:
    """What identifies a result."""
    ways = bool(row.get("compiled")), row.get("memory_format", CONTIGUOUS)
    return (*(row.get(name) for name in _IDENTITY), *ways, row.get("module", GENERATED))


def read_results(path: Path) -> set[tuple[Any, ...]]:
    """The keys of the results that a file holds; a last line that was cut off is removed.

    A segment that was measured before segments were replayed as CUDA graphs does not count: it is measured again.
    """
    if not path.exists():
        return set()
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    rows = map(json.loads, whole.splitlines())
    return {key_of(row) for row in rows if "forward_s" not in row or "graph_forward_s" in row}


class ResultCache:
    """Good results of earlier runs in an SQLite file; without a file, none.

    Attributes:
        trouble: why the file is not used any more; empty while it is.
    """

    def __init__(self, path: Path | None, *, measured_with: Row, model_text: str, has_own_ops: bool) -> None:
        """`measured_with`: what times depend on beside `key_of`; `has_own_ops`: model.py has ops that all code runs."""
        self.trouble = ""
        self._measured_with, self._has_own_ops = measured_with, has_own_ops
        self._model_hash = hashlib.sha256(model_text.encode()).hexdigest()
        self._path, self._database = path, None if path is None else self._opened(path)

    def find(self, task: Row) -> Row | None:
        """The figures of a task, as fields of a result line; None where they are not known."""
        found = self._run("SELECT figures FROM results WHERE key = ?", self._key(task))
        return json.loads(found[0][0]) if found else None

    def keep(self, row: Row) -> None:
        """Remember a result, if it is a good one."""
        if row["status"] == "measured":
            figures = json.dumps({name: value for name, value in row.items() if name not in _OF_TASK})
            self._run("INSERT OR REPLACE INTO results VALUES (?, ?)", self._key(row), figures)

    def close(self) -> None:
        """Leave the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _key(self, row: Row) -> str:
        runs_model = row.get("module") == OWN or self._has_own_ops
        parts = {"code": self._model_hash if runs_model else "", **self._measured_with}
        return json.dumps([*key_of(row), parts], sort_keys=True)

    def _opened(self, path: Path) -> sqlite3.Connection | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)  # every statement by itself
            database.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, figures TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            self.trouble = f"{path}: {error}; measuring without a cache"
            return None
        return database

    def _run(self, statement: str, *values: str) -> list[Any]:
        if self._database is None:
            return []
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            self.trouble = f"{self._path}: {error}; going on without a cache"
            self.close()
            return []
