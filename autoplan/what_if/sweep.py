"""The sweep: many points at once, over the cores of this machine, each searched once and kept.

    tasks --kept results--> those left --processes--> results, in the order of the tasks

A result belongs to all that it depends on: the graph, the cluster, the options, and the text of autoplan, so a changed
question searches only what changed, and what was left far from a proof. An interrupt keeps what is done. A process
reads a graph once.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.graph import OpGraph
from autoplan.hardware.cluster import Hardware
from autoplan.options import Options
from autoplan.planning.problem import Problem
from autoplan.tensor_parallel.layout_cache import own_hash, rule_hashes
from autoplan.user_cache import cache_entry, package_version, read_checked, write_checked
from autoplan.what_if.points import PointResult, solve_point, unusable
from autoplan.what_if.worker_pool import done_in_processes

FOLDER = "points"
INTERRUPTED = "interrupted"
KEPT_GAP = 0.1  # share of the step that another plan might save, at the most


@dataclass(frozen=True, slots=True)
class Task:
    """One search.

    Attributes:
        graph: hash of a graph of the sweep.
        refused: why this cannot be searched at all.
        patience_s: how long to go on where `options.time_limit_s` finds no plan; None ends there.
    """

    graph: str
    hardware: Hardware
    options: Options
    hw: str
    refused: str = ""
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came out.

    Attributes:
        results: in the order of the tasks; those that an interrupt left out say so.
        n_kept: results that were known before.
        is_interrupted: whether Ctrl-C ended it.
        processor_s: processor time of all processes together; `wall_s`: time that it took.
    """

    results: tuple[PointResult, ...]
    n_kept: int
    is_interrupted: bool
    processor_s: float
    wall_s: float


Solved = tuple[PointResult, float]  # with the processor seconds it took


def run_sweep(
    tasks: Sequence[Task],
    graphs: Mapping[str, OpGraph],
    *,
    n_jobs: int = 1,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sweep:
    """Every task, once; `progress` hears how many of how many are done.

    They are searched by `executor`, where one is given, and else by `n_jobs` processes.
    """
    started_s = time.perf_counter()
    keys = [_key(task) for task in tasks]
    found: dict[str, PointResult] = {}
    waiting: dict[str, Task] = {}
    for key, task in zip(keys, tasks, strict=True):
        kept = _kept(key)
        if task.refused:
            found[key] = unusable(_problem(task, graphs), task.refused)
        elif kept is not None:
            found[key] = kept
        else:
            waiting[key] = task
    n_kept, processor_s, is_interrupted = len(found), 0.0, False
    progress(n_kept, len(found) + len(waiting))
    try:
        with closing(_solve_all(waiting, graphs, n_jobs=n_jobs, executor=executor)) as solved:
            for key, (result, spent_s) in solved:
                found[key] = result
                processor_s += spent_s
                _keep(key, result)
                progress(len(found), n_kept + len(waiting))
    except KeyboardInterrupt:
        is_interrupted = True
    results = tuple(
        found[key] if key in found else replace(unusable(_problem(task, graphs), INTERRUPTED), status=INTERRUPTED)
        for key, task in zip(keys, tasks, strict=True)
    )
    return Sweep(results, n_kept, is_interrupted, processor_s, time.perf_counter() - started_s)


def default_n_jobs() -> int:
    """Processes that this machine has cores for."""
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------------------------------------------------- processes


def _solve_all(
    waiting: Mapping[str, Task], graphs: Mapping[str, OpGraph], *, n_jobs: int, executor: Executor | None
) -> Generator[tuple[str, Solved], None, None]:
    if executor is not None:
        yield from _solve_on(executor, waiting, graphs)
        return
    if n_jobs <= 1 or len(waiting) <= 1:
        for key, task in waiting.items():
            yield key, _solve(task, graphs)
        return
    packed = {name: pickle.dumps(graph) for name, graph in graphs.items()}
    calls = {key: (task, packed[task.graph]) for key, task in waiting.items()}
    yield from done_in_processes(_solve_in_worker, calls, n_jobs=n_jobs)


def _solve_on(
    executor: Executor, waiting: Mapping[str, Task], graphs: Mapping[str, OpGraph]
) -> Iterator[tuple[str, Solved]]:
    packed = {name: pickle.dumps(graph) for name, graph in graphs.items()}
    futures: dict[Future[Solved], str] = {
        executor.submit(_solve_in_worker, task, packed[task.graph]): key for key, task in waiting.items()
    }
    try:
        yield from _as_done(futures)
    finally:  # after an interrupt; what is done stays
        for future in futures:
            future.cancel()


def _as_done(futures: dict[Future[Solved], str]) -> Iterator[tuple[str, Solved]]:
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in done:
            yield futures[future], future.result()


def _solve_in_worker(task: Task, packed: bytes) -> Solved:
    return _solve(task, {task.graph: _unpacked(packed)})


@lru_cache(maxsize=8)
def _unpacked(packed: bytes) -> OpGraph:
    """The graph that the parent sent."""
    graph: OpGraph = pickle.loads(packed)
    return graph


def _solve(task: Task, graphs: Mapping[str, OpGraph]) -> Solved:
    started_s = time.process_time()
    return solve_point(_problem(task, graphs), patience_s=task.patience_s), time.process_time() - started_s


def _problem(task: Task, graphs: Mapping[str, OpGraph]) -> Problem:
    return Problem(graphs[task.graph], task.hardware, task.options, Path(), task.hw, task.hw)


# ------------------------------------------------------------------------------------------------------- what is kept


def _key(task: Task) -> str:
    """Of all that the result depends on."""
    parts = {
        "graph": task.graph,
        "hardware": asdict(task.hardware),
        "options": asdict(task.options),
        "refused": task.refused,
        "patience_s": task.patience_s,
        "rules": rule_hashes(task.options.rules),
        "autoplan": own_hash(),
        "solver": package_version("ortools"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _keep(key: str, result: PointResult) -> None:
    """For the next time, unless a search with more of the machine for itself may find a far better plan."""
    if result.gap is not None and result.gap > KEPT_GAP:
        return
    write_checked(cache_entry(FOLDER, key), "result", json.dumps(asdict(result)), key=key)


def _kept(key: str) -> PointResult | None:
    """What is known of a key; a damaged entry is searched again."""
    found = read_checked(cache_entry(FOLDER, key), "result", key=key)
    try:
        if found is None:
            return None
        return PointResult(**{name: _tuples(value) for name, value in json.loads(found[0]).items()})
    except (TypeError, ValueError, AttributeError):
        return None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
