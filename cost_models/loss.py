"""Losses. Cross-entropy splits over the classes: three small all-reduces instead of gathering the logits."""

from collections.abc import Iterator

from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES, Op, TensorSpec, extent_at
from autoplan.layout import R, sharded
from autoplan.rules import OpRule, Specs, Strategy


def _whole(op: Op, operands: Specs) -> str:
    terms = [" ".join(f"x{i}{j}^" for j in range(len(spec.shape))) for i, spec in enumerate(operands)]
    return ", ".join(terms) + " ->" + "".join(f" y{j}^" for j in range(len(op.outputs[0].shape)))


def _split_classes(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Row maximum, sum of exponentials and the target's logit: 3 numbers per row."""
    is_plain = len(op.args) <= 2 or op.args[2] is None
    if is_plain and len(operands) == 2 and len(operands[0].shape) == 2 and operands[1].dtype == "int64":
        n_rows_per_sample = extent_at(operands[0].shape[0], 1)
        yield Strategy(
            (sharded(1), R),
            R,
            is_split=True,
            function="vocab_parallel_cross_entropy",
            all_reduce_elements=3 * n_rows_per_sample,
        )


def _points(op: Op, operands: Specs, batch_size: int) -> int:
    return 8 * operands[0].n_elements(batch_size)


def _log_probabilities(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    """Cross-entropy keeps its log-softmax, as large as the logits."""
    return operands[0].n_elements(batch_size) * DTYPE_BYTES[COMPUTE_DTYPES[precision]]


_REGRESSION = OpRule(_whole, flops=_points, saves=(0, 1))

RULES = {
    "aten.cross_entropy_loss.default": OpRule(
        _whole,
        flops=_points,
        backward_bytes_ratio=2.0,
        n_kernels=2,
        n_backward_kernels=2,
        extra_saved_bytes=_log_probabilities,
        strategies=_split_classes,
    ),
    "aten.mse_loss.default": _REGRESSION,
    "aten.l1_loss.default": _REGRESSION,
    "aten.binary_cross_entropy_with_logits.default": _REGRESSION,
}
