"""Reading and writing at positions that a tensor of integers names. The named dim stays whole; all others may be split.

Additions at positions (scatter_add, index_add, index_put with accumulate) may also split what is added: each rank adds
its share, which leaves partial sums. This is how messages of a graph network meet at their nodes.
"""

from collections.abc import Callable
from typing import Any

from autoplan.cost_models.embedding import ADDED_BYTES, SCATTER_KERNELS

from autoplan.equations import Marks, added, all_whole, argument, broadcast_marks, dim_names, marked, write_equation
from autoplan.graph import Op, Ref, TensorSpec
from autoplan.rules import LocalCall, OpRule, Specs

# Rate at which rows are added where they belong / that of a copy, 4 bytes for each element: positions sorted first
# (`x[index]` backward), element by element (gather backward), row by row (index_select backward, index_add). And what
# sorting takes. H200, torch 2.11, rows of 1024 to 4096 (benchmarks/results/op_rates_h200_2026-11-23.jsonl).
_SORTED_FIRST, _BY_ELEMENT, _BY_ROW = 0.43, 0.25, 0.125
_SORTING_S = 60e-6


def _unlike(x: TensorSpec, other: TensorSpec) -> set[int]:
    """Dims in which the extents differ: only the first elements of the longer one take part, so they stay whole."""
    return {i for i, (a, b) in enumerate(zip(x.shape, other.shape, strict=True)) if a != b}


def _gather(op: Op, operands: Specs) -> str:
    """result[i, j] = x[index[i, j], j]: the named dim of the index may be split, and so every shared dim."""
    x, index = operands
    rank = len(x.shape)
    if rank == 0:
        return ", ->"
    dim = argument(op, 1 if op.target == "aten.gather.default" else 2, "dim") % rank
    names = dim_names(rank)
    shared = marked(names, _unlike(x, index) - {dim}, "^")
    return write_equation([_replaced(shared, dim, "all^"), shared], shared)


def _index_select(op: Op, operands: Specs) -> str:
    names, dim = dim_names(len(operands[0].shape)), op.args[1]
    dim %= len(names)
    return write_equation([_replaced(names, dim, "all^"), (names[dim],)], names)


def _index(op: Op, operands: Specs) -> str:
    """x[:, i, j]: the result has the broadcast dims of the index where the first one stood.

    Boolean masks select a number of elements that depends on their values, and have no equation.
    """
    x, *indices = operands
    named = [isinstance(item, Ref) for item in op.args[1]] + [False] * (len(x.shape) - len(op.args[1]))
    x_names, places = _indexed(named), [i for i, is_named in enumerate(named) if is_named]
    if any(spec.dtype in ("bool", "uint8") for spec in indices):
        return all_whole(op, operands)
    kept = [name for name, is_named in zip(x_names, named, strict=True) if not is_named]
    n_index = len(op.outputs[0].shape) - len(kept)
    start = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    index_names = dim_names(n_index, "i")
    index_shape = op.outputs[0].shape[start : start + n_index]
    terms = [broadcast_marks(s.shape, index_shape, index_names, f"one{n}_") for n, s in enumerate(indices)]
    return write_equation([x_names, *terms], (*kept[:start], *index_names, *kept[start:]))


def _index_put(op: Op, operands: Specs) -> str:
    """x[:, i] = values, or += values: then the shared dims of index and values are added up."""
    x, *indices, values = operands
    named = [isinstance(item, Ref) for item in op.args[1]] + [False] * (len(x.shape) - len(op.args[1]))
    places = [i for i, is_named in enumerate(named) if is_named]
    is_adjacent = places == list(range(places[0], places[0] + len(places)))
    if not is_adjacent or any(spec.dtype in ("bool", "uint8") for spec in indices):
        return all_whole(op, operands)
    x_names, kept = _indexed(named), [f"d{i}" for i, is_named in enumerate(named) if not is_named]
    n_index = max(len(spec.shape) for spec in indices)
    longest = next(spec.shape for spec in indices if len(spec.shape) == n_index)
    is_added = bool(argument(op, 3, "accumulate", False))
    index_names = marked(dim_names(n_index, "i"), range(n_index), "+" if is_added else "^")
    terms = [broadcast_marks(s.shape, longest, index_names, f"one{n}_") for n, s in enumerate(indices)]
    start = places[0]
    shape = (*x.shape[:start], *longest, *x.shape[start + len(places) :])
    source = broadcast_marks(values.shape, shape, (*kept[:start], *index_names, *kept[start:]), "v")
    return write_equation([added(x_names) if is_added else x_names, *terms, source], x_names)


def _indexed(named: list[bool]) -> Marks:
    return tuple(f"all{i}^" if is_named else f"d{i}" for i, is_named in enumerate(named))


def _replaced(names: Marks, dim: int, name: str) -> Marks:
    return (*names[:dim], name, *names[dim + 1 :])


def _scatter(op: Op, operands: Specs) -> str:
    """x[index[i, j], j] = source[i, j]."""
    return _scattered(op, operands, mark="^", is_added=False)


def _scatter_add(op: Op, operands: Specs) -> str:
    """x[index[i, j], j] += source[i, j]."""
    return _scattered(op, operands, mark="+", is_added=True)


