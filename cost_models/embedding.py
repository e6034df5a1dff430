"""Table look-up. Splitting the vocabulary makes each rank look up its own rows, and the sum is the result.

Bags of rows, which are added up, averaged or of which the largest counts, are looked up in tables split by columns.
"""

import math
from collections.abc import Iterator

from autoplan.equations import argument
from autoplan.graph import Op, TensorSpec
from autoplan.layout import P, R, padded, sharded
from autoplan.rules import LocalCall, OpRule, Specs, Strategy

# Adding rows where they belong takes as long in 16 bits as in 32: 4 bytes are counted for each element that is added.
SCATTER_KERNELS, ADDED_BYTES = 12, 4
# Of the gradient of a table, rows of one position are added up on the way: time goes with the positions that differ.
# Rate of their rows / that of a copy, and what sorting 3072 positions and more takes; torch sorts no fewer, which take
# about in proportion. H200, torch 2.11, random positions, rows of 1024 to 4096: the embeddings of
# benchmarks/results/op_rates_h200_2026-11-23.jsonl, and the segments outer.0 of T5-large, GPT-2 XL,
# Llama-1B and the mixture in profile_h200_*2026-11-2[12].jsonl, 1024 to 65536 positions.
_ADDED_FRACTION, _SORTING_S, _N_SORTED = 0.057, 100e-6, 3072


def _embedding(op: Op, operands: Specs) -> str:
    """Where gradients are divided by how often an id occurs, a rank needs all ids to count."""
    names, counts = "abde"[: len(operands[1].shape)], bool(argument(op, 3, "scale_grad_by_freq", False))
    ids = " ".join(f"{name}^" if counts else name for name in names)
    return f"v^ c, {ids} -> {ids} c"


def _split_vocabulary(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """`padding_idx` is known to the function; gradients scaled by frequency, or sparse, are not."""
    if not any(op.args[3:]) and not op.kwargs:
        for rows in (sharded(0), padded(0)):
            yield Strategy((rows, R), P, function="vocab_parallel_embedding")


def _distinct_bytes(call: LocalCall) -> float:
    """The gradient of the table is zeroed, and the rows of positions that differ are added.

    Of n random positions in a table of m rows, m (1 - exp(-n / m)) differ; those of texts repeat more often. Of a split
    table that part of its own rows; the positions of other ranks are one more.
    """
    table, positions = call.operands[:2]
    part = -math.expm1(-positions.n_elements(call.batch_size) / call.whole_operands[0].at(1)[0])
    return table.n_bytes(call.batch_size, call.precision) + ADDED_BYTES * part * table.n_elements(1) / _ADDED_FRACTION


def _sorting_s(call: LocalCall, copy_bytes_per_s: float) -> tuple[float, float]:
    return 0.0, _SORTING_S * min(1.0, call.operands[1].n_elements(call.batch_size) / _N_SORTED)


def _copy_flops(op: Op, operands: Specs, batch_size: int) -> int:
    return op.outputs[0].n_elements(batch_size)


def _bags(op: Op, operands: Specs) -> str:
    """Table, all positions in a row, where each bag starts, and weights of the positions if there are any."""
    return f"v^ c, n^, b^{', n^' if len(operands) == 4 else ''} -> b^ c"


def _bag_flops(op: Op, operands: Specs, batch_size: int) -> int:
    return operands[0].n_elements(1) // operands[0].at(1)[0] * operands[1].n_elements(batch_size)


def _further_rows(call: LocalCall) -> tuple[float, float]:
    """All rows of a bag are read for one that is returned; backward adds the gradient of that one to each."""
    n_columns = call.operands[0].at(1)[1]
    n_more = call.operands[1].n_elements(call.batch_size) - call.results[0].at(call.batch_size)[0]
    n_bytes = TensorSpec((max(0, n_more), n_columns), call.results[0].dtype).n_bytes(1, call.precision)
    return n_bytes, 0.0


def _bag_places(call: LocalCall) -> int:
    """What it returns besides: the bag of each position, the sizes of bags, and where each largest is."""
    return sum(spec.n_bytes(call.batch_size, call.precision) for spec in call.op.outputs[1:])


_EMBEDDING_BAG = OpRule(
    _bags,
    flops=_bag_flops,
    backward_bytes=_distinct_bytes,
    fixed_s=_sorting_s,
    n_backward_kernels=SCATTER_KERNELS,
    further_bytes=_further_rows,
    extra_saved_bytes=_bag_places,
    reads_rows=True,
)

RULES = {
    "aten.embedding_bag.default": _EMBEDDING_BAG,
    "aten.embedding_bag.padding_idx": _EMBEDDING_BAG,
    "aten.embedding.default": OpRule(
        _embedding,
        flops=_copy_flops,
        backward_bytes=_distinct_bytes,
        fixed_s=_sorting_s,
        n_backward_kernels=SCATTER_KERNELS,
        reads_rows=True,
        strategies=_split_vocabulary,
    ),
}
