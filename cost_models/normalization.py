"""Normalizations and softmax: the normalized dims stay whole; scale and shift see a share of the rows."""

from autoplan.graph import Op, extent_at
from autoplan.rules import OpRule, Specs, whole_dims_equation

_STATISTICS_BYTES = 4
# Achieved / rate of a copy. H200, torch 2.11, bf16, rows of 1536 to 4096: layer norm 1.7 TB/s forward and 1.05
# backward, RMS norm 2.8 and 1.4, against 4.2 (benchmarks/results/kernels_h200_2026-11-20.jsonl).
_LAYER_NORM_FRACTIONS = {"rate_fraction": 0.4, "backward_rate_fraction": 0.25}
_RMS_NORM_FRACTIONS = {"rate_fraction": 0.65, "backward_rate_fraction": 0.33}


def _last_dims(op: Op, operands: Specs) -> frozenset[int]:
    return frozenset(range(-len(op.args[1]), 0))


def _softmax_dim(op: Op, operands: Specs) -> frozenset[int]:
    return frozenset({op.args[1]})


def _n_rows(op: Op, operands: Specs, batch_size: int) -> int:
    n_rows = 1
    for extent in operands[0].shape[: -len(op.args[1])]:
        n_rows *= extent_at(extent, batch_size)
    return n_rows


def _mean_and_deviation(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    return 2 * _STATISTICS_BYTES * _n_rows(op, operands, batch_size)


def _deviation(op: Op, operands: Specs, batch_size: int, precision: str) -> int:
    return _STATISTICS_BYTES * _n_rows(op, operands, batch_size)


_SOFTMAX = OpRule(whole_dims_equation(_softmax_dim), flops_per_point=8.0, saves=(-1,))

RULES = {
    "aten.layer_norm.default": OpRule(
        whole_dims_equation(_last_dims),
        flops_per_point=8.0,
        backward_flops_ratio=2.0,
        n_backward_kernels=2,
        saves=(0, 1),
        extra_saved_bytes=_mean_and_deviation,
        **_LAYER_NORM_FRACTIONS,
    ),
    "aten.rms_norm.default": OpRule(
        whole_dims_equation(_last_dims),
        flops_per_point=6.0,
        backward_flops_ratio=2.0,
        n_backward_kernels=2,
        saves=(0, 1),
        extra_saved_bytes=_deviation,
        **_RMS_NORM_FRACTIONS,
    ),
    "aten.softmax.int": _SOFTMAX,
    "aten._softmax.default": _SOFTMAX,
    "aten.log_softmax.int": _SOFTMAX,
}
