"""Which rank does what, and the process groups between ranks.

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank,     dp_rank = replica * zero_shard_degree + shard

Ranks that differ only in `shard` share one sharded state; ranks that differ only in `replica` hold equal shards.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import Config

TIMEOUT_S = 600.0
GIB = 2**30
# Most thread blocks of a send or receive between stages. Each occupies a multiprocessor until the other rank is there,
# for half of an interleaved step. On 2 H200 a product beside a waiting receive took 17 % longer with NCCL's own 16 and
# 7 % with 4, which still carry 130 GB/s; an interleaved step of Llama-8B went from 3.11 to 2.97 s (2026-11-22).
SEND_BLOCKS = 4
OTHERS_FIRST_S = 5.0  # torchrun looks at its processes every 0.1 s

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class WorldSizeError(SystemExit):
    """The number of processes is not the plan's; ends the program with the message and a non-zero exit code."""


class DeviceCountError(SystemExit):
    """A host has fewer GPUs than processes; ends the program with the message and a non-zero exit code."""


class DeviceMemoryError(SystemExit):
    """A device has less memory than planned; ends the program with the message and a non-zero exit code."""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The place of a rank in the mesh.

    Attributes:
        tp_group, pp_group: None when the degree is 1.
        zero_mesh: the data-parallel ranks as (shard,) when one copy exists, otherwise as (replica, shard).
        n_replicas: data-parallel ranks that hold the same shard.
    """

    device: torch.device
    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    n_replicas: int
    tp_group: ProcessGroup | None
    pp_group: ProcessGroup | None
    zero_mesh: DeviceMesh

    def axes_of_groups(self) -> dict[str, str]:
        """The axis ("dp", "tp" or "pp") of each process group of the mesh, by the name of the group."""
        data_parallel = (("dp", self.zero_mesh.get_group(axis)) for axis in range(self.zero_mesh.ndim))
        groups = (*data_parallel, ("tp", self.tp_group), ("pp", self.pp_group))
        return {group.group_name: axis for axis, group in groups if group is not None and group.size() > 1}


def check_world_size(config: Config) -> None:
    """Refuse to start with another number of processes than planned.

    Raises: WorldSizeError naming both numbers and the command that fits.
    """
    found = world_size()
    if found != config.n_ranks:
        devices = "one device" if found == 1 else f"{found} devices"
        raise WorldSizeError(
            _said_once_per_host(
                f"planned: {config.n_ranks} processes (pp {config.pp} x dp {config.dp} x tp {config.tp}); found: "
                f"{found}\n  fix: start it with torchrun --nproc-per-node such that nodes x processes = "
                f"{config.n_ranks}, or plan again for {devices}"
            )
        )


def n_gpus() -> int:
    """GPUs of this host."""
    return torch.cuda.device_count()


def check_device_count() -> None:
    """Refuse to start where processes of this host would find no GPU.

    Raises: DeviceCountError naming both numbers.
    """
    found, expected = n_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found < expected:
        raise DeviceCountError(
            _said_once_per_host(
                f"--device cuda: found {found} GPUs on this host; expected: {expected}, one for each process\n"
                "  fix: start it where they are, or try it with --device cpu"
            )
        )


def _said_once_per_host(message: str) -> str | int:
    """What ends the program, which prints a message: every process of the host would print the same one."""
    return message if os.environ.get("LOCAL_RANK", "0") == "0" else 1


def world_size() -> int:
    """Processes of the group, or of the group torchrun started this process for; 1 without either."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def from_first_rank(
    make: Callable[[], Any],
    *,
    group: ProcessGroup | None = None,
    failure: Callable[[str], BaseException] = RuntimeError,
) -> Any:
    """What `make` returns on rank 0, on every rank; the process group must have been started.

    `group` holds all ranks; None is the one that trains.
    Raises: what `make` raises, on rank 0; `failure` with its message on the others, so that none waits for ever.
    """
    if dist.get_world_size(group) == 1:
        return make()
    values: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            values[0] = make()
        except BaseException as error:
            dist.broadcast_object_list([None, f"rank 0: {error}"], src=0, group=group)
            raise
    dist.broadcast_object_list(values, src=0, group=group)
    if values[1]:
        raise failure(values[1])
    return values[0]


def default_device_type() -> str:
    """The kind of device to train on: "cuda" where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def start_process_group(device_type: str, config: Config, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the process group for a plan, in a program of its own: on CPU its processes share the cores of the host.

    Raises: WorldSizeError when the number of processes is not the plan's; DeviceCountError when GPUs are missing.
    """
    check_world_size(config)
    if device_type == "cpu":
        _use_local_threads()
    join_process_group(device_type, timeout_s=timeout_s)


