"""Where the user's own forward, run as it is, waits for the device: a branch on data stands in no CUDA graph.

An export does not tell: code may look at the values of tensors only where nothing traces it, as Hugging Face's looks
whether a batch holds packed sequences (`transformers.masking_utils`). So the model runs once more, without gradients,
on meta tensors, which stand for those of a device; the first operator that needs their values, which fails, is noted.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autoplan
from autoplan.tracing.places import Watch
from autoplan.user_errors import USERS_ERRORS

_NOT_THE_MODELS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (torch, autoplan) if package.__file__)
_aten = torch.ops.aten
_NEEDING_VALUES = frozenset(
    {
        _aten._local_scalar_dense,  # item, tolist, bool, int, float
        _aten.equal,
        _aten.nonzero,
        _aten.masked_select,
        _aten._unique2,
        _aten.unique_dim,
        _aten.unique_consecutive,
    }
)
COPIES_TO_HOST = "Cannot copy out of meta tensor"  # what torch says of cpu, tolist and the like


def waiting_place(run: Callable[[], Any]) -> str:
    """`FILE:LINE: TEXT` of what waits first while `run` runs the model on meta tensors; "" where nothing does.

    A run that fails for another reason tells nothing: what it would come to, the program notices before it captures.
    """
    watch = Watch(_needs_values, line=_innermost)
    try:
        with torch.no_grad(), watch:
            run()
    except USERS_ERRORS as error:
        if COPIES_TO_HOST in str(error):
            return watch.place or _innermost(traceback.extract_tb(error.__traceback__))
    return watch.place


def _needs_values(func: Any, leaves: list[Any]) -> bool:
    return func.overloadpacket in _NEEDING_VALUES and any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves
    )


def _innermost(stack: traceback.StackSummary) -> str:
    """`FILE:LINE: TEXT` of the innermost call that is neither torch's nor autoplan's."""
    frames = [own for own in stack if not own.filename.startswith((*_NOT_THE_MODELS, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "a module of torch"
