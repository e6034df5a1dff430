"""Which attention of a graph torch runs as one fused kernel, whose result recomputation may keep.

Elsewhere torch computes attention op by op, and nothing of it is kept. Nor is it beside a mask that has a gradient,
which was not tried.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from autoplan.analysis.attention_kernel import ATTENTION, N_UNMASKED, kernel_of, scattered_masks
from autoplan.graph import GraphFacts, Op, OpGraph
from autoplan.rules import operand_names


def is_fused_attention(
    op: Op, facts: GraphFacts, *, precision: str, attention: str, scattered: Collection[str] = ()
) -> bool:
    """Whether torch runs this op as fused attention; `attention` is that of `Device`, `scattered` as in `LocalCall`."""
    if op.target != ATTENTION:
        return False
    names = operand_names(op)
    if any(name in facts.gradients for name in names[N_UNMASKED:]):
        return False
    operands = tuple(facts.specs[name] for name in names)
    is_scattered = any(name in scattered for name in names[N_UNMASKED:])
    return kernel_of(op, operands, precision=precision, attention=attention, mask_is_scattered=is_scattered) != "math"


def kinds_with_attention(graph: OpGraph, *, precision: str, attention: str) -> frozenset[int]:
    """The kinds of blocks that have fused attention, with a gradient."""
    facts = GraphFacts.of(graph)
    is_fused = partial(
        is_fused_attention, facts=facts, precision=precision, attention=attention, scattered=scattered_masks(graph)
    )
    return frozenset(
        kind
        for kind, segment in graph.first_of_kind().items()
        if segment.is_block and any(op.name in facts.gradients and is_fused(op) for op in graph.ops_of(segment))
    )


def recomputes_attention(graph: OpGraph, kinds: Collection[int], recomputed: Collection[int]) -> bool:
    """Whether some of the segments `recomputed` are of these kinds."""
    return any(graph.segments[index].kind in kinds for index in recomputed)
