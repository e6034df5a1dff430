"""In which order the numbers of images lie in memory: "contiguous", or "channels_last" for convolutions.

Only what goes into a model, stage or block is converted: the operators of torch hand the order on, the conversions of
tensor parallelism keep it, and convolutions convert their weights by themselves, which are small beside images
(`fully_shard` takes contiguous parameters alone).

Operators read the order from the strides, of which that of the first dim says nothing where there is one sample. A view
puts there what is next to it, as `fully_shard` does at every block, and torch then takes the images for contiguous:

    [1, 8, 16, 16]    in channels_last: (2048, 1, 128, 8)    after view_as: (8, 1, 128, 8)

So each block writes that stride anew (`plainly_channels_last`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .batches import flatten_tensors, map_tensors

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
IMAGE_DIMS = 4  # sample, channel, height, width
CHANNELS_BEHIND, CHANNELS_IN_FRONT = (0, 2, 3, 1), (0, 3, 1, 2)  # of [sample, channel, height, width], and back


def take_images(module: nn.Module, memory_format: str, *, blocks: Iterable[str] = ()) -> None:
    """Convert the images that `module` is called with, and keep their order plain in those that its blocks get."""
    if memory_format != "contiguous":
        convert = functools.partial(in_memory_format, memory_format=memory_format)
        module.register_forward_pre_hook(functools.partial(_converted, convert), with_kwargs=True)
        for block in {module.get_submodule(name) for name in blocks} - {module}:
            block.register_forward_pre_hook(_made_plain, with_kwargs=True)


def in_memory_format(tensor: torch.Tensor, memory_format: str) -> torch.Tensor:
    """The same numbers; tensors that are no images stay as they are."""
    if tensor.dim() != IMAGE_DIMS or not tensor.is_floating_point():
        return tensor
    return plainly_channels_last(tensor.contiguous(memory_format=_FORMATS[memory_format]))


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether these are images in channels_last and in no other order."""
    if tensor.dim() != IMAGE_DIMS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def plainly_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; images in channels_last get the strides that every operator takes for it."""
    if not _is_unclear(tensor):
        return tensor
    behind = tensor.permute(CHANNELS_BEHIND)
    return behind.view_as(behind).permute(CHANNELS_IN_FRONT)


def _is_unclear(tensor: torch.Tensor) -> bool:
    return is_channels_last(tensor) and tensor.stride(0) != tensor.shape[1:].numel()


def _converted(convert: Any, module: nn.Module, arguments: Any, named: Any) -> Any:
    return map_tensors(convert, arguments), map_tensors(convert, named)


def _made_plain(module: nn.Module, arguments: Any, named: Any) -> Any:
    """What a block gets; the very same objects where nothing is unclear, since a block may write into a list."""
    if not any(map(_is_unclear, flatten_tensors((arguments, named)))):
        return None
    return _converted(plainly_channels_last, module, arguments, named)
