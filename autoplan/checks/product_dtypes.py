"""Products and norms of numbers in two dtypes, which torch traces, and refuses when the program runs in 16 bits.

self.gate(x.float())      float32 times weights that are in float32 only where the plan's precision is fp32 or tf32

    norm of       weights in
    float32       16 bits       fails, but for batch_norm with running statistics: programs widen its weights
    16 bits       float32       fails on GPUs, but for batch_norm and instance_norm
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.analysis.float32_buffers import float32_values, running_statistics
from autoplan.analysis.mixed_operands import NORMS, PRODUCTS, RECURRENT, operands_of
from autoplan.errors import InputError
from autoplan.graph import COMPUTE, COMPUTE_DTYPES, DTYPE_BYTES, Op, OpGraph, Ref

_TAKES_FLOAT32_WEIGHTS = ("aten.batch_norm", "aten.instance_norm")  # beside an input in 16 bits


def check_product_dtypes(graph: OpGraph, precision: str) -> None:
    """Return when the products and norms of the model can run in this precision; those of the loss run in float32.

    Raises: InputError with the module of the first product, or else of the first norm, that cannot.
    """
    computed = COMPUTE_DTYPES[precision]
    dtypes = _dtypes(graph, computed)
    _check_products(graph, dtypes)
    if DTYPE_BYTES[computed] == 2:
        _check_norms(graph, dtypes)


def _check_products(graph: OpGraph, dtypes: Mapping[str, str]) -> None:
    for op, operands in operands_of(graph, PRODUCTS | RECURRENT):
        multiplied = operands[:3] if "attention" in op.target else operands  # without the mask, which is added
        found = dict.fromkeys(dtypes[name] for name in multiplied if name in dtypes)
        if len(found) > 1:
            raise InputError.of(
                _where(graph, op),
                found=f"a product of {' and '.join(found)}, {op.target}",
                expected="operands of one dtype: weights are in that of --precision",
                fix="cast both, F.linear(x.float(), self.gate.weight.float()), or none; or plan with --precision fp32",
            )


def _check_norms(graph: OpGraph, dtypes: Mapping[str, str]) -> None:
    statistics = running_statistics(graph)
    for op, operands in operands_of(graph, NORMS):
        own, *weights = (dtypes[name] for name in _normalized_and_weights(op) if name in dtypes)
        if statistics.isdisjoint(operands) and _is_refused(op, own, set(weights)):
            raise InputError.of(
                _where(graph, op),
                found=f"a norm of {own} with weights in {' and '.join(dict.fromkeys(weights))}, {op.target}",
                expected="an input and weights of one dtype: weights are in that of --precision",
                fix="give the norm an input in the dtype of its weights: it computes in float32 by itself; or call its"
                " function with all of them in float32, weight.float() and bias.float(); or plan with --precision fp32",
            )


def _dtypes(graph: OpGraph, computed: str) -> dict[str, str]:
    """What each floating-point value is in, in a program."""
    kept = float32_values(graph)
    own = {name: "float32" if name in kept else spec.dtype for name, spec in graph.specs().items() if spec.is_float}
    return {name: computed if dtype == COMPUTE else dtype for name, dtype in own.items()}


def _normalized_and_weights(op: Op) -> list[str]:
    """What is normalized, weight and bias, without running statistics."""
    position = 3 if op.target.startswith(_TAKES_FLOAT32_WEIGHTS) else 4
    return [argument.name for argument in op.args[:position] if isinstance(argument, Ref)]


def _is_refused(op: Op, own: str, weights: set[str]) -> bool:
    takes = own != "float64" and weights == {"float32"} and op.target.startswith(_TAKES_FLOAT32_WEIGHTS)
    return not takes and not weights <= {own}


def _where(graph: OpGraph, op: Op) -> str:
    return f"{graph.name}: module {op.module_path}" if op.module_path else f"{graph.name}: forward"
