"""Losses. Cross-entropy splits over the classes: three small all-reduces instead of gathering the logits.

Rows may be split where the loss is their sum, or one number per row. A mean is never split: its divisor is the number
of rows that count in the whole batch, and a mean of the means of parts with unlike numbers of ignored rows is another
number.
"""

from collections.abc import Callable, Iterator

from autoplan.equations import all_whole, argument, broadcast_marks, dim_names, marked, write_equation
from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES, Op, TensorSpec, extent_at
from autoplan.layout import R, padded, sharded
from autoplan.rules import LocalCall, OpRule, Specs, Strategy

# Times that cross-entropy goes over the float32 logits, reading or writing. H200, torch 2.11, 50304 and 128256 classes:
# what product (679 TFLOP/s) and cast leave of the head in benchmarks/results/profile_h200_2026-11-21.jsonl.
# (The kernels read three times and write the log-softmax; backward zeroes a gradient, reads two tensors, writes one.)
_FORWARD_PASSES, _BACKWARD_PASSES = 5.0, 3.4

_NONE, _SUM = 0, 2  # reductions, as ATen numbers them


def _elementwise(position: int) -> Callable[[Op, Specs], str]:
    """A loss of two tensors (and weights) element by element, with its reduction at this position."""

    def equation(op: Op, operands: Specs) -> str:
        reduction = argument(op, position, "reduction", 1)
        if reduction not in (_NONE, _SUM):
            return all_whole(op, operands)
        shape = operands[0].shape
        names = marked(dim_names(len(shape)), range(len(shape)) if reduction == _SUM else (), "+")
        terms = [broadcast_marks(spec.shape, shape, names, f"one{i}_") for i, spec in enumerate(operands)]
        return write_equation(terms, names if reduction == _NONE else ())

    return equation


def _classes(op: Op, operands: Specs) -> str:
    """x: [row, class, *place] or [class]; the target has a class or a number per class for each row and place."""
    reduction = argument(op, 3, "reduction", 1)
    if reduction not in (_NONE, _SUM):
        return all_whole(op, operands)
    x, target, *weight = operands
    class_dim = min(1, len(x.shape) - 1)
    rows = marked(dim_names(len(x.shape)), range(len(x.shape)) if reduction == _SUM else (), "+")
    x_term = (*rows[:class_dim], "class^", *rows[class_dim + 1 :])
    row_term = (*rows[:class_dim], *rows[class_dim + 1 :])
    target_term = row_term if target.dtype == "int64" else x_term
    return write_equation([x_term, target_term, *(("class^",) for _ in weight)], row_term if reduction == _NONE else ())


def _split_classes(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Row maximum, sum of exponentials and the target's logit: 3 numbers per row."""
    if len(operands) == 2 and len(operands[0].shape) == 2 and operands[1].dtype == "int64":
        n_rows_per_sample = extent_at(operands[0].shape[0], 1)
        for classes in (sharded(1), padded(1)):
            yield Strategy(
                (classes, R),
                R,
                is_split=True,
                function="vocab_parallel_cross_entropy",
                all_reduce_elements=3 * n_rows_per_sample,
            )


def _points(op: Op, operands: Specs, batch_size: int) -> int:
    return 8 * operands[0].n_elements(batch_size)


def log_probabilities(call: LocalCall) -> int:
    """Cross-entropy keeps its log-softmax, as large as the logits.

    One that takes logits in 16 bits keeps these themselves. What backward has beside them, a tensor in float32 and the
    gradient in 16 bits, is as large as the gradient in float32 and the kept are.
    """
    return call.operands[0].n_elements(call.batch_size) * DTYPE_BYTES[COMPUTE_DTYPES[call.given_precision]]


def _of_elements(position: int) -> OpRule:
    return OpRule(_elementwise(position), flops=_points, saves=(0, 1))


def _ctc_states(op: Op, operands: Specs, batch_size: int) -> int:
    """States of the CTC automaton at all frames: the labels of a sample, with a blank before and behind each."""
    log_probs, targets = operands[:2]
    n_frames = log_probs.n_elements(batch_size) // extent_at(log_probs.shape[-1], batch_size)
    return n_frames * (2 * extent_at(targets.shape[-1], batch_size) + 1)


def _ctc_points(op: Op, operands: Specs, batch_size: int) -> int:
    """Each state adds up the probabilities of three of the frame before."""
    return 8 * _ctc_states(op, operands, batch_size)


def _ctc_log_alpha(call: LocalCall) -> int:
    """Log alpha: a number for each state of each frame, in the dtype of the log-probabilities."""
    one_number = TensorSpec((), call.operands[0].dtype).n_bytes(call.batch_size, call.precision)
    return _ctc_states(call.op, call.operands, call.batch_size) * one_number


_JOINT = OpRule(all_whole, flops=_points, saves=(0, 1))

RULES = {
    "aten.cross_entropy_loss.default": OpRule(
        _classes,
        flops=_points,
        backward_bytes_ratio=2.0,
        n_kernels=2,
        n_backward_kernels=2,
        rate_fraction=1 / _FORWARD_PASSES,
        backward_rate_fraction=2 / _BACKWARD_PASSES,
        extra_saved_bytes=log_probabilities,
        strategies=_split_classes,
    ),
    "aten.nll_loss.default": OpRule(_classes, saves=(1,)),
    "aten.nll_loss_nd.default": OpRule(_classes, saves=(1,)),
    **{
        f"aten.{name}.default": _of_elements(2)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss")
    },
    "aten.binary_cross_entropy.default": _of_elements(3),
    "aten.binary_cross_entropy_with_logits.default": _of_elements(4),
    "aten.ctc_loss.Tensor": OpRule(
        all_whole, flops=_ctc_points, backward_bytes_ratio=2.0, saves=(0,), extra_saved_bytes=_ctc_log_alpha
    ),
    "aten.cosine_embedding_loss.default": _JOINT,
    "aten.triplet_margin_loss.default": _JOINT,
    "aten.margin_ranking_loss.default": _JOINT,
}
