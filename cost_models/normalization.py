"""Normalizations and softmax: the normalized dims stay whole; scale and shift see a share of the rows.

Over images, a channel (instance norm; `batch_norm` has a file of its own) or a group of channels (group norm) is
normalized by itself, and may be split off with its scale, shift and running statistics.
"""

from collections.abc import Iterator

from autoplan.equations import Equation, along, dim_names, marked, whole_dims, write_equation
from autoplan.graph import Op, TensorSpec, extent_at
from autoplan.layout import sharded
from autoplan.rules import LocalCall, OpRule, Specs, Strategy

_STATISTICS_BYTES = 4
# Achieved / rate of a copy. H200, torch 2.11, bf16, rows of 1536 to 4096: layer norm 1.7 TB/s forward and 1.05
# backward, RMS norm 2.8 and 1.4, against 4.2 (benchmarks/results/kernels_h200_2026-11-20.jsonl).
_LAYER_NORM_FRACTIONS = {"rate_fraction": 0.4, "backward_rate_fraction": 0.25}
_RMS_NORM_FRACTIONS = {"rate_fraction": 0.65, "backward_rate_fraction": 0.33}


def _normalized_dims(op: Op, rank: int) -> range:
    return range(-len(op.args[1]), 0)


def _n_rows(call: LocalCall) -> int:
    n_rows = 1
    for extent in call.operands[0].shape[: -len(call.op.args[1])]:
        n_rows *= extent_at(extent, call.batch_size)
    return n_rows


def _mean_and_deviation(call: LocalCall) -> int:
    return 2 * _STATISTICS_BYTES * _n_rows(call)


def _deviation(call: LocalCall) -> int:
    return _STATISTICS_BYTES * _n_rows(call)


def by_channel(*, whole_batch: bool) -> Equation:
    """x: [batch, channel, *space], and vectors of one number per channel; of batch norm the batch stays whole, too."""

    def equation(op: Op, operands: Specs) -> str:
        names = dim_names(len(operands[0].shape))
        names = marked(names, set(range(2, len(names))) | ({0} if whole_batch else set()), "^")
        return write_equation([names, *((names[1],) for _ in operands[1:])], names)

    return equation


def _by_group(op: Op, operands: Specs) -> str:
    """group_norm(x, n_groups): the batch may be split; `_split_groups` splits the channels."""
    names = dim_names(len(operands[0].shape))
    names = marked(names, range(1, len(names)), "^")
    return write_equation([names, *((names[1],) for _ in operands[1:])], names)


def _split_groups(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    if op.args[1] % degree == 0:
        yield Strategy((sharded(1), *(sharded(0) for _ in operands[1:])), sharded(1), is_split=True)


def _group_statistics(call: LocalCall) -> int:
    """Mean and deviation of each group of each sample."""
    return 2 * _STATISTICS_BYTES * extent_at(call.operands[0].shape[0], call.batch_size) * call.op.args[1]


def channel_statistics(call: LocalCall) -> int:
    """Mean and deviation of each channel."""
    return 2 * _STATISTICS_BYTES * extent_at(call.operands[0].shape[1], 1)


def _sample_statistics(call: LocalCall) -> int:
    return extent_at(call.operands[0].shape[0], call.batch_size) * channel_statistics(call)


IMAGE_NORM = {
    "flops_per_point": 8.0,
    "backward_flops_ratio": 2.0,
    "n_backward_kernels": 2,
    "saves": (0, 1),
}
_SOFTMAX = OpRule(along(1), flops_per_point=8.0, saves=(-1,))

RULES = {
    "aten.layer_norm.default": OpRule(
        whole_dims(_normalized_dims),
        flops_per_point=8.0,
        backward_flops_ratio=2.0,
        n_backward_kernels=2,
        saves=(0, 1),
        extra_saved_bytes=_mean_and_deviation,
        **_LAYER_NORM_FRACTIONS,
    ),
    "aten.rms_norm.default": OpRule(
        whole_dims(_normalized_dims),
        flops_per_point=6.0,
        backward_flops_ratio=2.0,
        n_backward_kernels=2,
        saves=(0, 1),
        extra_saved_bytes=_deviation,
        **_RMS_NORM_FRACTIONS,
    ),
    "aten.group_norm.default": OpRule(
        _by_group, strategies=_split_groups, extra_saved_bytes=_group_statistics, **IMAGE_NORM
    ),
    "aten.instance_norm.default": OpRule(
        by_channel(whole_batch=False), extra_saved_bytes=_sample_statistics, **IMAGE_NORM
    ),
    "aten.softmax.int": _SOFTMAX,
    "aten._softmax.default": _SOFTMAX,
    "aten._safe_softmax.default": _SOFTMAX,
    "aten.log_softmax.int": _SOFTMAX,
    "aten._log_softmax.default": _SOFTMAX,
}
