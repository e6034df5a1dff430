"""One mean over the targets of the global batch, where the loss leaves some targets out of its mean.

Micro-batch i of all m (over all data-parallel ranks) has n_i targets that count, and its loss is their mean. Then

    mean over the global batch  =  sum_i n_i loss_i / sum_i n_i  =  1/m sum_i w_i loss_i,     w_i = m n_i / sum_j n_j

so weights turn the usual mean over micro-batches into it, exactly. A micro-batch without any such target adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def mean_count(batches: Iterable[Any], *, ignored: int) -> torch.Tensor:
    """The mean over the targets of some micro-batches of how many are not `ignored`."""
    return torch.stack([count(targets, ignored=ignored) for targets in batches]).mean()


def count(targets: Any, *, ignored: int) -> torch.Tensor:
    """How many targets are not `ignored`, in float64.

    Raises: ValueError unless the targets are one tensor of integers.
    """
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        raise ValueError(f"ignored_target = {ignored} needs targets that are one tensor of integers")
    return (targets != ignored).sum().to(torch.float64)


def weigh(loss: torch.Tensor, targets: Any, *, ignored: int, mean: torch.Tensor) -> torch.Tensor:
    """The loss of one micro-batch times its weight; `mean` is the `mean_count` over all micro-batches of the step."""
    own = count(targets, ignored=ignored)
    weight = (own / mean).to(loss.dtype)
    return torch.where(own > 0, loss * weight, torch.zeros_like(loss))
