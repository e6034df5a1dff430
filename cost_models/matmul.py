"""Matrix products. A multiply-add is 2 FLOPs; backward is two products of the same size."""

from autoplan.graph import Op
from autoplan.rules import OpRule, Specs

_LEADING = "abcdefgh"


def _linear(op: Op, operands: Specs) -> str:
    leading = " ".join(_LEADING[: len(operands[0].shape) - 1])
    bias = ", ~n" if len(operands) == 3 else ""
    return f"{leading} k+, n k+{bias} -> {leading} n"


def _addmm(op: Op, operands: Specs) -> str:
    bias = "~n" if len(operands[0].shape) == 1 else "~m n"
    return f"{bias}, m k+, k+ n -> m n"


def _matmul(op: Op, operands: Specs) -> str | None:
    """Equal leading dims (or none on the right); other broadcasts have no equation and stay replicated."""
    left, right = operands[0].shape, operands[1].shape
    if len(left) < 2 or len(right) < 2 or (len(right) > 2 and left[:-2] != right[:-2]):
        return None
    leading = " ".join(_LEADING[: len(left) - 2])
    shared = leading if len(right) > 2 else ""
    return f"{leading} m k+, {shared} k+ n -> {leading} m n"


def _product(equation: object, *, saves: tuple[int, ...], linear_in: tuple[int, ...] = ()) -> OpRule:
    return OpRule(
        equation=equation,  # type: ignore[arg-type]
        flops_per_point=2.0,
        backward_flops_ratio=2.0,
        backward_bytes_ratio=2.0,
        n_backward_kernels=2,
        saves=saves,
        is_product=True,
        efficiency="matmul",
        linear_in=linear_in,
    )


RULES = {
    "aten.linear.default": _product(_linear, saves=(0, 1), linear_in=(0,)),
    "aten.addmm.default": _product(_addmm, saves=(1, 2), linear_in=(1,)),
    "aten.mm.default": _product("m k+, k+ n -> m n", saves=(0, 1), linear_in=(0, 1)),
    "aten.bmm.default": _product("a m k+, a k+ n -> a m n", saves=(0, 1), linear_in=(0, 1)),
    "aten.matmul.default": _product(_matmul, saves=(0, 1), linear_in=(0, 1)),
}
