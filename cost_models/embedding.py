"""Table look-up. Splitting the vocabulary makes each rank look up its own rows, and the sum is the result."""

from collections.abc import Callable, Iterator

from autoplan.graph import Op, TensorSpec
from autoplan.layout import P, R, padded, sharded
from autoplan.rules import LocalCall, OpRule, Specs, Strategy

# Adding rows where they belong takes as long in 16 bits as in 32: of a table's gradient 4 bytes are counted for each
# element that is added. Their rate / that of a copy, and what sorting the positions takes before, with the host's waits
# in it: H200, torch 2.11, rows of 1024 to 4096 in random order (benchmarks/results/op_rates_h200_2026-11-23.jsonl).
SCATTER_KERNELS, ADDED_BYTES = 12, 4
_ADDED_FRACTION, _SORTING_S = 0.26, 370e-6


def _embedding(op: Op, operands: Specs) -> str:
    ids = " ".join("abde"[: len(operands[1].shape)])
    return f"v^ c, {ids} -> {ids} c"


def _split_vocabulary(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """`padding_idx` is known to the function; gradients scaled by frequency, or sparse, are not."""
    if not any(op.args[3:]) and not op.kwargs:
        for rows in (sharded(0), padded(0)):
            yield Strategy((rows, R), P, function="vocab_parallel_embedding")


def scattered_bytes(fraction: float) -> Callable[[LocalCall], float]:
    """The gradient of the table is zeroed; the gradients of the rows are added at this part of the rate of a copy."""

    def backward_bytes(call: LocalCall) -> float:
        n_added = sum(spec.n_elements(call.batch_size) for spec in call.results)
        return call.operands[0].n_bytes(call.batch_size, call.precision) + ADDED_BYTES * n_added / fraction

    return backward_bytes


def _copy_flops(op: Op, operands: Specs, batch_size: int) -> int:
    return op.outputs[0].n_elements(batch_size)


RULES = {
    "aten.embedding.default": OpRule(
        _embedding,
        flops=_copy_flops,
        backward_bytes=scattered_bytes(_ADDED_FRACTION),
        backward_fixed_s=_SORTING_S,
        n_backward_kernels=SCATTER_KERNELS,
        reads_rows=True,
        strategies=_split_vocabulary,
    ),
}
