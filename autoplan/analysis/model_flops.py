"""Model FLOPs of a graph, and the operators that no rule knows."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.graph import OpGraph, gradient_values
from autoplan.rules import forward_flops, load_rules, operand_names

N_FACTORS = 2  # of a product; the backward pass of attention counts twice, too, by the convention of "model FLOPs"


def flops_per_sample(graph: OpGraph, *, rule_files: Sequence[str] = ()) -> int:
    """Model FLOPs of one sample, forward and backward: products, convolutions, attention; nothing recomputed.

    The gradient of one factor of a product takes as much as the product; images and frozen weights have none. Under a
    causal mask half of attention counts.
    """
    rules, specs, gradients = load_rules(rule_files), graph.specs(), gradient_values(graph.ops, graph.parameters)
    total = 0
    for op in graph.ops:
        rule = rules.get(op.target)
        if rule is not None and rule.efficiency == "matmul":
            names = operand_names(op)
            if rule.is_product and len(names) < N_FACTORS:  # an einsum of one tensor moves or adds up its elements
                continue
            factors = rule.saves[:N_FACTORS] if rule.is_product else ()
            n_without = sum(names[index] not in gradients for index in factors)
            operands = tuple(specs[name] for name in names)
            total += (1 + N_FACTORS - n_without) * forward_flops(rule, op, operands=operands, batch_size=1)
    return total


def ops_without_rule(graph: OpGraph, *, rule_files: Sequence[str] = ()) -> tuple[str, ...]:
    """Operators that are priced by their bytes and never split, because no rule knows them."""
    rules = load_rules(rule_files)
    return tuple(dict.fromkeys(op.target for op in graph.ops if op.target not in rules))
