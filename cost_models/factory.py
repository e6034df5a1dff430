"""Operators that make a tensor from nothing, or from the shape of another: no gradient, the same on every rank.

Where all elements are equal, each rank can make its share by itself.
"""

from collections.abc import Iterator

from autoplan.equations import broadcast_equation
from autoplan.graph import Op, TensorSpec
from autoplan.layout import R, sharded
from autoplan.rules import OpRule, Specs, Strategy


def _any_part(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """A part of any dim, from a tensor that is read for its dtype only."""
    for dim in range(len(result.shape)):
        yield Strategy((R,) * len(operands), sharded(dim))


def _from_any(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Whole or a part, whatever part of the other tensor is here."""
    yield from _any_part(op, operands, result, degree)
    for spec in operands:
        yield from (Strategy((sharded(dim),), R) for dim in range(len(spec.shape)))


_FACTORY = OpRule(backward_bytes_ratio=0.0, n_backward_kernels=0)
_CONSTANT = OpRule(backward_bytes_ratio=0.0, n_backward_kernels=0, strategies=_any_part)
_NEW = OpRule(backward_bytes_ratio=0.0, n_backward_kernels=0, strategies=_from_any)
_LIKE = OpRule(broadcast_equation, backward_bytes_ratio=0.0, n_backward_kernels=0)

RULES = {
    "aten.arange.default": _FACTORY,
    "aten.arange.start": _FACTORY,
    "aten.arange.start_step": _FACTORY,
    "aten.linspace.default": _FACTORY,
    "aten.eye.default": _FACTORY,
    "aten.eye.m": _FACTORY,
    "aten.zeros.default": _CONSTANT,
    "aten.ones.default": _CONSTANT,
    "aten.full.default": _CONSTANT,
    "aten.scalar_tensor.default": _FACTORY,
    **{f"aten.{name}.default": _NEW for name in ("new_zeros", "new_ones", "new_full")},
    "aten.copy_.default": _FACTORY,  # a forward that writes a buffer, which is whole on every rank
    **{f"aten.{name}.default": _LIKE for name in ("zeros_like", "ones_like", "full_like")},
}
