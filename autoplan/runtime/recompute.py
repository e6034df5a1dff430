"""Recompute: drop a module's activations after forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(root: nn.Module, names: Iterable[str]) -> None:
    """Recompute the submodules `names`; those that `root` lacks live in another pipeline stage and are skipped.

    Only `forward` is replaced, so the names of modules and parameters stay. Random state is restored for the second
    forward, so dropout draws the same mask; collectives inside the module run a second time.
    """
    modules = dict(root.named_modules())
    for name in names:
        if name in modules:
            module = modules[name]
            recomputed = functools.partial(checkpoint, module.forward, use_reentrant=False)
            module.forward = recomputed
