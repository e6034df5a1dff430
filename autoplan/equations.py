"""Equations of calls: what rules of any rank are written with. See `autoplan.rules` for what an equation means.

write_equation([("a", "k+"), ("k+", "n")], ("a", "n"))      ->  "a k+, k+ n -> a n"
marked(dim_names(3), {1}, "^")                              ->  ("d0", "d1^", "d2")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autoplan.graph import Argument, Extent, Op
from autoplan.rules import Specs

Marks = tuple[str, ...]
Equation = Callable[[Op, Specs], str]


def argument(op: Op, position: int, name: str, default: Argument = None) -> Argument:
    """An argument of a call, wherever it stands: by position, by name, or left out."""
    return op.args[position] if len(op.args) > position else dict(op.kwargs).get(name, default)


def write_equation(operands: Sequence[Sequence[str]], result: Sequence[str]) -> str:
    """The equation of these terms."""
    return ", ".join(" ".join(term) for term in operands) + " -> " + " ".join(result)


def dim_names(rank: int, prefix: str = "d") -> Marks:
    """A letter for each dim of a tensor."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def marked(names: Sequence[str], dims: Collection[int], mark: str) -> Marks:
    """The letters with a mark at some dims."""
    return tuple(name + mark if i in dims else name for i, name in enumerate(names))


def added(names: Sequence[str]) -> Marks:
    """The term of an operand that is added."""
    return (f"~{names[0]}", *names[1:]) if names else ("~",)


def broadcast_marks(shape: Sequence[Extent], result: Sequence[Extent], names: Sequence[str], prefix: str) -> Marks:
    """Letters of an operand that is broadcast to `result`, whose letters are `names`: dims align from the right."""
    offset = len(result) - len(shape)
    return tuple(
        names[offset + i] if extent == result[offset + i] else f"{prefix}{i}^" for i, extent in enumerate(shape)
    )


def normal_dims(dims: Argument, rank: int) -> frozenset[int]:
    """Dims counted from the front; None and () stand for all of them."""
    if dims is None or dims == ():
        return frozenset(range(rank))
    return frozenset(dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,))) if rank else frozenset()


def all_whole(op: Op, operands: Specs) -> str:
    """Nothing may be split."""
    terms = [marked(dim_names(len(s.shape), f"x{i}d"), range(len(s.shape)), "^") for i, s in enumerate(operands)]
    rank = len(op.outputs[0].shape)
    return write_equation(terms, marked(dim_names(rank, "y"), range(rank), "^"))


def changed_dims_equation(op: Op, operands: Specs) -> str:
    """One operand and a result of the same rank: dims that keep their extent may be split, the others stay whole.

    For ops that leave a dim alone or change its extent (a slice, a pad); an op may not mix up a dim of equal extents.
    """
    before, after = operands[0].shape, op.outputs[0].shape
    whole = {i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y}
    names = marked(dim_names(len(before)), whole, "^")
    return write_equation([names], names)


def broadcast_equation(op: Op, operands: Specs) -> str:
    """Element-wise with broadcasting: dims align from the right; a dim of size 1 beside a larger one stays whole."""
    shape = op.outputs[0].shape
    names = dim_names(len(shape))
    return write_equation([broadcast_marks(s.shape, shape, names, f"one{i}_") for i, s in enumerate(operands)], names)


def whole_dims(dims: Callable[[Op, int], Collection[int]]) -> Equation:
    """Same shape in and out; `dims` of the call and the rank stay whole. Further operands follow the last dims."""

    def equation(op: Op, operands: Specs) -> str:
        rank = len(operands[0].shape)
        names = marked(dim_names(rank), {dim % rank for dim in dims(op, rank)} if rank else set(), "^")
        return write_equation([names[rank - len(spec.shape) :] for spec in operands], names)

    return equation


def along(position: int, default: int = 0) -> Equation:
    """The dim that the argument `dim`, at this position, names stays whole."""
    return whole_dims(lambda op, rank: (argument(op, position, "dim", default),))
