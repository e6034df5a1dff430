"""What the user's optimizer keeps, and whether it computes with whole tensors: then it does something else with parts.

AdamW or SGD treats each element by itself. LARS, Adafactor and Muon take norms or products of a matrix, and those of a
shard are others. What `build_optimizer` returns is tried on a matrix and a bias: whole, and each half by itself.
One that fails on them may work on the model's own parameters, so that is told and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.graph import N_ADAM_STATES, WHOLE_OPTIMIZER, OpGraph
from autoplan.user_errors import USERS_ERRORS, users_place, what_failed

WIDTH, N_STEPS = 8, 2


def with_optimizer(graph: OpGraph, build_optimizer: Callable[[Any], Any]) -> OpGraph:
    """The graph, with what was found of the user's optimizer, or how it failed."""
    try:
        is_whole = computes_with_whole_tensors(build_optimizer)
    except USERS_ERRORS as error:
        return replace(graph, optimizer_failure=what_failed(error) + users_place(error))
    graph = replace(graph, n_optimizer_states=n_states_of(build_optimizer))
    return replace(graph, dissolved=(*graph.dissolved, WHOLE_OPTIMIZER)) if is_whole else graph


def computes_with_whole_tensors(build_optimizer: Callable[[Any], Any]) -> bool:
    """Whether halves of tensors are updated otherwise than the whole.

    Raises: what the user's optimizer does.
    """
    values, *gradients = _numbers()
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


def n_states_of(build_optimizer: Callable[[Any], Any]) -> int:
    """How many tensors of its size a matrix has as state: 2 of Adam, 1 of momentum; vectors and numbers do not count.

    Optimizers of torch tell by their `state`. Others, which may keep more elsewhere, count as Adam at least.

    Raises: what the user's optimizer does.
    """
    values, *gradients = _numbers()
    (matrix, _), optimizer = _stepped(build_optimizer, values, gradients)
    state = getattr(optimizer, "state", None)
    of_matrix = [kept for key, kept in state.items() if key is matrix] if isinstance(state, Mapping) else []
    kept = [item for one in of_matrix if isinstance(one, Mapping) for item in one.values()]
    n_found = sum(isinstance(item, Tensor) and item.numel() >= matrix.numel() for item in kept)
    is_of_torch = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    return n_found if is_of_torch else max(n_found, N_ADAM_STATES)


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
    return [parameter.detach() for parameter in _stepped(build_optimizer, values, gradients)[0]]


def _stepped(
    build_optimizer: Callable[[Any], Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[nn.Parameter], Any]:
    """The parameters after a step per gradient, and the optimizer."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = build_optimizer(list(parameters))
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return parameters, optimizer
