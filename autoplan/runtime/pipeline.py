"""Pipeline: this rank's stages under one of torch's schedules.

    step(inputs, targets) -> schedule -> _StageShell -> stage (with its own fully_shard) -> next rank

What crosses a cut is declared (`Boundary`), so no metadata is exchanged and no trial forward pass is run.

`_StageShell` stands between torch's `PipelineStage` and the stage, for three reasons:
- Boundary tensors and their gradients are made contiguous, which sending needs.
- The last stage returns its loss, divided by the number of micro-batches, so gradients need no scaling afterwards.
- `PipelineStage` sees no `fully_shard`. It would switch off every reduction and every freeing of parameters until all
  backward passes are done, which keeps gradients and gathered parameters whole under every ZeRO stage, and would
  then reduce with no computation beside it. Instead the shell prepares each backward pass, as without a pipeline.

`PipelineStage` allocates the tensors it receives into (activations, and the gradients of what it sent) for all
micro-batches of a step and keeps them; memory at the cuts is n_micro_batches x boundary, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from .config import Config


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


# (outputs of the model, targets) -> mean loss of a micro-batch, in the dtype of the parameters
Loss = Callable[[Any, Any], torch.Tensor]
PrepareBackward = Callable[[nn.Module, bool], None]


class Pipeline:
    """A rank's part of the pipeline.

    `stages` are the modules of this rank: stage `pp_rank`, `pp_rank + pp`, ... `boundaries` has one entry per cut of
    the model. `prepare_backward(stage, is_last_micro_batch)` is called before each backward pass of a stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        config: Config,
        boundaries: Sequence[tuple[Boundary, ...]],
        pp_rank: int,
        group: ProcessGroup,
        device: torch.device,
        loss: Loss,
        prepare_backward: PrepareBackward,
    ) -> None:
        self._config, self._boundaries = config, boundaries
        self._group, self._device = group, device
        self._indices = [pp_rank + chunk * config.pp for chunk in range(config.n_chunks)]
        self._shells = [
            _StageShell(
                stage,
                n_micro_batches=config.n_micro_batches,
                outputs=boundaries[index] if index < config.n_stages - 1 else None,
                loss=loss,
                prepare_backward=prepare_backward,
            )
            for stage, index in zip(stages, self._indices, strict=True)
        ]
        self._schedule: Any = None

    def run_step(self, inputs: tuple[torch.Tensor, ...], targets: Sequence[Any]) -> torch.Tensor:
        """Forward and backward passes of all micro-batches; the mean loss on ranks of the last stage, else zero.

        `inputs` hold this rank's samples of the step, `targets` one entry per micro-batch.
        """
        if self._schedule is None:
            self._schedule = self._build_schedule(inputs)
        for shell in self._shells:
            shell.start_step(targets)
        unused_target = torch.zeros(self._config.n_micro_batches, device=self._device)
        holds_first, holds_last = self._indices[0] == 0, self._indices[-1] == self._config.n_stages - 1
        arguments = inputs if holds_first else ()
        self._schedule.step(*arguments, target=unused_target if holds_last else None)
        losses = self._shells[-1].losses
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _build_schedule(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        config = self._config
        shells = zip(self._shells, self._indices, strict=True)
        stages = [self._pipeline_stage(shell, index, inputs) for shell, index in shells]
        options: dict[str, Any] = {
            "n_microbatches": config.n_micro_batches,
            "loss_fn": lambda output, target: output.squeeze(0),
            "scale_grads": False,
        }
        if config.n_chunks == 1:
            return _SINGLE[config.schedule](stages[0], **options)
        return _LOOPED[config.schedule](stages, **options)

    def _pipeline_stage(self, shell: nn.Module, index: int, inputs: tuple[torch.Tensor, ...]) -> PipelineStage:
        config = self._config
        last_output = torch.empty(1, dtype=config.parameter_dtype, device="meta", requires_grad=True)
        received = (
            [torch.empty_like(x[: config.micro_batch_size], device="meta") for x in inputs]
            if index == 0
            else [boundary.example(config) for boundary in self._boundaries[index - 1]]
        )
        sent = (
            [last_output]
            if index == config.n_stages - 1
            else [boundary.example(config) for boundary in self._boundaries[index]]
        )
        return PipelineStage(
            shell,
            stage_index=index,
            num_stages=config.n_stages,
            device=self._device,
            input_args=tuple(received),
            output_args=tuple(sent),
            group=self._group,
        )


_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_LOOPED: dict[str, Any] = {"gpipe": ScheduleLoopedBFS, "interleaved": ScheduleInterleaved1F1B}


class _StageShell(nn.Module):
    """One stage as torch's schedules run it; see the module docstring.

    `outputs` are None for the last stage. Forward and backward passes of a stage run in the order of micro-batches.
    """

    def __init__(
        self,
        stage: nn.Module,
        *,
        n_micro_batches: int,
        outputs: tuple[Boundary, ...] | None,
        loss: Loss,
        prepare_backward: PrepareBackward,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.losses: list[torch.Tensor] = []
        self._n_micro_batches = n_micro_batches
        self._outputs = outputs
        self._loss = loss
        self._prepare_backward = prepare_backward
        self._targets: Sequence[Any] = ()
        self._n_forward = 0
        self._n_backward = 0

    def start_step(self, targets: Sequence[Any]) -> None:
        """Forget the previous step."""
        self.losses = []
        self._targets, self._n_forward, self._n_backward = targets, 0, 0

    def forward(self, *tensors: torch.Tensor) -> Any:
        outputs = self.stage(*[_receive(tensor) for tensor in tensors])
        micro_batch = self._n_forward
        self._n_forward += 1
        if self._outputs is None:
            loss = self._loss(outputs, self._targets[micro_batch]) / self._n_micro_batches
            self.losses.append(loss.detach())
            return self._announce_backward([loss.view(1)])[0]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sent = [_send(tensor, boundary) for tensor, boundary in zip(outputs, self._outputs, strict=True)]
        return tuple(self._announce_backward(sent))

    def _announce_backward(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call `prepare_backward` before anything else of the backward pass of these outputs runs."""
        announced: list[bool] = []

        def announce(gradient: torch.Tensor) -> None:
            if not announced:
                announced.append(True)
                self._n_backward += 1
                self._prepare_backward(self.stage, self._n_backward == self._n_micro_batches)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(announce)  # type: ignore[no-untyped-call]
        return outputs


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _receive(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    received: torch.Tensor = _ContiguousGradient.apply(tensor)  # type: ignore[no-untyped-call]
    return received


def _send(tensor: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    if not boundary.requires_grad:
        return tensor.detach().contiguous()
    sent: torch.Tensor = _ContiguousGradient.apply(tensor.contiguous())  # type: ignore[no-untyped-call]
    return sent
