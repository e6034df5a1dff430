"""Operators that move or rename dims. Most are views: no kernel and no memory of their own."""

from collections.abc import Iterator
from typing import TypeGuard

from autoplan.equations import (
    Equation,
    along,
    argument,
    broadcast_equation,
    changed_dims_equation,
    dim_names,
    marked,
    whole_dims,
    write_equation,
)
from autoplan.graph import Extent, Op, TensorSpec, extent_at
from autoplan.layout import P, sharded
from autoplan.rules import OpRule, Specs, Strategy

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


def _movedim(op: Op, operands: Specs) -> str:
    """The moved dims take their places, the others fill the rest in order."""
    rank = len(operands[0].shape)
    sources, places = ([dim % rank for dim in _as_tuple(dims)] for dims in op.args[1:3])
    moved = dict(zip(places, sources, strict=True))
    others = iter(dim for dim in range(rank) if dim not in sources)
    return _permuted(tuple(moved[place] if place in moved else next(others) for place in range(rank)))


def _swap_last(op: Op, operands: Specs) -> str:
    order = list(range(len(operands[0].shape)))
    return _permuted((*order[:-2], order[-1], order[-2]))


def _as_tuple(dims: int | tuple[int, ...]) -> tuple[int, ...]:
    return dims if isinstance(dims, tuple) else (dims,)


def _select(op: Op, operands: Specs) -> str:
    letters = list(_LETTERS[: len(operands[0].shape)])
    dim = op.args[1] % len(letters)
    marked = [letter + ("^" if i == dim else "") for i, letter in enumerate(letters)]
    return f"{' '.join(marked)} -> {' '.join(letters[:dim] + letters[dim + 1 :])}"


def _last_two(op: Op, rank: int) -> range:
    return range(rank - 2, rank)


def _unbind(op: Op, operands: Specs) -> str:
    names, dim = dim_names(len(operands[0].shape)), argument(op, 1, "dim", 0)
    dim %= len(names)
    return write_equation([marked(names, {dim}, "^")], (*names[:dim], *names[dim + 1 :]))


def _stack(op: Op, operands: Specs) -> str:
    names, dim = dim_names(len(operands[0].shape)), argument(op, 1, "dim", 0)
    dim %= len(names) + 1
    return write_equation([names] * len(operands), (*names[:dim], "new^", *names[dim:]))


def _write_select(op: Op, operands: Specs) -> str:
    """select_scatter(x, source, dim, index): the source lacks the dim."""
    names = dim_names(len(operands[0].shape))
    dim = op.args[2] % len(names)
    names = marked(names, {dim}, "^")
    return write_equation([names, (*names[:dim], *names[dim + 1 :])], names)


def _windows(op: Op, operands: Specs) -> str:
    """unfold(x, dim, size, step): the dim becomes positions, and a new last dim holds the windows."""
    names = dim_names(len(operands[0].shape))
    names = marked(names, {op.args[1] % len(names)}, "^")
    return write_equation([names], (*names, "new^"))


def _diagonal(op: Op, operands: Specs) -> str:
    rank = len(operands[0].shape)
    dims = {argument(op, 2, "dim1", 0) % rank, argument(op, 3, "dim2", 1) % rank}
    names = marked(dim_names(rank), dims, "^")
    return write_equation([names], (*(name for i, name in enumerate(names) if i not in dims), "new^"))


def _repeated(op: Op, operands: Specs) -> str:
    """repeat(x, counts): dims repeated once are as before, the others stay whole; new dims come first."""
    rank, n_result = len(operands[0].shape), len(op.outputs[0].shape)
    counts = (*(1,) * (n_result - len(op.args[1])), *op.args[1])
    names = marked(dim_names(n_result), {i for i, count in enumerate(counts) if count != 1}, "^")
    return write_equation([names[n_result - rank :]], names)


def _repeat_each(op: Op, operands: Specs) -> str:
    """repeat_interleave(x, n, dim): each element n times in place, so that parts stay parts."""
    names = dim_names(len(operands[0].shape))
    if argument(op, 2, "dim") is None:
        return write_equation([marked(names, range(len(names)), "^")], ("all^",))
    return write_equation([names], names)


