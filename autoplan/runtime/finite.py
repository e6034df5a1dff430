"""A loss or gradients that are not finite stop the run before the update, while the parameters are still good."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .mesh import RankMesh


def check_finite(sums: torch.Tensor, own: torch.Tensor, *, step: int, mesh: RankMesh) -> None:
    """Look at [loss, squared norm of the gradients, ..]: `sums` of all ranks, `own` of this one.

    All ranks must call it. Waits for the device, which the update then follows at once.

    Raises: FloatingPointError on every rank, naming the ranks on which it began.
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
    raise FloatingPointError(
        f"step {step}: the loss is {sums[0].item()}, the squared norm of the gradients {sums[1].item()}; expected: "
        f"finite numbers. No parameter was changed by this step.\n{where}\n"
        "  fix: look at the data of this step; resume from the last checkpoint with a smaller --lr, or with --clip"
    )
