"""One mean over the targets of the global batch, where the loss leaves some targets out of its mean.

Micro-batch i (over all data-parallel ranks) has s_i of all s samples and n_i targets that count, and its loss is their
mean. Then

    mean over the global batch  =  sum_i n_i loss_i / sum_i n_i  =  sum_i s_i/s w_i loss_i,  w_i = s/s_i n_i / sum_j n_j

so weights turn the usual mean over samples into it, exactly. A micro-batch without any such target adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def total_count(batches: Iterable[Any], *, ignored: int) -> torch.Tensor:
    """How many targets of some micro-batches are not `ignored`; one number in float64, of shape [].

    Raises: ValueError unless the targets of each are one tensor of integers.
    """
    return torch.stack([count(targets, ignored=ignored) for targets in batches]).sum()


def count(targets: Any, *, ignored: int) -> torch.Tensor:
    """How many targets are not `ignored`; one number in float64, of shape [].

    Raises: ValueError unless the targets are one tensor of integers.
    """
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        raise ValueError(f"ignored_target = {ignored} needs targets that are one tensor of integers")
    return (targets != ignored).sum().to(torch.float64)


def weigh(loss: torch.Tensor, targets: Any, *, ignored: int, mean: torch.Tensor) -> torch.Tensor:
    """The loss of one micro-batch times its weight; `mean` is how many targets count of as many samples on average."""
    own = count(targets, ignored=ignored)
    weight = (own / mean).to(loss.dtype)
    return torch.where(own > 0, loss * weight, torch.zeros_like(loss))
