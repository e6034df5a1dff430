"""Operators that move or rename dims. Most are views: no kernel and no memory of their own."""

from collections.abc import Iterator
from typing import TypeGuard

from autoplan.graph import Extent, Op, TensorSpec, extent_at
from autoplan.layout import sharded
from autoplan.rules import OpRule, Specs, Strategy, broadcast_equation, whole_dims_equation

_LETTERS = "abcdefgh"
_MAX_BLOCKS = 4  # a fused projection has few parts (q, k, v); a larger leading factor is a head count
_PROBE_BATCH = 1_000_003  # a prime no other extent has: products of extents can be compared as numbers


def _permuted(order: tuple[int, ...]) -> str:
    letters = _LETTERS[: len(order)]
    return f"{' '.join(letters)} -> {' '.join(letters[i] for i in order)}"


def _transpose(op: Op, operands: Specs) -> str:
    order = list(range(len(operands[0].shape)))
    if order:
        i, j = op.args[1] % len(order), op.args[2] % len(order)
        order[i], order[j] = order[j], order[i]
    return _permuted(tuple(order))


def _permute(op: Op, operands: Specs) -> str:
    return _permuted(tuple(dim % len(op.args[1]) for dim in op.args[1]))


def _t(op: Op, operands: Specs) -> str:
    return _permuted(tuple(reversed(range(len(operands[0].shape)))))


def _unsqueeze(op: Op, operands: Specs) -> str:
    letters = list(_LETTERS[: len(operands[0].shape)])
    result = list(letters)
    result.insert(op.args[1] % (len(letters) + 1), "new")
    return f"{' '.join(letters)} -> {' '.join(result)}"


def _select(op: Op, operands: Specs) -> str:
    letters = list(_LETTERS[: len(operands[0].shape)])
    dim = op.args[1] % len(letters)
    marked = [letter + ("^" if i == dim else "") for i, letter in enumerate(letters)]
    return f"{' '.join(marked)} -> {' '.join(letters[:dim] + letters[dim + 1 :])}"


def _dim_argument(op: Op, operands: Specs) -> frozenset[int]:
    """The dim an op works along: its argument after the tensors and sizes, or `dim=`; 0 when left out."""
    position = {"aten.slice.Tensor": 1, "aten.cat.default": 1}.get(op.target, 2)
    return frozenset({dict(op.kwargs).get("dim", op.args[position] if len(op.args) > position else 0)})


def _split_blocks(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """A dim cut into k equal pieces: sharded in k blocks before, plainly sharded after."""
    (dim,) = _dim_argument(op, operands)
    if len({spec.shape for spec in op.outputs}) == 1:
        dim %= len(operands[0].shape)
        yield Strategy((sharded(dim, len(op.outputs)),), sharded(dim))


def _cat_equation(op: Op, operands: Specs) -> str:
    (dim,) = _dim_argument(op, operands)
    rank = len(operands[0].shape)
    term = " ".join(_LETTERS[i] + ("^" if i == dim % rank else "") for i in range(rank))
    return ", ".join([term] * len(operands)) + f" -> {term}"


def _cat_blocks(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    (dim,) = _dim_argument(op, operands)
    if len({spec.shape for spec in operands}) == 1:
        dim %= len(operands[0].shape)
        yield Strategy((sharded(dim),) * len(operands), sharded(dim, len(operands)))


def _reshape(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Dims fall into groups of equal product; the leading dim of a group may be split on both sides."""
    for before, after in _dim_groups(operands[0].shape, result.shape):
        if not before or not after:
            continue
        yield Strategy((sharded(before[0]),), sharded(after[0]))
        if len(before) == 1 and len(after) > 1 and _is_block_count(blocks := result.shape[after[0]]):
            yield Strategy((sharded(before[0], blocks),), sharded(after[1]))
        if len(after) == 1 and len(before) > 1 and _is_block_count(blocks := operands[0].shape[before[0]]):
            yield Strategy((sharded(before[1]),), sharded(after[0], blocks))


def _is_block_count(extent: Extent) -> TypeGuard[int]:
    return isinstance(extent, int) and extent <= _MAX_BLOCKS


def _dim_groups(
    before: tuple[Extent, ...], after: tuple[Extent, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest groups of consecutive dims with equal products on both sides; dims of size 1 are left out.

    (B, 6, 256, 64) -> (B, 6, 16384): groups ((0), (0)), ((1), (1)), ((2, 3), (2)).
    """
    left = [(i, extent_at(x, _PROBE_BATCH)) for i, x in enumerate(before) if x != 1]
    right = [(i, extent_at(x, _PROBE_BATCH)) for i, x in enumerate(after) if x != 1]
    while left and right:
        (i, product_left), (j, product_right) = left.pop(0), right.pop(0)
        group_left, group_right = [i], [j]
        while product_left != product_right:
            source, group = (left, group_left) if product_left < product_right else (right, group_right)
            if not source:
                return
            index, extent = source.pop(0)
            group.append(index)
            if source is left:
                product_left *= extent
            else:
                product_right *= extent
        yield tuple(group_left), tuple(group_right)


_VIEW = OpRule(None, is_view=True, n_kernels=0, n_backward_kernels=0, strategies=_reshape, linear_in=())
_COPY = OpRule(broadcast_equation, backward_bytes_ratio=1.0, linear_in=(0,))
_CAST = OpRule(broadcast_equation, backward_bytes_ratio=1.0)  # not linear: a cast may round


def _renamed(equation: object, *, is_view: bool = True) -> OpRule:
    n_kernels = 0 if is_view else 1
    return OpRule(
        equation,  # type: ignore[arg-type]
        is_view=is_view,
        n_kernels=n_kernels,
        n_backward_kernels=n_kernels,
        linear_in=(0,),
    )


_SPLIT = OpRule(
    whole_dims_equation(_dim_argument), is_view=True, n_kernels=0, n_backward_kernels=1, strategies=_split_blocks
)

RULES = {
    "aten.view.default": _VIEW,
    "aten.reshape.default": _VIEW,
    "aten._unsafe_view.default": _VIEW,
    "aten.flatten.using_ints": _VIEW,
    "aten.unflatten.int": _VIEW,
    "aten.squeeze.dim": _VIEW,
    "aten.unsqueeze.default": _renamed(_unsqueeze),
    "aten.transpose.int": _renamed(_transpose),
    "aten.permute.default": _renamed(_permute),
    "aten.t.default": _renamed(_t),
    "aten.select.int": _renamed(_select),
    "aten.slice.Tensor": _renamed(whole_dims_equation(_dim_argument)),
    "aten.expand.default": _renamed(broadcast_equation),
    "aten.split.Tensor": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.chunk.default": _SPLIT,
    "getitem": _renamed(broadcast_equation),
    "aten.contiguous.default": _COPY,
    "aten.clone.default": _COPY,
    "aten.alias.default": _renamed(broadcast_equation),
    "aten.detach.default": _renamed(broadcast_equation),
    "aten.to.dtype": _CAST,
    "aten._to_copy.default": _CAST,
    "aten.type_as.default": OpRule(broadcast_equation),
    "aten.cat.default": OpRule(_cat_equation, backward_bytes_ratio=1.0, strategies=_cat_blocks),
}
