"""Recompute: drop a module's activations after forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(root: nn.Module, names: Iterable[str]) -> None:
    """Recompute the submodules `names`; those that `root` lacks live in another pipeline stage and are skipped.

    Only `forward` is replaced, so the names of modules and parameters stay. Random state is restored for the second
    forward, so dropout draws the same mask, and what it writes into buffers is forgotten, so running statistics advance
    once; collectives inside the module run a second time.
    """
    modules = dict(root.named_modules())
    for name in names:
        if name in modules:
            module = modules[name]
            contexts = functools.partial(_contexts, module)
            recomputed = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
            module.forward = recomputed


@contextmanager
def unchanged_buffers(root: nn.Module) -> Iterator[None]:
    """Forward passes inside write into copies of the buffers of `root`, which are then dropped."""
    held = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
    for module, name, buffer in held:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the first and of the second forward pass."""
    return nullcontext(), unchanged_buffers(module)
