"""Matrix products. A multiply-add is 2 FLOPs; backward is two products of the same size.

In backward the gradient of the second factor, a weight, contracts what neither factor has innermost in memory. In tf32
the matrix units of Hopper read only what has the contracted dim innermost, so that product is slower than the others.
"""

from dataclasses import replace

from autoplan.equations import Equation, Marks, added, broadcast_marks, dim_names, write_equation
from autoplan.graph import PADDED_LINEAR, Op
from autoplan.rules import Arithmetic, LocalCall, OpRule, Specs

_LEADING = "abcdefgh"
# Rate of both products of backward / of the forward one in tf32. H200, torch 2.11, products of 34 to 1,100 GFLOP: 0.66
# of a forward product where neither factor has the contracted dim innermost (0.61 to 0.70), and 0.93 where the first
# alone has it (0.83 to 1.03); 16-bit products take as long in every layout, to 7 %
# (benchmarks/results/op_rates_by_layout_h200_2026-11-29.jsonl). Published steps of BERT-large in tf32 on A100 would be
# predicted up to 18 % too slow, which are 4 %.
_TF32_BACKWARD_FRACTION = 0.77


def _linear(op: Op, operands: Specs) -> str:
    leading = " ".join(_LEADING[: len(operands[0].shape) - 1])
    bias = ", ~n" if len(operands) == 3 else ""
    return f"{leading} k+, n k+{bias} -> {leading} n"


def _addmm(op: Op, operands: Specs) -> str:
    bias = "~n" if len(operands[0].shape) == 1 else "~m n"
    return f"{bias}, m k+, k+ n -> m n"


def _matmul(op: Op, operands: Specs) -> str:
    """Matrices or vectors, their leading dims broadcast."""
    left, right = operands[0].shape, operands[1].shape
    rows, columns = ("m",) * (len(left) > 1), ("n",) * (len(right) > 1)
    leading = op.outputs[0].shape[: len(op.outputs[0].shape) - len(rows) - len(columns)]
    names = dim_names(len(leading))
    terms = [
        (*broadcast_marks(left[:-2], leading, names, "l"), *rows, "k+"),
        (*broadcast_marks(right[:-2], leading, names, "r"), "k+", *columns),
    ]
    return write_equation(terms, (*names, *rows, *columns))


def _baddbmm(op: Op, operands: Specs) -> str:
    """The added matrices may be broadcast."""
    bias = broadcast_marks(operands[0].shape, op.outputs[0].shape, ("a", "m", "n"), "one")
    return write_equation([added(bias), ("a", "m", "k+"), ("a", "k+", "n")], ("a", "m", "n"))


def _bilinear(op: Op, operands: Specs) -> str:
    leading = dim_names(len(operands[0].shape) - 1)
    terms = [(*leading, "i+"), (*leading, "j+"), ("n", "i+", "j+"), *(added(("n",)) for _ in operands[3:])]
    return write_equation(terms, (*leading, "n"))


def _tensordot(op: Op, operands: Specs) -> str:
    """The listed dims of both are contracted with each other."""
    left, right = list(dim_names(len(operands[0].shape), "l")), list(dim_names(len(operands[1].shape), "r"))
    kept = [
        *(name for i, name in enumerate(left) if i not in {dim % len(left) for dim in op.args[2]}),
        *(name for i, name in enumerate(right) if i not in {dim % len(right) for dim in op.args[3]}),
    ]
    for number, (i, j) in enumerate(zip(op.args[2], op.args[3], strict=True)):
        left[i] = right[j] = f"k{number}+"
    return write_equation([left, right], kept)


def _einsum(op: Op, operands: Specs) -> str:
    """Its own equation, with an ellipsis written out. A dim of size 1 that is broadcast has a letter of its own."""
    left, _, right = op.args[0].replace(" ", "").partition("->")
    n_dots = max(
        len(spec.shape) - len(text.replace("...", "")) if "..." in text else 0
        for text, spec in zip(left.split(","), operands, strict=True)
    )
    terms = [_spelled(text, len(spec.shape), n_dots) for text, spec in zip(left.split(","), operands, strict=True)]
    letters = [letter for term in terms for letter in term]
    if not right and "->" not in op.args[0]:
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1 and len(letter) == 1)
        right = ("..." if n_dots else "") + "".join(once)
    result = _spelled(right, len(right.replace("...", "")) + (n_dots if "..." in right else 0), n_dots)
    extents = dict.fromkeys(letters, 1)
    for term, spec in zip(terms, operands, strict=True):
        extents.update({name: x for name, x in zip(term, spec.shape, strict=True) if x != 1})
    marks = {
        letter: letter + ("^" if any(term.count(letter) > 1 for term in terms) else "+" if letter not in result else "")
        for letter in letters
    }
    named = [
        tuple(marks[name] if x == extents[name] else f"one{i}{name}^" for name, x in zip(term, spec.shape, strict=True))
        for i, (term, spec) in enumerate(zip(terms, operands, strict=True))
    ]
    return write_equation(named, [marks[name] for name in result])


