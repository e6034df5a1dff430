"""Batch norm: each channel of images by itself, over the whole batch; it may be split off with its scale, shift and
running statistics.

In bf16 torch computes it by kernels of its own, a pass over the images for statistics (forward) or sums (backward) and
one that writes:

    forward   small kernels + statistics + 2 images / rate of a copy
    backward  small kernels + sums       + 3 images / rate of a copy

Statistics and sums take as long on an H100 as on an H200 with 1.4 times its bandwidth: what limits them is what a
thread computes of a number, or waits for it, and how many threads there are. So they are seconds by shape
(`_reduction_s`), those of these two, where no device's memory takes longer; other devices, whose multiprocessors times
clock are 0.5 to 1.4 times as much, were not measured.

    channels_last   numbers * seconds of one, all threads busy / part of the threads that are    (`_busy_part`)
    contiguous      numbers a thread reads * the longer of waiting for one, and all channels' turns   (`_n_turns`)

Contiguous backward is one kernel that reads twice and writes; it is priced like the two of channels_last, and what that
misses is in the fitted seconds of a turn.

Which threads there are is that of torch 2.11, aten/src/ATen/native/cuda/Normalization.cuh.
"""

import math
from typing import NamedTuple

from autoplan.cost_models.normalization import IMAGE_NORM, by_channel, channel_statistics

from autoplan.equations import argument
from autoplan.graph import extent_at
from autoplan.rules import LocalCall, OpRule

# In other precisions cuDNN computes it. Not measured: taken to read the images twice and write them once, where the
# price of an op counts 2 times, and in backward the images and the gradient of the result twice, and to write that of
# the images once, where it counts 3.
_CUDNN_FRACTIONS = 2 / 3, 3 / 5

# Kernels that take no longer for more images. Forward: scale and shift are widened (2.4 us each), running statistics
# updated (3.6 us), 2.1 us each to start statistics and the pass that writes. Backward: two gradients are narrowed (1.3
# us each), 5.0 and 1.4 us to start sums and the pass that writes; `kernel_s` counts for 1 us of forward, 2 of backward.
# H100, 155 of each in ResNet-152 with 32 images (benchmarks/results/step_kernels_resnet_h100_x4_2026-11-27.txt), less
# what they take by the rates below.
_SMALL_KERNELS_S = 11.6e-6, 7e-6

# channels_last: seconds of a number, forward and backward, of [64, 256, 56, 56] and [512, 1024, 14, 14], H200
# (benchmarks/results/op_rates_h200_2026-11-23.jsonl), less the pass that writes.
_NUMBER_S = 3.25e-12, 2.12e-12
_BLOCK_THREADS = 512  # torch's MAX_BLOCK_SIZE
_BLOCK_CHANNELS = 32  # OPTIMAL_TILE_W: threads of a block side by side, one channel each
_READ_BY_THREAD = 16  # ELEMENTS_PER_THREAD
_MOST_SHARING = 128  # MAX_H_BLOCK: blocks of threads that share a channel
_FEWEST_SHARING = 8  # fewer of them become one
_FULL_BLOCKS_fit = 150  # keep all threads busy: by benchmarks/image_blocks.py

# contiguous: a block of threads has one channel. Seconds from one number of a thread to its next, forward and backward,
# where images fit into half of the cache (50 MB on H100 and H200) and where they do not, and for each channel where
# those of a multiprocessor take turns. In the cache: blocks of ResNet-152, most of them with 8 images, by
# benchmarks/image_blocks.py; else of the images above, less the same.
_CACHE_BYTES = 25_000_000
_CACHED_TURN_S_fit = 0.23e-6, 0.40e-6
_TURN_S = 0.58e-6, 0.80e-6
_CHANNEL_TURN_S = 1.45e-9, 1.9e-9
_NARROW_BLOCKS = (32, 64, 128, 256)


class _Images(NamedTuple):
    """How many numbers of what."""

    n_samples: int
    n_channels: int
    n_pixels: int

    @property
    def n_numbers(self) -> int:
        return math.prod(self)


def _images(call: LocalCall) -> _Images:
    n_samples, n_channels, *space = (extent_at(extent, call.batch_size) for extent in call.operands[0].shape)
    return _Images(n_samples, n_channels, math.prod(space))


def _fractions(call: LocalCall) -> tuple[float, float]:
    return (1.0, 1.0) if call.precision == "bf16" else _CUDNN_FRACTIONS


def _fixed_s(call: LocalCall, copy_bytes_per_s: float) -> tuple[float, float]:
    """Small kernels, and statistics or sums; the latter read images, or images and a gradient, no faster than a copy.

    In evaluation there are no statistics, and no small kernels are taken to run in front of them.
    """
    if call.precision != "bf16":
        return 0.0, 0.0
    forward_s, backward_s = _reduction_s(call)
    read_s = call.operands[0].n_bytes(call.batch_size, call.precision) / copy_bytes_per_s
    forward_s = _SMALL_KERNELS_S[0] + max(forward_s, read_s) if argument(call.op, 5, "training", True) else 0.0
    return forward_s, _SMALL_KERNELS_S[1] + max(backward_s, 2 * read_s)


def _reduction_s(call: LocalCall) -> tuple[float, float]:
    """Statistics, and sums of backward."""
    images = _images(call)
    if call.operand_format == "channels_last" or images.n_pixels == 1:
        n_numbers = images.n_numbers / _busy_part(images)
        return n_numbers * _NUMBER_S[0], n_numbers * _NUMBER_S[1]
    is_cached = call.operands[0].n_bytes(call.batch_size, call.precision) <= _CACHE_BYTES
    turns_s = _CACHED_TURN_S_fit if is_cached else _TURN_S
    forward_s, backward_s = (
        _n_turns(images) * max(turn_s, images.n_channels * channel_s)
        for turn_s, channel_s in zip(turns_s, _CHANNEL_TURN_S, strict=True)
    )
    return forward_s, backward_s


def _busy_part(images: _Images) -> float:
    """channels_last: which part of the device's threads has something to do."""
    n_rows = images.n_samples * images.n_pixels
    width = min(_largest_power(images.n_channels), _BLOCK_CHANNELS)
    height = min(_largest_power(math.ceil(n_rows / _READ_BY_THREAD)), _BLOCK_THREADS // width)
    width = min(_largest_power(images.n_channels), _BLOCK_THREADS // height)
    n_sharing = min(math.ceil(n_rows / (height * _READ_BY_THREAD)), _MOST_SHARING)
    n_blocks = math.ceil(images.n_channels / width) * (n_sharing if n_sharing >= _FEWEST_SHARING else 1)
    return min(1.0, n_blocks * width * height / (_FULL_BLOCKS_fit * _BLOCK_THREADS))


def _largest_power(number: int) -> int:
    """The largest power of 2 up to it."""
    return 1 << (number.bit_length() - 1)


def _n_turns(images: _Images) -> int:
    """contiguous: how many numbers a thread reads."""
    width = next((width for width in _NARROW_BLOCKS if images.n_pixels <= width), _BLOCK_THREADS)
    return math.ceil(images.n_pixels / width) * math.ceil(images.n_samples / (_BLOCK_THREADS // width))


RULES = {
    "aten.batch_norm.default": OpRule(
        by_channel(whole_batch=True),
        extra_saved_bytes=channel_statistics,
        fractions=_fractions,
        fixed_s=_fixed_s,
        **IMAGE_NORM,
    )
}
