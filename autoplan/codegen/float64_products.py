"""Which operands of a product must be rounded to float32 first where a program runs in float64.

A model is traced in bfloat16, where bfloat16 + float32 gives float32, and a cast of that to float32 is no operator. In
float64 the sum stays float64, and the cast is missing: a product of it with a float32 tensor, which needs two of one
dtype, would fail. In other precisions, in which programs are checked in float64 too, the cast does nothing.

    h = (x.float() + bias).float()      traced: h is float32        in float64: h is float64
    y = h @ x.float()                   fits                        h.to(torch.float32) @ ...
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache

from autoplan.analysis.mixed_operands import PRODUCTS
from autoplan.codegen.value_names import operator_name
from autoplan.graph import COMPUTE, GraphFacts, Op, OpGraph, TensorSpec, dtypes_said
from autoplan.rules import operand_names


def rounded_operands(graph: OpGraph, op: Op) -> tuple[int, ...]:
    """Positions among the operands of those that are float64 where another one is float32."""
    return _rounded(op, GraphFacts.of(graph).specs, _promoted(graph))


def _rounded(op: Op, specs: Mapping[str, TensorSpec], promoted: Set[str]) -> tuple[int, ...]:
    if operator_name(op) not in PRODUCTS:
        return ()
    names = operand_names(op)
    in_float32 = [index for index, name in enumerate(names) if specs[name].dtype == "float32"]
    found = tuple(index for index in in_float32 if names[index] in promoted)
    return found if len(found) < len(in_float32) else ()


@lru_cache(maxsize=4)
def _promoted(graph: OpGraph) -> frozenset[str]:
    """Values that are float32 in the trace, and float64 where the compute dtype is."""
    specs = GraphFacts.of(graph).specs
    found: set[str] = set()
    for op in graph.ops:
        if op.outputs[0].dtype != "float32" or dtypes_said(op) or _rounded(op, specs, found):
            continue
        if any(name in found or specs[name].dtype == COMPUTE for name in op.input_names()):
            found.add(op.name)
    return frozenset(found)
