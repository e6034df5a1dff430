"""Random numbers of tensor-parallel ranks: shards of a value drop elements of their own, and can drop them again.

All ranks of the tensor-parallel axis hold their default generator in one state, so that values that are whole on every
rank are dropped alike. A shard needs other numbers on each rank. Here they follow from that common state and the rank:

    state s of the default generator  -->  numbers of f(s, rank)      s advances alike on all ranks

and from nothing else, so recomputation, which sets the state back, draws them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import functional as F

# 2**64 / golden ratio: far from the neighbouring seeds that data-parallel ranks and stages have.
_SEED_STEP = 0x9E3779B97F4A7C15
_N_SEEDS = 2**63


def rank_dropout(x: torch.Tensor, p: float, training: bool, tp: ProcessGroup | None) -> torch.Tensor:
    """`F.dropout` of this rank's shard, with a mask that differs on each rank of `tp`."""
    if not training or p == 0.0 or tp is None:
        return F.dropout(x, p, training)
    with _numbers_of_rank(x.device, tp.rank()):
        return F.dropout(x, p, training)


def rank_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tp: ProcessGroup | None, **options: Any
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of this rank's heads or rows, with dropout that differs on each rank of `tp`."""
    if not options.get("dropout_p", 0.0) or tp is None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with _numbers_of_rank(q.device, tp.rank()):
        return F.scaled_dot_product_attention(q, k, v, **options)


def grouped_attention_of_rank(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tp: ProcessGroup | None,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's query heads, which read the key and value heads of their groups.

    query: [batch, heads / tp, ...], key, value: [batch, key heads, ...], whole on every rank. Query head h reads key
    head h // (heads / key heads). The gradients of key and value are this rank's share of them. Dropout differs on each
    rank.
    """
    n_ranks, rank = (1, 0) if tp is None else (tp.size(), tp.rank())
    n_local = query.shape[1]
    n_per_key_head = n_local * n_ranks // key.shape[1]
    first, last = rank * n_local // n_per_key_head, ((rank + 1) * n_local - 1) // n_per_key_head
    return rank_attention(
        query,
        key[:, first : last + 1],
        value[:, first : last + 1],
        tp=tp,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=n_local > last + 1 - first,
    )


@contextmanager
def _numbers_of_rank(device: torch.device, rank: int) -> Iterator[None]:
    """Inside, the default generator of the device gives this rank's numbers; after, it has advanced as on all ranks."""
    numbers = _cuda_numbers if device.type == "cuda" else _cpu_numbers
    with numbers(device, rank):
        yield


@contextmanager
def _cuda_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """The numbers of another seed at the same offset, which equal shapes advance alike; nothing waits for the GPU."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_seed_of_rank(seed, rank))
    generator.set_offset(offset)
    try:
        yield
    finally:
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)


@contextmanager
def _cpu_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """The numbers of a seed that is drawn from the generator, which goes on after that one number."""
    generator = torch.default_generator
    seed = int(torch.randint(_N_SEEDS - 1, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed(_seed_of_rank(seed, rank))
    try:
        yield
    finally:
        generator.set_state(state)


def _seed_of_rank(seed: int, rank: int) -> int:
    return (seed + (rank + 1) * _SEED_STEP) % _N_SEEDS
