"""Run a function, or an emitted folder, on several processes of this machine.

Starting processes costs seconds, so one launch should carry many configurations.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# What every rank would import for itself, which takes seconds.
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "transformers.modeling_utils"]
)


def run_ranks(
    function: Callable[..., Any], n_ranks: int, *args: Any, backend: str = "gloo", timeout_s: float = 100.0
) -> list[Any]:
    """`function(*args)` on `n_ranks` processes that form a process group; what each returned, by rank.

    With the backend "nccl" each process has a GPU of its own.

    `function` must be importable (defined at the top of a module).

    Raises: AssertionError with the traceback of every rank that failed, or on a timeout.
    """
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
            return _collect(results, n_ranks, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(results: Any, n_ranks: int, timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(values) < n_ranks:
        try:
            rank, value, error = results.get(timeout=max(0.1, deadline - time.monotonic()))
        except Exception as missing:
            silent = sorted(set(range(n_ranks)) - set(values))
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
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(Path(folder, "store")), n_ranks),
            rank=rank,
            world_size=n_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(*args)
        dist.destroy_process_group()
        results.put((rank, value, ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_folder(
    folder: Path, n_ranks: int, *options: str, timeout_s: float = 120.0, n_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """`torchrun train.py *options` in an emitted folder, where autoplan cannot be imported."""
    blocker = Path(folder, "sitecustomize.py")
    blocker.write_text("import sys\nsys.modules['autoplan'] = None\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command += [f"--max-restarts={n_restarts}"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            [*command, "train.py", *options],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    finally:
        blocker.unlink()
