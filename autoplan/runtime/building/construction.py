"""The user's model, built whole and equal on every rank, and what of it a rank keeps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import Config
from ..mesh import RankMesh
from ..process_group import wait_for_all_ranks
from .known_values import NumbersOnHost, build_on_meta
from .weights import load_weights

# Whole model plus the part that is kept, at most this fraction of the device's free memory.
MAX_DEVICE_FRACTION = 0.45


def build_whole_model(
    build_model: Callable[..., nn.Module], *, seed: int, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The user's model under one seed, on `device`, in training mode, with real numbers in `dtype`.

    Complex buffers stay as they are; `model.to(dtype)` would make them real. Whose samples `nn.SyncBatchNorm` takes is
    left to the plan.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    torch.manual_seed(seed)
    with torch.device(device), NumbersOnHost():
        model = build_model()
    model._apply(cast)  # type: ignore[no-untyped-call]
    _leave_ranks_to_plan(model)
    return model.train()


def _leave_ranks_to_plan(root: nn.Module) -> None:
    """Let each `nn.SyncBatchNorm` of `root` call `F.batch_norm`, as other BatchNorm does.

    By itself it takes the samples of all ranks on CUDA, whatever the plan says, and refuses tensors on the CPU.
    """
    norms: list[Any] = [m for m in root.modules() if type(m).forward is nn.SyncBatchNorm.forward]
    for module in norms:
        module.forward = functools.partial(nn.modules.batchnorm._BatchNorm.forward, module)


def construction_device(
    build_model: Callable[..., nn.Module], *, dtype: torch.dtype, device: torch.device
) -> torch.device:
    """Where to build the whole model: on the accelerator if it fits on every rank, otherwise in host memory.

    All ranks give the same answer, because the random numbers of a CPU and an accelerator differ.
    """
    if device.type == "cpu":
        return device
    model = build_on_meta(build_model)
    itemsize = torch.empty((), dtype=dtype).element_size()
    model_bytes = sum(t.numel() * itemsize for t in (*model.parameters(), *model.buffers()))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fits = torch.tensor(int(model_bytes <= MAX_DEVICE_FRACTION * free_bytes), device=device)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return device if fits.item() else torch.device("cpu")


@contextmanager
def one_process_at_a_time(is_needed: bool, device: torch.device) -> Iterator[None]:
    """Let the processes of one host pass one after the other, so that host memory holds one whole model.

    All ranks must enter; `device` is that of this rank. Each turn ends for all of them together, so there are as many
    as the host with the most processes needs.
    """
    own_turn, n_turns = 0, 1
    if is_needed:
        own_turn = int(os.environ.get("LOCAL_RANK", "0"))
        most = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        n_turns = int(most.item())
    for _ in range(own_turn):
        wait_for_all_ranks()
    yield
    for _ in range(n_turns - own_turn):
        wait_for_all_ranks()


def local_stages(
    full: nn.Module, *, config: Config, mesh: RankMesh, parallel_model: ModuleType | Any | None
) -> list[nn.Module]:
    """The modules that this rank trains: the user's model itself, or its generated stages with their weights.

    Weights that are tied in the user's model are tied in a stage that holds both.
    """
    if parallel_model is None:
        return [full]
    stages = []
    for index in config.stages_of(mesh.pp_rank):
        with torch.device("meta"):
            stage = parallel_model.STAGES[index](mesh.tp_group)
        load_weights(stage, full, parallel_model.SHARDS, mesh.tp_rank, config.tp)
        stages.append(stage.train())
    return stages
