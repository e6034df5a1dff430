"""Element-wise operators: priced by the bytes they move."""

from autoplan.graph import Op
from autoplan.rules import OpRule, Specs, broadcast_equation


def _mask_bytes(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    """A dropout mask is one byte per element; without dropout there is none."""
    return operands[0].n_elements(batch_size) if op.args[1] else 0


def _unary(*saves: int, flops: float = 4.0, is_linear: bool = False) -> OpRule:
    return OpRule(broadcast_equation, flops_per_point=flops, saves=saves, linear_in=(0,) if is_linear else ())


_LINEAR = _unary(flops=1.0, is_linear=True)
_FROM_INPUT = _unary(0)
_FROM_OUTPUT = _unary(-1)
_NO_GRADIENT = _unary(flops=1.0)
_ADD = OpRule(broadcast_equation, backward_bytes_ratio=0.4)
_PRODUCT = OpRule(broadcast_equation, saves=(0, 1), is_product=True, backward_bytes_ratio=2.0, n_backward_kernels=2)

RULES = {
    "aten.neg.default": _LINEAR,
    "aten.gelu.default": _unary(0, flops=10.0),
    "aten.silu.default": _FROM_INPUT,
    "aten.relu.default": _FROM_OUTPUT,
    "aten.sigmoid.default": _FROM_OUTPUT,
    "aten.tanh.default": _FROM_OUTPUT,
    "aten.exp.default": _FROM_OUTPUT,
    "aten.log.default": _FROM_INPUT,
    "aten.sqrt.default": _FROM_OUTPUT,
    "aten.rsqrt.default": _FROM_OUTPUT,
    "aten.sin.default": _FROM_INPUT,
    "aten.cos.default": _FROM_INPUT,
    "aten.abs.default": _FROM_INPUT,
    "aten.square.default": _FROM_INPUT,
    "aten.softplus.default": _FROM_INPUT,
    "aten.leaky_relu.default": _FROM_INPUT,
    "aten.elu.default": _FROM_INPUT,
    "aten.pow.Tensor_Scalar": _FROM_INPUT,
    "aten.pow.Scalar": _FROM_OUTPUT,
    "aten.clamp.default": _FROM_INPUT,
    "aten.reciprocal.default": _FROM_OUTPUT,
    "aten.add.Tensor": _ADD,
    "aten.add.Scalar": _NO_GRADIENT,
    "aten.sub.Tensor": _ADD,
    "aten.rsub.Scalar": _NO_GRADIENT,
    "aten.mul.Tensor": _PRODUCT,
    "aten.mul.Scalar": _LINEAR,
    "aten.div.Tensor": _PRODUCT,
    "aten.div.Scalar": _LINEAR,
    "aten.where.self": OpRule(broadcast_equation, saves=(0,)),
    "aten.masked_fill.Scalar": OpRule(broadcast_equation, saves=(1,)),
    "aten.dropout.default": OpRule(broadcast_equation, flops_per_point=2.0, extra_saved_bytes=_mask_bytes),
    "aten.eq.Scalar": _NO_GRADIENT,
    "aten.ne.Scalar": _NO_GRADIENT,
    "aten.lt.Scalar": _NO_GRADIENT,
    "aten.gt.Scalar": _NO_GRADIENT,
    "aten.eq.Tensor": _NO_GRADIENT,
    "aten.le.Tensor": _NO_GRADIENT,
    "aten.lt.Tensor": _NO_GRADIENT,
    "aten.ge.Tensor": _NO_GRADIENT,
    "aten.gt.Tensor": _NO_GRADIENT,
    "aten.logical_not.default": _NO_GRADIENT,
    "aten.bitwise_not.default": _NO_GRADIENT,
    "aten.bitwise_and.Tensor": _NO_GRADIENT,
}
