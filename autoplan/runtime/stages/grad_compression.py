"""Gradients made smaller for their reduction over the data-parallel ranks.

    "bf16"      rounded to bfloat16, reduced so, and widened again        every ZeRO stage
    "powersgd"  each matrix M as P Q^T of a small rank, by torch's hook   stage 0

Micro-batches are added up in the dtype of the parameters first, as without compression. One group of `fully_shard` is
what a bucket is to DDP. Where all ranks keep all parameters (stage 0), groups are sharded over one rank, which leaves
their reduction to the hook; else the hook takes the place of the reduce-scatter.

PowerSGD reduces the first `powersgd_start_step` steps whole. From then on what a step loses, M - P Q^T, is added to the
gradient of the next one. These errors are a rank's own: a checkpoint keeps them for a run that goes on under the same
plan. Another one has none, and counts its steps from 0 again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..config import Config

Reduction = Callable[[torch.Tensor], None]  # of the gradients of a group, in place
WIRE_DTYPE = torch.bfloat16


def compresses(config: Config) -> bool:
    """Whether any gradient is reduced in a smaller form."""
    return config.grad_compression != "none" and config.dp > 1


def sharded_axes(mesh: DeviceMesh, config: Config) -> DeviceMesh:
    """Of the data-parallel ranks, those that `fully_shard` itself is to know."""
    return mesh["shard"] if compresses(config) and config.zero_stage == 0 else mesh


def compress_reductions(root: nn.Module, *, mesh: DeviceMesh, config: Config) -> PowerSGD | None:
    """Reduce the gradients of each group of `fully_shard` in and below `root` in the plan's smaller form.

    What is returned remembers something from step to step.
    """
    if not compresses(config):
        return None
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    if config.zero_stage > 0:
        for module in modules:
            module.set_custom_reduce_scatter(_NarrowReduceScatter())  # type: ignore[arg-type]
        return None
    group = mesh["replica"].get_group()
    groups = [module for module in modules if _shapes(module)]
    power_sgd = PowerSGD.of(config, group, n_groups=len(groups)) if config.grad_compression == "powersgd" else None
    for index, module in enumerate(groups):
        module.set_all_reduce_hook(
            _narrow_all_reduce(group) if power_sgd is None else power_sgd.of_group(module, index)
        )
    return power_sgd


# ---------------------------------------------------------------- bf16


def _narrow_all_reduce(group: ProcessGroup) -> Reduction:
    """The mean over `group`, of addends and in sums of `WIRE_DTYPE`."""

    def reduce(gradients: torch.Tensor) -> None:
        narrow = gradients.to(WIRE_DTYPE).div_(group.size())
        dist.all_reduce(narrow, group=group)
        gradients.copy_(narrow)

    return reduce


class _NarrowReduceScatter:
    """What `fully_shard` calls instead of its own reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, op: Any, **_: Any
    ) -> None:
        narrow = torch.empty_like(output_tensor, dtype=WIRE_DTYPE)
        dist.reduce_scatter_tensor(narrow, input_tensor.to(WIRE_DTYPE), op=op, group=group)
        output_tensor.copy_(narrow)


# ---------------------------------------------------------------- PowerSGD


@dataclass(frozen=True)
class _Bucket:
    """What torch's hook reads of a bucket of DDP; views of its gradients share memory with the whole."""

    place: int
    whole: torch.Tensor
    shapes: tuple[torch.Size, ...]

    def index(self) -> int:
        return self.place

    def buffer(self) -> torch.Tensor:
        return self.whole

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self.whole, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def is_last(self) -> bool:
        """Steps are counted by `PowerSGD`: which group is reduced last depends on the schedule."""
        return False


@dataclass
class PowerSGD:
    """The state of all groups of one stage: torch's, and how many of them this step has reduced."""

    state: Any
    n_groups: int
    n_reduced: int = field(default=0)

    @classmethod
    def of(cls, config: Config, group: ProcessGroup, *, n_groups: int) -> PowerSGD:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        state = PowerSGDState(
            group,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_step,
            orthogonalization_epsilon=1e-8,  # a gradient may be zero, as that of an unused row
        )
        return cls(state, n_groups)

    def of_group(self, module: FSDPModule, index: int) -> Reduction:
        """The reduction of the gradients of one group."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        shapes = _shapes(module)
        n_elements = sum(shape.numel() for shape in shapes)

        def reduce(gradients: torch.Tensor) -> None:
            if gradients.numel() != n_elements:
                raise RuntimeError(
                    f"grad_compression: found gradients of {gradients.numel()} elements\n"
                    f"  expected: {n_elements}, of all parameters of the block\n"
                    "  fix: give every trainable parameter a gradient, or plan without it"
                )
            powerSGD_hook(self.state, _Bucket(index, gradients, shapes)).wait()
            self.n_reduced = (self.n_reduced + 1) % self.n_groups
            self.state.iter += self.n_reduced == 0

        return reduce

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the next step takes over from this one: the number of steps, and of each group the errors, P and Q."""
        found = {"steps": torch.tensor(self.state.iter)}
        for kind, by_group in self._kinds().items():
            found |= {f"{kind}_{index}": tensor for index, tensor in by_group.items()}
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `tensors` gave under the same plan."""
        self.state.iter = int(tensors["steps"])
        for kind, by_group in self._kinds().items():
            names = [name for name in tensors if name.startswith(f"{kind}_")]
            by_group.clear()
            by_group.update({int(name.removeprefix(f"{kind}_")): tensors[name] for name in names})

    def _kinds(self) -> dict[str, dict[int, torch.Tensor]]:
        return {"error": self.state.error_dict, "p": self.state.p_memory_dict, "q": self.state.q_memory_dict}


def _shapes(module: FSDPModule) -> tuple[torch.Size, ...]:
    """Of the trainable parameters of its group, in the order of their gradients; none where it has no group."""
    return tuple(p.sharded_size for p in _parameters(module) if p.sharded_param.requires_grad)


def _parameters(module: FSDPModule) -> Iterator[Any]:
    for group in parameter_groups(module):
        yield from group.fsdp_params


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The parameters that `fully_shard` gathers and reduces together; none where `module` has none of its own."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one or None in 2.11
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
