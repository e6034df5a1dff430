"""Products and norms of numbers in two dtypes, which torch traces, and refuses when the program runs in 16 bits.

self.gate(x.float())      float32 times weights that are in float32 only where the plan's precision is fp32 or tf32

Of norms, with an input and weights in:

    float32, 16 bits    fails      batch_norm with running statistics does not: programs widen its weights
    16 bits, float32    fails      on GPUs; batch_norm and instance_norm do not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoplan.analysis.float32_buffers import float32_values, running_statistics
from autoplan.analysis.mixed_operands import NORMS, PRODUCTS, RECURRENT, operands_of
from autoplan.errors import InputError
from autoplan.graph import COMPUTE, COMPUTE_DTYPES, DTYPE_BYTES, Op, OpGraph, Ref

DtypesOf = Callable[[Iterable[str]], tuple[str, ...]]
_TAKES_FLOAT32_WEIGHTS = ("aten.batch_norm", "aten.instance_norm")  # beside an input in 16 bits


def check_product_dtypes(graph: OpGraph, precision: str) -> None:
    """Return when the products and norms of the model can run in this precision; those of the loss run in float32.

    Raises: InputError with the module of the first product, or else of the first norm, that cannot.
    """
    computed = COMPUTE_DTYPES[precision]
    dtypes_of = _dtypes_of(graph, computed)
    for op, operands in operands_of(graph, PRODUCTS | RECURRENT):
        multiplied = operands[:3] if "attention" in op.target else operands  # without the mask, which is added
        dtypes = tuple(dict.fromkeys(dtypes_of(multiplied)))
        if len(dtypes) > 1:
            raise InputError.of(
                _where(graph, op),
                found=f"a product of {' and '.join(dtypes)}, {op.target}",
                expected="operands of one dtype: weights are in that of --precision",
                fix="cast both, F.linear(x.float(), self.gate.weight.float()), or none; or plan with --precision fp32",
            )
    statistics = running_statistics(graph)
    for op, operands in operands_of(graph, NORMS) if DTYPE_BYTES[computed] == 2 else ():
        own, *weights = dtypes_of(_normalized_and_weights(op))
        if statistics.isdisjoint(operands) and _is_refused(op, own, set(weights)):
            raise InputError.of(
                _where(graph, op),
                found=f"a norm of {own} with weights in {' and '.join(dict.fromkeys(weights))}, {op.target}",
                expected="an input and weights of one dtype: weights are in that of --precision",
                fix="leave .float() out, since norms compute in float32 by themselves; or cast both,"
                " F.layer_norm(x.float(), shape, self.norm.weight.float(), self.norm.bias.float());"
                " or plan with --precision fp32",
            )


def _dtypes_of(graph: OpGraph, computed: str) -> DtypesOf:
    """The dtypes that those of some values that are floating-point numbers have in a program."""
    specs, kept = graph.specs(), float32_values(graph)

    def dtype_of(name: str) -> str:
        dtype = "float32" if name in kept else specs[name].dtype
        return computed if dtype == COMPUTE else dtype

    return lambda names: tuple(dtype_of(name) for name in names if specs[name].is_float)


def _normalized_and_weights(op: Op) -> list[str]:
    """What is normalized, weight and bias, without running statistics."""
    position = 3 if op.target.startswith(_TAKES_FLOAT32_WEIGHTS) else 4
    return [argument.name for argument in op.args[:position] if isinstance(argument, Ref)]


def _is_refused(op: Op, own: str, weights: set[str]) -> bool:
    takes = own != "float64" and weights == {"float32"} and op.target.startswith(_TAKES_FLOAT32_WEIGHTS)
    return not takes and not weights <= {own}


def _where(graph: OpGraph, op: Op) -> str:
    return f"{graph.name}: module {op.module_path}" if op.module_path else f"{graph.name}: forward"
