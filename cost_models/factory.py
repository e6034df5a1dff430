"""Operators that make a tensor from nothing: no operand, no gradient, the same on every rank."""

from autoplan.rules import OpRule

_FACTORY = OpRule(backward_bytes_ratio=0.0, n_backward_kernels=0)

RULES = {
    "aten.arange.default": _FACTORY,
    "aten.arange.start": _FACTORY,
    "aten.arange.start_step": _FACTORY,
    "aten.zeros.default": _FACTORY,
    "aten.ones.default": _FACTORY,
    "aten.full.default": _FACTORY,
    "aten.scalar_tensor.default": _FACTORY,
    "aten.outer.default": OpRule("a, b -> a b", saves=(0, 1)),
    "aten.tril.default": _FACTORY,
    "aten.triu.default": _FACTORY,
}
