"""The process group of all ranks: how a process joins and leaves it, and how it ends when one of them fails."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .alone import is_alone, join_alone
from .config import Config
from .endings import endings
from .failure_watch import INTERRUPTED, WITH_AN_ERROR, FailureWatch
from .job_store import connected_store
from .planned_devices import check_device_count, check_world_size
from .refusal import OTHERS_FIRST_S, Refusal, is_first_of_host

TIMEOUT_S = 600.0
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def default_device_type() -> str:
    """The kind of device to train on: "cuda" where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def start_process_group(
    device_type: str, config: Config, *, timeout_s: float = TIMEOUT_S, alone: int | None = None
) -> None:
    """Join the process group for a plan, in a program of its own: on CPU its processes share the cores of the host.

    `alone` is the rank to be without the others, see alone.py.
    Raises: WorldSizeError when the number of processes is not the plan's; DeviceCountError when GPUs are missing;
        torch's DistError when the others, or the store of the job, are not met within `timeout_s`; OptionError where
        there is no such rank.
    """
    if alone is not None:
        join_alone(alone, config=config)
    check_world_size(config)
    if device_type == "cpu":
        _use_local_threads()
    join_process_group(device_type, timeout_s=timeout_s)
    if "WORLD_SIZE" in os.environ and alone is None:  # alone no rank waits, and Python's own exit code stands
        atexit.register(_leave_if_not_stopped)
        if dist.get_world_size() > 1:
            watch = FailureWatch(dist.get_rank(), timeout_s=timeout_s)
            endings.tells.append(watch.tell)
            endings.stops.append(watch.stop)


def join_process_group(device_type: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the process group: gloo on CPU, NCCL on CUDA; a process started without torchrun is a group of one.

    From then on an exception that nobody catches ends this process at once, see `_exit_at_once`.
    """
    # Every model whose last op is a linear layer is warned of; `in_place` lets outputs be changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if device_type == "cuda":
        # Said by the first product of a backward pass that sends and receives; torch then does what it says.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        choose_allocator()
        # NCCL would register what a CUDA graph sends, and the ranks then wait for each other for ever: seen with tensor
        # and pipeline parallelism (torch 2.11 with NCCL 2.28, 2 H200, 2026-11-25), where segments are expandable.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        check_device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
    for end in (endings.stop, endings.release):  # of a loop of the user's own, which need not stop the group
        atexit.register(end)
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, **_store_of_restart(timeout))
        sys.excepthook = _exit_at_once(sys.excepthook)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def choose_allocator() -> None:
    """Ask for memory that grows in place, before the first allocation, unless the environment says otherwise.

    Without it gaps between large tensors took 11 GiB of Llama-1B's 128.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the later name, of which torch reads the earlier one first
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _store_of_restart(timeout: timedelta) -> dict[str, Any]:
    """The arguments by which restarted processes of one host meet.

    torchrun's agent keeps its store over restarts, and torch 2.13 looks there for the others under the same keys, where
    it finds the addresses of those that are dead. Hosts may count restarts differently, so on several of them the
    launch scripts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead, which makes a store for each attempt.
    """
    environment = os.environ
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not is_shared or environment.get("GROUP_WORLD_SIZE") != "1":
        return {}
    ranks = {"rank": int(environment["RANK"]), "world_size": int(environment["WORLD_SIZE"])}
    return {"store": connected_store(f"restart_{restart}", timeout=timeout), **ranks}


def _use_local_threads() -> None:
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_processes))


def from_first_rank(
    make: Callable[[], Any],
    *,
    group: ProcessGroup | None = None,
    failure: Callable[[str], BaseException] = RuntimeError,
) -> Any:
    """What `make` returns on rank 0, on every rank; the process group must have been started.

    `group` holds all ranks; None is the one that trains.
    Raises: what `make` raises, on rank 0; on the others the same `Refusal`, or `failure` with the message of any other
        error, so that none waits for ever.
    """
    if dist.get_world_size(group) == 1 or is_alone():
        return make()
    values: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            values[0] = make()
        except BaseException as error:
            told = error if isinstance(error, Refusal) else failure(f"rank 0: {error}")
            dist.broadcast_object_list([None, told], src=0, group=group)
            raise
    dist.broadcast_object_list(values, src=0, group=group)
    if values[1] is not None:
        raise values[1]
    return values[0]


def _exit_at_once(report: ExceptHook) -> ExceptHook:
    """A handler that reports an exception (torch's prints the rank before each line) and leaves without any clean-up.

    Ctrl-C is no fault to be looked for: one line per host says it.
    The other ranks may be waiting inside a collective, and so would the clean-up of the process group. torchrun stops
    them as soon as it sees this process fail.
    """

    def report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            report(kind, error, trace)
            _leave(1, WITH_AN_ERROR)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes the same one on
        if is_first_of_host():
            print("interrupted by Ctrl-C", file=sys.stderr)
        _leave(128 + signal.SIGINT, INTERRUPTED)

    return report_and_exit


def _leave_if_not_stopped() -> None:
    """At the end of one of several processes: what ended it before `stop_process_group` is a refusal, told by now."""
    if dist.is_initialized():
        _leave(1, WITH_AN_ERROR)


def _leave(code: int, how: str) -> None:
    endings.tell(how)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def failing_after_others() -> Iterator[None]:
    """Hold back the error of a collective for `OTHERS_FIRST_S`.

    Most often another rank has died. On the same host torchrun ends this one in the meantime, so that the other rank
    is the one that is reported; on another host it fails then, which ends that host's part of the job too.
    """
    try:
        yield
    except RuntimeError as error:
        if _is_of_a_collective(error):
            _let_sigterm_end_this_process()
            time.sleep(OTHERS_FIRST_S)
        raise


def _let_sigterm_end_this_process() -> None:
    """Also where a handler would finish the step first: it cannot be finished any more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, comes from the backend; gloo's have no type of their own."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return any(isinstance(cause, dist.DistError) or "gloo" in str(cause) for cause in causes)


def stop_process_group() -> None:
    """Leave the process group, all ranks together: none takes a connection away that another still uses."""
    endings.release()
    wait_for_all_ranks()
    endings.stop()
    dist.destroy_process_group()


def wait_for_all_ranks() -> None:
    """A barrier; NCCL's on the device of this process, as torch warns where it has to guess."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
