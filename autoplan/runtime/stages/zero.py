"""ZeRO: how parameters, gradients and optimizer state are divided over the data-parallel ranks.

One mechanism, `fully_shard` on a (replica, shard) mesh, gives all stages; they differ in when parameters are gathered
and freed, and when gradients are reduced. In a step of several micro-batches:

    stage   parameters of a block are gathered           gradients are reduced
    0, 1    at the first forward, freed at the end       once, while the last micro-batch runs backward
    2       at the first forward, freed at the end       reduce-scattered in every micro-batch
    3       in every forward and in every backward       reduce-scattered in every micro-batch

- Stage 0 is stage 1 with a shard degree of 1: nothing is divided, one all-reduce.
- What is sent of gradients, `grad_compression` may make smaller.
- Until they are reduced, gradients of stages 0 and 1 are kept whole, in the dtype of the reduction (float32 for 16-bit
  compute) once a second micro-batch has to be added.
- With replicas (shard degree below dp) the all-reduce over replicas happens in the last micro-batch only.
- Parameters outside of all blocks (embedding, head) form one group, gathered from the first forward until
  the end of the backward pass; under stage 3 it is gathered once per micro-batch. A large head is a group of its own
  (`Config.head_group`), so that it is gathered and reduced beside the blocks; nor is it freed before its backward pass.
- The table holds for pipelines too, because a stage's `fully_shard` is hidden from the pipeline (see pipeline.py).
  There, parameters that are gathered once begin to be before their first forward pass (`prefetch_parameters`): by
  itself `fully_shard` gathers a block when it is about to run, and nothing before the input of its stage has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..building.buffers import cast_buffers
from ..config import Config
from .grad_compression import PowerSGD, compress_reductions, sharded_axes
from .packing import pack_at_once


def apply_zero(root: nn.Module, *, blocks: Sequence[str], mesh: DeviceMesh, config: Config) -> PowerSGD | None:
    """Divide the parameters of `root` over `mesh`, one group per block and one for the rest.

    It returns what compressed reductions remember from step to step.

    A single data-parallel rank in full precision is left alone. A block that shares a parameter with the rest of the
    model belongs to the group of the rest. In 16-bit precision, gathered parameters and most floating-point buffers
    have the compute dtype, as after `model.to(dtype)`, so that they mix with activations; see `buffers`.
    """
    is_mixed = config.compute_dtype != config.parameter_dtype
    if config.dp == 1 and not is_mixed:
        return None
    policy = MixedPrecisionPolicy()
    if is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=config.compute_dtype, reduce_dtype=config.parameter_dtype)
        cast_buffers(root, config.compute_dtype, kept=config.float32_buffers)
    _leave_cudnn_out_of_rnns(root)
    pack_at_once()
    axes = sharded_axes(mesh, config)
    innermost_first = sorted(blocks, key=lambda name: -name.count("."))
    for block in [root.get_submodule(name) for name in innermost_first]:
        if any(True for _ in block.parameters()) and not _shares_parameters(block, root):
            fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=config.zero_stage == 3)
            _refuse_changed_lists(block)
    if config.head_group:
        fully_shard(root.get_submodule(config.head_group), mesh=axes, mp_policy=policy, reshard_after_forward=False)
    # None: free the group of the rest after backward, not between forward and backward.
    fully_shard(root, mesh=axes, mp_policy=policy, reshard_after_forward=None if config.zero_stage == 3 else False)
    if config.zero_stage >= 2:
        _free_before_last_block(root, blocks)
    return compress_reductions(root, mesh=mesh, config=config)


def _free_before_last_block(root: nn.Module, blocks: Sequence[str]) -> None:
    """See `free_reduced_gradients`; where there are no blocks, before the loss. Not when a checkpoint of the user's own
    calls the block again, in backward: there it would wait for what has just begun.
    """

    def free(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            free_reduced_gradients(root)

    if blocks:
        root.get_submodule(blocks[-1]).register_forward_pre_hook(free)
    else:
        root.register_forward_hook(free)


def _refuse_changed_lists(block: nn.Module) -> None:
    """Let the first call of a block fail if it puts something into a list or dict of its inputs.

    `fully_shard` gives it copies of these, so that whoever passed them would not see what the block put in.
    """
    given: list[list[int]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(_sizes((args, kwargs)))

    def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        for handle in handles:
            handle.remove()
        if _sizes((args, kwargs)) != given.pop():
            raise RuntimeError(
                f"{type(module).__name__}: puts something into a list or dict that it is given, which is a copy under"
                " data parallelism\n  fix: return it, or plan with --fix generated=on"
            )

    handles = (
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, with_kwargs=True),
    )


def _sizes(value: Any) -> list[int]:
    """Of all lists and dicts in it; other containers, such as caches of keys and values, are not looked into."""
    if not isinstance(value, tuple) and type(value) not in (list, dict):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [len(value), *(size for item in items for size in _sizes(item))]


def prefetch_parameters(root: nn.Module, *, config: Config) -> None:
    """Begin to gather all parameters below `root` where they stay for the step; each block waits for its own.

    Until then its parameters are in the buffer that receives them, which takes the room that they will have; while a
    block copies its own out of it, they are there twice. In its first step `fully_shard` has not set up its streams
    yet; that step goes without. Under ZeRO 3 only the first block could be gathered, once among all the gathers of a
    step; that is left to `fully_shard`.
    """
    is_kept = config.zero_shard_degree > 1 and config.zero_stage < 3
    if is_kept and isinstance(root, FSDPModule) and root._get_fsdp_state()._is_root:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)


def free_reduced_gradients(root: nn.Module) -> None:
    """Free what the last reduction of the micro-batch before was given, once it is done.

    `fully_shard` keeps it until its next reduction, which is in the next backward pass. Freed at the end of the pass
    that began it, it would hold up the next forward pass; before the last block, that has hidden it, and memory peaks
    later. After the head it would lie between logits, as the allocator puts them, of this micro-batch and the last.
    """
    if isinstance(root, FSDPModule) and root._get_fsdp_state()._is_root:
        context: Any = root._get_fsdp_state()._comm_ctx
        states = getattr(context, "reduce_scatter_states", None)  # torch 2.13; one at the most in 2.11
        if states is None:
            states, context.reduce_scatter_state = [context.reduce_scatter_state], None
        for state in filter(None, states):
            if state.event is not None:
                torch.cuda.current_stream().wait_event(state.event)
        states.clear()


def prepare_backward(root: nn.Module, *, zero_stage: int, is_last_micro_batch: bool, waits_at_end: bool = True) -> None:
    """Say, before a backward pass of `root`, what happens to its gradients and gathered parameters.

    The pass of the last micro-batch ends by waiting for all reductions, unless `wait_for_reductions` does it later.
    """
    if not isinstance(root, FSDPModule):
        return
    free_reduced_gradients(root)
    root.set_is_last_backward(is_last_micro_batch and waits_at_end)
    _set_flags(
        root,
        reduces=zero_stage >= 2 or is_last_micro_batch,
        all_reduces=is_last_micro_batch,
        frees=zero_stage == 3 or is_last_micro_batch,
    )


def _set_flags(root: FSDPModule, *, reduces: bool, all_reduces: bool, frees: bool) -> None:
    """What backward does in all groups below `root`; most often it stays as it was, and going through them costs."""
    flags = reduces, all_reduces, frees
    if getattr(root, "_backward_flags", None) == flags:
        return
    root.set_requires_gradient_sync(reduces)
    root.set_requires_all_reduce(all_reduces)
    root.set_reshard_after_backward(frees)
    root._backward_flags = flags  # type: ignore[attr-defined]


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules in `root` that gather parameters; `reshard` gives back what a pass has gathered."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def freeing_blocks(stages: Iterable[nn.Module], *, config: Config) -> Iterator[None]:
    """Let forward passes without backward passes give back what they gather of a block at its end, as under ZeRO 3.

    The rest of a stage and a large head, which the loss may read, stay gathered until `reshard`.
    """
    named = [pair for stage in stages for pair in stage.named_modules()]
    blocks = [
        module for name, module in named if isinstance(module, FSDPModule) and name not in ("", config.head_group)
    ]
    for block in blocks:
        block.set_reshard_after_forward(True, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(config.zero_stage == 3, recurse=False)


def hold_gradients(root: nn.Module) -> None:
    """Say, before the first half of a split backward pass of `root`, that nothing is reduced or freed yet."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(False)
        _set_flags(root, reduces=False, all_reduces=False, frees=False)


