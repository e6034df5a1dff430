"""Meta tensors whose values are known: what follows from constants and from the integers of a batch.

A model may look at them while it is built: `[x.item() for x in torch.linspace(0, 0.1, depth)]` are the rates of its
blocks. A forward pass may too: Hugging Face leaves an attention mask out when all of it is true.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MAX_ELEMENTS = 2**27  # of a tensor whose values are kept
MAX_ELEMENTS_WHILE_BUILT = 2**16  # likewise while a model is built: numbers that it reads, and none of its weights
NO_VALUES = "meta tensor"  # in each message of torch about values that a tensor on the meta device does not have


def build_on_meta(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The user's model on the meta device, where it may read numbers of small tensors that follow from constants."""
    with torch.device("meta"):
        try:
            return build_model()
        except RuntimeError as error:
            if NO_VALUES not in str(error):
                raise
        with KnownValues(MAX_ELEMENTS_WHILE_BUILT):
            return build_model()


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, operators on meta tensors with known values run on the CPU too; `item`, `tolist` and `cpu`
    answer. Random numbers are not known, nor tensors of more than `max_elements`.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_elements = max_elements
        # By id of the meta tensor, which is kept alive: that, its values, and what memory it had then.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def remember(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """The values of a meta tensor."""
        self._known[id(meta)] = meta, value, _memory(meta)

    def _knows(self, meta: torch.Tensor) -> bool:
        """Whether its values are known, and it has not been given other memory since, as by `x.data = y`."""
        return id(meta) in self._known and self._known[id(meta)][2] == _memory(meta)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        metas = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_meta(leaf)]
        is_known = all(map(self._knows, metas)) and not _is_random(func)
        if is_known and metas and _is_read(func, kwargs):
            return func(*self._real(args), **self._real(kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if _is_meta(leaf)]
        if is_known and made and all(tensor.numel() <= self._max_elements for tensor in made):
            values = pytree.tree_leaves(func(*self._real(args), **self._real(kwargs)))
            for tensor, value in zip(made, (v for v in values if isinstance(v, torch.Tensor)), strict=True):
                self.remember(tensor, value)
        elif func._schema.is_mutable:
            written = set(map(_memory, metas))  # whoever has it: `nn.Parameter(x)` is another tensor than x
            self._known = {key: known for key, known in self._known.items() if known[2] not in written}
        return result

    def _real(self, arguments: Any) -> Any:
        def real(leaf: Any) -> Any:
            if _is_meta(leaf):
                return self._known[id(leaf)][1]
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(real, arguments)


def _memory(meta: torch.Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_read(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator brings values to the host: `item`, and `cpu`, by which `tolist` reads."""
    if func is torch.ops.aten._to_copy.default:
        return kwargs.get("device") == torch.device("cpu")
    return func is torch.ops.aten._local_scalar_dense.default
