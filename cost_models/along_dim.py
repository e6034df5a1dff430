"""Ops that work along one dim (scans, sorts, shifts): it stays whole, each position of the other dims is by itself."""

from autoplan.equations import Equation, along, argument, whole_dims
from autoplan.graph import Op
from autoplan.rules import OpRule


def _several(position: int) -> Equation:
    """The dims that an argument lists; all of them when it lists none."""

    def dims(op: Op, rank: int) -> tuple[int, ...]:
        return argument(op, position, "dims", ()) or tuple(range(rank))

    return whole_dims(dims)


def _scan(*saves: int, linear_in: tuple[int, ...] = ()) -> OpRule:
    return OpRule(along(1, -1), saves=saves, linear_in=linear_in, backward_bytes_ratio=1.0)


def _move(equation: Equation) -> OpRule:
    return OpRule(equation, linear_in=(0,), backward_bytes_ratio=1.0)


# A sort of rows reads and writes them several times; 8 FLOPs per element stand for the comparisons.
_SORT = OpRule(along(1, -1), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)
_STABLE_SORT = OpRule(along(9, -1), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)
_TOP = OpRule(along(2, -1), flops_per_point=8.0, n_kernels=2, saves=(-1,), backward_bytes_ratio=1.0)

RULES = {
    "aten.cumsum.default": _scan(linear_in=(0,)),
    "aten.cumprod.default": _scan(0, -1),
    "aten.cummax.default": _scan(-1),
    "aten.cummin.default": _scan(-1),
    "aten.logcumsumexp.default": _scan(0, -1),
    "aten.diff.default": OpRule(along(2, -1), backward_bytes_ratio=1.0),
    "aten.sort.default": _SORT,
    "aten.sort.stable": _STABLE_SORT,
    "aten.argsort.default": _SORT,
    "aten.argsort.stable": _STABLE_SORT,
    "aten.topk.default": _TOP,
    "aten.flip.default": _move(_several(1)),
    "aten.roll.default": _move(_several(2)),
}
