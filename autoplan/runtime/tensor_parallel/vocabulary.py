"""Vocabulary-parallel embedding and loss: each rank of the tensor-parallel group has some rows of the vocabulary.

No rank ever holds all logits. `tp` is the process group; None stands for a group of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.overrides import handle_torch_function, has_torch_function_unary


def vocab_parallel_embedding(
    ids: torch.Tensor, weight_shard: torch.Tensor, tp: ProcessGroup | None, *, padding_idx: int | None = None
) -> torch.Tensor:
    """A partial sum of `embedding(ids, weight)`, where rank r holds rows [r * n, (r + 1) * n) of the weight.

    Ids of other ranks' rows give zeros; the caller all-reduces or reduce-scatters the result. The row of
    `padding_idx` gets no gradient, as in `torch.nn.functional.embedding`. Rows that pad the weight belong to no id.
    """
    n_rows = weight_shard.shape[0]
    first_row = 0 if tp is None else tp.rank() * n_rows
    is_elsewhere = (ids < first_row) | (ids >= first_row + n_rows)
    local_ids = (ids - first_row).masked_fill(is_elsewhere, 0)
    rows = torch.nn.functional.embedding(local_ids, weight_shard)
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)


def takes_16_bits(loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that is given outputs as they are: all that reads them is `vocab_parallel_cross_entropy`."""
    loss_fn.takes_16_bits = True  # type: ignore[attr-defined]
    return loss_fn


def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor,
    targets: torch.Tensor,
    tp: ProcessGroup | None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    n_classes: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of logits sharded over their last dim; equal on all ranks, with no rank holding all logits.

        loss_i = lse_i - (1 - s) * logits_i[target_i] - s / V * sum_v logits_iv,     lse_i = log sum_v exp(logits_iv)

    s is `label_smoothing`, V the whole vocabulary. `logits_shard: [..., V / tp]`, `targets: [...]`. `n_classes` is V
    when it does not divide: the logits after it are padding, take no part, and get a gradient of zero. Computed in
    float32 (float64 for float64 logits). Saves the logits themselves and one number per row for backward, and holds
    one tensor of their size in float32 at a time.
    """
    if has_torch_function_unary(logits_shard):
        found: torch.Tensor = handle_torch_function(
            vocab_parallel_cross_entropy,
            (logits_shard,),
            logits_shard,
            targets,
            tp,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            n_classes=n_classes,
        )
        return found
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction: found {reduction!r}, expected "mean", "sum" or "none"')
    rows = logits_shard.reshape(-1, logits_shard.shape[-1])
    flat_targets = targets.reshape(-1)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, flat_targets, tp, ignore_index, label_smoothing, n_classes
    )
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (flat_targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Loss per row; see `vocab_parallel_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        tp: ProcessGroup | None,
        ignore_index: int,
        label_smoothing: float,
        n_classes: int | None,
    ) -> torch.Tensor:
        n_columns = logits.shape[-1]
        first_column = 0 if tp is None else tp.rank() * n_columns
        vocabulary = n_classes or n_columns * (1 if tp is None else tp.size())
        n_real_columns = min(max(vocabulary - first_column, 0), n_columns)
        is_here = (targets >= first_column) & (targets < first_column + n_columns)
        columns = (targets - first_column).masked_fill(~is_here, 0)
        dtype, real = _accumulation_dtype(logits.dtype), logits.narrow(-1, 0, n_real_columns)

        highest = real.amax(dim=-1) if n_real_columns else logits.new_full(targets.shape, -torch.inf)
        highest = highest.to(dtype)
        _reduce_in_place(highest, tp, dist.ReduceOp.MAX)
        # Of 16-bit logits and a number per row in float32, which no pass widens first; so in backward.
        exponentials = torch.sub(real, highest.unsqueeze(-1)).exp_()
        picked = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).to(dtype).masked_fill(~is_here, 0.0)
        terms = [exponentials.sum(dim=-1), picked]
        if label_smoothing > 0.0:
            terms.append(real.sum(dim=-1, dtype=dtype))
        sums = torch.stack(terms)
        _reduce_in_place(sums, tp, dist.ReduceOp.SUM)

        lse = sums[0].log() + highest
        losses = lse - (1.0 - label_smoothing) * sums[1]
        if label_smoothing > 0.0:
            losses = losses - label_smoothing / vocabulary * sums[2]
        is_ignored = targets == ignore_index
        ctx.save_for_backward(logits, lse, columns, is_here, is_ignored)
        ctx.label_smoothing, ctx.vocabulary, ctx.n_real_columns = label_smoothing, vocabulary, n_real_columns
        return losses.masked_fill(is_ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, lse, columns, is_here, is_ignored = ctx.saved_tensors
        probabilities = torch.sub(logits, lse.unsqueeze(-1)).exp_()
        picked = is_here.to(lse.dtype).mul(ctx.label_smoothing - 1.0).unsqueeze(-1)
        probabilities.scatter_add_(-1, columns.unsqueeze(-1), picked)
        if ctx.label_smoothing > 0.0:
            probabilities -= ctx.label_smoothing / ctx.vocabulary
        # What torch.compile makes of it narrows the product in the same pass, but not into `out` of another dtype.
        is_wide = probabilities.dtype == logits.dtype
        out = None if torch.compiler.is_compiling() else probabilities if is_wide else torch.empty_like(logits)
        logits_gradient = torch.mul(probabilities, gradient.masked_fill(is_ignored, 0.0).unsqueeze(-1), out=out)
        logits_gradient[..., ctx.n_real_columns :] = 0.0
        return logits_gradient.to(logits.dtype), None, None, None, None, None


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduce_in_place(x: torch.Tensor, tp: ProcessGroup | None, op: Any) -> None:
    if tp is not None and tp.size() > 1:
        dist.all_reduce(x, op=op, group=tp)
