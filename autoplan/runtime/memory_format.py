"""In which order the numbers of images lie in memory: "contiguous", or "channels_last" for convolutions.

Only what goes into a model or stage is converted: the operators of torch hand the order on, and convolutions convert
their weights by themselves, which are small beside images (`fully_shard` takes contiguous parameters alone).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .data import map_tensors

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
IMAGE_DIMS = 4  # sample, channel, height, width


def take_images(module: nn.Module, memory_format: str) -> None:
    """Convert the images that `module` is called with."""
    if memory_format != "contiguous":
        convert = functools.partial(in_memory_format, memory_format=memory_format)
        module.register_forward_pre_hook(functools.partial(_converted, convert), with_kwargs=True)


def in_memory_format(tensor: torch.Tensor, memory_format: str) -> torch.Tensor:
    """The same numbers; tensors that are no images stay as they are."""
    if tensor.dim() != IMAGE_DIMS or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[memory_format])


def _converted(convert: Any, module: nn.Module, arguments: Any, named: Any) -> Any:
    return map_tensors(convert, arguments), map_tensors(convert, named)
