"""The user's `build_model`, called: numbers that it reads on the meta device, and its errors in the user's terms."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import InputError, UsageError
from autoplan.user_errors import USERS_ERRORS, user_frame

if TYPE_CHECKING:
    from torch import nn

_WITH_VALUES = "build_model{} to accept these --set values\n  fix: give values the model file knows"
_WITHOUT_VALUES = "build_model{} to build the model without arguments\n  fix: correct it"
_UNKNOWN_NAME = re.compile(r"got an unexpected keyword argument '(\w+)'")
# Of `item`, `tolist` and `cpu`, of NumPy, of a format, and of what counts values, as `nonzero`.
_LACKS_VALUES = re.compile(r"\b[Mm]eta (device type )?tensor|Tensor\.__format__|register_meta")
_ON_META = (  # messages of torch and NumPy, and what is expected in their place
    (
        _LACKS_VALUES,
        'numbers that have values: build_model runs under torch.device("meta"), where weights have none\n'
        '  fix: make them in Python, or by torch with device="cpu", as torch.linspace(0, 0.1, 6, device="cpu"); random'
        " ones also with generator=torch.Generator().manual_seed(0); decide nothing by the values of weights",
    ),
    (
        re.compile("incompatible tensor type"),
        'weights that stay where they are: build_model runs under torch.device("meta")\n'
        "  fix: write into them, as weight.data.copy_(x), or replace them by nn.Parameter(x)",
    ),
    (
        re.compile("is read-only"),
        "no writes into the array of a tensor\n  fix: write into a copy, as x.numpy().copy()",
    ),
)


def build_users_model(build_model: Callable[..., nn.Module], overrides: dict[str, Any], path: Path) -> nn.Module:
    """What `build_model` of the model file gives for the `--set` values.

    Raises: InputError with the line of the file that failed; UsageError for a value of no such name.
    """
    build = functools.partial(build_model, **overrides)
    try:
        return _build_knowing_numbers(build)
    except USERS_ERRORS as error:
        signature = inspect.signature(build_model)
        unknown = _UNKNOWN_NAME.search(str(error)) if isinstance(error, TypeError) else None
        if unknown and unknown[1] in overrides:
            raise UsageError.of(
                f"{path}: build_model",
                found=f"--set {' '.join(f'{k}={v}' for k, v in overrides.items())} ({error})",
                expected=f"build_model{signature}",
                fix="use a name that build_model accepts",
            ) from error
        called = f"build_model({', '.join(f'{k}={v!r}' for k, v in overrides.items())})"
        expected = (_WITH_VALUES if overrides else _WITHOUT_VALUES).format(signature)
        expected = next((told for message, told in _ON_META if message.search(str(error))), expected)
        raise InputError(f"{path}: {called} failed: {user_frame(error, path)}\n  expected: {expected}") from error


def _build_knowing_numbers(build: Callable[[], nn.Module]) -> nn.Module:
    """The model; on the meta device it may read numbers of small tensors that follow from constants.

    What knows them is imported only where some are read: that takes longer than a small model takes to trace.
    """
    try:
        return build()
    except (RuntimeError, TypeError) as error:
        if not _LACKS_VALUES.search(str(error)):
            raise
    from autoplan.runtime.building.known_values import build_with_values

    return build_with_values(build)
