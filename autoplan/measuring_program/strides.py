"""How what a block is given lies in memory, as in a pass of the whole model on the meta device: inputs and gradients.

Some of it is a view: a mask that is the same for all samples, a tensor whose dims are in another order. Kernels are
chosen by that, so a block is measured with tensors like those. Of blocks of one kind that see different ones, what most
of them see counts.
"""

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from .stand_ins import RankOfOne
from .timing import tensors_of
from .values import default_dtype, fill_module

Strides = tuple[tuple[int, ...], ...]  # of each tensor
_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides of the inputs of a call, and of the gradients of its results; none of these where they are not known."""

    inputs: Strides
    gradients: Strides | None


@dataclass(slots=True)
class Recorded:
    """One call of a block in a pass of the whole model."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    _gradients: list[tuple[int, ...] | None] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """How it lay in memory."""
        inputs = tuple(tensor.stride() for tensor in tensors_of((self.arguments, self.named)))
        known = tuple(strides for strides in self._gradients if strides is not None)
        return Layout(inputs, known if len(known) == len(self._gradients) else None)

    def add_results(self, results: Any) -> None:
        """Remember the gradients of what the call has made, once a backward pass knows them."""
        given = {id(tensor) for tensor in tensors_of((self.arguments, self.named))}
        for tensor in tensors_of(results):
            if tensor.requires_grad and id(tensor) not in given:
                self._gradients.append(None)
                remember = functools.partial(self._remember, len(self._gradients) - 1)
                tensor.register_hook(remember)  # type: ignore[no-untyped-call]

    def _remember(self, place: int, gradient: torch.Tensor) -> None:
        self._gradients[place] = gradient.stride()


@contextlib.contextmanager
def recorded(root: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Recorded]]]:
    """All calls of some modules of `root` inside, by path."""
    found: dict[str, list[Recorded]] = {path: [] for path in paths}
    hooks = []
    for path, calls in found.items():
        module = root.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(functools.partial(_record, calls), with_kwargs=True))
        hooks.append(module.register_forward_hook(functools.partial(_complete, calls)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _record(calls: list[Recorded], _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    calls.append(Recorded(arguments, dict(named)))


def _complete(calls: list[Recorded], _: nn.Module, arguments: tuple[Any, ...], results: Any) -> None:
    calls[-1].add_results(results)


def run_backward(outputs: Any) -> None:
    """The backward pass of outputs on the meta device, as far as operators run there."""
    roots = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    with contextlib.suppress(RuntimeError):
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


class StageStrides:
    """Strides of the inputs of blocks of generated models; a model runs once per micro-batch size.

    `inputs` and `float32_buffers` are those of the whole model.
    """

    def __init__(self, inputs: Sequence[dict[str, Any]], float32_buffers: Sequence[str], dtype: torch.dtype) -> None:
        self._inputs, self._float32_buffers, self._dtype = inputs, float32_buffers, dtype
        self._found: dict[tuple[str, int], dict[str, list[Layout]]] = {}

    def of(self, region: dict[str, Any], batch_size: int) -> Layout | None:
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

    def _captured(self, region: dict[str, Any], batch_size: int) -> dict[str, list[Layout]]:
        """By block, the layout of every call in one pass."""
        generated: Any = importlib.import_module(region["module"])
        tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
        meta = torch.device("meta")
        with default_dtype(self._dtype), meta:
            stage = generated.Stage0(tp).train()
        fill_module(stage, self._dtype, float32_buffers=self._float32_buffers)
        with recorded(stage, stage.BLOCKS) as found, contextlib.suppress(RuntimeError):
            run_backward(stage(*(_meta(described, batch_size, self._dtype) for described in self._inputs)))
        return {path: [call.layout for call in calls] for path, calls in found.items()}


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
