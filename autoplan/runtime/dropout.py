"""Dropout left out, so that a program can be compared with one process, where it would draw other masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

_NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
# Functions that drop at random: where they are looked up, and where they take the probability.
_DROPPING: tuple[tuple[Any, str, int, str], ...] = (
    *((home, name, 1, "p") for home in (F, torch) for name in _NAMES if hasattr(home, name)),
    (F, "scaled_dot_product_attention", 4, "dropout_p"),
    (F, "multi_head_attention_forward", 10, "dropout_p"),
    *((home, name, 5, "dropout") for home in (torch, torch._VF) for name in ("lstm", "gru")),
)


@contextmanager
def without_dropout() -> Iterator[None]:
    """What drops at random drops nothing inside, in every thread, so also where blocks are computed again.

    The functions themselves are replaced, as modes of torch are left in backward passes. A function that a model file
    imported by its name (`from torch.nn.functional import dropout`) goes on as it was.
    """
    with ExitStack() as stack:
        for home, name, position, keyword in _DROPPING:
            keeping = _keeping_all(getattr(home, name), position, keyword)
            stack.enter_context(patch.object(home, name, keeping))
        yield


def _keeping_all(function: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            return function(*args[:position], 0.0, *args[position + 1 :], **kwargs)
        return function(*args, **kwargs | {keyword: 0.0})

    return call
