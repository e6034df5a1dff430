"""Measures what `fully_shard` takes of the host: the hooks of a block, gathering it, reducing it, the optimizer.

Blocks of tiny products run forward and backward as a step of several micro-batches, alone and sharded as programs do it
(`runtime.stages.zero`). The device has next to nothing to do, so what passes is the host's time, which `host_shares`
reads.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoplan.measure_hardware.host_shares import ShardedPasses
from autoplan.measure_hardware.links import Ranks
from autoplan.runtime.config import Config
from autoplan.runtime.stages.zero import apply_zero, local_part, prepare_backward
from autoplan.runtime.update.optimizer import LEARNING_RATE, build_optimizer_of

N_BLOCKS, WIDTH = 16, 32
LAYERS_OF_BLOCK = (1, 8)  # two parameters each
N_MICRO_BATCHES = 4
N_STEPS, N_WARM_UP = 12, 4


def sharded_passes(ranks: Ranks) -> tuple[ShardedPasses, ...]:
    """Every combination; all ranks must call it at the same time."""
    return tuple(_passes(ranks, stage, layers) for layers in LAYERS_OF_BLOCK for stage in (None, 1, 3))


class _Block(nn.Module):
    """A residual chain of small linear layers."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _passes(ranks: Ranks, zero_stage: int | None, n_layers: int) -> ShardedPasses:
    model = nn.Sequential(*(_Block(n_layers) for _ in range(N_BLOCKS))).to(ranks.device)
    x = torch.randn(WIDTH, WIDTH, device=ranks.device, dtype=torch.bfloat16)
    if zero_stage is None:
        model = model.to(torch.bfloat16)
    else:
        blocks = tuple(map(str, range(N_BLOCKS)))
        config = Config(dp=ranks.n_ranks, zero_stage=zero_stage, zero_shard_degree=ranks.n_ranks, precision="bf16")
        mesh = init_device_mesh(ranks.device.type, (1, ranks.n_ranks), mesh_dim_names=("replicate", "shard"))
        apply_zero(model, blocks=blocks, mesh=mesh, config=config)
    optimizer = build_optimizer_of(None, list(model.parameters()), LEARNING_RATE)
    steps = [_step(model, x, optimizer, zero_stage) for _ in range(N_STEPS)][N_WARM_UP:]
    seconds = [ranks.slowest(median(step[place] for step in steps)) / N_BLOCKS for place in range(len(steps[0]))]
    return ShardedPasses(zero_stage, 2 * n_layers, tuple(seconds[:-1:2]), tuple(seconds[1:-1:2]), seconds[-1])


def _step(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, zero_stage: int | None
) -> tuple[float, ...]:
    """Seconds of the forward and backward pass of each micro-batch in turn, then of the optimizer."""
    if x.is_cuda:
        torch.cuda.synchronize()
    optimizer.zero_grad(set_to_none=True)
    marks_s = [time.perf_counter()]
    for index in range(N_MICRO_BATCHES):
        loss = model(x).sum()
        marks_s.append(time.perf_counter())
        if zero_stage is not None:
            prepare_backward(model, zero_stage=zero_stage, is_last_micro_batch=index == N_MICRO_BATCHES - 1)
        loss.backward()
        marks_s.append(time.perf_counter())
    with torch.no_grad():  # as in a program: under autograd `local_part` takes the host ten times as long
        torch.nn.utils.get_total_norm([local_part(p.grad) for p in model.parameters() if p.grad is not None])
    optimizer.step()
    marks_s.append(time.perf_counter())
    return tuple(later - earlier for earlier, later in pairwise(marks_s))
