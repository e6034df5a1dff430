"""The user's model and loss as functions: of inputs in any form, and of outputs that may hold the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..mesh import RankMesh
from .batches import flatten_tensors, map_tensors


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the user's model with its inputs: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_of(
    loss_fn: Callable[..., torch.Tensor] | None, outputs: Any, targets: Any, *, widens: bool = True
) -> torch.Tensor:
    """The loss of a model's outputs, computed in float32 or better; unless it `widens`, `loss_fn` sees to that itself.

    Without a `loss_fn` the outputs are the loss, or hold it: as "loss", or as the first of their tensors.
    """
    if loss_fn is not None:
        return loss_fn(map_tensors(_at_least_float32, outputs) if widens else outputs, targets)
    if isinstance(outputs, torch.Tensor):
        return outputs
    named = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    return named if isinstance(named, torch.Tensor) else flatten_tensors(outputs)[0]


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def loss_function(model_file: Any, parallel_model: Any | None, mesh: RankMesh) -> Callable[[Any, Any], torch.Tensor]:
    """(outputs, targets) -> loss, of the generated program if there is one."""
    generated = getattr(parallel_model, "loss_fn", None)
    if generated is not None:
        return generated_loss(generated, mesh.tp_group)
    return functools.partial(loss_of, getattr(model_file, "loss_fn", None))


def generated_loss(loss_fn: Callable[..., torch.Tensor], tp: Any) -> Callable[[Any, Any], torch.Tensor]:
    """(outputs, targets) -> loss, of the `loss_fn` of a generated program."""

    def call(outputs: Any, targets: Any) -> torch.Tensor:
        return loss_fn(outputs, targets, tp)

    return functools.partial(loss_of, call, widens=not getattr(loss_fn, "takes_16_bits", False))
