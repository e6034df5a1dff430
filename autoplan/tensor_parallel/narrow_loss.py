"""Losses that take outputs in 16 bits: split over the classes, they compute in float32 by themselves.

Others are given outputs that were widened to float32, which costs a pass over the logits and twice their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoplan.graph import COMPUTE, LOSS_PATH, Op, OpGraph, dtypes_said
from autoplan.rules import OpRule, Strategy, operand_names

SPLIT_LOSS = "vocab_parallel_cross_entropy"


def is_narrow_loss(
    graph: OpGraph, ops: Iterable[Op], strategies: Mapping[str, Strategy], rules: Mapping[str, OpRule]
) -> bool:
    """Whether such a loss is all that reads the outputs of the model, or views of them; `ops` has those of the loss.

    Not where an op makes something in the dtype of the outputs, such as a mask: it would have 16 bits then, too.
    """
    outputs, is_read = set(graph.model_outputs), False
    for op in (op for op in ops if op.module_path == LOSS_PATH):
        rule = rules.get(op.target)
        if COMPUTE in dtypes_said(op):
            return False
        if not outputs.intersection(operand_names(op)):
            continue
        if strategies[op.name].function == SPLIT_LOSS:
            is_read = True
        elif rule is not None and rule.is_view:
            outputs.add(op.name)
        else:
            return False
    return is_read
