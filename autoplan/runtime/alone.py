"""One rank of a plan by itself, on one device: what it holds can be seen before there are others.

Its groups are torch's fake ones, which wait for nobody: what others would have sent is a copy of its own, zeros, or
what was there. So its losses and times say nothing. Which tensors there are, when, and how large, is as among others,
and so is the memory of training; that of communicators is not there.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch
import torch.distributed as dist

from .config import Config
from .refusal import OptionError

BACKEND = "fake"


def join_alone(rank: int, *, config: Config) -> None:
    """Be this rank of the plan in a group whose others do not exist.

    Raises: OptionError where the plan has no such rank or has PowerSGD, which needs what others send, or where a
        launcher has started several processes.
    """
    n_of_stage = config.dp * config.tp
    if rank >= config.n_ranks:
        raise OptionError(
            f"--alone: found {rank}; expected: 0 to {config.n_ranks - 1}, the ranks of the plan\n"
            f"  fix: one of each pipeline stage is enough: {', '.join(map(str, range(0, config.n_ranks, n_of_stage)))}"
        )
    if config.grad_compression == "powersgd":
        raise OptionError(
            f"--alone {rank}: found a plan with PowerSGD, which computes with what others send; expected: another\n"
            "  fix: plan with --fix grad_compression=none to see the memory of the rest"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError(
            f"--alone {rank}: found {os.environ['WORLD_SIZE']} processes; expected: one\n"
            "  fix: start it with python, not with torchrun"
        )
    import_module("torch.testing._internal.distributed.fake_pg")  # which makes the backend known
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=config.n_ranks)  # type: ignore[attr-defined]
    print(f"rank {rank} of {config.n_ranks} alone: nothing is sent, so losses and times say nothing", file=sys.stderr)


def is_alone() -> bool:
    """Whether the other ranks of this one's groups do not exist."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def speaks_for_all(rank: int) -> bool:
    """Whether this rank says what all could: the first one, or one that is alone."""
    return rank == 0 or is_alone()


def host_backend() -> str:
    """Of groups that send what is in host memory."""
    return BACKEND if is_alone() else "gloo"


def receive_zeros(received: torch.Tensor) -> None:
    """Put into a tensor what no one sends: numbers that any forward pass accepts, as positions too."""
    received.detach().zero_()
