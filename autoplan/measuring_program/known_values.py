"""Meta tensors whose values are known: what follows from constants and from the integers of a batch.

A forward pass may look at them: Hugging Face leaves an attention mask out when all of it is true.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MAX_ELEMENTS = 2**27  # of a tensor whose values are kept


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, operators on meta tensors with known values run on the CPU too, and `item` answers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the meta tensor, which is kept alive

    def remember(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """The values of a meta tensor."""
        self._known[id(meta)] = meta, value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        metas = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_meta(leaf)]
        is_known = all(id(meta) in self._known for meta in metas)
        if is_known and metas and func is torch.ops.aten._local_scalar_dense.default:
            return self._known[id(metas[0])][1].item()
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if _is_meta(leaf)]
        if is_known and made and all(tensor.numel() <= MAX_ELEMENTS for tensor in made):
            values = pytree.tree_leaves(func(*self._real(args), **self._real(kwargs)))
            for tensor, value in zip(made, (v for v in values if isinstance(v, torch.Tensor)), strict=True):
                self.remember(tensor, value)
        elif func._schema.is_mutable:
            for meta in metas:
                self._known.pop(id(meta), None)
        return result

    def _real(self, arguments: Any) -> Any:
        def real(leaf: Any) -> Any:
            if _is_meta(leaf):
                return self._known[id(leaf)][1]
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(real, arguments)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
