"""The line of the user's code that calls an operator of a traced graph.

An export records the lines of `forward` methods alone. Where an error has to name a line of `loss_fn`, or of a function
that forward calls, the model runs once more, and the stack is read when the operator comes by.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.tracing.source_names import place_of
from autoplan.user_errors import USERS_ERRORS, users_line

Matches = Callable[[Any, list[Any]], bool]  # of an operator and its operands


def calling_place(node: torch.fx.Node, run: Callable[[], Any], *, reads: torch.Tensor | None = None) -> str:
    """` at FILE:LINE: TEXT` of the call that became `node`, found while `run` runs the model.

    It is the first of the same operator with the same numbers, or the first that is given a tensor like `reads`, which
    is told from parameters by its device. Where none comes by, it is the line that the export recorded.
    """
    recorded = place_of(node.meta.get("stack_trace") or "")
    if reads is not None and reads.device.type == "meta":
        return recorded
    return _watched(_same_numbers(node) if reads is None else _given(reads), run) or recorded


def reading_place(like: torch.Tensor, run: Callable[[], Any]) -> str:
    """Likewise of the first call that is given a tensor like this one; nothing where none comes by."""
    return _watched(_given(like), run)


def escaping_place(run: Callable[[], Any]) -> str:
    """Likewise of the first line, not torch's own, that reads or writes `.data`, and of that which takes gradients."""
    found: dict[str, str] = {}
    tensor: Any = torch.Tensor
    own: Any = torch._C.TensorBase.data
    take = torch.autograd.grad

    def note(what: str) -> None:
        if not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch."):
            found.setdefault(what, users_line(traceback.extract_stack()))

    def read(self: Any) -> Any:
        note("data")
        return own.__get__(self)

    def write(self: Any, value: Any) -> None:
        note("data")
        own.__set__(self, value)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note("gradients")
        return take(*args, **kwargs)

    tensor.data, torch.autograd.grad = property(read, write), noted
    try:
        with contextlib.suppress(*USERS_ERRORS):
            run()
    finally:
        del tensor.data
        torch.autograd.grad = take
    return " and".join(found[what] for what in ("data", "gradients") if what in found)


def _watched(matches: Matches, run: Callable[[], Any]) -> str:
    watch = Watch(matches, line=users_line)
    # Whatever the user's code raises: the error that is being made matters more.
    with contextlib.suppress(*USERS_ERRORS), torch.no_grad(), watch:
        run()
    return watch.place


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which line of the stack called the first operator that matches."""

    def __init__(self, matches: Matches, *, line: Callable[[traceback.StackSummary], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._matches, self._line = matches, line
        self.place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.place and self._matches(func, pytree.tree_leaves((args, kwargs))):
            self.place = self._line(traceback.extract_stack())
        return func(*args, **kwargs)


def _same_numbers(node: torch.fx.Node) -> Matches:
    numbers = _numbers(pytree.tree_leaves((node.args, node.kwargs)))
    return lambda func, leaves: func is node.target and _numbers(leaves) == numbers


def _given(reads: torch.Tensor) -> Matches:
    def matches(func: Any, leaves: list[Any]) -> bool:
        like = (reads.shape, reads.dtype, reads.device)
        return any(isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype, leaf.device) == like for leaf in leaves)

    return matches


def _numbers(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, int | float)]
