"""Calls of the user's own blocks: modules of model.py, called as the model calls them.

    build_model on the meta device --forward on a micro-batch--> the arguments of every call of a block
    a copy of the block on the device, with tensors of the same shapes as arguments --> Call

A program without tensor and pipeline parallelism runs these modules. Their host code (keyword arguments, decorators,
checks) is slower than the generated one that computes the same.
"""

import copy
import enum
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from .generated import Compile
from .strides import Recorded, most_common, recorded, run_backward
from .timing import Call, tensors_of
from .values import fill_module, random_strided

# What a call cannot change. Other objects, such as caches of keys and values, grow from one call to the next.
UNCHANGING = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum, type)
TWO_SIZES = 2, 3  # micro-batches that tell what depends on the batch


class NotMeasurable(Exception):
    """A block that cannot be called by itself, and why."""


class OwnModel:
    """The user's model on the meta device, in one dtype; built when first asked for.

    `paths` are the blocks whose calls are wanted.
    """

    def __init__(self, overrides: dict[str, Any], paths: set[str], dtype: torch.dtype) -> None:
        self._overrides, self._paths, self._dtype = overrides, sorted(paths), dtype
        self._calls: dict[int, dict[str, list[Recorded]]] = {}

    def builder(
        self,
        own: dict[str, Any],
        batch_size: int,
        device: torch.device,
        compiled: Compile | None,
        *,
        float32_buffers: Collection[str] = (),
    ) -> Callable[[], Call]:
        """Makes copies of the block `own["path"]`, with arguments like those of most of `own["instances"]`.

        Raises: NotMeasurable, or whatever the user's code raises on meta tensors.
        """
        called = self._called(own, batch_size)
        kept_once = self._kept_once(own)
        block = self._model.get_submodule(own["path"])

        def build() -> Call:
            module = copy.deepcopy(block).to_empty(device=device)
            fill_module(module, self._dtype, float32_buffers=float32_buffers)
            if compiled is not None:
                module.forward = compiled(module.forward)
            real = functools.partial(_real, device=device, known={})
            given = real(called.arguments), real(called.named)
            once = [tensor for tensor, is_once in zip(tensors_of(given), kept_once, strict=True) if is_once]
            return Call(module, *given, kept_once=once, gradient_strides=called.layout.gradients)

        return build

    def _called(self, own: dict[str, Any], batch_size: int) -> Recorded:
        if batch_size not in self._calls:
            self._calls[batch_size] = self._captured(batch_size)
        calls = self._calls[batch_size]
        found = len(calls[own["path"]])
        if found != own["n_calls"]:
            raise NotMeasurable(
                f"{own['path']} is called {found} times by itself, but has {own['n_calls']} parts in the graph"
            )
        given = [calls[path][call] for path, call in own["instances"] if call < len(calls[path])]
        usual = most_common(call.layout for call in given)
        return next(call for call in given if call.layout == usual)

    def _kept_once(self, own: dict[str, Any]) -> list[bool]:
        """Of each tensor among the arguments, whether all blocks read the same: no gradient, no batch dim."""
        calls = (self._called(own, size) for size in TWO_SIZES)
        one, other = (tensors_of((call.arguments, call.named)) for call in calls)
        return [not a.requires_grad and a.shape == b.shape for a, b in zip(one, other, strict=True)]

    @functools.cached_property
    def _file(self) -> Any:
        return importlib.import_module("model")

    @functools.cached_property
    def _known_values(self) -> Any:
        return importlib.import_module("runtime.building.known_values")

    @functools.cached_property
    def _model(self) -> nn.Module:
        model: nn.Module = self._known_values.build_on_meta(lambda: self._file.build_model(**self._overrides))
        # `model.to(dtype)` would make complex buffers real.
        model._apply(lambda t: t.to(self._dtype) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
        return model.train()

    def _captured(self, batch_size: int) -> dict[str, list[Recorded]]:
        """Every call of the wanted blocks, in one pass of the whole model."""
        model = self._model
        batch, _ = importlib.import_module("runtime.input_pipeline.batches").tensors_in_place(
            self._file.make_batch(batch_size)
        )
        known = self._known_values.KnownValues()
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # as programs give it to the model
        inputs = _mapped(batch, functools.partial(_meta, dtype=self._dtype, known=known))
        with recorded(model, self._paths) as found:
            with known:
                if isinstance(inputs, dict):
                    outputs = model(**inputs)
                else:
                    outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
            run_backward(outputs)
        return found


def _meta(tensor: torch.Tensor, *, dtype: torch.dtype, known: Any) -> torch.Tensor:
    """A tensor of the batch on the meta device: floating in the compute dtype, or integers with known values."""
    if tensor.is_floating_point():
        return torch.empty_like(tensor, device="meta", dtype=dtype)
    meta = torch.empty_like(tensor, device="meta")
    known.remember(meta, tensor)
    return meta


def _real(value: Any, *, device: torch.device, known: dict[int, torch.Tensor]) -> Any:
    """Tensors of the same shapes and strides on the device; what was one tensor is one again, by `known`."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            made = random_strided(tensor.shape, tensor.stride(), like=tensor, device=device)
            known[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return known[id(tensor)]

    return _mapped(value, real)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors.

    Raises: NotMeasurable for an object that a call may change.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, UNCHANGING) or callable(value):
        return value
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    raise NotMeasurable(f"it is called with a {type(value).__name__}, which a call may change")
