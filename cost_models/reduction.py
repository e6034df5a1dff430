"""Sums and means over dims. Splitting a summed dim leaves partial sums; a mean's divisor is the global extent."""

from autoplan.graph import Op
from autoplan.rules import OpRule, Specs

_LETTERS = "abcdefgh"


def _reduced_dims(op: Op, rank: int) -> set[int]:
    dims = op.args[1] if len(op.args) > 1 and op.args[1] is not None else tuple(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,))} if rank else set()


def _keeps_dims(op: Op) -> bool:
    return len(op.args) > 2 and bool(op.args[2]) or bool(dict(op.kwargs).get("keepdim", False))


def _reduce(mark: str) -> object:
    def equation(op: Op, operands: Specs) -> str:
        rank = len(operands[0].shape)
        dims = _reduced_dims(op, rank)
        operand = " ".join(_LETTERS[i] + (mark if i in dims else "") for i in range(rank))
        kept = [_LETTERS[i] if i not in dims else f"one{i}" for i in range(rank) if i not in dims or _keeps_dims(op)]
        return f"{operand} -> {' '.join(kept)}"

    return equation


_SUM = OpRule(_reduce("+"), backward_bytes_ratio=1.0, linear_in=(0,))  # type: ignore[arg-type]
_MEAN = OpRule(_reduce("^"), backward_bytes_ratio=1.0, linear_in=(0,))  # type: ignore[arg-type]

RULES = {
    "aten.sum.default": _SUM,
    "aten.sum.dim_IntList": _SUM,
    "aten.mean.default": _MEAN,
    "aten.mean.dim": _MEAN,
}
