"""The optimizer of a run: the user's own, or AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LEARNING_RATE = 3e-4


def build_optimizer_of(model_file: Any, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """The user's optimizer, or AdamW, in one kernel on an accelerator (it would loop over sharded parameters)."""
    build_optimizer = getattr(model_file, "build_optimizer", None)
    if build_optimizer is not None:
        optimizer: torch.optim.Optimizer = build_optimizer(parameters)
        return optimizer
    is_fused = any(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=learning_rate, fused=is_fused or None)
