"""`torch.autocast(x.device.type)` while a model is traced: torch has none for "meta", but for what programs run on.

It becomes that of CUDA, by which no operator on meta tensors casts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Inside, autocast takes "meta" as a device, and so do the questions about it."""
    autocast = torch.amp.autocast_mode.autocast
    places: list[tuple[Any, str]] = [
        (autocast, "__init__"),
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch.amp, "is_autocast_available"),
    ]
    saved = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, saved, strict=True):
        setattr(owner, name, _for_cuda(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, saved, strict=True):
            setattr(owner, name, function)


def _for_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_device, args), **{name: _device(value) for name, value in kwargs.items()})

    return called


def _device(value: Any) -> Any:
    return "cuda" if isinstance(value, str) and value == "meta" else value
