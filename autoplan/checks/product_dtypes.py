"""Products of numbers in two dtypes, which torch traces, and refuses when the program runs in 16 bits.

self.gate(x.float())      float32 times weights that are in float32 only where the plan's precision is fp32 or tf32
"""

from __future__ import annotations

from autoplan.analysis.float32_buffers import float32_values
from autoplan.analysis.mixed_operands import PRODUCTS, RECURRENT, operands_of
from autoplan.errors import InputError
from autoplan.graph import COMPUTE, COMPUTE_DTYPES, OpGraph


def check_product_dtypes(graph: OpGraph, precision: str) -> None:
    """Return when the products of the model can run in this precision; those of the loss run in float32.

    Raises: InputError with the module of the first that cannot.
    """
    specs = graph.specs()
    computed = COMPUTE_DTYPES[precision]
    kept = dict.fromkeys(float32_values(graph), "float32")
    for op, operands in operands_of(graph, PRODUCTS | RECURRENT):
        multiplied = operands[:3] if "attention" in op.target else operands  # without the mask, which is added
        names = [name for name in multiplied if specs[name].is_float]
        own = {name: computed if specs[name].dtype == COMPUTE else specs[name].dtype for name in names}
        dtypes = dict.fromkeys(kept.get(name, own[name]) for name in names)
        if len(dtypes) > 1:
            raise InputError.of(
                f"{graph.name}: module {op.module_path}" if op.module_path else f"{graph.name}: forward",
                found=f"a product of {' and '.join(dtypes)}, {op.target}",
                expected="operands of one dtype: weights are in that of --precision",
                fix="cast both, F.linear(x.float(), self.gate.weight.float()), or none; or plan with --precision fp32",
            )
