"""Mixtures of experts: rows sorted by expert, multiplied group by group.

    rows: [t, k], weight: [experts, k, n], ends: [experts], where the rows of each expert end

Every expert may be split inside, as any product is. Or whole experts go to ranks (expert parallelism): each rank picks
the rows of its own experts from all tokens and computes these alone, in layout E, and puts the results where they
belong, which leaves partial sums. Both are splits over the tensor-parallel ranks, so the expert degree is the
tensor-parallel degree. Attention need not be split by heads over these ranks: with the sequence split between blocks it
may have whole weights, and some of the tokens on each rank (see `attention`), as under data parallelism. The batch is
never split over them.

How tokens then reach their experts depends on how the model says it:

    sorted (here)       all-gather of the tokens, reduce-scatter of the results; every rank sorts all tokens. An
                        all-to-all is out of reach: [batch, tokens] becomes one dim of rows, which cannot be split along
                        the tokens, and `sort` and the reads in its order need all rows.
    slots, in einsums   "bgtec,bgtm->ebgcm" and its like, with groups of tokens along the sequence: groups are split,
                        and then experts: one all-to-all there, one back. It takes no rule but that of `einsum`.

Time and memory are those of balanced routing, where each rank has equally many rows.
"""

from collections.abc import Iterator

from autoplan.graph import Op, TensorSpec
from autoplan.layout import E, R, sharded
from autoplan.rules import OpRule, Specs, Strategy
from autoplan.tensor_parallel.expert_rows import is_product_by_rows


def _grouped_flops(op: Op, operands: Specs, batch_size: int) -> int:
    """Every row meets one expert's matrix."""
    rows, weight, *_ = operands
    return 2 * rows.n_elements(batch_size) * weight.at(batch_size)[-1]


def _own_experts(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    if is_product_by_rows(operands):
        yield Strategy((E, sharded(0), R), E, is_split=True, function="own_experts_mm")


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
