"""Which attention of a graph torch runs as one fused kernel, whose result recomputation may keep.

Elsewhere torch computes attention op by op, and nothing of it is kept. That is so where a device has no fused kernel
for it: float64 on a GPU, dropout on a CPU, gradients of a mask, other dims than [sample, head, row, size], and on GPUs
fewer key than query heads in float32 or beside a mask. Which kernels a GPU has for some sizes is not looked at.
"""

from __future__ import annotations

from collections.abc import Collection

from autoplan.equations import argument
from autoplan.graph import GraphFacts, Op, OpGraph
from autoplan.rules import operand_names

ATTENTION = "aten.scaled_dot_product_attention.default"
_DIMS, _MASK = 4, 3
_WITH_FEW_KEY_HEADS = ("bf16", "fp16")


def is_fused_attention(op: Op, facts: GraphFacts, *, precision: str, is_cpu: bool) -> bool:
    """Whether torch runs this op as fused attention on a CPU, or on a GPU."""
    if op.target != ATTENTION or len(op.outputs[0].shape) != _DIMS:
        return False
    masks = operand_names(op)[_MASK:]
    if any(name in facts.gradients for name in masks):
        return False
    if is_cpu:
        return not argument(op, 4, "dropout_p", 0.0)
    return precision != "fp64" and not is_grouped_op_by_op(op, precision=precision, has_mask=bool(masks))


def is_grouped_op_by_op(op: Op, *, precision: str, has_mask: bool) -> bool:
    """Whether no kernel of a GPU takes this attention since it has fewer key than query heads."""
    return bool(argument(op, 7, "enable_gqa", False)) and (has_mask or precision not in _WITH_FEW_KEY_HEADS)


def kinds_with_attention(graph: OpGraph, *, precision: str, is_cpu: bool) -> frozenset[int]:
    """The kinds of blocks that have fused attention, with a gradient."""
    facts = GraphFacts.of(graph)
    return frozenset(
        kind
        for kind, segment in graph.first_of_kind().items()
        if segment.is_block
        and any(
            op.name in facts.gradients and is_fused_attention(op, facts, precision=precision, is_cpu=is_cpu)
            for op in graph.ops_of(segment)
        )
    )


def recomputes_attention(graph: OpGraph, kinds: Collection[int], recomputed: Collection[int]) -> bool:
    """Whether some of the segments `recomputed` are of these kinds."""
    return any(graph.segments[index].kind in kinds for index in recomputed)
