"""A loss or gradients that are not finite stop the run, and change no parameter.

    optimizer in one kernel    update, which the device leaves out if it must | look
    another optimizer          look | update

In the first case the host hands over the update while gradients are still being computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import RankMesh
from ..refusal import Refusal


class NotFiniteError(Refusal, FloatingPointError):
    """A step's loss or gradients are not finite."""


@contextmanager
def finite_update(
    optimizer: torch.optim.Optimizer, sums: torch.Tensor, own: torch.Tensor, *, step: int, mesh: RankMesh
) -> Iterator[None]:
    """Around an update that changes nothing if `sums` are not finite; see `check_finite`.

    Optimizers in one kernel read `found_inf` on the device, as they do for torch's `GradScaler`. So the host hands them
    their work while the device still computes gradients, rather than after it has looked at them.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        check_finite(sums, own, step=step, mesh=mesh)
        yield
        return
    told: Any = optimizer
    told.grad_scale, told.found_inf = None, (~torch.isfinite(sums).all()).float()
    try:
        yield
    finally:
        del told.grad_scale, told.found_inf
    check_finite(sums, own, step=step, mesh=mesh)


def check_finite(sums: torch.Tensor, own: torch.Tensor, *, step: int, mesh: RankMesh) -> None:
    """Look at [loss, squared norm of the gradients, ..]: `sums` of all ranks, `own` of this one.

    All ranks must call it. Waits for the device.

    Raises: NotFiniteError on every rank, naming the ranks on which it began.
    """
    if torch.isfinite(sums).all():
        return
    place = f"rank {mesh.rank} (dp {mesh.dp_rank}, tp {mesh.tp_rank}, pp {mesh.pp_rank})"
    found: list[Any] = [(place, *own[:2].tolist())]
    if dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (place, *own[:2].tolist()))
    losses = [f"{place}: loss {loss}" for place, loss, _ in found if not math.isfinite(loss)]
    gradients = [f"{place}: gradients" for place, _, norm in found if not math.isfinite(norm)]
    where = "\n".join(f"  not finite on {line}" for line in losses or gradients or ["the sum of all ranks only"])
    raise NotFiniteError(
        f"step {step}: the loss is {sums[0].item()}, the squared norm of the gradients {sums[1].item()}; expected: "
        f"finite numbers. No parameter was changed by this step.\n{where}\n"
        "  fix: look at the data of this step; resume from the last checkpoint with a smaller --lr, or with --clip"
    )
