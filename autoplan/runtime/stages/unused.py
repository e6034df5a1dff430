"""Parameters that a forward pass leaves out, where control flow depends on data.

Data-parallel ranks reduce gradients together, so each must have a gradient for the same parameters, whichever way its
own samples took. What a micro-batch did not use gets a gradient of zeros; what no rank used in the whole step gets none
in the end, as in one process, so that the optimizer leaves it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class UnusedParameters:
    """Which trainable parameters of `root` a step has used; all data-parallel ranks call the same methods."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._used: set[int] = set()

    def start_step(self) -> None:
        """Forget the step before."""
        self._used.clear()

    def complete(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss, whose backward pass also reaches every parameter that it does not depend on, with zeros."""
        parameters = [parameter for parameter in self._root.parameters() if parameter.requires_grad]
        used = _leaves(loss)
        self._used |= {index for index, parameter in enumerate(parameters) if id(parameter) in used}
        unused = [parameter for parameter in parameters if id(parameter) not in used]
        completed: torch.Tensor = _WithZeroGradients.apply(loss, *unused)  # type: ignore[no-untyped-call]
        return completed

    def drop_gradients(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Take the gradient from what no rank used; `parameters` are those of the root, in order."""
        was_used = torch.zeros(len(parameters), dtype=torch.int32)
        was_used[sorted(self._used)] = 1
        was_used = was_used.to(device)
        dist.all_reduce(was_used, op=dist.ReduceOp.MAX)
        for parameter, is_used in zip(parameters, was_used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None


class _WithZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _leaves(loss: torch.Tensor) -> set[int]:
    """The ids of the tensors that a backward pass of `loss` gives gradients to."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found
