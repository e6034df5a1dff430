"""Parameters that tensor-parallel ranks hold whole, kept equal.

Each rank computes their gradients by itself. Where a kernel adds in no fixed order, or compiled blocks chose other
kernels, these differ by rounding, and the copies drift apart: on two H200 a small GPT whose blocks were replicated had
lost 0.05 of its loss after 2,000 steps, in float32 (`benchmarks/text_loss_curves.py`, 2026-11-28). So every `EVERY`
steps all ranks take the copies of the first, with what the optimizer remembers of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..stages.zero import local_part
from .gradients import NamedParameter

EVERY = 100  # steps, in which differences grew threefold there


@torch.no_grad()
def equalize_replicas(
    parameters: Sequence[NamedParameter], optimizer: torch.optim.Optimizer, tp: ProcessGroup | None, *, step: int
) -> None:
    """Every `EVERY` steps, give all tensor-parallel ranks the first's replicated parameters and optimizer state."""
    if tp is not None and step % EVERY == EVERY - 1:
        for tensor in _replicated(parameters, optimizer):
            dist.broadcast(tensor, group=tp, group_src=0)


def _replicated(parameters: Sequence[NamedParameter], optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What this rank holds of them; not the numbers of an optimizer, such as steps, which no rounding changes."""
    for entry in parameters:
        if entry.is_replicated:
            state = optimizer.state.get(entry.updated, {}).values()
            tensors = [value for value in state if isinstance(value, torch.Tensor) and value.dim() > 0]
            yield from (local_part(tensor) for tensor in (entry.parameter, *tensors))
