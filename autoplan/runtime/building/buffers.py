"""The dtype of buffers where a program computes in 16 bits.

    compute dtype    most: they meet activations, as after `model.to(dtype)`. Integers and masks of booleans stay.
    float32          running statistics of BatchNorm, to which a step adds less than 16 bits resolve, and what
                     `Config.float32_buffers` names: what forward itself widens, such as rotary frequencies

Running statistics that the user's own class gives to `F.batch_norm` outside of `nn.BatchNorm` are of the first kind,
where that class itself runs.
Checkpoints and exports hold each buffer in the dtype it has here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

STATISTICS = "running_mean", "running_var"


def cast_buffers(root: nn.Module, dtype: torch.dtype, *, kept: Collection[str] = ()) -> None:
    """Give the floating-point buffers of `root` this dtype, but those that stay.

    `kept` are names, or names with `*` in place of numbers.
    """
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            is_statistic = isinstance(module, _BatchNorm) and name in STATISTICS
            full_name = f"{path}.{name}" if path else name
            if not is_statistic and full_name not in kept and _without_numbers(full_name) not in kept:
                module._buffers[name] = buffer.to(dtype)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
