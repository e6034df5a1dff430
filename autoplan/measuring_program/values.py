"""Values that weights and tables have while they are measured."""

import contextlib
import importlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

WEIGHT_STD = 0.02


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside it floating-point tensors get this dtype unless they ask for one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def fill(weight: torch.Tensor) -> None:
    """Values of the size that training has: what a device draws, and so how fast it runs, depends on them."""
    weight.normal_(std=WEIGHT_STD) if weight.dim() > 1 else weight.fill_(1.0)


def random_strided(
    shape: Sequence[int], strides: Sequence[int], *, like: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """Normal values, true, or 0, which is the one integer that every table has; on the device of `like` or this one."""
    elements = torch.empty(n_elements(shape, strides), dtype=like.dtype, device=device or like.device)
    if like.is_floating_point() or like.is_complex():
        elements.normal_()
    else:
        elements.fill_(like.dtype == torch.bool)
    return elements.as_strided(shape, strides)


def n_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements a tensor of this shape and these strides spans."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def fill_module(module: nn.Module, dtype: torch.dtype, *, float32_buffers: Collection[str]) -> None:
    """Values for all its weights and buffers; these take the dtype, but those named, as in a program.

    Biases are 0: what all tokens had in common would send them to the same experts of a mixture.
    """
    for name, parameter in module.named_parameters():
        if "bias" in name.rpartition(".")[2]:
            nn.init.zeros_(parameter)
        else:
            fill(parameter)
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(torch.float32 if is_16_bit else dtype)
    if is_16_bit:
        buffers: Any = importlib.import_module("runtime.building.buffers")
        batch_norm: Any = importlib.import_module("runtime.stages.batch_norm")
        buffers.cast_buffers(module, dtype, kept=float32_buffers)
        batch_norm.normalize_in_float32(module)
    for buffer in module.buffers():
        buffer.fill_(1)
