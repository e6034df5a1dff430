"""Products of numbers in two dtypes, which torch traces, and refuses when the program runs in 16 bits.

self.gate(x.float())      float32 times weights that are in float32 only where the plan's precision is fp32 or tf32
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.analysis.float32_buffers import float32_values
from autoplan.errors import InputError
from autoplan.graph import COMPUTE, COMPUTE_DTYPES, LOSS_PATH, PADDED_LINEAR, Op, OpGraph
from autoplan.rules import OpRule, operand_names


def check_product_dtypes(graph: OpGraph, precision: str, *, rules: Mapping[str, OpRule]) -> None:
    """Return when the products of the model can run in this precision; those of the loss run in float32.

    A model that enters torch.autocast may have that cast operands, which the graph does not tell.

    Raises: InputError with the module of the first that cannot.
    """
    if "autocast" in graph.dissolved:
        return
    specs = graph.specs()
    computed = COMPUTE_DTYPES[precision]
    kept = dict.fromkeys(float32_values(graph), "float32")
    for op in graph.ops:
        if op.module_path == LOSS_PATH or not _is_product_of_torch(op, rules):
            continue
        names = [name for name in _multiplied(op) if specs[name].is_float]
        own = {name: computed if specs[name].dtype == COMPUTE else specs[name].dtype for name in names}
        dtypes = dict.fromkeys(kept.get(name, own[name]) for name in names)
        if len(dtypes) > 1:
            raise InputError.of(
                f"{graph.name}: module {op.module_path}" if op.module_path else f"{graph.name}: forward",
                found=f"a product of {' and '.join(dtypes)}, {op.target}",
                expected="operands of one dtype: weights are in that of --precision",
                fix="cast both, F.linear(x.float(), self.gate.weight.float()), or none; or plan with --precision fp32",
            )


def _multiplied(op: Op) -> tuple[str, ...]:
    """The operands; of attention without its mask, which is added."""
    names = operand_names(op)
    return names[:3] if "attention" in op.target else names


def _is_product_of_torch(op: Op, rules: Mapping[str, OpRule]) -> bool:
    """Whether it is one of torch's own, none of which takes two dtypes; an operator of the user may."""
    is_torchs = op.target.startswith("aten.") or op.target == PADDED_LINEAR
    return is_torchs and op.target in rules and rules[op.target].efficiency == "matmul"
