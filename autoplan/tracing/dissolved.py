"""What a user's forward does that its traced graph does not hold: it dissolves while `torch.export` follows the code.

- checkpoint: `torch.utils.checkpoint.checkpoint` calls its function, and the graph holds what that one computes.
- autocast: `torch.autocast` becomes a sub-graph without casts, which is then inlined.

Both are seen where torch itself passes through, because their names are bound wherever somebody imported them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint


@contextlib.contextmanager
def watch_dissolved() -> Iterator[set[str]]:
    """A set that learns which of "checkpoint" and "autocast" the code inside uses; autocast counts when it is on."""
    found: set[str] = set()
    with _watch_checkpoint(found), _watch_autocast(found):
        yield found


@contextlib.contextmanager
def _watch_checkpoint(found: set[str]) -> Iterator[None]:
    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.add("checkpoint")
            return function(*args, **kwargs)

        return noted

    module: Any = torch.utils.checkpoint
    saved = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = noting(saved[0])
    module.CheckpointFunction = SimpleNamespace(apply=noting(saved[1].apply))
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = saved


@contextlib.contextmanager
def _watch_autocast(found: set[str]) -> Iterator[None]:
    """By what is asked for, since autocast for a device that this machine lacks is off."""
    autocast: Any = torch.amp.autocast_mode.autocast
    init, enter = autocast.__init__, autocast.__enter__

    def noted_init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kw: Any) -> None:
        found.update(["autocast"] if enabled else [])
        init(self, device_type, dtype, enabled, *args, **kw)

    def noted_enter(self: Any) -> Any:
        found.update(["autocast"] if self._enabled else [])
        return enter(self)

    autocast.__init__, autocast.__enter__ = noted_init, noted_enter
    try:
        yield
    finally:
        autocast.__init__, autocast.__enter__ = init, enter
