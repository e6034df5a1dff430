"""Mixtures of experts: rows sorted by expert, multiplied group by group.

    rows: [t, k], weight: [experts, k, n], ends: [experts], where the rows of each expert end

Every expert may be split inside, as any product is. Or whole experts go to ranks (expert parallelism): each rank
computes the rows of its own experts, between two products of the same rows in layout E, and the results sum to the
whole.
"""

from collections.abc import Iterator

from autoplan.graph import Op, TensorSpec
from autoplan.layout import E, P, V, sharded
from autoplan.rules import OpRule, Specs, Strategy


def _grouped_flops(op: Op, operands: Specs, batch_size: int) -> int:
    """Every row meets one expert's matrix."""
    return 2 * op.outputs[0].n_elements(batch_size) * operands[1].at(batch_size)[1]


def _own_experts(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    if len(operands) == 3 and len(operands[1].shape) == 3:
        experts = sharded(0)
        yield Strategy((V, experts, V), E, is_split=True, function="own_experts_mm")
        yield Strategy((E, experts, V), P, is_split=True, function="own_experts_mm")


RULES = {
    "aten._grouped_mm.default": OpRule(
        equation="t^ k+, e^ k+ n, e^ -> t^ n",
        flops=_grouped_flops,
        backward_flops_ratio=2.0,
        n_backward_kernels=2,
        saves=(0, 1, 2),
        is_product=True,
        efficiency="matmul",
        strategies=_own_experts,
    ),
    "aten.histc.default": OpRule(equation="a^ -> n^", saves=()),
}
