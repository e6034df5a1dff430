"""Element-wise operators: priced by the bytes they move.

The tables go by what backward needs: the operand, the result, or nothing. A sum of partial sums is a partial sum, and
so is the product of a partial sum and a whole value.
"""

from collections.abc import Iterator

from autoplan.equations import broadcast_equation, dim_names, write_equation
from autoplan.graph import Op, TensorSpec
from autoplan.layout import P
from autoplan.rules import LocalCall, OpRule, Specs, Strategy


def _mask_bytes(call: LocalCall) -> int:
    """A dropout mask is one byte per element; without dropout there is none."""
    return call.operands[0].n_elements(call.batch_size) if call.op.args[1] else 0


def _all_partial(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """The sum of partial sums is one; a number that is added would be added once per rank."""
    if len(operands) == 2:
        yield Strategy((P, P), P)


def _channel_slopes(op: Op, operands: Specs) -> str:
    """prelu(x, weight): one slope for all, or one per channel (dim 1)."""
    names = dim_names(len(operands[0].shape))
    is_per_channel = operands[1].shape[0] != 1
    return write_equation([names, (names[1],) if is_per_channel else ("one^",)], names)


def _unary(*saves: int, flops: float = 4.0, is_linear: bool = False, is_finite: bool = False) -> OpRule:
    """`is_finite`: value and derivative are finite wherever the operand is."""
    linear_in, finite_in = (0,) if is_linear else (), (0,) if is_finite or is_linear else ()
    return OpRule(broadcast_equation, flops_per_point=flops, saves=saves, linear_in=linear_in, finite_in=finite_in)


_LINEAR = _unary(flops=1.0, is_linear=True)
_FROM_INPUT = _unary(0)
_SMOOTH = _unary(0, is_finite=True)
_FROM_OUTPUT = _unary(-1)
_SATURATING = _unary(-1, is_finite=True)
_NO_GRADIENT = OpRule(broadcast_equation, n_backward_kernels=0)
_PAIR = OpRule(broadcast_equation, flops_per_point=4.0, saves=(0, 1), backward_bytes_ratio=2.0)
_ADD = OpRule(broadcast_equation, backward_bytes_ratio=0.4, finite_in=(0, 1), strategies=_all_partial)


def _product(*finite_in: int, linear_in: tuple[int, ...] = ()) -> OpRule:
    return OpRule(
        broadcast_equation,
        saves=(0, 1),
        is_product=True,
        backward_bytes_ratio=2.0,
        n_backward_kernels=2,
        finite_in=finite_in,
        linear_in=linear_in,
    )


# Backward reads the operand; value and derivative are finite wherever the operand is.
_FINITE_OF_INPUT = (
    "abs atan celu cos elu erf erfc hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish relu6 selu"
    " silu sin softplus softshrink threshold clamp clamp_min clamp_max"
)
# Backward reads the operand.
_OF_INPUT = (
    "acos acosh asin asinh atanh cosh digamma erfinv exp2 expm1 frac lgamma log log10 log1p log2 logit sinc sinh square"
    " tan nan_to_num"
)
# Backward reads the result.
_OF_OUTPUT = "exp reciprocal rsqrt sqrt"
# No gradient passes: integers, comparisons, steps.
_STEPS = "ceil floor round trunc sign sgn logical_not bitwise_not isnan isinf isfinite"
_COMPARED = [f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")]
_LOGIC = [f"bitwise_{name}.{kind}" for name in ("and", "or", "xor") for kind in ("Scalar", "Tensor")]
_LOGIC += [f"__{name}__.{kind}" for name in ("and", "or", "xor") for kind in ("Scalar", "Tensor")]
_LOGIC += [f"logical_{name}.default" for name in ("and", "or", "xor")]
_LOGIC += ["floor_divide.default", "floor_divide.Scalar", "remainder.Scalar", "fmod.Scalar"]
# Backward reads both operands.
_PAIRS = (
    "maximum.default minimum.default max.other min.other atan2.default pow.Tensor_Tensor xlogy.Tensor hypot.default"
    " logaddexp.default logaddexp2.default remainder.Tensor fmod.Tensor copysign.Tensor clamp_min.Tensor"
    " clamp_max.Tensor div.Tensor_mode div.Scalar_mode"
)

RULES = {
    **{f"aten.{name}.default": _FROM_INPUT for name in _OF_INPUT.split()},
    **{f"aten.{name}.default": _SMOOTH for name in _FINITE_OF_INPUT.split()},
    **{f"aten.{name}.default": _FROM_OUTPUT for name in _OF_OUTPUT.split()},
    **{f"aten.{name}.default": _NO_GRADIENT for name in _STEPS.split()},
    **{f"aten.{name}": _NO_GRADIENT for name in (*_COMPARED, *_LOGIC)},
    **{f"aten.{name}": _PAIR for name in _PAIRS.split()},
    "aten.neg.default": _LINEAR,
    "aten.positive.default": _LINEAR,
    "aten.gelu.default": _unary(0, flops=10.0, is_finite=True),
    "aten.relu.default": _SATURATING,
    "aten.sigmoid.default": _SATURATING,
    "aten.tanh.default": _SATURATING,
    "aten.pow.Tensor_Scalar": _FROM_INPUT,
    "aten.pow.Scalar": _FROM_OUTPUT,
    "aten.add.Tensor": _ADD,
    "aten.add.Scalar": _unary(flops=1.0),
    "aten.sub.Tensor": _ADD,
    "aten.sub.Scalar": _unary(flops=1.0),
    "aten.rsub.Scalar": _unary(flops=1.0),
    "aten.mul.Tensor": _product(0, 1, linear_in=(0, 1)),
    "aten.mul.Scalar": _LINEAR,
    "aten.div.Tensor": _product(0, linear_in=(0,)),
    "aten.div.Scalar": _LINEAR,
    "aten.polar.default": OpRule(broadcast_equation, flops_per_point=8.0, saves=(-1,), backward_bytes_ratio=2.0),
    "aten.lerp.Scalar": OpRule(broadcast_equation),
    "aten.lerp.Tensor": OpRule(broadcast_equation, saves=(0, 1, 2), backward_bytes_ratio=2.0),
    "aten.addcmul.default": OpRule(broadcast_equation, saves=(1, 2), backward_bytes_ratio=2.0),
    "aten.addcdiv.default": OpRule(broadcast_equation, saves=(1, 2), backward_bytes_ratio=2.0),
    "aten.prelu.default": OpRule(_channel_slopes, saves=(0, 1)),
    "aten.clamp.Tensor": OpRule(broadcast_equation, saves=(0, 1, 2)),
    "aten.where.self": OpRule(broadcast_equation, saves=(0,)),
    "aten.where.ScalarOther": OpRule(broadcast_equation, saves=(0,)),
    "aten.where.ScalarSelf": OpRule(broadcast_equation, saves=(0,)),
    "aten.where.Scalar": _NO_GRADIENT,
    "aten.masked_fill.Scalar": OpRule(broadcast_equation, saves=(1,)),
    "aten.masked_fill.Tensor": OpRule(broadcast_equation, saves=(1,)),
    "aten.dropout.default": OpRule(
        broadcast_equation, flops_per_point=2.0, extra_saved_bytes=_mask_bytes, finite_in=(0,)
    ),
}
