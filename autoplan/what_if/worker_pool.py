"""Calls in processes of this machine, which end at once when nobody waits for them any more.

    calls --a pipe for each process--> results, as they are done

Processes are started afresh (`spawn`), since torch and the solver have threads. Ctrl-C, which a terminal sends to all
of them, is for the parent alone: they are born with it blocked. A `ProcessPoolExecutor` would wait for what runs, and
for ever where a process ends before it has read what the parent writes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from autoplan.errors import StoppedError
from autoplan.garbage import few_collections

Result = TypeVar("Result")
_ENDED = "a search process ended before its time\n  fix: --jobs 1, or more memory"


def done_in_processes(
    work: Callable[..., Result], calls: Mapping[str, tuple[Any, ...]], *, n_jobs: int
) -> Iterator[tuple[str, Result]]:
    """What `work` returns for the arguments of each call, by its key; `work` must be a function of a module.

    Raises: what `work` raises; StoppedError when a process ends, as by want of memory.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    under_way: dict[Connection, str] = {}
    left = iter(calls.items())
    try:
        with _interrupts_blocked():
            for _ in range(min(n_jobs, len(calls))):
                ours, theirs = context.Pipe()
                started = context.Process(target=_serve, args=(work, theirs), daemon=True)
                started.start()
                processes.append(started)
                theirs.close()
                under_way[ours] = ""
        for connection in under_way:
            under_way[connection], arguments = next(left)
            _send(connection, arguments)
        while under_way:
            for connection in cast(list[Connection], wait(list(under_way))):
                yield under_way.pop(connection), _received(connection)
                following = next(left, None)
                if following is not None:
                    under_way[connection], arguments = following
                    _send(connection, arguments)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started here never see Ctrl-C; one that comes meanwhile is raised in this process afterwards."""
    resource_tracker.ensure_running()  # which unblocks interrupts where it begins to run
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(connection: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        connection.send(arguments)
    except OSError:
        raise StoppedError(_ENDED) from None


def _received(connection: Connection) -> Any:
    try:
        result, error = connection.recv()
    except (EOFError, OSError):
        raise StoppedError(_ENDED) from None
    if error is not None:
        raise error
    return result


def _serve(work: Callable[..., Any], connection: Connection) -> None:
    """In a process: one call after the other, until the parent has gone; what a call raises is raised there."""
    with suppress(EOFError, OSError), few_collections():
        while True:
            arguments = connection.recv()
            result, raised = None, None
            try:
                result = work(*arguments)
            except Exception as error:
                raised = _sendable(error)
            connection.send((result, raised))


def _sendable(error: Exception) -> Exception:
    """The error with the lines it came through as a note; in place of one that cannot be sent, its text."""
    lines = traceback.format_exc()
    error.add_note(f"in a process of the sweep: {lines}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(lines)
    return error
