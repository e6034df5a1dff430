"""Table look-up. Splitting the vocabulary makes each rank look up its own rows, and the sum is the result."""

from collections.abc import Iterator

from autoplan.graph import Op, TensorSpec
from autoplan.layout import P, R, padded, sharded
from autoplan.rules import OpRule, Specs, Strategy

# Rows added to a table per second / rate of a copy. H200, torch 2.11, bf16, rows of 1536 to 4096: 150 GB/s against
# 4242, by the slopes over the micro-batch in benchmarks/results/profile_h200_2026-11-21.jsonl. Sorting them first takes
# 0.17 ms more, whatever their number; of that, only the kernels are counted.
_SCATTER_FRACTION, SCATTER_KERNELS = 0.035, 12


def _embedding(op: Op, operands: Specs) -> str:
    ids = " ".join("abde"[: len(operands[1].shape)])
    return f"v^ c, {ids} -> {ids} c"


def _split_vocabulary(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """`padding_idx` is known to the function; gradients scaled by frequency, or sparse, are not."""
    if not any(op.args[3:]) and not op.kwargs:
        for rows in (sharded(0), padded(0)):
            yield Strategy((rows, R), P, function="vocab_parallel_embedding")


def scattered_bytes(operands: Specs, results: Specs, batch_size: int, precision: str) -> float:
    """The gradient of the table is zeroed, and then the gradients of the rows are added where they belong."""
    row_bytes = sum(spec.n_bytes(batch_size, precision) for spec in results)
    return operands[0].n_bytes(batch_size, precision) + row_bytes / _SCATTER_FRACTION


def _copy_flops(op: Op, operands: Specs, batch_size: int) -> int:
    return op.outputs[0].n_elements(batch_size)


RULES = {
    "aten.embedding.default": OpRule(
        _embedding,
        flops=_copy_flops,
        backward_bytes=scattered_bytes,
        n_backward_kernels=SCATTER_KERNELS,
        strategies=_split_vocabulary,
    ),
}
