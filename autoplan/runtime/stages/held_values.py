"""What modules hold from step to step, apart from what their parameters contain: flags, numbers, which tensors.

A CUDA graph took all of it as it was. `Watched` says what has changed since. To say "nothing" it looks whether each
thing is the same object as before, which takes a tenth of the time of describing them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, starmap
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

MAX_DEPTH = 2  # of lists and dicts that modules hold
_ABSENT = object()  # None may be what was there
_IS_TRAINED = attrgetter("requires_grad")
_OF_THIS_RANK = attrgetter("_local_tensor")  # `to_local` would make a view
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_DESCRIBED = (torch.Tensor, int, float, str, dict, list, tuple, type(None), nn.Module)  # None: until there is something


class Watched:
    """What was held when this was made, by `root` and as `parameters`.

    Args:
        parameters: all that are trained on this rank, with their names; where they lie is watched, not what they
            contain.
    """

    def __init__(self, root: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        is_sharded = any(isinstance(module, FSDPModule) for module in root.modules())  # which swaps parameters
        frozen = [] if is_sharded else [item for item in root.named_parameters() if not item[1].requires_grad]
        self._root, self._names = root, [name for name, _ in (*parameters, *frozen)]
        self._parameters = [parameter for _, parameter in (*parameters, *frozen)]
        self._held = self._described()
        self._look_again()

    def changes(self) -> list[str]:
        """What is another since, in words."""
        if self._is_as_before():
            return []
        changes = changed_between(self._held, self._described(), when="since it was captured")
        if not changes:  # another object that is equal
            self._look_again()
        return changes

    def _look_again(self) -> None:
        self._containers = list(_containers(self._root))
        self._sizes = list(map(len, self._containers))
        dicts = [one for one in self._containers if isinstance(one, dict)]
        lists = [one for one in self._containers if not isinstance(one, dict)]
        self._of_dicts = [(d, key, _ABSENT) for d in dicts for key, value in d.items() if _is_watched(key, value)]
        self._of_lists = [(one, index) for one in lists for index, value in enumerate(one) if _is_watched(None, value)]
        self._values = list(self._values_now())
        tensors = [value for value in (*self._values, *self._parameters) if isinstance(value, torch.Tensor)]
        self._strided = [t for t in tensors if not isinstance(t, DTensor) and t.layout == torch.strided]
        self._sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._places = self._places_now()

    def _is_as_before(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # else asking a sharded parameter takes longer than all the rest
            return (
                list(map(len, self._containers)) == self._sizes
                and all(map(is_, self._values_now(), self._values))
                and self._places_now() == self._places
            )

    def _values_now(self) -> Iterator[Any]:
        """What lies where something was described: no loop of Python's, as the device waits for it in every step."""
        return chain(starmap(dict.get, self._of_dicts), starmap(getitem, self._of_lists))

    def _places_now(self) -> list[Any]:
        tensors = chain(self._strided, map(_OF_THIS_RANK, self._sharded))
        return [*map(torch.Tensor.data_ptr, tensors), *map(_IS_TRAINED, self._parameters)]

    def _described(self) -> dict[str, Any]:
        places: dict[str, list[Any]] = {}  # several of a name: copies of a tied weight, in stages of one rank
        for name, parameter in zip(self._names, self._parameters, strict=True):
            places.setdefault(f"parameter {name}", []).append(_place(parameter))
        return held_by(self._root) | places


def _place(parameter: nn.Parameter) -> tuple[int, bool]:
    """The address of the elements of this rank, and whether they are trained."""
    return _address(parameter), parameter.requires_grad


def _address(tensor: torch.Tensor) -> int:
    own = _OF_THIS_RANK(tensor) if isinstance(tensor, DTensor) else tensor
    return own.data_ptr() if own.layout == torch.strided else 0


def _is_watched(key: Any, value: Any) -> bool:
    return isinstance(value, _DESCRIBED) and key not in _OF_TORCH


def _containers(root: nn.Module) -> Iterator[Any]:
    """The dicts and lists in which what `held_by` describes lies."""
    for module in root.modules():
        yield vars(module)
        yield module._buffers
        yield module._modules
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                yield from _inner_containers(value, depth=MAX_DEPTH)


def _inner_containers(value: Any, *, depth: int) -> Iterator[Any]:
    if depth and isinstance(value, dict | list | tuple):
        if not isinstance(value, tuple) or not all(isinstance(item, int | float | str) for item in value):
            yield value  # a tuple of numbers stays what it is
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inner_containers(item, depth=depth - 1)


def changed_between(held: Mapping[str, Any], later: Mapping[str, Any], *, when: str = "in forward") -> list[str]:
    """Which of the things held have changed, in words."""
    names = dict.fromkeys((*held, *later))
    return [f"{name} changes {when}" for name in names if not _is_same(held.get(name), later.get(name))]


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, _Tensor) and isinstance(other, _Tensor):
        return value.tensor is other.tensor and value.address == other.address
    return value is other or (not isinstance(value, _Tensor) and value == other)


class _Tensor(NamedTuple):
    """Which tensor it is. It is kept, else another one may be made where it lay, and look the same."""

    tensor: torch.Tensor
    address: int


def held_by(root: nn.Module) -> dict[str, Any]:
    """By name the modules in modules, and the numbers, texts and tensors that these hold.

    Without parameters, which `fully_shard` swaps in each pass.
    """
    found: dict[str, Any] = {}
    for prefix, module in root.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        for name, value in (own | module._buffers | module._modules).items():
            found.update(_values(f"{prefix}.{name}".lstrip("."), value, depth=MAX_DEPTH))
    return found


def _values(name: str, value: Any, *, depth: int) -> Iterator[tuple[str, Any]]:
    """What is compared of a value, and of what lists and dicts have."""
    if isinstance(value, torch.Tensor):
        yield name, _Tensor(value, _address(value))
    elif isinstance(value, int | float | str | nn.Module):
        yield name, value
    elif depth and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(f"{name}.{key}", item, depth=depth - 1)