def finish_weights(root: nn.Module, *, zero_stage: int, is_last_micro_batch: bool) -> None:
    """After the half for weights of a split backward pass: accumulate or reduce gradients, free gathered parameters.

    That half is no backward pass to `fully_shard`, whose hooks it does not set off; so its end is called by hand, as
    torch's own pipeline stages do.
    """
    if isinstance(root, FSDPModule):
        prepare_backward(root, zero_stage=zero_stage, is_last_micro_batch=is_last_micro_batch, waits_at_end=False)
        root._get_fsdp_state()._root_post_backward_final_callback()


def wait_for_reductions(root: nn.Module) -> None:
    """End a step of `root` whose last backward pass did not: what follows may read its gradients."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(True)
        root._get_fsdp_state()._root_post_backward_final_callback()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds of a parameter or gradient; shares its memory."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All elements over the data-parallel ranks; every rank of them must call it."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _leave_cudnn_out_of_rnns(root: nn.Module) -> None:
    """Run `nn.LSTM`, `nn.GRU` and `nn.RNN` below `root` without cuDNN.

    With it, from the second step on, forward under `fully_shard` gave another loss than one process with the same
    parameters: 5e-5 in float64, 2 H200, torch 2.11, 2026-11-21; the cause is not known.
    """
    for module in root.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = torch.backends.cudnn.flags(enabled=False)(module.forward)


def _shares_parameters(block: nn.Module, root: nn.Module) -> bool:
    own_modules = set(block.modules())
    own = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in own
        for module in root.modules()
        if module not in own_modules
        for parameter in module.parameters(recurse=False)
    )
