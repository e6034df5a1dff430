"""The optimizer of a run: the user's own, or AdamW."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..refusal import Refusal
from ..stages.zero import local_part

LEARNING_RATE = 3e-4
_TAKES = (
    "build_optimizer takes a list of parameters, those of this rank, without their names and without the model; tell"
    " groups apart by the parameters themselves, such as p.ndim > 1 for those with weight decay"
)
# What torch says of an operation that its distributed tensors have not, or not in place.
_OF_DISTRIBUTED_TENSORS = (
    "Sharding propagation failed",
    "in-place operations that require placement changes",
    "does not have a sharding strategy",
)


class OptimizerError(Refusal):
    """What build_optimizer returned cannot train."""

    may_be_of_one_rank = True


class _LocalParts:
    """Adam that lists, first in a step of a group, what its kernels take: elements of this rank."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


class _Adam(_LocalParts, torch.optim.Adam):
    pass


class _AdamW(_LocalParts, torch.optim.AdamW):
    pass


_OF_LOCAL_PARTS: dict[type, type] = {torch.optim.Adam: _Adam, torch.optim.AdamW: _AdamW}


def build_optimizer_of(model_file: Any, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """The user's optimizer, or AdamW; of both see `hasten`.

    No optimizer takes an empty list, so where a rank trains nothing, all its stages being frozen, a parameter that
    never has a gradient stands in.

    Raises: OptimizerError when the user's function returns something else, or an optimizer whose steps need a closure.
    """
    parameters = parameters or [nn.Parameter(torch.zeros(1))]
    build_optimizer = getattr(model_file, "build_optimizer", None)
    if build_optimizer is None:
        return hasten(torch.optim.AdamW(parameters, lr=learning_rate))
    try:
        optimizer = build_optimizer(parameters)
    except Exception as error:
        error.add_note(_TAKES)
        raise
    return hasten(_checked(optimizer))


def hasten(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same; torch's own Adam and AdamW now compute with plain tensors: the elements that this rank holds.

    On a GPU they do it in one kernel, unless the user says how (`fused`, `foreach`). Left alone, torch goes over
    sharded parameters one by one, and handing over 300 of them as they are took the host 8.2 ms a step, this 1.4 (2
    cores, torch 2.13, 2026-11-22). Others keep state by what they are handed, or take norms of it.
    """
    if type(optimizer) in _OF_LOCAL_PARTS:
        optimizer.__class__ = _OF_LOCAL_PARTS[type(optimizer)]
        for group in optimizer.param_groups:
            if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
                group["fused"] = all(parameter.is_cuda for parameter in group["params"]) or None
    return optimizer


def _checked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, once a step of it takes no argument."""
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        fix = "end it by `return optimizer`"
        if isinstance(optimizer, tuple | list):
            fix = "return the optimizer alone; a scheduler is what build_scheduler(optimizer, n_steps) returns"
        raise OptimizerError(
            f"build_optimizer: found {_kind(optimizer)}\n"
            f"  expected: an optimizer, such as torch.optim.AdamW(params)\n  fix: {fix}"
        )
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        raise OptimizerError(
            f"build_optimizer: found {type(optimizer).__name__}, whose step needs a closure\n"
            "  expected: an optimizer whose step() takes the gradients that are there\n"
            "  fix: return one such as torch.optim.AdamW(params)"
        ) from None
    found: torch.optim.Optimizer = optimizer
    return found


def _kind(value: Any) -> str:
    """`None`, `a tuple`."""
    return "None" if value is None else f"a {type(value).__name__}"


@contextmanager
def naming_distributed_tensors() -> Iterator[None]:
    """Add to an error of an optimizer that cannot compute with parameters of data-parallel ranks what would do."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in _OF_DISTRIBUTED_TENSORS):
            error.add_note(
                "optimizer: its parameters are distributed tensors (DTensor) of all data-parallel ranks, which have no"
                " such operation\n"
                "  fix: plan with --fix zero=0,tp=1, which leaves them whole, or use another optimizer in"
                " build_optimizer (AdamW has all it needs)"
            )
        raise
