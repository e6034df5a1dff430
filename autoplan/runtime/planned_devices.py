"""Whether a program runs on the processes and devices that were planned; else it ends before the first step."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from .config import Config
from .refusal import Refusal

GIB = 2**30


class WorldSizeError(Refusal):
    """The number of processes is not the plan's."""


class DeviceCountError(Refusal):
    """A host has fewer GPUs than processes."""


class DeviceMemoryError(Refusal):
    """A device has less memory than planned."""


def world_size() -> int:
    """Processes of the group, or of the group torchrun started this process for; 1 without either."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def n_gpus() -> int:
    """GPUs of this host."""
    return torch.cuda.device_count()


def check_world_size(config: Config) -> None:
    """Refuse to start with another number of processes than planned.

    Raises: WorldSizeError naming both numbers and the command that fits.
    """
    found = world_size()
    if found != config.n_ranks:
        devices = "one device" if found == 1 else f"{found} devices"
        raise WorldSizeError(
            f"planned: {config.n_ranks} processes (pp {config.pp} x dp {config.dp} x tp {config.tp}); found: "
            f"{found}\n  fix: start it with torchrun --nproc-per-node such that nodes x processes = "
            f"{config.n_ranks}, or plan again for {devices}; --alone RANK shows the memory of one of them"
        )


def check_device_count() -> None:
    """Refuse to start where processes of this host would find no GPU.

    Raises: DeviceCountError naming both numbers.
    """
    found, expected = n_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if found < expected:
        raise DeviceCountError(
            f"--device cuda: found {found} GPUs on this host; expected: {expected}, one for each process\n"
            "  fix: start it where they are, or try it with --device cpu"
        )


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
            "too little device memory for the plan\n" + "\n".join(dict.fromkeys(lines)) + "\n"
            "  fix: end other programs on these devices, or plan again for devices of this size; to try nevertheless, "
            "remove device_bytes from PLAN in train.py"
        )


def free_bytes(device: torch.device) -> int:
    """What torch's allocator may take: free memory and what it holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))
