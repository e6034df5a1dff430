"""Meta tensors whose values are known: what follows from constants and from the integers of a batch.

A model may look at them while it is built: `[x.item() for x in torch.linspace(0, 0.1, depth)]` are the rates of its
blocks. A forward pass may too: Hugging Face leaves an attention mask out when all of it is true.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MAX_ELEMENTS = 2**27  # of a tensor whose values are kept
MAX_ELEMENTS_WHILE_BUILT = 2**16  # likewise while a model is built: numbers that it reads, and none of its weights
_aten = torch.ops.aten
_OVERWRITE = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default}


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The user's model on the meta device, where it may read numbers of small tensors that follow from constants."""
    with torch.device("meta"), suppress(RuntimeError, TypeError):  # what is not for lack of values is raised again
        return build_model()
    return build_with_values(build_model)


def build_with_values(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Likewise, of a model that is known to read numbers, which takes longer."""
    with torch.device("meta"), KnownValues(MAX_ELEMENTS_WHILE_BUILT) as known, NumbersOnHost(known):
        return build_model()


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, operators on meta tensors with known values run on the CPU too; `item`, `tolist` and `cpu`
    answer. Random numbers are not known, nor tensors of more than `max_elements`.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_elements = max_elements
        # By address of the memory of meta tensors, which all views of it share: that, kept alive, and its values.
        self._known: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def remember(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """The values of a meta tensor."""
        self._allocate(meta)
        self._value(meta).copy_(value)

    def remember_given(self, meta: torch.Tensor, numbers: Any) -> None:
        """Those of a meta tensor that was made of numbers, arrays and tensors."""
        if self.knows(numbers) and self._can_keep(meta) and not self._knows(meta):
            self.remember(meta, torch.as_tensor(self.real(numbers), dtype=meta.dtype, device="cpu"))

    def knows(self, arguments: Any) -> bool:
        """Whether the values of all meta tensors among some arguments are known."""
        return all(map(self._knows, _metas(arguments)))

    def real(self, arguments: Any) -> Any:
        """The same arguments on the CPU; of meta tensors that `knows`."""

        def real(leaf: Any) -> Any:
            if _is_meta(leaf):
                return self._value(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(real, arguments)

    def _knows(self, meta: torch.Tensor) -> bool:
        return _is_plain(meta) and _address(meta) in self._known

    def _can_keep(self, meta: torch.Tensor) -> bool:
        return _is_plain(meta) and meta.numel() <= self._max_elements

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OVERWRITE and self._can_keep(args[0]) and _is_whole(args[0]) and self.knows(args[1:]):
            self._allocate(args[0])
        metas = _metas((args, kwargs))
        is_known = all(map(self._knows, metas)) and _follows_from_arguments(func, args)
        if is_known and metas and _is_read(func, kwargs):
            return func(*self.real(args), **self.real(kwargs))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # shapes that follow from values, as of `nonzero`
            if not is_known:
                raise
            return pytree.tree_map(self._as_meta, func(*self.real(args), **self.real(kwargs)))
        made = _metas(result)
        is_new = [not self._knows(meta) for meta in made]  # what is not is a view of another, or was written into
        if is_known and made and all(self._can_keep(meta) for meta, new in zip(made, is_new, strict=True) if new):
            values = pytree.tree_leaves(func(*self.real(args), **self.real(kwargs)))
            values = [value for value in values if isinstance(value, torch.Tensor)]
            for meta, value, new in zip(made, values, is_new, strict=True):
                if new:
                    self.remember(meta, value)
        elif func._schema.is_mutable:
            for meta in filter(_is_plain, _metas(_written(func, args, kwargs))):
                self._known.pop(_address(meta), None)
        return result

    def _allocate(self, meta: torch.Tensor) -> None:
        memory = meta.untyped_storage()
        if _address(meta) not in self._known:
            values = torch.empty(memory.nbytes(), dtype=torch.uint8, device="cpu")
            self._known[_address(meta)] = memory, values.untyped_storage()

    def _value(self, meta: torch.Tensor) -> torch.Tensor:
        """What is known of it: a view of the memory that stands for its own."""
        values = self._known[_address(meta)][1]
        whole = torch.empty(0, dtype=meta.dtype, device="cpu")
        value = whole.set_(values, meta.storage_offset(), meta.size(), meta.stride())
        value = value.conj() if meta.is_conj() else value
        return torch._neg_view(value) if meta.is_neg() else value

    def _as_meta(self, value: Any) -> Any:
        """A tensor of the CPU as one on the meta device, whose values are known; what else there is as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        meta = torch.empty_like(value, device="meta")
        if self._can_keep(meta):
            self.remember(meta, value)
        return meta


class NumbersOnHost(TorchFunctionMode):
    """While it is active, tensors on other devices become NumPy arrays and text, too, as on the CPU.

    An array is then a copy, and read-only, since what is written into it would not reach the tensor. Numbers that no
    operator shows, those of `torch.tensor([...])` and of `x[[0, 2]]`, are told to `known`.
    """

    def __init__(self, known: KnownValues | None = None) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ and not args[0].is_cpu:
            result = func(args[0].cpu(), *args[1:], **kwargs)
            if func is not torch.Tensor.__format__:
                result.flags.writeable = False
            return result
        if self._known is None:
            return func(*args, **kwargs)
        if func in _INDEXED:
            args = (args[0], _index_on_host(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if func in _GIVEN and _is_meta(result):
            given = args[1:] if func is torch.Tensor.new_tensor else args
            self._known.remember_given(result, given[0] if given else kwargs.get("data", kwargs.get("obj")))
        return result


_READ = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_GIVEN = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


def _index_on_host(index: Any) -> Any:
    """An index whose lists of integers are tensors."""
    if isinstance(index, tuple):
        return tuple(map(_index_on_host, index))
    is_numbers = isinstance(index, list) and index and all(isinstance(number, int) for number in index)
    return torch.tensor(index, device="cpu") if is_numbers else index


def _metas(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if _is_meta(leaf)]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _is_plain(meta: torch.Tensor) -> bool:
    """Whether it has memory of its own kind: a sparse tensor consists of others."""
    return meta.layout is torch.strided


def _address(meta: torch.Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Those arguments of an operator that it writes into."""
    given = {own.name: value for own, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [given[own.name] for own in func._schema.arguments if own.is_write and own.name in given]


def _is_whole(value: Any) -> bool:
    """Whether it is a meta tensor and all of its memory."""
    return _is_meta(value) and value.numel() * value.itemsize == value.untyped_storage().nbytes()


def _follows_from_arguments(func: Any, args: Any) -> bool:
    """Whether an operator draws no random numbers, and takes memory of tensors only."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return not is_random and not any(isinstance(leaf, torch.UntypedStorage | torch.TypedStorage) for leaf in args)


def _is_read(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator brings values to the host: `item`, `equal`, and `cpu`, by which `tolist` reads."""
    if func is _aten._to_copy.default:
        return kwargs.get("device") == torch.device("cpu")
    return [str(own.type) for own in func._schema.returns] in (["number"], ["bool"])
