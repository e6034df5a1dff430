"""`nn.SyncBatchNorm` while a model is traced: the ops are those of one process, and the graph says that it is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronizes_batch_norm(model: nn.Module) -> bool:
    """Whether a model in training mode would take statistics over ranks, which one process does not show."""
    return any(isinstance(module, nn.SyncBatchNorm) and module.training for module in model.modules())


@contextlib.contextmanager
def batch_norm_of_one_process() -> Iterator[None]:
    """Inside, `nn.SyncBatchNorm` does not look for other ranks, of which a process may have joined a group."""
    cls: Any = nn.SyncBatchNorm
    saved, cls.forward = cls.forward, _BatchNorm.forward
    try:
        yield
    finally:
        cls.forward = saved
