"""Convolutions: split over output channels, over input channels (partial sums), or over groups.

    x: [batch, in, *space]    weight: [out, in / groups, *kernel]    transposed: weight: [in, out / groups, *kernel]

With groups only whole groups can be split; input and output channels go together then. A depthwise convolution (one
output channel per group) is element-wise in its channels. Space and kernel stay whole.
"""

import math
from collections.abc import Iterator

from autoplan.equations import added, argument, dim_names, marked, write_equation
from autoplan.graph import COMPUTE_DTYPES, DTYPE_BYTES, Op, TensorSpec, extent_at
from autoplan.layout import sharded
from autoplan.rules import Arithmetic, LocalCall, OpRule, Specs, Strategy

# How cuDNN computes: H200, torch 2.11, cuDNN 9.19 (benchmarks/results/op_rates_h200_2026-11-23.jsonl). Figures of tf32
# are for Hopper and later (op_rates_convolutions_h200_2026-11-29.jsonl there): published steps of ResNet-50 in tf32 on
# A100 are predicted 9 and 12 % too fast without them, and would be 12 and 15 %.
# Kernels of the matrix units read pixel by pixel, all channels of one together (channels_last), and those of float32
# channel by channel. Images that lie in the other order are copied, at this part of the rate of a copy.
_READ_CHANNELS_LAST = frozenset({"bf16", "fp16", "tf32"})
_COPY_FRACTION, _TF32_COPY_FRACTION = 0.5, 0.86
_ALIGNED_BYTES = 16
# The matrix units compute so many channels at once: fewer take as long. Of fewest (images of 3), other kernels run,
# whose rate is that of 8.
_CHANNEL_TILE, _TF32_CHANNEL_TILE, _FEWEST_CHANNELS = 128, 96, 8
# Forward and the gradient of images are matrix products of pixels and channels. A multiprocessor computes a tile of
# 128 x 128 of their result at a time: fewer tiles than multiprocessors, 132 on H100 and H200, leave some idle (other
# devices are priced alike). Products of linear layers are split along what is summed where tiles are few, and so is the
# gradient of the weight.
_TILE, _FULL_TILES = 128, 132
# The gradient of the weight contracts over pixels, which neither images nor their gradient have innermost; in tf32 that
# is slow (see cost_models/matmul.py): 0.45 and 0.47 of the rate of forward in 512 images of 64 and 256 channels, where
# 16 bits have 0.9, and 0.45 and 0.53 of the rate that forward is priced at; 0.86 of images of 3.
_TF32_WEIGHT_FRACTION = 0.49
# What each gradient takes besides: kernels that fill it with zeros and add up the parts of a split sum. Blocks of
# ResNet-152 with 8 to 512 images on H100 and H200, by benchmarks/image_blocks.py.
_GRADIENT_S_fit = 3.2e-6
# Of one channel by itself: forward and backward rate / peak of float32, kernels of 7 x 7 in bf16.
_DEPTHWISE_FRACTIONS = {"contiguous": (0.042, 0.024), "channels_last": (0.18, 0.12)}


def _is_transposed(op: Op) -> bool:
    return bool(op.args[6]) if "convolution" in op.target else "transpose" in op.target


def _n_groups(op: Op) -> int:
    position = 8 if "convolution" in op.target else 6
    return argument(op, position, "groups", 1)


def _convolution(op: Op, operands: Specs) -> str:
    """Letters for one group or depthwise; other groups are split by `_split_groups`."""
    x, weight, *bias = operands
    n_groups, out_channels = _n_groups(op), op.outputs[0].shape[-len(weight.shape) + 1]
    kernel = marked(dim_names(len(weight.shape) - 2, "w"), range(len(weight.shape)), "^")
    space = marked(dim_names(len(weight.shape) - 2, "s"), range(len(weight.shape)), "^")
    batch = ("b",) if len(x.shape) == len(weight.shape) else ()
    if n_groups == 1:
        ends = ("k+", "c") if _is_transposed(op) else ("c", "k+")
        terms = [(*batch, "k+", *space), (*ends, *kernel), *(added(("c",)) for _ in bias)]
        return write_equation(terms, (*batch, "c", *space))
    if n_groups == out_channels and not _is_transposed(op):
        terms = [(*batch, "c", *space), ("c", "i^", *kernel), *(added(("c",)) for _ in bias)]
        return write_equation(terms, (*batch, "c", *space))
    terms = [(*batch, "k^", *space), ("m^", "i^", *kernel), *(added(("c^",)) for _ in bias)]
    return write_equation(terms, (*batch, "c^", *space))


def _split_groups(op: Op, operands: Specs, result: TensorSpec, degree: int) -> Iterator[Strategy]:
    """Whole groups: input channels, the weight's first dim and output channels alike."""
    n_groups, channel_dim = _n_groups(op), len(operands[0].shape) - len(operands[1].shape) + 1
    if n_groups > 1 and n_groups % degree == 0:
        channels = sharded(channel_dim)
        yield Strategy((channels, sharded(0), sharded(0))[: len(operands)], channels, is_split=True)


def _flops(op: Op, operands: Specs, batch_size: int) -> int:
    """2 * batch * weight elements * positions: each weight meets every position of the output once.

    Of a transposed convolution the input counts.
    """
    x, weight = operands[:2]
    positions = x.shape if _is_transposed(op) else op.outputs[0].shape
    count = 2 * weight.n_elements(1)
    for extent in positions[2 - len(weight.shape) :]:
        count *= extent_at(extent, batch_size)
    return count * (extent_at(x.shape[0], batch_size) if len(x.shape) == len(weight.shape) else 1)


