"""Ops that work along one dim (scans, sorts, shifts): it stays whole, each position of the other dims is by itself."""

from autoplan.equations import Equation, argument, same_dims
from autoplan.graph import Op
from autoplan.rules import OpRule


def _along(position: int) -> Equation:
    """The dim that the argument at `position` names."""
    return same_dims(lambda op, rank: (argument(op, position, "dim", -1),))


def _several(position: int) -> Equation:
    """The dims that an argument lists; all of them when it lists none."""

    def dims(op: Op, rank: int) -> tuple[int, ...]:
        return argument(op, position, "dims", ()) or tuple(range(rank))

    return same_dims(dims)


def _scan(*saves: int, linear_in: tuple[int, ...] = ()) -> OpRule:
    return OpRule(_along(1), saves=saves, linear_in=linear_in, backward_bytes_ratio=1.0)


def _move(equation: Equation) -> OpRule:
    return OpRule(equation, linear_in=(0,), backward_bytes_ratio=1.0)


# A sort of rows reads and writes them several times; 8 FLOPs per element stand for the comparisons.
_SORT = OpRule(_along(1), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)
_STABLE_SORT = OpRule(_along(9), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)
_TOP = OpRule(_along(2), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)

RULES = {
    "aten.cumsum.default": _scan(linear_in=(0,)),
    "aten.cumprod.default": _scan(0, -1),
    "aten.cummax.default": _scan(-1),
    "aten.cummin.default": _scan(-1),
    "aten.logcumsumexp.default": _scan(0, -1),
    "aten.diff.default": OpRule(_along(2), backward_bytes_ratio=1.0),
    "aten.sort.default": _SORT,
    "aten.sort.stable": _STABLE_SORT,
    "aten.argsort.default": _SORT,
    "aten.argsort.stable": _STABLE_SORT,
    "aten.topk.default": _TOP,
    "aten.flip.default": _move(_several(1)),
    "aten.roll.default": _move(_several(2)),
}
