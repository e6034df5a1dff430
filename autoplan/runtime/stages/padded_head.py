"""The product of a head with padded classes: rows of logits then start where fast kernels need them to.

    weight [class, hidden]  ->  weight and rows of zeros [class + padding, hidden]
    logits [..., class + padding]  ->  logits [..., class], a view

The zeros are made anew in every forward pass, so weights and checkpoints have the classes of the model. Nothing reads
the logits of the padding, so its gradient is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CLASSES_OF_PADDED_ROWS = 64  # at multiples of 128 bytes with 16-bit numbers, a cache line of a GPU


def padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, computed with padded classes: x [..., hidden], weight [class, hidden] -> a view [..., class]."""
    logits = F.linear(x, with_padding(weight), None if bias is None else with_padding(bias))
    return logits[..., : weight.shape[0]]


def with_padding(tensor: torch.Tensor, *, dim: int = 0) -> torch.Tensor:
    """`tensor` with zeros behind its classes, which are its `dim`; itself where there are none to add."""
    n_missing = -tensor.shape[dim] % CLASSES_OF_PADDED_ROWS
    n_dims_behind = tensor.dim() - 1 - dim % tensor.dim()
    return F.pad(tensor, (0, 0) * n_dims_behind + (0, n_missing)) if n_missing else tensor


def pad_classes(head: nn.Module) -> None:
    """Let the product in `head`, a module of the user's that has one, be padded; names stay."""
    replace_linear(head, padded_linear)


def replace_linear(module: nn.Module, product: Callable[..., torch.Tensor]) -> None:
    """Let `product` take the place of `F.linear` while `module` runs; only `forward` is replaced, so names stay."""
    forward = module.forward

    @functools.wraps(forward)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        with _OtherLinear(product):
            return forward(*args, **kwargs)

    module.forward = replacing


class _OtherLinear(TorchFunctionMode):
    """While it is active, `product` takes the place of `F.linear`."""

    def __init__(self, product: Callable[..., torch.Tensor]) -> None:
        self._product = product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._product if func is F.linear else func)(*args, **(kwargs or {}))