def _scattered(op: Op, operands: Specs, *, mark: str, is_added: bool) -> str:
    x, index, *source = operands
    rank = len(x.shape)
    if rank == 0:
        return ", ".join(["", *["" for _ in operands[1:]]]) + " ->"
    dim = op.args[1] % rank
    unlike = _unlike(x, index) | (_unlike(index, source[0]) if source else set())
    names = marked(dim_names(rank), unlike - {dim}, "^")
    whole = _replaced(names, dim, "all^")
    is_cut = bool(source) and dim in _unlike(index, source[0])
    placed = _replaced(names, dim, "i" + ("^" if is_cut else mark))
    x_term = added(whole) if is_added else whole
    return write_equation([x_term, placed, *([placed] * len(source))], whole)


def _index_add(op: Op, operands: Specs) -> str:
    return _index_added(op, operands, mark="+", is_added=True)


def _index_copy(op: Op, operands: Specs) -> str:
    return _index_added(op, operands, mark="^", is_added=False)


def _index_added(op: Op, operands: Specs, *, mark: str, is_added: bool) -> str:
    names = dim_names(len(operands[0].shape))
    dim = op.args[1] % len(names)
    whole = _replaced(names, dim, "all^")
    return write_equation(
        [added(whole) if is_added else whole, ("i" + mark,), _replaced(names, dim, "i" + mark)], whole
    )


def _one_hot(op: Op, operands: Specs) -> str:
    names = dim_names(len(operands[0].shape))
    return write_equation([names], (*names, "class^"))


def _buckets(op: Op, operands: Specs) -> str:
    """bucketize(x, boundaries)."""
    names = dim_names(len(operands[0].shape))
    return write_equation([names, *([("all^",)] if len(operands) == 2 else [])], names)


def _no_flops(op: Op, operands: Specs, batch_size: int) -> int:
    """Numbers are only moved; the points of the iteration space are not all visited."""
    return 0


def _added_bytes(fraction: float) -> Callable[[LocalCall], tuple[float, float]]:
    """The last operand is added to a copy of the first."""

    def further_bytes(call: LocalCall) -> tuple[float, float]:
        return ADDED_BYTES * call.operands[-1].n_elements(call.batch_size) / fraction, 0.0

    return further_bytes


def _read_bytes(call: LocalCall) -> float:
    """The gradient of what is added is read from that of the result, which is also the gradient of the copy."""
    return 2.0 * call.operands[-1].n_bytes(call.batch_size, call.precision)


def _added(fraction: float) -> dict[str, Any]:
    return {"flops": _no_flops, "further_bytes": _added_bytes(fraction), "backward_bytes": _read_bytes}


def _scattered_bytes(fraction: float) -> Callable[[LocalCall], float]:
    """The gradient of the table is zeroed; the gradients of the rows are added at this part of the rate of a copy."""

    def backward_bytes(call: LocalCall) -> float:
        n_added = sum(spec.n_elements(call.batch_size) for spec in call.results)
        return call.operands[0].n_bytes(call.batch_size, call.precision) + ADDED_BYTES * n_added / fraction

    return backward_bytes


def _read(fraction: float) -> dict[str, Any]:
    return {
        "flops": _no_flops,
        "backward_bytes": _scattered_bytes(fraction),
        "n_backward_kernels": 2,
        "linear_in": (0,),
        "reads_rows": True,
    }


def _sorting_s(call: LocalCall, copy_bytes_per_s: float) -> tuple[float, float]:
    return 0.0, _SORTING_S


_SORTED = {"fixed_s": _sorting_s, "n_backward_kernels": SCATTER_KERNELS}
_WRITE = {"flops": _no_flops, "backward_bytes_ratio": 1.0}

RULES = {
    "aten.gather.default": OpRule(_gather, saves=(1,), **_read(_BY_ELEMENT)),
    "aten.take_along_dim.default": OpRule(_gather, saves=(1,), **_read(_BY_ELEMENT)),
    "aten.index_select.default": OpRule(_index_select, saves=(1,), **_read(_BY_ROW)),
    "aten.index.Tensor": OpRule(_index, **_read(_SORTED_FIRST) | _SORTED),
    "aten.index_put.default": OpRule(_index_put, **_WRITE),
    "aten.scatter.src": OpRule(_scatter, saves=(1,), **_WRITE),
    "aten.scatter.value": OpRule(_scatter, saves=(1,), **_WRITE),
    "aten.scatter_add.default": OpRule(_scatter_add, saves=(1,), **_added(_BY_ELEMENT)),
    "aten.scatter_reduce.two": OpRule(
        _scatter, saves=(0, 1, 2, -1), flops=_no_flops, backward_bytes_ratio=3.0, n_backward_kernels=2
    ),
    "aten.index_add.default": OpRule(_index_add, saves=(1,), **_added(_BY_ROW)),
    "aten.index_copy.default": OpRule(_index_copy, saves=(1,), **_WRITE),
    "aten.one_hot.default": OpRule(_one_hot, n_backward_kernels=0),
    "aten.bucketize.Tensor": OpRule(_buckets, n_backward_kernels=0),
}
