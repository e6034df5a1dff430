"""Whole modules of a model that was run instead of traced: see `autoplan.tracing.module_level`.

A number is (fixed, per sample). Matrix products are limited by the matrix units, the rest by memory.
"""

from autoplan.graph import COMPUTE, MODULE_OTHER, MODULE_PRODUCTS, Op, TensorSpec
from autoplan.rules import LocalCall, OpRule, Specs


def _at(op: Op, name: str, batch_size: int) -> int:
    fixed, per_sample = dict(op.kwargs)[name]
    return int(fixed + per_sample * batch_size)


def _in_bytes(op: Op, elements: str, other: str, batch_size: int, precision: str) -> int:
    compute = TensorSpec((_at(op, elements, batch_size),), COMPUTE)
    return compute.n_bytes(1, precision) + _at(op, other, batch_size)


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    return _at(op, "flops", batch_size)


def _moved_bytes(call: LocalCall) -> int:
    return _in_bytes(call.op, "elements", "bytes", call.batch_size, call.precision)


def _saved_bytes(call: LocalCall) -> int:
    return _in_bytes(call.op, "saved_elements", "saved_bytes", call.batch_size, call.precision)


def _n_products(op: Op) -> int:
    return _at(op, "n_products", 1)


def _n_others(op: Op) -> int:
    return _at(op, "n_others", 1)


RULES = {
    MODULE_PRODUCTS: OpRule(
        flops=_flops,
        moved_bytes=_moved_bytes,
        n_calls=_n_products,
        backward_flops_ratio=2.0,
        backward_bytes_ratio=2.0,
        n_backward_kernels=2,
        efficiency="matmul",
    ),
    MODULE_OTHER: OpRule(
        flops_per_point=0.0,
        moved_bytes=_moved_bytes,
        n_calls=_n_others,
        extra_saved_bytes=_saved_bytes,
    ),
}
