"""Ops that run nothing: their result is their operand.

dropout     that drops nothing
clone       a plain one: a dropout that drops nothing is traced as one in some models. In a user's own classes it
            may be a copy, which is not counted; generated code has none but of parameters
contiguous  of the result of attention whose heads are put back beside each other: fused kernels write it so where
            the query lies so. Where attention runs op by op it is a copy, which is kept in place of the result
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.analysis.attention_kernel import ATTENTION
from autoplan.analysis.memory_order import REORDERS
from autoplan.graph import Op, OpGraph, Ref

_CONTIGUOUS = frozenset({"aten.clone.default", "aten.contiguous.default"})
_VIEWS = frozenset({"aten.view.default", "aten.reshape.default"})


def idle_ops(graph: OpGraph) -> frozenset[str]:
    """The names of their results."""
    ops = {op.name: op for op in graph.ops}
    return frozenset(op.name for op in graph.ops if _is_idle(op, ops))


def _is_idle(op: Op, ops: Mapping[str, Op]) -> bool:
    if op.target == "aten.dropout.default":
        return not op.args[1]
    is_plain = op.target == "aten.clone.default" and not op.kwargs
    return is_plain or (op.target in _CONTIGUOUS and _is_attention_put_back(_made_by(op, ops), ops))


def _is_attention_put_back(op: Op | None, ops: Mapping[str, Op]) -> bool:
    made_by = None if op is None or op.target not in REORDERS else _made_by(op, ops)
    while made_by is not None and made_by.target in _VIEWS:  # of the same shape, in transformers
        before = _made_by(made_by, ops)
        made_by = before if before is not None and before.outputs == made_by.outputs else None
    return made_by is not None and made_by.target == ATTENTION


def _made_by(op: Op, ops: Mapping[str, Op]) -> Op | None:
    """The op whose result it reads first."""
    return ops.get(op.args[0].name) if isinstance(op.args[0], Ref) else None
