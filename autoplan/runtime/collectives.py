"""Tensor-parallel conversions: each public function is one forward and one backward movement over a process group.

A value on the tensor-parallel axis is whole on every rank, a shard of one dim, or a partial sum. A conversion changes
which of these it is; its backward pass converts the gradient the other way, so both directions are visible in one line:

    copy_to_tp              x                 <->  all-reduce of the gradient
    all_reduce              all-reduce        <->  gradient
    all_gather              all-gather        <->  slice of the gradient
    reduce_scatter          reduce-scatter    <->  all-gather of the gradient
    shard                   slice             <->  all-gather of the gradient

`tp` is the process group; None stands for a group of one rank, where every conversion is the identity.
`blocks=k` says that the dim consists of k equal blocks which are sharded one by one (a fused QKV weight has 3):

    dim    | q0 q1 | k0 k1 | v0 v1 |        shard of rank 0:  | q0 | k0 | v0 |

`size=n` says that the dim has n elements, which do not divide: shards have ceil(n / ranks), and what lies beyond the
end is padding. It is cut off where shards become whole, and zeros where they are made, of values and gradients alike:

    dim    | a b c d e |                    shards of 2 ranks:  | a b c |  and  | d e 0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.overrides import handle_torch_function, has_torch_function_unary

from .memory_format import CHANNELS_BEHIND, CHANNELS_IN_FRONT, is_channels_last, plainly_channels_last

# torch 2.13 renamed these two; 2.11 has the old names only.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ------------------------------------------------------------------ conversions


def copy_to_tp(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """The same value, to be used differently by each rank; forward identity, backward all-reduce."""
    return _convert(x, _identity, _all_reduce, tp)


def all_reduce(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """The sum of partial sums; forward all-reduce, backward identity."""
    return _convert(x, _all_reduce, _identity, tp)


def all_reduce_both(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """The sum of partial sums, to be used differently by each rank; all-reduce both ways."""
    return _convert(x, _all_reduce, _all_reduce, tp)


def all_gather(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The whole of a sharded dim; forward all-gather, backward slice."""
    return _convert(x, _gather, _slice, tp, dim, blocks, size)


