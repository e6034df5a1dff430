"""Tensor-parallel conversions: each public function is one forward and one backward movement over a process group.

A value on the tensor-parallel axis is whole on every rank, a shard of one dim, or a partial sum. A conversion changes
which of these it is; its backward pass converts the gradient the other way, so both directions are visible in one line:

    copy_to_tp              x                 <->  all-reduce of the gradient
    all_reduce              all-reduce        <->  gradient
    all_gather              all-gather        <->  slice of the gradient
    reduce_scatter          reduce-scatter    <->  all-gather of the gradient
    shard                   slice             <->  all-gather of the gradient

`tp` is the process group, in shapes its size; None stands for a group of one rank, where every conversion is the
identity. Those without a `dim` keep the shape.
`blocks=k` says that the dim consists of k equal blocks which are sharded one by one (a fused QKV weight has 3):

    dim    | q0 q1 | k0 k1 | v0 v1 |        shard of rank 0:  | q0 | k0 | v0 |

`size=n` says that the dim has n elements, which do not divide: shards have ceil(n / ranks), and what lies beyond the
end is padding, so n / tp in shapes is rounded up. Padding is cut off where shards become whole, and zeros where they
are made, of values and gradients alike:

    dim    | a b c d e |                    shards of 2 ranks:  | a b c |  and  | d e 0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..input_pipeline.memory_format import CHANNELS_BEHIND, CHANNELS_IN_FRONT, is_channels_last, plainly_channels_last

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
    """The whole of a sharded dim; forward all-gather, backward slice.

    x: [.., n / tp, ..] -> [.., n, ..] at `dim`.
    """
    return _convert(x, _gather, _slice, tp, dim, blocks, size)


def all_gather_reduce_grad(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The whole of a sharded dim, to be used differently by each rank; forward all-gather, backward reduce-scatter.

    x: [.., n / tp, ..] -> [.., n, ..] at `dim`.
    """
    return _convert(x, _gather, _reduce_scatter, tp, dim, blocks, size)


def reduce_scatter(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The rank's own shard of the sum of partial sums; forward reduce-scatter, backward all-gather.

    x: [.., n, ..] -> [.., n / tp, ..] at `dim`.
    """
    return _convert(x, _reduce_scatter, _gather, tp, dim, blocks, size)


def shard(x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None) -> torch.Tensor:
    """The rank's own shard of a whole value; forward slice, backward all-gather.

    x: [.., n, ..] -> [.., n / tp, ..] at `dim`.
    """
    return _convert(x, _slice, _gather, tp, dim, blocks, size)


def shard_partial_grad(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """The rank's own shard of a value whose gradient is a partial sum; forward slice, backward zero-padding.

    x: [.., n, ..] -> [.., n / tp, ..] at `dim`.
    """
    return _convert(x, _slice, _pad, tp, dim, blocks, size)


def pad_to_partial(
    x: torch.Tensor, dim: int, tp: ProcessGroup | None, blocks: int = 1, size: int | None = None
) -> torch.Tensor:
    """A partial sum that holds this rank's shard and zeros elsewhere; forward zero-padding, backward slice.

    x: [.., n / tp, ..] -> [.., n, ..] at `dim`.
    """
    return _convert(x, _pad, _slice, tp, dim, blocks, size)


def all_to_all(x: torch.Tensor, from_dim: int, to_dim: int, tp: ProcessGroup | None) -> torch.Tensor:
    """The value sharded on `from_dim` becomes sharded on `to_dim`; all-to-all both ways.

    x: [.., n / tp, .., m, ..] -> [.., n, .., m / tp, ..], n at `from_dim` and m at `to_dim`, in either order.
    """
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