def join_process_group(device_type: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the process group: gloo on CPU, NCCL on CUDA; a process started without torchrun is a group of one.

    From then on an exception that nobody catches ends this process at once, see `_exit_at_once`.
    """
    # Every model whose last op is a linear layer is warned of; `in_place` lets outputs be changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if device_type == "cuda":
        choose_allocator()
        # NCCL would register what a CUDA graph sends, and the ranks then wait for each other for ever: seen with tensor
        # and pipeline parallelism (torch 2.11 with NCCL 2.28, 2 H200, 2026-11-25), where segments are expandable.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        check_device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
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
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=timeout)
    ranks = {"rank": int(environment["RANK"]), "world_size": int(environment["WORLD_SIZE"])}
    return {"store": PrefixStore(f"restart_{restart}", store), **ranks}


def _exit_at_once(report: ExceptHook) -> ExceptHook:
    """A handler that reports an exception (torch's prints the rank before each line) and leaves without any clean-up.

    The other ranks may be waiting inside a collective, and so would the clean-up of the process group. torchrun stops
    them as soon as it sees this process fail.
    """

    def report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return report_and_exit


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


class HoldsCommunicators(Protocol):
    """What keeps communicators from ending until it lets go of them."""

    def release(self) -> None: ...


_holders: WeakSet[HoldsCommunicators] = WeakSet()


def release_before_stop(holder: HoldsCommunicators) -> None:
    """Let it go before the process groups of this process end."""
    _holders.add(holder)


def stop_process_group() -> None:
    """Leave the process group, all ranks together: none takes a connection away that another still uses."""
    for holder in list(_holders):
        holder.release()
    dist.barrier()
    dist.destroy_process_group()


def _use_local_threads() -> None:
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_processes))


def build_rank_mesh(config: Config, device_type: str) -> RankMesh:
    """Create the process groups of the plan; every rank must call it.

    Raises: WorldSizeError when the number of processes is not the plan's.
    """
    check_world_size(config)
    replica_degree = config.dp // config.zero_shard_degree
    mesh = init_device_mesh(
        device_type,
        (config.pp, replica_degree, config.zero_shard_degree, config.tp),
        mesh_dim_names=("pp", "replica", "shard", "tp"),
        backend_override={"pp": _send_options()} if config.pp > 1 and device_type == "cuda" else None,
    )
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, torch.cuda.current_device())
    pp_rank, replica, shard, tp_rank = (mesh.get_local_rank(axis) for axis in ("pp", "replica", "shard", "tp"))
    if config.device_bytes and device.type == "cuda":
        place = config.share_of(replica * config.zero_shard_degree + shard) if config.shares else pp_rank
        check_device_memory(config.device_bytes[place], free_bytes=_free_bytes(device))
    return RankMesh(
        device=device,
        rank=dist.get_rank(),
        pp_rank=pp_rank,
        dp_rank=replica * config.zero_shard_degree + shard,
        tp_rank=tp_rank,
        n_replicas=replica_degree,
        tp_group=mesh["tp"].get_group() if config.tp > 1 else None,
        pp_group=mesh["pp"].get_group() if config.pp > 1 else None,
        zero_mesh=mesh["shard"] if replica_degree == 1 else mesh["replica", "shard"],
    )


def _send_options() -> Any:
    """How NCCL is to talk between pipeline stages."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = SEND_BLOCKS
    world: Any = dist.group.WORLD
    options._timeout = world._get_backend(torch.device("cuda")).options._timeout  # otherwise its own default
    return options


def check_device_memory(planned_bytes: int, *, free_bytes: int) -> None:
    """Refuse to start where a device has less memory than planned; every rank must call it.

    Raises: DeviceMemoryError on every rank, naming those that have too little, with planned and found.
    """
    own = f"rank {dist.get_rank()} on {socket.gethostname()}", planned_bytes, free_bytes
    ranks: list[Any] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    lines = [
        f"  {rank}: planned: {planned / GIB:.1f} GiB; found: {free / GIB:.1f} GiB free"
        for rank, planned, free in ranks
        if free < planned
    ]
    if lines:
        raise DeviceMemoryError(
            "too little device memory for the plan\n" + "\n".join(lines) + "\n"
            "  fix: end other programs on these devices, or plan again for devices of this size; to try nevertheless, "
            "remove device_bytes from PLAN in train.py"
        )


def _free_bytes(device: torch.device) -> int:
    """What torch's allocator may take: free memory and what it holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))


def group_over_pipeline_ranks(config: Config, pp_ranks: Iterable[int]) -> ProcessGroup | None:
    """The group of this rank and its peers (same dp and tp rank) on some pipeline ranks.

    Every rank must call it, in the same order; None on ranks outside of all such groups.
    """
    chosen = sorted(pp_ranks)
    n_columns = config.dp * config.tp
    ranks = [[pp_rank * n_columns + column for pp_rank in chosen] for column in range(n_columns)]
    own_group: ProcessGroup | None = None
    own_rank = dist.get_rank()
    for members in ranks:
        group = dist.new_group(members)
        if own_rank in members:
            own_group = group
    return own_group
