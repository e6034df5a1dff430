"""What the user's own classes write in place around `fully_shard`: inputs of a block, and what it returned.

`fully_shard` learns from the backward pass when a block begins and ends, by what it hangs into the graph:

    x --(end)--> block --(begin)--> y

Torch refuses `x += 1` in the block, since `end` is a Function that returns its inputs, and a view `y` has lost `begin`
after `y += 1`. Here both are hooks of tensors:

    end      of aliases of the inputs. What the block wrote into has another place in the graph afterwards; then it is a
             hook of what x was before, which is later where something else reads that too
    begin    also of the tensor that y is a view of
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree


def allow_writes(root: nn.Module) -> None:
    """Let each block below `root` that `fully_shard` has divided write into its inputs, and others into its outputs."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if state._fsdp_param_group is not None:
                block = _WritingBlock(state)
                state._fsdp_param_group._register_post_backward_hook = block.enter
                module.register_forward_hook(block.leave, with_kwargs=True)


class _WritingBlock:
    """A module that `fully_shard` divides; `_call` is of the forward pass that runs."""

    def __init__(self, state: Any) -> None:
        self._state, self._call = state, _Call()

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the block is to get them."""
        self._call = call = _Call()
        if torch.is_grad_enabled():
            args, kwargs = _mapped(call.alias_of, args), _mapped(call.alias_of, kwargs)
        if call.inputs:
            end, written = self._state._fsdp_param_group.post_backward, call.written
            register_multi_grad_hook([item.alias for item in call.inputs], lambda _: None if written else end())
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """Hang in what depends on what the block wrote, and on what may be written of its outputs."""
        call, self._call = self._call, _Call()
        nodes = call.note_written()
        end = _Last(len(nodes), self._state._fsdp_param_group.post_backward)
        for node in nodes:
            node.register_prehook(end)
        for output in pytree.tree_leaves(outputs):
            viewed: Any = output._base if isinstance(output, torch.Tensor) else None
            own = viewed.grad_fn if viewed is not None else None
            if own is not None and all(own is not item.node for item in call.inputs):
                viewed.register_hook(self._state._pre_backward)


class _Input(NamedTuple):
    """An input: what the block gets of it, at which version, and the node that made what it was before."""

    alias: torch.Tensor
    version: int
    node: Any


class _Call:
    """The inputs of a call that have gradients; `written` gets an item when the block has written into one."""

    def __init__(self) -> None:
        self.inputs: list[_Input] = []
        self.written: list[bool] = []

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the block gets in place of a tensor."""
        if not tensor.requires_grad:
            return tensor
        made_by = tensor if tensor._base is None else tensor._base
        self.inputs.append(_Input(tensor.view_as(tensor), tensor._version, made_by.grad_fn))
        return self.inputs[-1].alias

    def note_written(self) -> list[Any]:
        """The nodes that made what the block has written into."""
        nodes = [item.node for item in self.inputs if item.alias._version != item.version]
        self.written += [True] * bool(nodes)
        return nodes


class _Last:
    """A hook of several nodes that calls a function when it runs for the last time.

    Where no backward pass comes to one of them, the end is left to `fully_shard`, which ends every block after it.
    """

    def __init__(self, n_nodes: int, function: Callable[[], None]) -> None:
        self._n_nodes, self._function = n_nodes, function

    def __call__(self, gradients: Any) -> None:
        self._n_nodes -= 1
        if self._n_nodes == 0:
            self._function()


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with its tensors replaced; what holds none that changes stays the same object, to write into."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, dict | type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: _mapped(function, item) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item is not old[name]}
        return dataclasses.replace(value, **changed) if changed else value
    if not isinstance(value, dict | list | tuple):
        return value
    items = list(value.values() if isinstance(value, dict) else value)
    replaced = [_mapped(function, item) for item in items]
    if all(new is item for new, item in zip(replaced, items, strict=True)):
        return value
    if isinstance(value, dict):
        named = dict(zip(value, replaced, strict=True))
        return named if type(value) is dict else type(value)(**named)
    return type(value)(*replaced) if hasattr(value, "_fields") else type(value)(replaced)
