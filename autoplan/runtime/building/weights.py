"""Parameters of generated blocks under the user's own names, and how each rank gets its part of them.

A generated stage registers empty parameters of the local shapes; `load_weights` fills them from the user's model:

    full.transformer.h.3.attn.qkv.weight  --take_shard(Shard(0, blocks=3))-->  stage.transformer.h.3.attn.qkv.weight

so a name in a checkpoint is the name in the user's model, whatever the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim that is divided over the tensor-parallel ranks; with `blocks` = k each of k equal blocks is divided.

    A dim of n elements that does not divide is `padded_from` n: zeros after its end make all parts equally large.
    They stay zeros, since their gradient is zero.
    """

    dim: int
    blocks: int = 1
    padded_from: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that is not trained; `dtype` is torch's name without the `torch.`."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    persistent: bool = True


class Weights(nn.Module):
    """Uninitialised parameters and buffers of given local shapes: `Weights(weight=(768,), mean=Buffer((768,)))`.

    What has a number for its name is an item, `weights["0"]`: a module below it, as parametrizations have, or a tensor
    of an `nn.ParameterList`.
    """

    def __init__(self, **shapes: tuple[int, ...] | Buffer) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if isinstance(shape, Buffer):
                tensor = torch.empty(shape.shape, dtype=getattr(torch, shape.dtype))
                self.register_buffer(name, tensor, persistent=shape.persistent)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def __setitem__(self, name: str, module: nn.Module) -> None:
        self.add_module(name, module)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def attach(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` the submodule `name` of `root`; missing levels in between become plain modules."""
    *levels, last = name.split(".")
    parent = root
    for level in levels:
        if level not in parent._modules:
            parent.add_module(level, nn.Module())
        parent = parent.get_submodule(level)
    parent.add_module(last, module)


def take_shard(tensor: torch.Tensor, shard: Shard | None, tp_rank: int, tp_degree: int) -> torch.Tensor:
    """The part of a whole tensor that one tensor-parallel rank holds; a copy of all of it when `shard` is None."""
    if shard is None or tp_degree == 1:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    dim = shard.dim % tensor.dim()
    n_parts = shard.blocks * tp_degree
    n_missing = -tensor.shape[dim] % n_parts
    if n_missing and shard.padded_from != tensor.shape[dim]:
        raise ValueError(f"dim {dim} of shape {list(tensor.shape)} cannot be divided into {n_parts} equal parts")
    zeros = tensor.new_zeros((*tensor.shape[:dim], n_missing, *tensor.shape[dim + 1 :]))
    divisible = torch.cat([tensor.detach(), zeros], dim) if n_missing else tensor.detach()
    own = torch.unflatten(divisible, dim, (shard.blocks, tp_degree, -1)).select(dim + 1, tp_rank)
    return own.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def join_shards(parts: list[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The whole tensor from the parts of all tensor-parallel ranks, in rank order: the inverse of `take_shard`."""
    dim = shard.dim % parts[0].dim()
    by_rank = torch.stack([torch.unflatten(part, dim, (shard.blocks, -1)) for part in parts], dim=dim + 1)
    whole = by_rank.flatten(dim, dim + 2)
    return whole if shard.padded_from is None else whole.narrow(dim, 0, shard.padded_from)


def load_weights(stage: nn.Module, full: nn.Module, shards: dict[str, Shard], tp_rank: int, tp_degree: int) -> None:
    """Fill a stage from the user's whole model, by name.

    Weights that are one Parameter under several names in `full` become one Parameter in the stage, so tied weights
    stay tied. Buffers are copied whole.

    Raises: ValueError when a name is missing in `full`, a shape differs, or a tied weight is sharded in two ways.
    """
    sources: dict[str, torch.Tensor] = dict(full.named_parameters(remove_duplicate=False))
    sources.update(full.named_buffers(remove_duplicate=False))
    loaded: dict[int, tuple[str, nn.Parameter]] = {}
    for name, old in list(stage.named_parameters(remove_duplicate=False)):
        source = _source(sources, name)
        if id(source) not in loaded:
            part = take_shard(source, shards.get(name), tp_rank, tp_degree)
            loaded[id(source)] = (name, nn.Parameter(part, requires_grad=source.requires_grad))
        first_name, parameter = loaded[id(source)]
        if shards.get(name) != shards.get(first_name):
            raise ValueError(f"{name} and {first_name} are one weight but are sharded differently")
        _check_shape(name, old, parameter)
        _owner(stage, name)._parameters[name.rpartition(".")[2]] = parameter
    for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
        copy = _source(sources, name).detach().clone()
        _check_shape(name, buffer, copy)
        _owner(stage, name)._buffers[name.rpartition(".")[2]] = copy


def _source(sources: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in sources:
        raise ValueError(f"{name} is in the generated stage but not in the user's model; generate the program again")
    return sources[name]


def _check_shape(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.shape != found.shape:
        raise ValueError(
            f"{name}: the model file gives this rank shape {list(found.shape)}, the generated stage expects "
            f"{list(expected.shape)}; generate the program again for this model"
        )


def _owner(root: nn.Module, name: str) -> nn.Module:
    return root.get_submodule(name.rpartition(".")[0])