def _n_local_groups(call: LocalCall) -> int:
    """Of the groups of channels, those that are computed here."""
    weight = call.operands[1]
    divided = call.results[0] if _is_transposed(call.op) else call.operands[0]
    return max(1, extent_at(divided.shape[1 - len(weight.shape)], 1) // weight.at(1)[1])


def _channels_of_a_group(call: LocalCall) -> int:
    """The fewest that a group reads or writes."""
    first, second = call.operands[1].at(1)[:2]
    return min(first // _n_local_groups(call), second)


def _arithmetic(call: LocalCall) -> Arithmetic:
    n_channels = _channels_of_a_group(call)
    if n_channels == 1 and _n_groups(call.op) > 1:
        return Arithmetic(False, *_DEPTHWISE_FRACTIONS[call.operand_format])
    if call.precision in _READ_CHANNELS_LAST:
        tile = _TF32_CHANNEL_TILE if call.is_tf32_of_hopper else _CHANNEL_TILE
        fraction = min(1.0, max(n_channels, _FEWEST_CHANNELS) / tile)
        busy = _busy_part(call, call.results[0])
        return Arithmetic(True, fraction * busy, fraction * _busy_part_backward(call))
    return Arithmetic(True)


def _busy_part(call: LocalCall, images: TensorSpec) -> float:
    """Which part of the multiprocessors has a tile to compute where these are the result."""
    n_groups, n_dims = _n_local_groups(call), len(call.operands[1].shape) - 2
    extents = images.at(call.batch_size)
    n_channels, n_pixels = extents[-n_dims - 1], math.prod(extents) // extents[-n_dims - 1]
    n_columns = n_groups * max(1.0, n_channels / n_groups / _TILE)
    return min(1.0, max(1.0, n_pixels / _TILE) * n_columns / _FULL_TILES)


def _has_gradients(call: LocalCall) -> tuple[bool, bool]:
    """Whether images and weight have one."""
    return (call.gradients[0], call.gradients[1]) if call.gradients else (True, True)


def _busy_part_backward(call: LocalCall) -> float:
    """The same of the gradients, each half of the arithmetic; that of the weight leaves nothing idle but in tf32."""
    of_images, of_weight = _has_gradients(call)
    is_slow = call.is_tf32_of_hopper and _channels_of_a_group(call) > _FEWEST_CHANNELS
    weight_part = _TF32_WEIGHT_FRACTION if is_slow else 1.0
    parts = (_busy_part(call, call.operands[0]),) * of_images + (weight_part,) * of_weight
    return len(parts) / sum(1 / part for part in parts) if parts else 1.0


def _gradients_s(call: LocalCall, copy_bytes_per_s: float) -> tuple[float, float]:
    return 0.0, _GRADIENT_S_fit * sum(_has_gradients(call))


def _is_product_of_pixels(call: LocalCall) -> bool:
    """A kernel of one pixel on whole contiguous images, whose channels start at multiples of 16 bytes."""
    x, weight = call.operands[:2]
    n_dims = len(weight.shape) - 2
    space = math.prod(x.at(1)[-n_dims:])
    is_point = weight.at(1)[2:] == (1,) * n_dims and space == math.prod(call.results[0].at(1)[-n_dims:])
    item_bytes = DTYPE_BYTES[COMPUTE_DTYPES[call.precision]]
    return is_point and _n_groups(call.op) == 1 and space * item_bytes % _ALIGNED_BYTES == 0


def _copied_bytes(call: LocalCall) -> tuple[float, float]:
    """From the order that images and weights lie in to that of the kernels, and back: both in forward, and in backward
    for the gradient of each.
    """
    needs_channels_last = call.precision in _READ_CHANNELS_LAST
    is_channels_last = call.operand_format == "channels_last"
    if needs_channels_last == is_channels_last or (needs_channels_last and _is_product_of_pixels(call)):
        return 0.0, 0.0
    if _n_groups(call.op) > 1 and _channels_of_a_group(call) == 1:
        return 0.0, 0.0
    x, weight, result = (
        spec.n_bytes(call.batch_size, call.precision) for spec in (*call.operands[:2], call.results[0])
    )
    fraction = _TF32_COPY_FRACTION if call.is_tf32_of_hopper else _COPY_FRACTION
    forward_bytes = 2 * (x + weight + result) / fraction
    return forward_bytes, 2 * forward_bytes


_CONVOLUTION = OpRule(
    _convolution,
    flops=_flops,
    backward_flops_ratio=2.0,
    backward_bytes_ratio=2.0,
    n_backward_kernels=2,
    saves=(0, 1),
    is_product=True,
    efficiency="matmul",
    arithmetic=_arithmetic,
    further_bytes=_copied_bytes,
    fixed_s=_gradients_s,
    linear_in=(0,),
    strategies=_split_groups,
)

RULES = {
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv1d.padding": _CONVOLUTION,
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv2d.padding": _CONVOLUTION,
    "aten.conv3d.default": _CONVOLUTION,
    "aten.conv3d.padding": _CONVOLUTION,
    "aten.conv_transpose1d.default": _CONVOLUTION,
    "aten.conv_transpose2d.input": _CONVOLUTION,
    "aten.conv_transpose3d.input": _CONVOLUTION,
    "aten.convolution.default": _CONVOLUTION,
}