def _spelled(text: str, rank: int, n_dots: int) -> Marks:
    """The letters of one term; an ellipsis stands for as many dims as the rank leaves, aligned from the right."""
    before, dots, after = text.partition("...")
    count = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"dots{i}" for i in range(n_dots - count, n_dots)), *after)


def _arithmetic(call: LocalCall) -> Arithmetic:
    return Arithmetic(True, backward_fraction=_TF32_BACKWARD_FRACTION if call.is_tf32_of_hopper else 1.0)


def _product(equation: str | Equation, *, saves: tuple[int, ...], linear_in: tuple[int, ...] = ()) -> OpRule:
    return OpRule(
        equation=equation,
        flops_per_point=2.0,
        backward_flops_ratio=2.0,
        backward_bytes_ratio=2.0,
        n_backward_kernels=2,
        saves=saves,
        is_product=True,
        efficiency="matmul",
        arithmetic=_arithmetic,
        is_matrix_product=True,
        linear_in=linear_in,
        finite_in=(0, 1, 2),
    )


def _weight_bytes(call: LocalCall) -> int:
    return call.operands[1].n_bytes(call.batch_size, call.precision)


# Times that padding goes over the gradient of the logits at the rate of a copy: it is copied into zeros, from rows that
# start at odd bytes. H200, torch 2.11, what product and loss leave of the heads of GPT-2 XL and BERT-large: 8.0 and
# 8.4, 6.9 where blocks and loss are compiled (benchmarks/results/profile_h200_x2_2026-11-26_own_blocks.jsonl).
_GRADIENT_PASSES_fit = 7.5


def _padding_bytes(call: LocalCall) -> tuple[float, float]:
    """Of a copy of the weight with padding, and of one of the gradient of the logits."""
    size = call.batch_size, call.precision
    return 2.0 * call.operands[1].n_bytes(*size), _GRADIENT_PASSES_fit * call.results[0].n_bytes(*size)


_LINEAR = _product(_linear, saves=(0, 1), linear_in=(0,))

RULES = {
    "aten.linear.default": _LINEAR,
    PADDED_LINEAR: replace(
        _LINEAR,
        is_matrix_product=False,  # whatever the rows of weight and logits are, the product's are not odd
        n_kernels=3,  # the padding is filled, and the weight copied before it; in backward the same of a gradient
        n_backward_kernels=4,
        further_bytes=_padding_bytes,
        extra_saved_bytes=_weight_bytes,
    ),
    "aten.addmm.default": _product(_addmm, saves=(1, 2), linear_in=(1,)),
    "aten.mm.default": _product("m k+, k+ n -> m n", saves=(0, 1), linear_in=(0, 1)),
    "aten.bmm.default": _product("a m k+, a k+ n -> a m n", saves=(0, 1), linear_in=(0, 1)),
    "aten.matmul.default": _product(_matmul, saves=(0, 1), linear_in=(0, 1)),
    "aten.baddbmm.default": _product(_baddbmm, saves=(1, 2), linear_in=(1, 2)),
    "aten.outer.default": OpRule("a, b -> a b", saves=(0, 1), is_product=True, linear_in=(0, 1)),
    "aten.mv.default": _product("m k+, k+ -> m", saves=(0, 1), linear_in=(0, 1)),
    "aten.dot.default": _product("k+, k+ ->", saves=(0, 1), linear_in=(0, 1)),
    "aten.addmv.default": _product("~m, m k+, k+ -> m", saves=(1, 2), linear_in=(1, 2)),
    "aten.einsum.default": _product(_einsum, saves=(0, 1, 2), linear_in=(0, 1, 2)),
    "aten.tensordot.default": _product(_tensordot, saves=(0, 1), linear_in=(0, 1)),
    "aten.bilinear.default": _product(_bilinear, saves=(0, 1, 2), linear_in=(0, 1, 2)),
}