def _piece(op: Op, operands: Specs) -> str:
    """getitem: one of several results, which lie alike; only the first one's shape is known here."""
    before, after = operands[0].shape, op.outputs[0].shape
    if len(before) != len(after):
        return write_equation(
            [marked(dim_names(len(before), "x"), range(len(before)), "^")], dim_names(len(after), "y")
        )
    return broadcast_equation(op, operands)


def _padded_dims(op: Op, rank: int) -> set[int]:
    """pad(x, (left, right of the last dim, left, right of the one before, ...)): dims with an amount."""
    return {rank - 1 - i // 2 for i, amount in enumerate(op.args[1]) if amount != 0}


def _split_halves(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    dim = argument(op, 1, "dim", -1) % len(result.shape)
    yield Strategy((sharded(dim, 2),), sharded(dim), is_split=True)


def _other_dims(op: Op, rank: int) -> set[int]:
    """_weight_norm(v, g, dim): v * g / norm(v), one norm per position of the dim."""
    return set(range(rank)) - {argument(op, 2, "dim", 0) % rank}


def _all_partial(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Moving partial sums about leaves partial sums, when all operands are."""
    yield Strategy((P,) * len(operands), P)


def _split_blocks(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """A dim cut into k equal pieces: sharded in k blocks before, plainly sharded after."""
    dim = argument(op, 2, "dim", 0)
    if len({spec.shape for spec in op.outputs}) == 1:
        dim %= len(operands[0].shape)
        yield Strategy((sharded(dim, len(op.outputs)),), sharded(dim))
    yield from _all_partial(op, operands, result, degree)


def _cat_blocks(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    dim = argument(op, 1, "dim", 0)
    if len({spec.shape for spec in operands}) == 1:
        dim %= len(operands[0].shape)
        yield Strategy((sharded(dim),) * len(operands), sharded(dim, len(operands)))
    yield from _all_partial(op, operands, result, degree)


def _kept_dims(op: Op, operands: Specs) -> str:
    """The letters of the dims that a reshape leaves alone; `_reshape` splits the others."""
    before, after = operands[0].shape, op.outputs[0].shape
    kept = {i[0]: j[0] for i, j in _dim_groups(before, after) if len(i) == len(j) == 1}
    names = marked(dim_names(len(before)), set(range(len(before))) - set(kept), "^")
    result = list(dim_names(len(after), "y"))
    for i, j in kept.items():
        result[j] = names[i]
    return write_equation([names], result)


def _reshape(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Dims fall into groups of equal product; the leading dim of a group may be split on both sides."""
    for before, after in _dim_groups(operands[0].shape, result.shape):
        if len(before) == len(after) == 1:
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


_VIEW = OpRule(
    _kept_dims,
    is_view=True,
    n_kernels=0,
    n_backward_kernels=0,
    strategies=_reshape,
    linear_in=(0,),
    finite_in=(0,),
)


def _as_complex(op: Op, operands: Specs) -> str:
    """[..., 2] -> [...]: the last dim is real and imaginary part."""
    names = dim_names(len(operands[0].shape))
    return write_equation([marked(names, [len(names) - 1], "^")], names[:-1])


def _as_real(op: Op, operands: Specs) -> str:
    names = dim_names(len(operands[0].shape))
    return write_equation([names], (*names, "new^"))


def _as_second(op: Op, operands: Specs) -> str:
    """x.type_as(y): y gives its dtype, whatever its shape; one of the same shape is split as x is."""
    first, second = (spec.shape for spec in operands)
    names = dim_names(len(first))
    other = dim_names(len(second), "other")
    return write_equation([names, names if first == second else marked(other, range(len(second)), "^")], names)


_COPY = OpRule(broadcast_equation, backward_bytes_ratio=1.0, linear_in=(0,), finite_in=(0,))
_CAST = OpRule(broadcast_equation, backward_bytes_ratio=1.0, finite_in=(0,))  # not linear: a cast may round


def _renamed(equation: Equation) -> OpRule:
    return OpRule(equation, is_view=True, n_kernels=0, n_backward_kernels=0, linear_in=(0,), finite_in=(0,))


_SPLIT = OpRule(
    along(2),
    is_view=True,
    n_kernels=0,
    n_backward_kernels=1,
    finite_in=(0,),
    strategies=_split_blocks,
)
_EXPAND_LIKE = OpRule(broadcast_equation, is_view=True, n_kernels=0, linear_in=(0,), backward_bytes_ratio=1.0)
_MOVE = OpRule(_repeated, backward_bytes_ratio=1.0, linear_in=(0,))
_TRIANGLE = OpRule(whole_dims(_last_two), backward_bytes_ratio=1.0, linear_in=(0,))
_WRITE = {"backward_bytes_ratio": 1.0, "strategies": _all_partial}

_VIEWS = (
    "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int ravel.default squeeze.default"
    " squeeze.dim squeeze.dims"
)

RULES = {
    **{f"aten.{name}": _VIEW for name in _VIEWS.split()},
    "aten.unsqueeze.default": _renamed(_unsqueeze),
    "aten.transpose.int": _renamed(_transpose),
    "aten.swapaxes.default": _renamed(_transpose),
    "aten.swapdims.default": _renamed(_transpose),
    "aten.permute.default": _renamed(_permute),
    "aten.movedim.int": _renamed(_movedim),
    "aten.movedim.intlist": _renamed(_movedim),
    "aten.moveaxis.int": _renamed(_movedim),
    "aten.t.default": _renamed(_t),
    "aten.numpy_T.default": _renamed(_t),
    "aten.mT.default": _renamed(_swap_last),
    "aten.select.int": _renamed(_select),
    "aten.slice.Tensor": _renamed(changed_dims_equation),
    "aten.narrow.default": _renamed(changed_dims_equation),
    "aten.unfold.default": _renamed(_windows),
    "aten.diagonal.default": _renamed(_diagonal),
    "aten.expand.default": _renamed(broadcast_equation),
    "aten.broadcast_to.default": _renamed(broadcast_equation),
    "aten.expand_as.default": _EXPAND_LIKE,
    "aten.broadcast_tensors.default": OpRule(
        broadcast_equation, is_view=True, n_kernels=0, backward_bytes_ratio=1.0, strategies=_all_partial
    ),
    "aten.unbind.int": OpRule(
        _unbind, is_view=True, n_kernels=0, linear_in=(0,), backward_bytes_ratio=1.0, finite_in=(0,)
    ),
    "aten.split.Tensor": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.chunk.default": _SPLIT,
    "aten.tensor_split.sections": _SPLIT,
    "getitem": _renamed(_piece),
    "aten.contiguous.default": _COPY,
    "aten.clone.default": _COPY,
    "aten.view_as_complex.default": _renamed(_as_complex),
    "aten.view_as_real.default": _renamed(_as_real),
    "aten.real.default": _renamed(broadcast_equation),
    "aten.imag.default": _renamed(broadcast_equation),
    "aten.alias.default": _renamed(broadcast_equation),
    "aten.detach.default": _renamed(broadcast_equation),
    "aten.to.dtype": _CAST,
    "aten.to.dtype_layout": _CAST,
    "aten.to.device": _CAST,
    "aten._to_copy.default": _CAST,
    "aten.type_as.default": OpRule(_as_second),
    "aten.repeat.default": _MOVE,
    "aten.tile.default": _MOVE,
    "aten.repeat_interleave.self_int": OpRule(_repeat_each, backward_bytes_ratio=1.0, linear_in=(0,)),
    "aten.pad.default": OpRule(whole_dims(_padded_dims), backward_bytes_ratio=1.0),
    "aten.constant_pad_nd.default": OpRule(whole_dims(_padded_dims), backward_bytes_ratio=1.0),
    "aten.cat.default": OpRule(along(1), backward_bytes_ratio=1.0, strategies=_cat_blocks),
    "aten.stack.default": OpRule(_stack, backward_bytes_ratio=1.0, strategies=_all_partial),
    "aten.tril.default": _TRIANGLE,
    "aten.triu.default": _TRIANGLE,
    "aten.slice_scatter.default": OpRule(along(2), **_WRITE),
    "aten.select_scatter.default": OpRule(_write_select, **_WRITE),
    "aten.glu.default": OpRule(along(1, -1), flops_per_point=6.0, saves=(0,), strategies=_split_halves),
    "aten._weight_norm.default": OpRule(
        whole_dims(_other_dims), flops_per_point=4.0, saves=(0, 1), backward_bytes_ratio=2.0
    ),
}
