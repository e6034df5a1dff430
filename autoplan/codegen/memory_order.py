"""In which order the elements of a value lie in memory.

A transpose moves nothing: its result is a view in the order of what it was made from. Inside a block that is what one
wants. What leaves a block is read by others, for which blocks are measured with dense tensors, and some kernels insist
on these: attention whose mask is a transposed view falls back to a slower one, in every block that gets the mask.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.graph import Op, OpGraph

_REORDERING = (
    "transpose.int swapaxes.default swapdims.default permute.default movedim.int movedim.intlist moveaxis.int t.default"
    " numpy_T.default mT.default"
)
_KEEPING = "unsqueeze.default squeeze.default squeeze.dim squeeze.dims alias.default"
_REORDERS, _KEEPS = (frozenset(f"aten.{name}" for name in names.split()) for names in (_REORDERING, _KEEPING))


def scattered_outputs(graph: OpGraph) -> frozenset[str]:
    """Results that leave their segment and are a transposed view of something computed."""
    ops = {op.name: op for op in graph.ops}
    leaving = {name for segment in graph.segments for name in segment.outputs}
    return frozenset(name for name in leaving if name in ops and _is_scattered(ops[name], ops))


def _is_scattered(op: Op, ops: Mapping[str, Op]) -> bool:
    while op.target in _KEEPS and op.args[0].name in ops:
        op = ops[op.args[0].name]
    return op.target in _REORDERS and op.args[0].name in ops
