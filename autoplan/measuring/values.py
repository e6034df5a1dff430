"""Values that weights and tables have while they are measured."""

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WEIGHT_STD = 0.02


@torch.no_grad()
def fill(weight: torch.Tensor) -> None:
    """Values of the size that training has: what a device draws, and so how fast it runs, depends on them."""
    weight.normal_(std=WEIGHT_STD) if weight.dim() > 1 else weight.fill_(1.0)


def fill_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Values for all its weights and buffers; floating buffers take the dtype, as in a program."""
    for parameter in module.parameters():
        fill(parameter)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = (buffer.to(dtype) if buffer.is_floating_point() else buffer).fill_(1)
