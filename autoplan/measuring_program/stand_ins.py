"""Stand-ins for torch.distributed on one device.

On one rank of a tensor-parallel group the collectives are replaced by copies that give the right shapes. These copies
are timed by themselves and subtracted: communication is priced by the hardware profile.
"""

import importlib
from typing import Any

import torch
import torch.distributed as dist


@torch.library.custom_op("autoplan::collective", mutates_args=("target",))
def _opaque_copy(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """A copy that compiled code calls as it would a collective: it is not merged with what stands around it."""
    if source is not None:
        target.view(-1, *source.shape).copy_(source)


class LocalCollectives:
    """Stands in for torch.distributed on one device: copies with the right shapes, remembered unless compiled."""

    ReduceOp = dist.ReduceOp

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []

    def all_reduce(self, x: torch.Tensor, **_: Any) -> None:
        """The partial sum stands for the sum."""
        if torch.compiler.is_compiling():
            _opaque_copy(x, None)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, **_: Any) -> None:
        """Copies of one part stand for all parts."""
        self._copy(whole, part)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, **_: Any) -> None:
        """The first part of the partial sum stands for that of the sum."""
        self._copy(part, whole[: part.shape[0]])

    def all_to_all_single(self, arriving: torch.Tensor, leaving: torch.Tensor, **_: Any) -> None:
        """What leaves stands for what arrives."""
        self._copy(arriving, leaving)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            _opaque_copy(target, source)
            return
        target = target.view(-1, *source.shape)
        self.seen.append((tuple(target.shape), tuple(source.shape), target.dtype))
        target.copy_(source)


class RankOfOne:
    """Stands in for a process group: the first of `n_ranks` ranks."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks

    def size(self) -> int:
        return self._n_ranks

    def rank(self) -> int:
        return 0


def replace_collectives() -> LocalCollectives:
    """From now on generated code communicates with nobody."""
    local = LocalCollectives()
    for name in ("collectives", "vocabulary", "attention"):
        module: Any = importlib.import_module(f"runtime.tensor_parallel.{name}")
        module.dist = local
    module = importlib.import_module("runtime.tensor_parallel.collectives")
    module._all_gather_tensor, module._reduce_scatter_tensor = local.all_gather, local.reduce_scatter
    return local


def collective_names() -> frozenset[str]:
    """The names under which autograd runs the collectives of generated code, which stand-ins do from now on."""
    replace_collectives()
    modules = (importlib.import_module(f"runtime.tensor_parallel.{name}") for name in ("collectives", "vocabulary"))
    found = (x for module in modules for x in vars(module).values())
    return frozenset(x.__name__ for x in found if isinstance(x, type) and issubclass(x, torch.autograd.Function))
