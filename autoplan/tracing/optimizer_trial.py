"""Whether the user's optimizer computes with whole tensors, so that it does something else with parts of them.

AdamW or SGD treats each element by itself. LARS, Adafactor and Muon take norms or products of a matrix, and those of a
shard are others. What `build_optimizer` returns is tried on a matrix and a bias: whole, and each half by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.user_errors import USERS_ERRORS

WIDTH, N_STEPS = 8, 2


def computes_with_whole_tensors(build_optimizer: Callable[[Any], Any]) -> bool:
    """Whether halves of tensors are updated otherwise than the whole; false where the optimizer cannot be tried."""
    values, *gradients = _numbers()
    try:
        whole = _trained(build_optimizer, values, gradients)
        return any(
            not torch.allclose(trained, expected)
            for dim in (0, 1)
            for half in (0, 1)
            for trained, expected in zip(
                _trained(build_optimizer, _half(values, dim, half), [_half(step, dim, half) for step in gradients]),
                _half(whole, dim, half),
                strict=True,
            )
        )
    except USERS_ERRORS:
        return False


def _numbers() -> list[tuple[Tensor, ...]]:
    """A matrix and a bias, and their gradients in each step."""
    generator = torch.Generator().manual_seed(0)
    shapes = (WIDTH, WIDTH), (WIDTH,)
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for _ in range(1 + N_STEPS)
    ]


def _half(tensors: Sequence[Tensor], dim: int, half: int) -> tuple[Tensor, ...]:
    """What one of two ranks has of a matrix split along `dim` and its bias, which goes with the rows."""
    matrix, bias = tensors
    return matrix.chunk(2, dim)[half].contiguous(), bias.chunk(2)[half] if dim == 0 else bias


def _trained(
    build_optimizer: Callable[[Any], Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = build_optimizer(list(parameters))
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
