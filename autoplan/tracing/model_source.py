"""What there is to trace: the functions of a model file, or a live module."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import InputError
from autoplan.tracing.batches import as_given
from autoplan.tracing.local_modules import check_model_file, search_beside
from autoplan.tracing.model_building import build_users_model
from autoplan.user_errors import USERS_ERRORS, check_takes, import_failure


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model file (or a library call) gives to trace.

    Attributes:
        where: what an error names: the path of the file, or the class of the module.
        make_batch: batch size -> (inputs, targets).
        loss_fn: None when the model returns its loss.
        has_overrides: whether build_model is given --set values.
        build_optimizer: the user's own, if any: parameters -> optimizer.
        buffers: of a module that has values, those of its buffers.
    """

    name: str
    where: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    has_overrides: bool = False
    build_optimizer: Callable[[Any], Any] | None = None
    buffers: Callable[[], dict[str, torch.Tensor]] | None = None


def load_model_file(path: Path) -> ModuleType:
    """Import a model file and check that it has the required functions. It runs the user's code.

    Raises: InputError when the file is missing, fails to import, or lacks a function, or one takes other arguments.
    """
    check_model_file(path)
    search_beside(path)
    spec = importlib.util.spec_from_file_location(f"autoplan_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except USERS_ERRORS as error:
        raise InputError(import_failure(path, error)) from error
    for name, signature in (
        ("build_model", "(**overrides) -> nn.Module"),
        ("make_batch", "(batch_size) -> (inputs, targets)"),
    ):
        if not callable(getattr(module, name, None)):
            functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
            raise InputError.of(
                f"{path}: {name}",
                found="functions: " + (", ".join(functions) or "none"),
                expected=f"a function {name}{signature}",
                fix=f"add `def {name}` to the file; examples/mlp.py is the shortest example",
            )
    for name, arguments in (("build_optimizer", ("params",)), ("build_scheduler", ("optimizer", "n_steps"))):
        if hasattr(module, name):
            check_takes(getattr(module, name), name, arguments, where=str(path))
    return module


def model_source(path: Path, overrides: dict[str, Any]) -> ModelSource:
    """The source to trace for a model file with `--set` overrides."""
    module = load_model_file(path)
    return ModelSource(
        name=path.stem,
        where=str(path),
        build_model=lambda: build_users_model(module.build_model, overrides, path),
        make_batch=module.make_batch,
        loss_fn=getattr(module, "loss_fn", None),
        has_overrides=bool(overrides),
        build_optimizer=getattr(module, "build_optimizer", None),
    )


def module_source(
    module: nn.Module, example_batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor] | None
) -> ModelSource:
    """The source to trace for a live module; `example_batch` is (inputs, targets), first dim = batch."""

    def make_batch(batch_size: int) -> tuple[Any, Any]:
        return pytree.tree_map(lambda t: torch.zeros(batch_size, *t.shape[1:], dtype=t.dtype), as_given(example_batch))

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return ModelSource(
        name=type(module).__name__.lower(),
        where=type(module).__name__,
        build_model=lambda: copy.deepcopy(module, dict(memo)),
        make_batch=make_batch,
        loss_fn=loss_fn,
        buffers=lambda: {name: own.cpu() for name, own in module.named_buffers() if not own.is_meta},
    )
