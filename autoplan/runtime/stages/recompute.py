"""Recompute: drop a module's activations after forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from .kept_attention import is_captured, kept_attention


def apply_recompute(root: nn.Module, names: Iterable[str], *, keeps_attention: bool = False) -> None:
    """Recompute the submodules `names`; those that `root` lacks live in another pipeline stage and are skipped.

    `keeps_attention`: all but fused attention, see `kept_attention`.

    Only `forward` is replaced, so the names of modules and parameters stay. Random state is restored for the second
    forward, so dropout draws the same mask; a CUDA graph cannot do that, and no block that draws is captured. What the
    second forward writes into buffers is forgotten, so running statistics advance once; collectives inside the module
    run a second time. Inputs that the module writes in place are kept as they were before, see `_RecomputedForward`.
    """
    modules = dict(root.named_modules())
    for name in names:
        if name in modules:
            modules[name].forward = _RecomputedForward(name, modules[name], modules[name].forward, keeps_attention)


def recomputed_and_drawing(root: nn.Module) -> list[str]:
    """The recomputed submodules of `root` whose last call drew random numbers on the GPU."""
    own = (vars(module).get("forward") for module in root.modules())
    return [forward.name for forward in own if isinstance(forward, _RecomputedForward) and forward.draws]


@contextmanager
def unchanged_buffers(root: nn.Module) -> Iterator[None]:
    """Forward passes inside write into copies of the buffers of `root`, which are then dropped."""
    held = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
    for module, name, buffer in held:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


@dataclass(slots=True)
class _RecomputedForward:
    """A recomputed forward pass.

    The second pass needs the inputs as the first one found them. Those that the first pass writes (`x += y`,
    `nn.ReLU(inplace=True)`) are copied before it. Which those are, the first call tells, while which every input is
    copied.

    Attributes:
        written: the inputs that `forward` writes, by their place among all, in training and not: dropout may. Before
            the first call it is not known.
        draws: whether the last call drew random numbers on the GPU.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    keeps_attention: bool = False
    draws: bool = False
    written: dict[bool, frozenset[int]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given, structure = pytree.tree_flatten((args, kwargs))
        tensors = {place: item for place, item in enumerate(given) if isinstance(item, torch.Tensor)}
        versions = {place: tensor._version for place, tensor in tensors.items()}
        mode = self.module.training
        copies = {place: _copy(tensors[place]) for place in tensors.keys() & self.written.get(mode, tensors.keys())}
        first, kept = [(args, kwargs)], list[Any]()

        def run(*_: torch.Tensor) -> Any:
            if first:
                own_args, own_kwargs = first.pop()  # the very same objects, since it may write into a list
            else:
                self._check_unchanged(kept, versions, but=copies)
                inputs = [copies[place].clone() if place in copies else item for place, item in enumerate(kept)]
                own_args, own_kwargs = pytree.tree_unflatten(inputs, structure)
            return self.forward(*own_args, **own_kwargs)

        # Empty tensors in place of the inputs tell it of which devices to restore the random state.
        devices = [tensor.new_empty(0) for tensor in tensors.values()]
        contexts = functools.partial(_contexts, self.module, self.keeps_attention)
        drawn, restores = _numbers_drawn(), not is_captured()
        outputs = checkpoint(run, *devices, use_reentrant=False, context_fn=contexts, preserve_rng_state=restores)
        self.draws = drawn != _numbers_drawn()
        if mode not in self.written:
            self.written[mode] = self._written(tensors, versions)
            for place in tensors.keys() - self.written[mode]:
                del copies[place]
        kept += [None if place in copies else item for place, item in enumerate(given)]
        self._check_unchanged(kept, versions, but=copies)
        return outputs

    def _written(self, tensors: dict[int, torch.Tensor], versions: dict[int, int]) -> frozenset[int]:
        """Raises: RuntimeError when a tensor was written that another input shows in another way."""
        written = {place: tensor for place, tensor in tensors.items() if tensor._version != versions[place]}
        if len({tensor.untyped_storage().data_ptr() for tensor in written.values()}) < len(written):
            raise RuntimeError(
                f"{self.name}: recomputed, it writes in place into one of two inputs that share memory\n"
                "  fix: let its forward make a new tensor, as in x = x + y or nn.ReLU(inplace=False)"
            )
        return frozenset(written)

    def _check_unchanged(self, kept: list[Any], versions: dict[int, int], *, but: dict[int, torch.Tensor]) -> None:
        """Raises: RuntimeError when an input of which there is no copy has been written."""
        if any(kept[place]._version != version for place, version in versions.items() if place not in but):
            raise RuntimeError(
                f"{self.name}: recomputed, its input is written in place, after it ran or not in every call\n"
                "  fix: make a new tensor there, as in x = x + y or nn.ReLU(inplace=False)"
            )


def _numbers_drawn() -> int:
    """How far the generator of the current GPU is."""
    if not torch.cuda.is_initialized() or is_captured():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _contexts(
    module: nn.Module, keeps_attention: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the first and of the second forward pass."""
    if not keeps_attention:
        return nullcontext(), unchanged_buffers(module)
    keeping, handing_out = kept_attention()
    return keeping, _both(unchanged_buffers(module), handing_out)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
