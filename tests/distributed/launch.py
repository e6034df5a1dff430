"""Run a function, or an emitted folder, on several processes of this machine.

Starting processes costs seconds, so one launch should carry many configurations.
"""

import io
import multiprocessing
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
_CONTEXT = multiprocessing.get_context("forkserver")
# What every rank would import for itself, which takes seconds.
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "transformers.modeling_utils"]
)


def run_ranks(
    function: Callable[..., Any], n_ranks: int, *args: Any, backend: str = "gloo", timeout_s: float = 100.0
) -> list[Any]:
    """`function(*args)` on `n_ranks` processes that form a process group; what each returned, by rank.

    With the backend "nccl" each process has a GPU of its own; with "" there is no process group yet.

    `function` must be importable (defined at the top of a module).

    A launch in which torch itself crashed is repeated: once in some thousand of them, gloo's own thread writes into
    memory that is not its own (torch 2.13, on CPU; neither rank had come to an end).

    Raises: AssertionError with the traceback of every rank that failed, or on a timeout.
    """
    try:
        return _launch(function, n_ranks, args, backend=backend, timeout_s=timeout_s)
    except Crash as crash:
        print(f"{function.__name__}: {crash}, launched again", file=sys.stderr)
        return _launch(function, n_ranks, args, backend=backend, timeout_s=timeout_s)


class Crash(AssertionError):
    """A rank was ended by a signal that nobody sends."""


def _launch(
    function: Callable[..., Any], n_ranks: int, args: tuple[Any, ...], *, backend: str, timeout_s: float
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = _CONTEXT.Queue()
        processes = [
            _CONTEXT.Process(
                target=_run_rank, args=(function, rank, n_ranks, backend, folder, timeout_s, results, args)
            )
            for rank in range(n_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, timeout_s)
        except AssertionError as error:
            _end(processes)
            crashed = [rank for rank, process in enumerate(processes) if process.exitcode in CRASHES]
            if crashed:
                raise Crash(f"ranks {crashed} of {n_ranks} crashed") from error
            raise
        finally:
            _end(processes)


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _collect(results: Any, processes: list[Any], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    n_ranks, deadline = len(processes), time.monotonic() + timeout_s
    while len(values) < n_ranks:
        try:
            rank, value, error = results.get(timeout=0.2)
        except Exception as missing:
            silent = sorted(set(range(n_ranks)) - set(values))
            has_crashed = any(processes[rank].exitcode in CRASHES for rank in silent)
            if isinstance(missing, queue.Empty) and not has_crashed and time.monotonic() < deadline:
                continue
            raise AssertionError(f"ranks {silent} gave no result within {timeout_s:g} s") from missing
        if error:
            raise AssertionError(f"rank {rank} of {n_ranks} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(n_ranks)]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    n_ranks: int,
    backend: str,
    folder: str,
    timeout_s: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n_ranks))
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if backend:
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(Path(folder, "store")), n_ranks),
                rank=rank,
                world_size=n_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
        value = function(*args)
        if backend:
            dist.destroy_process_group()
        results.put((rank, value, ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_program(folder: Path, n_ranks: int, *options: str, exit_code: int = 0, timeout_s: float = 120.0) -> list[str]:
    """What each rank of `train.py *options` of an emitted folder writes to stdout, where autoplan cannot be imported.

    Raises: AssertionError as `run_ranks`, also when the program exits with another code than `exit_code`.
    """
    ends = ends_of_program(folder, n_ranks, *options, timeout_s=timeout_s)
    assert [code for code, _ in ends] == [exit_code] * n_ranks, f"train.py exits, after it printed: {ends}"
    return [printed for _, printed in ends]


def ends_of_program(folder: Path, n_ranks: int, *options: str, timeout_s: float = 120.0) -> list[tuple[object, str]]:
    """What each rank exits with, and what it writes to stdout.

    The ranks are processes of `run_ranks`, which have imported torch already, with the variables that torchrun sets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_ranks(_run_program, n_ranks, str(folder), options, port, backend="", timeout_s=timeout_s)


def _run_program(folder: str, options: tuple[str, ...], port: int) -> tuple[object, str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "autoplan"]:
        del sys.modules[name]
    sys.modules["autoplan"] = None  # type: ignore[assignment]
    sys.path.insert(0, folder)
    sys.argv = ["train.py", *options]
    code: object = 0
    with redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path("train.py", run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return code, printed.getvalue()


def run_folder(
    folder: Path, n_ranks: int, *options: str, timeout_s: float = 120.0, n_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """`torchrun train.py *options` in an emitted folder, where autoplan cannot be imported.

    As in `run_ranks`, a launch in which torch itself crashed is repeated: a C++ thread aborted one in some thousand as
    its program came to an end.
    """
    blocker = Path(folder, "sitecustomize.py")
    blocker.write_text("import sys\nsys.modules['autoplan'] = None\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command += [f"--max-restarts={n_restarts}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    launch = partial(
        subprocess.run,
        [*command, "train.py", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    try:
        done = launch()
        if any(f"Signal {-crash:d} " in done.stderr for crash in CRASHES):
            print(f"launched again after a crash:\n{done.stderr}", file=sys.stderr)
            done = launch()
        return done
    finally:
        blocker.unlink()
