"""What loss_fn, or a model without one, returns: one tensor that training can start its backward pass from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.errors import InputError

LOSS = "a floating-point scalar from loss_fn(outputs, targets), or from the model itself"
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def check_returned(returned: Any, *, of: Any, where: str, has_loss_fn: bool) -> None:
    """Return when a run under autograd returned a tensor with a gradient; without loss_fn the first one is the loss.

    Raises: InputError naming what was returned; where nothing that it is made `of` has a gradient, none is missed.
    """
    leaves = [returned] if has_loss_fn else pytree.tree_leaves(returned)
    loss = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if loss is None:
        if has_loss_fn:
            found, fix = _no_tensor(returned)
            raise InputError.of(f"{where}: loss", found=found, expected=LOSS, fix=fix)
        return
    is_trained = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(of))
    if loss.dim() == 0 and is_trained and not loss.requires_grad:
        raise InputError.of(
            f"{where}: loss",
            found="a tensor without a gradient",
            expected="a loss that is computed from the model's parameters by differentiable operators",
            fix="leave out .detach(), .data, argmax, round and torch.no_grad() between the parameters and the loss",
        )


def _no_tensor(returned: Any) -> tuple[str, str]:
    """What was found in place of a tensor, and what to do."""
    alone = "return the loss alone, and compute other figures where you evaluate"
    if returned is None:
        return "None", "end loss_fn by `return loss`"
    if isinstance(returned, _NUMBERS):
        return f"a number, {type(returned).__name__}", "return the tensor itself, without .item() or float()"
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} of {', '.join(map(str, returned))}", alone
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {len(returned)}", alone
    return f"a {type(returned).__name__}", alone
