"""Model FLOPs: what the model itself computes for one sample, whatever the plan; the numerator of MFU."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.graph import OpGraph
from autoplan.rules import OpRule, forward_flops, operand_names


def model_flops_per_sample(graph: OpGraph, rules: Mapping[str, OpRule]) -> int:
    """Forward and backward FLOPs of all matrix products, attention included, for one sample.

        sum over products of forward_flops x (1 + backward_flops_ratio)

    Elementwise ops are left out, as is usual for MFU; recomputation is not the model's work and never counts.
    """
    specs = graph.specs()
    total = 0.0
    for op in graph.ops:
        rule = rules.get(op.target)
        if rule is not None and rule.efficiency == "matmul":
            operands = tuple(specs[name] for name in operand_names(op))
            n_flops = forward_flops(rule, op, operands=operands, batch_size=1)
            total += n_flops * (1 + rule.backward_flops_ratio)
    return round(total)