def all_gather_reduce_grad(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The whole of a sharded dim, to be used differently by each rank; forward all-gather, backward reduce-scatter."""
    return _convert(x, _gather, _reduce_scatter, tp, dim, blocks, size)


def reduce_scatter(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The rank's own shard of the sum of partial sums; forward reduce-scatter, backward all-gather."""
    return _convert(x, _reduce_scatter, _gather, tp, dim, blocks, size)


def shard(x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None) -> torch.Tensor:
    """The rank's own shard of a whole value; forward slice, backward all-gather."""
    return _convert(x, _slice, _gather, tp, dim, blocks, size)


def shard_partial_grad(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The rank's own shard of a value whose gradient is a partial sum; forward slice, backward zero-padding."""
    return _convert(x, _slice, _pad, tp, dim, blocks, size)


def pad_to_partial(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """A partial sum that holds this rank's shard and zeros elsewhere; forward zero-padding, backward slice."""
    return _convert(x, _pad, _slice, tp, dim, blocks, size)


def all_to_all(x: torch.Tensor, from_dim: int, to_dim: int, tp: ProcessGroup | None) -> torch.Tensor:
    """The value sharded on `from_dim` becomes sharded on `to_dim`; all-to-all both ways."""
    if _is_alone(tp):
        return x
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    converted: torch.Tensor = _Exchange.apply(x, from_dim, to_dim, tp)  # type: ignore[no-untyped-call]
    return converted


def first_rank_only(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """A whole value as a partial sum: x on the first rank, zeros elsewhere; backward identity."""
    return _convert(x, _keep_on_first_rank, _identity, tp)


def first_rank_only_both(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """x, and its gradient, on the first rank and zeros elsewhere."""
    return _convert(x, _keep_on_first_rank, _keep_on_first_rank, tp)


def keep_first_rank_grad(x: torch.Tensor, tp: ProcessGroup | None) -> torch.Tensor:
    """The same value, whose gradient becomes a partial sum: kept on the first rank, zeros elsewhere."""
    return _convert(x, _identity, _keep_on_first_rank, tp)


# ------------------------------------------------------------------ vocabulary-parallel embedding and loss


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
    float32 (float64 for float64 logits). Saves the logits themselves and one number per row for backward.
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
        precise = logits.to(_accumulation_dtype(logits.dtype))
        real = precise.narrow(-1, 0, n_real_columns)

        local_lse = torch.logsumexp(real, dim=-1)
        picked = precise.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        highest = local_lse.clone()
        _reduce_in_place(highest, tp, dist.ReduceOp.MAX)
        terms = [torch.exp(local_lse - highest), picked]
        if label_smoothing > 0.0:
            terms.append(real.sum(dim=-1))
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
        probabilities = torch.exp(logits.to(lse.dtype) - lse.unsqueeze(-1))
        picked = is_here.to(lse.dtype).mul(ctx.label_smoothing - 1.0).unsqueeze(-1)
        probabilities = probabilities.scatter_add(-1, columns.unsqueeze(-1), picked)
        if ctx.label_smoothing > 0.0:
            probabilities = probabilities - ctx.label_smoothing / ctx.vocabulary
        logits_gradient = probabilities * gradient.masked_fill(is_ignored, 0.0).unsqueeze(-1)
        logits_gradient[..., ctx.n_real_columns :] = 0.0
        return logits_gradient.to(logits.dtype), None, None, None, None, None


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduce_in_place(x: torch.Tensor, tp: ProcessGroup | None, op: Any) -> None:
    if not _is_alone(tp):
        dist.all_reduce(x, op=op, group=tp)


# ------------------------------------------------------------------ movements


class _Layout(NamedTuple):
    """Over which ranks, and which dim, a movement goes; `size` is the dim's extent when shards are padded."""

    tp: ProcessGroup
    dim: int
    blocks: int
    size: int | None


Movement = Callable[[torch.Tensor, _Layout], torch.Tensor]


class _Convert(torch.autograd.Function):
    """Applies one movement forward and another one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward_move: Movement, backward_move: Movement, *where: Any
    ) -> torch.Tensor:
        ctx.backward_move, ctx.where = backward_move, where
        return _fresh(_in_its_order(forward_move, x, _Layout(*where)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        moved = _in_its_order(ctx.backward_move, gradient, _Layout(*ctx.where))
        return moved, None, None, None, None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, from_dim: int, to_dim: int, tp: ProcessGroup) -> torch.Tensor:
        ctx.from_dim, ctx.to_dim, ctx.tp = from_dim, to_dim, tp
        return _fresh(_exchange_in_its_order(x, from_dim, to_dim, tp))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange_in_its_order(gradient, ctx.to_dim, ctx.from_dim, ctx.tp), None, None, None


def _convert(
    x: torch.Tensor,
    forward_move: Movement,
    backward_move: Movement,
    tp: ProcessGroup | None,
    dim: int = 0,
    blocks: int = 1,
    size: int | None = None,
) -> torch.Tensor:
    if _is_alone(tp):
        return x
    dim = dim % x.dim() if x.dim() else 0
    converted: torch.Tensor = _Convert.apply(  # type: ignore[no-untyped-call]
        x, forward_move, backward_move, tp, dim, blocks, size
    )
    return converted


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """`x` as the result of an operator of its own, while compiling.

    torch.compile in 2.11 gives zero gradients to a Function whose result was written in place by a collective.
    """
    return x.clone() if torch.compiler.is_compiling() else x


def _in_its_order(move: Movement, x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """What a movement makes of `x`, in the order in which `x` lies in memory, which is the same on all ranks."""
    if not is_channels_last(x):
        return move(x, layout)
    behind = layout._replace(dim=CHANNELS_BEHIND.index(layout.dim))
    return move(plainly_channels_last(x).permute(CHANNELS_BEHIND), behind).permute(CHANNELS_IN_FRONT)


def _is_alone(tp: ProcessGroup | None) -> bool:
    return tp is None or tp.size() == 1


def _identity(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    return x.view_as(x)


def _keep_on_first_rank(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    return x.clone() if layout.tp.rank() == 0 else torch.zeros_like(x)


def _all_reduce(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=layout.tp)
    return total


def _split(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """`x` with its dim taken apart into (blocks, ranks, rest); zeros at its end make it divide, else it is a view."""
    n_missing = 0 if layout.size is None else -layout.size % layout.tp.size()
    if n_missing:
        x = torch.cat([x, x.new_zeros((*x.shape[: layout.dim], n_missing, *x.shape[layout.dim + 1 :]))], layout.dim)
    return torch.unflatten(x, layout.dim, (layout.blocks, layout.tp.size(), -1))


def _without_padding(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    return x if layout.size is None else x.narrow(layout.dim, 0, layout.size)


def _gather(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    n_ranks, dim = layout.tp.size(), layout.dim
    shards = x.new_empty((n_ranks * x.shape[0], *x.shape[1:]))
    _all_gather_tensor(shards, x.contiguous(), group=layout.tp)
    by_rank = torch.unflatten(shards.view(n_ranks, *x.shape), dim + 1, (layout.blocks, -1))
    return _without_padding(by_rank.movedim(0, dim + 1).flatten(dim, dim + 2), layout).contiguous()


def _reduce_scatter(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    by_rank = _split(x, layout).movedim(layout.dim + 1, 0).contiguous()
    total = torch.empty_like(by_rank[0])
    _reduce_scatter_tensor(total, by_rank.flatten(0, 1), group=layout.tp)
    return total.flatten(layout.dim, layout.dim + 1)


def _slice(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    own = _split(x, layout).select(layout.dim + 1, layout.tp.rank())
    return own.clone(memory_format=torch.contiguous_format).flatten(layout.dim, layout.dim + 1)


def _pad(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    dim = layout.dim
    whole = x.new_zeros((*x.shape[:dim], x.shape[dim] * layout.tp.size(), *x.shape[dim + 1 :]))
    by_rank = torch.unflatten(whole, dim, (layout.blocks, layout.tp.size(), -1))
    by_rank.select(dim + 1, layout.tp.rank()).copy_(torch.unflatten(x, dim, (layout.blocks, -1)))
    return _without_padding(whole, layout).contiguous()


def _exchange(x: torch.Tensor, from_dim: int, to_dim: int, tp: ProcessGroup) -> torch.Tensor:
    outgoing = torch.unflatten(x, to_dim, (tp.size(), -1)).movedim(to_dim, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=tp)
    return incoming.movedim(0, from_dim).flatten(from_dim, from_dim + 1).contiguous()


def _exchange_in_its_order(x: torch.Tensor, from_dim: int, to_dim: int, tp: ProcessGroup) -> torch.Tensor:
    if not is_channels_last(x):
        return _exchange(x, from_dim, to_dim, tp)
    dims = CHANNELS_BEHIND.index(from_dim), CHANNELS_BEHIND.index(to_dim)
    return _exchange(plainly_channels_last(x).permute(CHANNELS_BEHIND), *dims, tp).permute(CHANNELS_IN_FRONT)
