"""Recomputation that keeps what fused attention made, whose time grows with the square of the sequence, its size not.

    first pass     attention runs; its result and log-sum-exp are kept      all else is dropped
    second pass    where it would run again, these are handed out           all else is computed again

Its inputs are computed again like all else. Both passes see every operator that torch dispatches, one by one, or, in
compiled code, those that are no kernels of the compiler's own, of which attention is one. Attention that torch computes
op by op (float64 on a GPU, dropout on a CPU) is computed again.

In a CUDA graph no recomputed block draws random numbers, and torch refuses to read where their generator is.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import is_current_stream_capturing  # as it is, also where a step's capture is hidden from models
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = tuple(
    f"_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)
_FUSED_OPS = frozenset(getattr(torch.ops.aten, name).default for name in FUSED if hasattr(torch.ops.aten, name))


def kept_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first and of the second forward pass of one call of a block."""
    calls = deque[_Call]()
    return _Keeping(calls), _HandingOut(calls)


@dataclass(slots=True)
class _Call:
    """What one call of attention made, and the state of the random numbers after it, from which dropout goes on.

    `numbers`: None in a CUDA graph.
    """

    results: Any
    versions: tuple[int, ...]
    numbers: torch.Tensor | None

    def handed_out(self) -> Any:
        """Raises: RuntimeError when a result has been written since."""
        if self.versions != _versions(self.results):
            raise RuntimeError(
                "what attention returned is written in place, but recomputation keeps it\n"
                "  fix: make a new tensor there, as in x = x + y, or plan with --fix keep_attention=off"
            )
        return self.results


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators of one pass.

    `calls`: of attention in the first pass, in their order, that the second one has not asked for.
    """

    def __init__(self, calls: deque[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Blocks are compiled inside all the same."""
        return True


class _Keeping(_Seeing):  # type: ignore[no-untyped-call]
    """The first pass."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        if op in _FUSED_OPS:
            kept = pytree.tree_map_only(torch.Tensor, _detached, results)
            self.calls.append(_Call(kept, _versions(kept), _state_of_numbers(args[0].device)))
        return results


class _HandingOut(_Seeing):  # type: ignore[no-untyped-call]
    """The second pass."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in _FUSED_OPS:
            return op(*args, **(kwargs or {}))
        if not self.calls:
            raise RuntimeError("a block that keeps attention is recomputed twice, or calls it more often than before")
        call = self.calls.popleft()
        if call.numbers is not None:
            _numbers(args[0].device).set_state(call.numbers)
        return call.handed_out()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version, so that who writes into one is seen in the other; here autograd is switched off."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(results: Any) -> tuple[int, ...]:
    return tuple(item._version for item in pytree.tree_leaves(results) if isinstance(item, torch.Tensor))


def is_captured() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _state_of_numbers(device: torch.device) -> torch.Tensor | None:
    return None if is_captured() else _numbers(device).get_state()


def _numbers(device: torch.device) -> torch.Generator:
    """The generator that operators of a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
