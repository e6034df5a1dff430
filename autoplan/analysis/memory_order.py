"""In which order the elements of a value lie in memory.

A transpose moves nothing: its result is a view in the order of what it was made from, which element-wise ops keep.
Inside a block that is what one wants. What leaves a block is read by others, for which blocks are measured with dense
tensors, and some kernels insist on these: attention whose mask has the numbers of a row apart is computed op by op, in
every block that gets the mask. So generated code makes dense what leaves a block, and such masks; the user's own
classes do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoplan.graph import Extent, Op, OpGraph, Ref

Order = tuple[int, ...]  # of each dim its place in memory, from the outermost to the innermost


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_PERMUTES = _aten("permute.default")
_SWAPS = _aten("transpose.int swapaxes.default swapdims.default")
_MOVES = _aten("movedim.int movedim.intlist moveaxis.int")
_REVERSES = _aten("t.default numpy_T.default")
_SWAPS_LAST = _aten("mT.default")
_SQUEEZES = _aten("squeeze.default squeeze.dim squeeze.dims")
_KEEPS = _aten("alias.default detach.default slice.Tensor clone.default _to_copy.default neg.default")
_FOLLOWS = _aten("where.self where.ScalarOther where.ScalarSelf add.Tensor sub.Tensor mul.Tensor div.Tensor")
REORDERS = _PERMUTES | _SWAPS | _MOVES | _REVERSES | _SWAPS_LAST
_OF_SIZE_1 = _SQUEEZES | {"aten.unsqueeze.default"}


def scattered_outputs(graph: OpGraph) -> frozenset[str]:
    """Results that leave their segment and are a transposed view of something computed."""
    ops = {op.name: op for op in graph.ops}
    leaving = {name for segment in graph.segments for name in segment.outputs}
    return frozenset(name for name in leaving if name in ops and _is_scattered(ops[name], ops))


def _is_scattered(op: Op, ops: Mapping[str, Op]) -> bool:
    while op.target in _OF_SIZE_1 | {"aten.alias.default"} and op.args[0].name in ops:
        op = ops[op.args[0].name]
    return op.target in REORDERS and op.args[0].name in ops


def scattered_rows(graph: OpGraph, *, dense: Collection[str] = ()) -> frozenset[str]:
    """Results of which the numbers of a row (the last dim) do not lie beside each other, if only `dense` are copied."""
    specs = graph.specs()
    orders: dict[str, Order] = {}
    for op in graph.ops:
        order = None if op.name in dense else _order(op, orders, {name: specs[name].shape for name in op.input_names()})
        if order is not None and order != tuple(sorted(order)):
            orders[op.name] = order
    return frozenset(name for name, order in orders.items() if order[-1] != max(order))


def _order(op: Op, orders: Mapping[str, Order], shapes: Mapping[str, tuple[Extent, ...]]) -> Order | None:
    """That of a result; None where it is dense, as far as is known here."""
    if op.target in _FOLLOWS:
        return _followed(op, orders, shapes)
    if not op.args or not isinstance(op.args[0], Ref):
        return None
    shape = shapes[op.args[0].name]
    order = orders.get(op.args[0].name, tuple(range(len(shape))))
    if op.target in REORDERS:
        return tuple(order[dim] for dim in _permutation(op, len(shape)))
    if op.target == "aten.expand.default":
        return (*((-1,) * (len(op.outputs[0].shape) - len(shape))), *order)
    if op.target == "aten.unsqueeze.default":
        dim = op.args[1] % (len(shape) + 1)
        return (*order[:dim], -1 if dim < len(shape) else max(order, default=0) + 1, *order[dim:])
    if op.target in _SQUEEZES:
        given: Any = op.args[1] if len(op.args) > 1 else range(len(shape))
        chosen = {dim % len(shape) for dim in (given if not isinstance(given, int) else (given,))}
        return tuple(place for dim, place in enumerate(order) if not (dim in chosen and shape[dim] == 1))
    is_copied_dense = "contiguous" in str(dict(op.kwargs).get("memory_format", ""))
    return order if op.target in _KEEPS and not is_copied_dense else None


def _followed(op: Op, orders: Mapping[str, Order], shapes: Mapping[str, tuple[Extent, ...]]) -> Order | None:
    """Element by element of several: as the first operand of the result's shape lies, else as one that is not dense."""
    result = op.outputs[0].shape
    names = [argument.name for argument in op.args if isinstance(argument, Ref)]
    whole = next((name for name in names if shapes[name] == result), None)
    if whole is not None:
        return orders.get(whole)
    return next((orders[name] for name in names if name in orders and len(shapes[name]) == len(result)), None)


def _permutation(op: Op, n_dims: int) -> tuple[int, ...]:
    """For each dim of the result that of the operand."""
    dims = list(range(n_dims))
    given: Any = op.args[1:]
    if op.target in _PERMUTES:
        return tuple(dim % n_dims for dim in given[0])
    if op.target in _REVERSES:
        return tuple(reversed(dims))
    if op.target in _MOVES:
        sources, targets = ([dim % n_dims for dim in ([part] if isinstance(part, int) else part)] for part in given)
        others = iter(dim for dim in dims if dim not in sources)
        return tuple(sources[targets.index(dim)] if dim in targets else next(others) for dim in dims)
    first, second = (n_dims - 2, n_dims - 1) if op.target in _SWAPS_LAST else (dim % n_dims for dim in given)
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)
