"""Dropout left out, so that a program can be compared with one process, where it would draw other masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

_Place = int | Callable[[tuple[Any, ...]], int]  # of an argument, which may depend on all of them


def _behind_weights(args: tuple[Any, ...]) -> int:
    """Of recurrent layers: the third argument after the weights, and these are the last sequence of tensors.

    (input, hx, weights, has_biases, num_layers, dropout, ...); packed samples have their sizes as a second argument.
    """
    return 3 + max(place for place, given in enumerate(args) if isinstance(given, tuple | list))


_NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Functions that drop at random: where they are looked up, and where they take the probability.
_DROPPING: tuple[tuple[Any, str, _Place, str], ...] = (
    *((home, name, 1, "p") for home in (F, torch) for name in _NAMES if hasattr(home, name)),
    (F, "scaled_dot_product_attention", 4, "dropout_p"),
    (F, "multi_head_attention_forward", 10, "dropout_p"),
    *((home, name, _behind_weights, "dropout") for home in (torch, torch._VF) for name in _RECURRENT),
)


@contextmanager
def without_dropout() -> Iterator[None]:
    """What drops at random drops nothing inside, in every thread, so also where blocks are computed again.

    The functions themselves are replaced, as modes of torch are left in backward passes. A function that a model file
    imported by its name (`from torch.nn.functional import dropout`) goes on as it was.
    """
    with ExitStack() as stack:
        for home, name, place, keyword in _DROPPING:
            keeping = _keeping_all(getattr(home, name), place, keyword)
            stack.enter_context(patch.object(home, name, keeping))
        yield


def _keeping_all(function: Callable[..., Any], place: _Place, keyword: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        position = place if isinstance(place, int) else place(args)
        if len(args) > position:
            return function(*args[:position], 0.0, *args[position + 1 :], **kwargs)
        return function(*args, **kwargs | {keyword: 0.0})

    return call
