"""Fused attention of one tensor-parallel rank: of its heads, or of its rows of the query (context parallelism).

    query: [batch, heads, rows, size], key, value: [batch, key heads, keys, size]

Dropout differs on each rank. Gradients of what every rank holds whole are this rank's share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from .random import numbers_of_rank

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_ALIGNMENT, _FLASH_LARGEST_SIZE, _FLASH_CAPABILITY = 8, 256, (8, 0)


def rank_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tp: ProcessGroup | None, **options: Any
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of this rank's heads or rows, with dropout that differs on each rank of `tp`."""
    if not options.get("dropout_p", 0.0) or tp is None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with numbers_of_rank(q.device, tp.rank()):
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
    head h // (heads / key heads).
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


def causal_attention_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tp: ProcessGroup | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Causal attention of this rank's rows of the query: row i of all of them reads keys 0 to i.

    query: [..., rows / tp, size], key, value: [..., rows, size], whole on every rank. Later rows read more keys. So the
    rows are taken as 2 n runs for n ranks, of which rank r computes runs r and 2 n - 1 - r, as much as any other rank:

        rank        0 0 1 1 2 2        holds these runs, and has them again in the result
        computed by 0 1 2 2 1 0
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if tp is None or tp.size() == 1:
        return _attention_of_run(query, key, value, 0, tp, **options)
    last, n_rows = 2 * tp.size() - 1, query.shape[-2] // 2
    early, late = exchange_runs(torch.stack(query.chunk(2, dim=-2)), tp, is_return=False)
    attended = [
        _attention_of_run(run, key, value, number * n_rows, tp, **options)
        for run, number in ((early, tp.rank()), (late, last - tp.rank()))
    ]
    return torch.cat(tuple(exchange_runs(torch.stack(attended), tp, is_return=True)), dim=-2)


def exchange_runs(runs: torch.Tensor, tp: ProcessGroup, *, is_return: bool) -> torch.Tensor:
    """runs: [2, ...], runs 2 r and 2 r + 1 of rank r, for runs r and 2 n - 1 - r; or back. All-to-all both ways."""
    exchanged: torch.Tensor = _ExchangeOfRuns.apply(runs, tp, is_return)  # type: ignore[no-untyped-call]
    return exchanged


class _ExchangeOfRuns(torch.autograd.Function):
    """Backward goes the other way."""

    @staticmethod
    def forward(ctx: Any, runs: torch.Tensor, tp: ProcessGroup, is_return: bool) -> torch.Tensor:
        ctx.tp, ctx.is_return = tp, is_return
        return _exchanged(runs, tp, is_return)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(gradient, ctx.tp, not ctx.is_return), None, None


def _exchanged(runs: torch.Tensor, tp: ProcessGroup, is_return: bool) -> torch.Tensor:
    """Of two runs the one from, or for, the lower rank stands first on the way."""
    n_ranks, rank = tp.size(), tp.rank()
    computing = [min(run, 2 * n_ranks - 1 - run) for run in (2 * rank, 2 * rank + 1)]
    holding = [rank // 2, (2 * n_ranks - 1 - rank) // 2]
    is_swapped = computing[0] > computing[1]
    leaving = (runs.flip(0) if is_swapped and not is_return else runs).contiguous()
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(
        arriving,
        leaving,
        output_split_sizes=_counts(computing if is_return else holding, n_ranks),
        input_split_sizes=_counts(holding if is_return else computing, n_ranks),
        group=tp,
    )
    # A copy in both cases: compiled in torch 2.11, a result that a collective wrote in place gets no gradient.
    return arriving.flip(0) if is_swapped and is_return else arriving.clone()


def _counts(ranks: list[int], n_ranks: int) -> list[int]:
    return [ranks.count(rank) for rank in range(n_ranks)]


def _attention_of_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    tp: ProcessGroup | None,
    *,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of consecutive rows, from row `first` of all on: of the keys up to their last one."""
    n_rows, n_keys = query.shape[-2], key.shape[-2]
    end = first + n_rows
    if _takes_flash(query, value) and _has_flash():
        seen = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        return _flash_from_lower_right(query, *seen, tp, dropout_p=dropout_p, scale=scale)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True} if enable_gqa else {"scale": scale}
    if dropout_p:  # ranks must draw for equal shapes, so all keys are read
        mask = torch.ones(n_rows, n_keys, dtype=torch.bool, device=query.device).tril(first)
        return rank_attention(query, key, value, tp=tp, attn_mask=mask, dropout_p=dropout_p, **options)
    key, value = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
    if first == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    mask = torch.ones(n_rows, end, dtype=torch.bool, device=query.device).tril(first)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _flash_from_lower_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tp: ProcessGroup | None,
    *,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Flash attention, which counts a causal mask from the lower right; fewer key heads it takes as they are.

    `F.scaled_dot_product_attention` counts it from the upper left. `torch.nn.attention.bias.causal_lower_right` calls
    this operator, too, but cannot be compiled, and allocates the mask on the CPU.
    """
    flash: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.aten._scaled_dot_product_flash_attention
    if not dropout_p or tp is None:
        return flash(query, key, value, dropout_p, True, False, scale=scale)[0]
    with numbers_of_rank(query.device, tp.rank()):
        return flash(query, key, value, dropout_p, True, False, scale=scale)[0]


def _takes_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    size = query.shape[-1]
    is_sized = size == value.shape[-1] and size % _FLASH_ALIGNMENT == 0 and size <= _FLASH_LARGEST_SIZE
    return query.is_cuda and query.dtype in _FLASH_DTYPES and query.dim() == 4 and is_sized


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_flash() -> bool:
    """Whether this build and the current device have flash attention, and nobody has switched it off."""
    is_on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_on and is_built and torch.cuda.get_device_capability() >= _FLASH_CAPABILITY
