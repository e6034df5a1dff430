"""Measures what an action of a pipeline takes of the host, beside the blocks it runs: torch's schedule, and transfers.

A stage of tiny products runs forward and backward in three ways; the device has next to nothing to do, so what passes
is the host's time. Per micro-batch, by the difference of many micro-batches and few, which leaves the bubble out:

    pipeline_action      half of what a pipeline of one stage takes more than calling the stage
    pipeline_transfer    half of what a pipeline of two ranks takes more than that of one: each of the two actions of a
                         micro-batch sends or receives once
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.measure_hardware.device import N_SMALL
from autoplan.measure_hardware.links import Ranks
from autoplan.measure_hardware.measured_host import Rate
from autoplan.runtime.config import Config
from autoplan.runtime.stages.pipeline import Boundary, PerSample, Pipeline

WIDTH, N_LAYERS = 32, 8
FEW, MANY = 8, 40  # micro-batches of a step
N_STEPS, N_WARM_UP = 9, 3
PAIR = 2
SHORTEST_S = 1e-7  # what the schema of a hardware profile takes


def pipeline_rates(ranks: Ranks) -> tuple[Rate, ...]:
    """Both figures of the module docstring, of the slowest rank; all ranks must call it at the same time.

    Pairs of ranks are measured side by side; nothing where the ranks make no pairs.
    """
    pair = dict(ranks.group_of_size).get(PAIR)
    if pair is None:
        return ()
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    called_s = ranks.slowest(_micro_batch_s(partial(_called, ranks)))
    alone_s = ranks.slowest(_micro_batch_s(partial(_pipeline, ranks, alone, 1)))
    paired_s = ranks.slowest(_micro_batch_s(partial(_pipeline, ranks, pair, PAIR)))
    action_s, transfer_s = (alone_s - called_s) / 2, (paired_s - alone_s) / 2
    return tuple(
        Rate(what, N_SMALL, 8 * N_SMALL, max(SHORTEST_S, seconds), MANY)
        for what, seconds in (("pipeline_action", action_s), ("pipeline_transfer", transfer_s))
    )


def _micro_batch_s(make: Callable[[int], Callable[[], Any]]) -> float:
    """Seconds of one more micro-batch in a step; `make` gives a step of so many."""
    few_s, many_s = (_step_s(make(n_micro_batches)) for n_micro_batches in (FEW, MANY))
    return (many_s - few_s) / (MANY - FEW)


def _step_s(step: Callable[[], Any]) -> float:
    """The median step after warm-up."""
    found = []
    for _ in range(N_STEPS):
        start_s = time.perf_counter()
        step()
        found.append(time.perf_counter() - start_s)
    return median(found[N_WARM_UP:])


def _stage(ranks: Ranks) -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH, device=ranks.device, dtype=torch.bfloat16) for _ in range(N_LAYERS))
    return nn.Sequential(*layers)


def _inputs(ranks: Ranks, n_samples: int) -> torch.Tensor:
    return torch.randn(n_samples, WIDTH, device=ranks.device, dtype=torch.bfloat16)


def _mean(outputs: Any, _: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.float().mean()
    return loss


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _called(ranks: Ranks, n_micro_batches: int) -> Callable[[], Any]:
    """The stage forward and backward, micro-batch by micro-batch, without a pipeline."""
    stage, inputs = _stage(ranks), _inputs(ranks, n_micro_batches * WIDTH)

    def step() -> None:
        for micro_batch in torch.split(inputs, WIDTH):
            torch.autograd.backward(_mean(stage(micro_batch), None))
        _wait(ranks)

    return step


def _pipeline(ranks: Ranks, group: Any, pp: int, n_micro_batches: int) -> Callable[[], Any]:
    """The same stage on each of `pp` ranks, as the runtime runs it."""
    config = Config(pp=pp, micro_batch_size=WIDTH, n_micro_batches=n_micro_batches, precision="bf16")
    inputs = _inputs(ranks, n_micro_batches * WIDTH)
    pipeline = Pipeline(
        [_stage(ranks)],
        config=config,
        boundaries=((Boundary((PerSample(1), WIDTH)),),) * (pp - 1),
        pp_rank=ranks.rank % pp,
        group=group,
        p2p_groups=dict.fromkeys(config.neighbours(), group),
        device=ranks.device,
        loss=_mean,
        prepare_backward=lambda stage, is_last: None,
        finish_weights=lambda stage, is_last: None,
    )

    def step() -> None:
        pipeline.run_step((inputs,), [None] * n_micro_batches)
        _wait(ranks)

    return step
