"""Pooling, resizing and patches of images: each channel by itself, space whole."""

from autoplan.equations import Equation, whole_dims
from autoplan.rules import LocalCall, OpRule

# Achieved / rate of a copy, forward and backward: windows of 3 x 3 every 2 pixels; H200, torch 2.11
# (benchmarks/results/op_rates_h200_2026-11-23.jsonl).
_MAX_POOL_FRACTIONS = {"contiguous": (0.145, 0.095), "channels_last": (0.14, 0.155)}


def _channels(n_space: int) -> Equation:
    """The last `n_space` dims stay whole, batch and channels may be split."""
    return whole_dims(lambda op, rank: range(rank - n_space, rank))


def _max_pool(n_space: int) -> OpRule:
    return OpRule(
        _channels(n_space),
        flops_per_point=4.0,
        saves=(0,),
        backward_bytes_ratio=2.0,
        fractions=_max_pool_fractions,
        extra_saved_bytes=_places,
    )


def _places(call: LocalCall) -> int:
    """Where each maximum was found: int64 in eager mode, a byte within its window compiled."""
    return (1 if call.is_compiled else 8) * call.results[0].n_elements(call.batch_size)


def _max_pool_fractions(call: LocalCall) -> tuple[float, float]:
    return _MAX_POOL_FRACTIONS[call.operand_format]


def _average(n_space: int) -> OpRule:
    return OpRule(_channels(n_space), flops_per_point=4.0, linear_in=(0,), backward_bytes_ratio=1.0)


_PATCHES = OpRule("b c h^ w^ -> b c p^", linear_in=(0,), backward_bytes_ratio=1.0)
_FOLD = OpRule("b c p^ -> b c h^ w^", linear_in=(0,), backward_bytes_ratio=1.0)
_SHUFFLE = OpRule("b c h^ w^ -> b c h^ w^", linear_in=(0,), backward_bytes_ratio=1.0)

RULES = {
    **{f"aten.max_pool{n}d.default": _max_pool(n) for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices.default": _max_pool(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _max_pool(n) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _average(n) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _average(n) for n in (1, 2, 3)},
    "aten._adaptive_avg_pool2d.default": _average(2),
    "aten._adaptive_avg_pool3d.default": _average(3),
    **{f"aten.upsample_nearest{n}d.vec": _average(n) for n in (1, 2, 3)},
    "aten.upsample_linear1d.vec": _average(1),
    "aten.upsample_bilinear2d.vec": _average(2),
    "aten.upsample_bicubic2d.vec": _average(2),
    "aten.upsample_trilinear3d.vec": _average(3),
    "aten._upsample_bilinear2d_aa.vec": _average(2),
    "aten._upsample_bicubic2d_aa.vec": _average(2),
    "aten.im2col.default": _PATCHES,
    "aten.col2im.default": _FOLD,
    "aten.pixel_shuffle.default": _SHUFFLE,
    "aten.pixel_unshuffle.default": _SHUFFLE,
}
