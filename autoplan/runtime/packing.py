"""Copies gradients to where their reduction reads them: the parts of rank 0 of all parameters, those of rank 1, ...

    one group of `fully_shard`:  [grad a, grad b]  ->  [a of rank 0, b of rank 0, a of rank 1, b of rank 1]

torch's own kernel for it reaches 1.8 TB/s from bfloat16 to float32 on an H100, a copy of many tensors at once 2.5. Over
one rank the former takes seven times as long, most of it on the host, the latter more of it for each tensor, which
small groups are spared (benchmarks/results/packing_h100_2026-11-27.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as of_torch

LEAST_ELEMENTS = 1 << 24  # of a group: 20 us less of an H100 against 50 more of its host

_pack_by_torch = of_torch.foreach_reduce_scatter_copy_in


def pack_at_once() -> None:
    """Let `fully_shard` copy the gradients of large groups with `pack`. It has no setting for it."""
    of_torch.foreach_reduce_scatter_copy_in = pack


def pack(unsharded_grads: list[torch.Tensor], reduce_scatter_input: torch.Tensor, world_size: int) -> None:
    """Copy the gradients of one group into a vector of as many elements, or of more where ranks get padding."""
    if reduce_scatter_input.numel() < LEAST_ELEMENTS or not _are_even(unsharded_grads, world_size):
        _pack_by_torch(unsharded_grads, reduce_scatter_input, world_size)
        return
    sizes = [gradient.numel() // world_size for gradient in unsharded_grads]
    by_rank = zip(*(gradient.view(world_size, -1).unbind() for gradient in unsharded_grads), strict=True)
    rows = reduce_scatter_input.view(world_size, -1).unbind()
    torch._foreach_copy_(
        [part for row in rows for part in torch.split(row, sizes)],
        [part for of_rank in by_rank for part in of_rank],
    )


def _are_even(gradients: Sequence[torch.Tensor], n_ranks: int) -> bool:
    return all(gradient.is_contiguous() and gradient.size(0) % n_ranks == 0 for gradient in gradients)
