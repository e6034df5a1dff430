"""How what a generated block is called with lies in memory, as in a pass of the whole model on the meta device.

Some of it is a view: a mask that is the same for all samples, a tensor whose dims are in another order. Kernels are
chosen by that, so a block is measured with tensors like those. Of blocks of one kind that see different ones, what most
of them see counts.
"""

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .stand_ins import RankOfOne
from .values import default_dtype, fill_module

Strides = tuple[tuple[int, ...], ...]  # of each input
_Value = TypeVar("_Value", bound=Hashable)


class StageStrides:
    """Strides of the inputs of blocks of generated models; a model runs once per micro-batch size.

    `inputs` and `float32_buffers` are those of the whole model.
    """

    def __init__(self, inputs: Sequence[dict[str, Any]], float32_buffers: Sequence[str], dtype: torch.dtype) -> None:
        self._inputs, self._float32_buffers, self._dtype = inputs, float32_buffers, dtype
        self._found: dict[tuple[str, int], dict[str, list[Strides]]] = {}

    def of(self, region: dict[str, Any], batch_size: int) -> Strides | None:
        """Those of a region at a micro-batch size.

        None where it is no block, or where the model has an operator that refuses this dtype on the meta device, as
        torch's grouped products do.
        """
        if not region["instances"]:
            return None
        key = region["module"], batch_size
        if key not in self._found:
            self._found[key] = self._captured(region, batch_size)
        calls = self._found[key]
        instances = [calls[path][call] for path, call in region["instances"] if call < len(calls[path])]
        return most_common(instances) if instances else None

    def _captured(self, region: dict[str, Any], batch_size: int) -> dict[str, list[Strides]]:
        """By block, the strides of every call in one forward pass."""
        generated: Any = importlib.import_module(region["module"])
        tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
        meta = torch.device("meta")
        with default_dtype(self._dtype), meta:
            stage = generated.Stage0(tp).train()
        fill_module(stage, self._dtype, float32_buffers=self._float32_buffers)
        found: dict[str, list[Strides]] = {path: [] for path in stage.BLOCKS}
        for path, calls in found.items():
            stage.get_submodule(path).register_forward_pre_hook(functools.partial(_remember, calls))
        with contextlib.suppress(RuntimeError):
            stage(*(_meta(described, batch_size, self._dtype) for described in self._inputs))
        return found


def _remember(calls: list[Strides], _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    calls.append(tuple(tensor.stride() for tensor in inputs))


def _meta(described: dict[str, Any], batch_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape_of(described, batch_size), dtype=dtype_of(described, dtype), device="meta")


def shape_of(described: dict[str, Any], batch_size: int) -> list[int]:
    """The shape of an input that measurement.json describes."""
    return [extent["per_sample"] * batch_size if isinstance(extent, dict) else extent for extent in described["shape"]]


def dtype_of(described: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Its dtype, in this compute dtype."""
    found: torch.dtype = dtype if described["dtype"] == "compute" else getattr(torch, described["dtype"])
    return found


def most_common(values: Iterable[_Value]) -> _Value:
    """The value that is there most often, the first of those."""
    return Counter(values).most_common(1)[0][0]


def n_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements a tensor of this shape and these strides spans."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
