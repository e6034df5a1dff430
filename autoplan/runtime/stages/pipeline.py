"""Pipeline: this rank's stages under one of torch's schedules.

    step(inputs, targets) -> schedule -> StageShell -> stage (with its own fully_shard) -> next rank

What crosses a cut is declared (`Boundary`), so no metadata is exchanged and no trial forward pass is run.

What goes from one rank to another has a process group of its own (`RankMesh.p2p_groups`).

`fully_shard` would wait for all reductions of a stage at the end of its last backward pass, before the stage in front
gets its gradient: the reductions of all stages would run one after the other. So that is left to the end of the step.

**A split backward pass** (zero-bubble V) is torch's: one half by `autograd.grad` for the inputs of a stage, which keeps
the graph, one from the kept gradients for its weights. It sets off the hooks of `fully_shard` in the first half only,
so there nothing may be reduced or freed; `_SplitStage` has that done after the second. Three things follow:
- ZeRO 3 is refused: the graph holds the gathered parameters of the forward pass, which it has freed by then.
- Recomputation is refused: every weight's part of the second half would compute its whole block again.
- What a stage returns must not be a view: torch detaches it in place, and what is not detached keeps its graph, with
  all that was saved for it, until the end of the step.

`PipelineStage` allocates the tensors it receives into (activations, and the gradients of what it sent) for all
micro-batches of a step and keeps them; memory at the cuts is n_micro_batches x boundary, in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _batch_p2p

from ..alone import is_alone, receive_zeros
from ..config import Config
from .stage_shell import CARRIER, FinishWeights, Loss, PrepareBackward, StageShell, as_floats, from_floats
from .zero import hold_gradients, prefetch_parameters, wait_for_reductions


@dataclass(frozen=True, slots=True)
class PerSample:
    """An extent of `count` x micro-batch size."""

    count: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """One tensor that crosses a cut; `dtype` is torch's name without the `torch.`, or "compute" for the plan's."""

    shape: tuple[int | PerSample, ...]
    dtype: str = "compute"
    requires_grad: bool = True

    def example(self, config: Config) -> torch.Tensor:
        """A tensor without memory of the shape and dtype of one micro-batch."""
        size = config.micro_batch_size
        shape = tuple(extent.count * size if isinstance(extent, PerSample) else extent for extent in self.shape)
        dtype = config.compute_dtype if self.dtype == "compute" else getattr(torch, self.dtype)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=self.requires_grad)

    def sent(self, config: Config) -> torch.Tensor:
        """What is sent for it, without memory: itself, or the float32 tensor with its bytes."""
        example = self.example(config)
        if self.requires_grad:
            return example
        n_floats = -(-example.numel() * example.element_size() // CARRIER.itemsize)
        return torch.empty(n_floats, dtype=CARRIER, device="meta", requires_grad=True)


class Pipeline:
    """A rank's part of the pipeline.

    `stages` are the modules of this rank: those of `config.stages_of(pp_rank)`. `boundaries` has one entry per cut of
    the model. `group` has all pipeline ranks; `p2p_groups` are those of `RankMesh`.
    `prepare_backward(stage, is_last_micro_batch)` is called before each backward pass of a stage;
    `finish_weights(stage, is_last_micro_batch)`, where the backward pass is split, after each half for weights instead.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        config: Config,
        boundaries: Sequence[tuple[Boundary, ...]],
        pp_rank: int,
        group: ProcessGroup,
        p2p_groups: Mapping[tuple[int, int], ProcessGroup],
        device: torch.device,
        loss: Loss,
        prepare_backward: PrepareBackward,
        finish_weights: FinishWeights,
    ) -> None:
        self._config, self._boundaries = config, boundaries
        self._group, self._p2p_groups, self._device = group, p2p_groups, device
        self._pp_rank = pp_rank
        self._indices = config.stages_of(pp_rank)
        self._shells = [
            StageShell(
                stage,
                n_micro_batches=config.n_micro_batches,
                inputs=_examples(boundaries[index - 1], config) if index > 0 else (),
                outputs=_examples(boundaries[index], config) if index < config.n_stages - 1 else (),
                loss=loss,
                prepare_backward=_hold_gradients if config.splits_backward else prepare_backward,
                finish_weights=finish_weights,
            )
            for stage, index in zip(stages, self._indices, strict=True)
        ]
        if self._indices[0] == 0:
            self._shells[0].before_second = partial(self._prefetch_parameters, self._shells[1:])
        self._schedule: Any = None

    def run_step(self, inputs: tuple[torch.Tensor, ...], targets: Sequence[Any]) -> torch.Tensor:
        """Forward and backward passes of all micro-batches; the mean loss on ranks of the last stage, else zero.

        `inputs` hold this rank's samples of the step, `targets` one entry per micro-batch.
        """
        if self._schedule is None:
            self._connect()
            self._schedule = self._build_schedule(inputs)
        for shell in self._shells:
            shell.start_step(targets)
        holds_first, holds_last = self._indices[0] == 0, self._indices[-1] == self._config.n_stages - 1
        if not holds_first:
            self._prefetch_parameters(self._shells)
        unused_target = torch.zeros(self._config.n_micro_batches, device=self._device)
        arguments = inputs if holds_first else ()
        self._schedule.step(*arguments, target=unused_target if holds_last else None)
        for shell in self._shells:
            wait_for_reductions(shell.stage)
        losses = self._shells[-1].losses
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _connect(self) -> None:
        """Send through every group once, all ranks in one order: what comes first waits for the other rank to join."""
        message = torch.zeros(1, device=self._device)
        for source, target in self._config.neighbours():
            if self._pp_rank in (source, target):
                self._move(message, source, target)

    def _move(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Send or receive it, as this rank is one or the other."""
        op, peer = (dist.isend, target) if self._pp_rank == source else (dist.irecv, source)
        group = self._p2p_groups[source, target]
        # as the schedules do: through another communicator of the group in torch 2.13 than in 2.11
        for work in _batch_p2p([dist.P2POp(op, tensor, dist.get_global_rank(self._group, peer), group)]):
            work.wait()

    def _prefetch_parameters(self, shells: Sequence[StageShell]) -> None:
        """Gather for these stages while the rank waits for its first input.

        The first stage of the model does not wait, and its host would only be late with the first kernels; so what it
        gathers for later stages of its rank begins when its first forward pass is on its way.
        """
        for shell in shells:
            prefetch_parameters(shell.stage, config=self._config)

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> torch.Tensor:
        """Forward passes only, one micro-batch after the other; the mean loss on ranks of the last stage, else zero.

        All ranks take (micro-batch, stage) in the same order, so each send meets its receive.
        """
        losses, config = [], self._config
        for tensors, targets in batches:
            for shell, index in zip(self._shells, self._indices, strict=True):
                if index > 0 and not self._is_own(index - 1):
                    tensors = self._receive(index - 1)
                outputs = shell.evaluate(tensors)
                if index == config.n_stages - 1:
                    losses.append(shell.loss_of(outputs, targets))
                else:
                    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
                    if not self._is_own(index + 1):
                        self._send(tensors, index)
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)

    def _is_own(self, stage: int) -> bool:
        return stage in self._indices

    def _send(self, tensors: tuple[torch.Tensor, ...], cut: int) -> None:
        target = self._config.rank_of_stage(cut + 1)
        for boundary, tensor in zip(self._boundaries[cut], tensors, strict=True):
            example = boundary.example(self._config)
            declared = tensor.to(example.dtype).contiguous()
            sent = declared if boundary.requires_grad else as_floats(declared)
            self._move(sent, self._pp_rank, target)

    def _receive(self, cut: int) -> tuple[torch.Tensor, ...]:
        source, received = self._config.rank_of_stage(cut), []
        for boundary in self._boundaries[cut]:
            tensor = torch.empty_like(boundary.sent(self._config), device=self._device, requires_grad=False)
            self._move(tensor, source, self._pp_rank)
            is_itself = boundary.requires_grad
            received.append(tensor if is_itself else from_floats(tensor, boundary.example(self._config)))
        return tuple(received)

    def _build_schedule(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        config = self._config
        shells = zip(self._shells, self._indices, strict=True)
        stages = [self._pipeline_stage(shell, index, inputs) for shell, index in shells]
        options: dict[str, Any] = {
            "n_microbatches": config.n_micro_batches,
            "loss_fn": lambda output, target: output.sum(),  # of one element; not a view, see the module docstring
            "scale_grads": False,
        }
        if config.receives_ahead:
            return _AHEAD[config.schedule](stages, **options)
        return _IN_FRONT[config.schedule](stages[0], **options)

    def _pipeline_stage(self, shell: nn.Module, index: int, inputs: tuple[torch.Tensor, ...]) -> _Stage:
        config = self._config
        last_output = torch.empty(1, dtype=config.parameter_dtype, device="meta", requires_grad=True)
        received = (
            [torch.empty_like(x[: config.micro_batch_size], device="meta") for x in inputs]
            if index == 0
            else [boundary.sent(config) for boundary in self._boundaries[index - 1]]
        )
        sent = (
            [last_output]
            if index == config.n_stages - 1
            else [boundary.sent(config) for boundary in self._boundaries[index]]
        )
        kind = _SplitStage if config.splits_backward else _Stage
        return kind(
            shell,
            stage_index=index,
            num_stages=config.n_stages,
            device=self._device,
            input_args=tuple(received),
            output_args=tuple(sent),
            group=self._group,
            p2p_groups=self._p2p_groups,
        )


# Ranks call a receive in front of the pass that needs it, or ahead.
_IN_FRONT: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_AHEAD: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble_v": ScheduleZBVZeroBubble}


def _hold_gradients(stage: nn.Module, is_last_micro_batch: bool) -> None:
    hold_gradients(stage)


class _Stage(PipelineStage):
    """A stage that sends and receives through the groups of its neighbours, and what `Boundary` says it does."""

    def __init__(self, *args: Any, p2p_groups: Mapping[tuple[int, int], ProcessGroup], **options: Any) -> None:
        super().__init__(*args, **options)
        own, global_ranks = dist.get_rank(self.group), dist.get_process_group_ranks(self.group)
        pairs = p2p_groups.items()
        self._to = {global_ranks[target]: found for (source, target), found in pairs if source == own}
        self._from = {global_ranks[source]: found for (source, target), found in pairs if target == own}

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """None of torch 2.11's first messages between all neighbouring stages, see `Pipeline._connect`."""
        return []

    def _warmup_forward_vote(self, *args: Any, **options: Any) -> torch.Tensor:
        """Nor of 2.13's, by which ranks agree whether all know what they send."""
        return torch.ones(1)

    _warmup_backward_result = _warmup_forward_vote

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._through_p2p_groups(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._through_p2p_groups(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._through_p2p_groups(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._through_p2p_groups(super().get_bwd_send_ops(bwd_chunk_id))

    def _through_p2p_groups(self, ops: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        if is_alone():
            for op in ops:
                if op.op is dist.irecv:
                    receive_zeros(op.tensor)
        groups = ((op, (self._to if op.op is dist.isend else self._from)[op.peer]) for op in ops)
        return [dist.P2POp(op.op, op.tensor, op.peer, group, op.tag) for op, group in groups]


class _SplitStage(_Stage):
    """A stage whose shell is told of the end of each half for weights."""

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        super().backward_weight_one_chunk(*args, **options)
        shell: Any = self.submod
        shell.end_weights()


def _examples(cut: tuple[Boundary, ...], config: Config) -> tuple[torch.Tensor, ...]:
    return tuple(boundary.example(config) for boundary in cut)
