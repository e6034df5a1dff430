"""Table look-up. Splitting the vocabulary makes each rank look up its own rows, and the sum is the result."""

from collections.abc import Iterator

from autoplan.graph import Op, TensorSpec
from autoplan.layout import P, R, padded, sharded
from autoplan.rules import OpRule, Specs, Strategy


def _embedding(op: Op, operands: Specs) -> str:
    ids = " ".join("abde"[: len(operands[1].shape)])
    return f"v^ c, {ids} -> {ids} c"


def _split_vocabulary(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """`padding_idx` is known to the function; gradients scaled by frequency, or sparse, are not."""
    if not any(op.args[3:]) and not op.kwargs:
        for rows in (sharded(0), padded(0)):
            yield Strategy((rows, R), P, function="vocab_parallel_embedding")


def _copy_flops(op: Op, operands: Specs, batch_size: int) -> int:
    return op.outputs[0].n_elements(batch_size)


RULES = {
    "aten.embedding.default": OpRule(
        _embedding, flops=_copy_flops, backward_bytes_ratio=3.0, n_backward_kernels=3, strategies=_split_vocabulary
    ),
}
