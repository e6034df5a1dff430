"""Copies gradients to where their reduction reads them: the parts of rank 0 of all parameters, those of rank 1, ...

    one group of `fully_shard`:  [grad a, grad b]  ->  [a of rank 0, b of rank 0, a of rank 1, b of rank 1]

From bfloat16 to float32 torch's own kernel for it reaches 1.8 TB/s on an H100, a copy of many tensors at once 2.5. Over
one rank the former takes seven times as long for a block of Llama-8B, most of it on the host. The latter takes the host
for each tensor and rank, so that it is for large parts only (benchmarks/results/packing_h100_2026-11-27.jsonl).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as of_torch

LEAST_PART_ELEMENTS = 1 << 20  # of a gradient on one rank, in the mean of a group

# Torch 2.11 and 2.13 have it; where it has another name, all is left to torch.
pack_by_torch: Callable[[list[torch.Tensor], torch.Tensor, int], None] | None = getattr(
    of_torch, "foreach_reduce_scatter_copy_in", None
)


def pack_at_once() -> None:
    """Let `fully_shard` copy the gradients of its groups with `pack`. It has no setting for it."""
    if pack_by_torch is not None:
        of_torch.foreach_reduce_scatter_copy_in = pack


def pack(unsharded_grads: list[torch.Tensor], reduce_scatter_input: torch.Tensor, world_size: int) -> None:
    """Copy the gradients of one group into a vector of as many elements, or of more where ranks get padding.

    Small parts, padded ones, and gradients that are not contiguous are left to torch.
    """
    is_large = reduce_scatter_input.numel() >= LEAST_PART_ELEMENTS * len(unsharded_grads) * world_size
    if is_large and _are_even(unsharded_grads, world_size):
        copy_at_once(unsharded_grads, reduce_scatter_input, world_size)
    elif pack_by_torch is not None:
        pack_by_torch(unsharded_grads, reduce_scatter_input, world_size)


def copy_at_once(gradients: Sequence[torch.Tensor], packed: torch.Tensor, n_ranks: int) -> None:
    """Of contiguous gradients, each with a first dim that the ranks divide."""
    sizes = [gradient.numel() // n_ranks for gradient in gradients]
    by_rank = zip(*(gradient.view(n_ranks, -1).unbind() for gradient in gradients), strict=True)
    torch._foreach_copy_(
        [part for row in packed.view(n_ranks, -1).unbind() for part in torch.split(row, sizes)],
        [part for of_rank in by_rank for part in of_rank],
    )


def _are_even(gradients: Sequence[torch.Tensor], n_ranks: int) -> bool:
    return all(gradient.is_contiguous() and gradient.size(0) % n_ranks == 0 for gradient in gradients)
