"""Writes in place that autograd refuses: an export makes new values of them, and the program fails in its first step.

    y = exp(x); z = linear(y); y.add_(1)     both exp and linear need y as it was

So a model that writes numbers in place also runs forward and backward on meta tensors. They have no values, but count
how often they were written, which is what autograd compares.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.errors import TraceError
from autoplan.user_errors import USERS_ERRORS, users_line

_REFUSED = re.compile(r"in-?place")
_FOUND = re.compile(r"\[\w+ \[([\d, ]*)\]\].*expected version (\d+)")


def writes_numbers(graph: torch.fx.Graph) -> bool:
    """Whether an operator of an export writes into a floating-point tensor."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            values = [own.meta.get("val") for own in node.all_input_nodes[:1]]
            if any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
                return True
    return False


def refuse_what_autograd_refuses(run: Callable[[], Any], parameters: Sequence[torch.Tensor], *, where: str) -> None:
    """Return when autograd takes a model's writes in place; `run` gives its loss on meta tensors.

    Raises: TraceError with the line that writes. What fails for another reason tells nothing.
    """
    written = _Written()
    try:
        with written:
            loss = run()
        torch.autograd.grad(loss, parameters, allow_unused=True)
    except USERS_ERRORS as error:
        text = str(error).partition(" Hint:")[0]
        if isinstance(error, RuntimeError) and _REFUSED.search(text):
            found = re.sub(r"\[Meta\w+ (\[[\d, ]*\])\]", r"a tensor of shape \1", text)
            raise TraceError(
                f"{where}: autograd refuses a write in place{written.place(text)}\n"
                f"  found: {found}\n"
                "  expected: values that stay as they are until the backward pass has read them\n"
                "  fix: make a new tensor in this line, such as y = y + 1 in place of y.add_(1) or y += 1"
            ) from error


class _Write(NamedTuple):
    shape: str  # as autograd tells it
    version: int
    place: str


class _Written(TorchFunctionMode):
    """Notes where tensors are written."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: list[_Write] = []

    def place(self, text: str) -> str:
        """Where the tensor of an error was written first that should not have been; "" if that is not known."""
        if (found := _FOUND.search(text)) is None:
            return ""
        later = [own for own in self._writes if own.version == int(found[2]) + 1]
        alike = [own for own in later if own.shape == found[1]]
        return next((own.place for own in alike or later), "")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        before = [own._version for own in given]
        result = func(*args, **(kwargs or {}))
        for own, version in zip(given, before, strict=True):
            if own._version != version:
                shape = ", ".join(map(str, own.shape))
                self._writes.append(_Write(shape, own._version, users_line(traceback.extract_stack())))
        return result
