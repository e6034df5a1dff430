"""Pipeline: this rank's stages under one of torch's schedules.

    step(inputs, targets) -> schedule -> _StageShell -> stage (with its own fully_shard) -> next rank

What crosses a cut is declared (`Boundary`), so no metadata is exchanged and no trial forward pass is run.

`_StageShell` stands between torch's `PipelineStage` and the stage, for four reasons:
- Boundary tensors and their gradients are made contiguous, which sending needs.
- torch 2.11 sends only floating-point tensors that get a gradient. A boundary tensor without one (a mask, positions)
  travels as the float32 tensor with the same bytes, and zeros travel back.
- The last stage returns its loss, divided by the number of micro-batches, so gradients need no scaling afterwards.
- `PipelineStage` sees no `fully_shard`. It would switch off every reduction and every freeing of parameters until all
  backward passes are done, which keeps gradients and gathered parameters whole under every ZeRO stage, and would
  then reduce with no computation beside it. Instead the shell prepares each backward pass, as without a pipeline.

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

from collections.abc import Callable, Sequence
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
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from .config import Config
from .data import flatten_tensors
from .zero import hold_gradients, start_gathers


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
        n_floats = -(-example.numel() * example.element_size() // _CARRIER.itemsize)
        return torch.empty(n_floats, dtype=_CARRIER, device="meta", requires_grad=True)


_CARRIER = torch.float32

# (outputs of the model, targets) -> mean loss of a micro-batch, in the dtype of the parameters
Loss = Callable[[Any, Any], torch.Tensor]
PrepareBackward = Callable[[nn.Module, bool], None]
FinishWeights = Callable[[nn.Module, bool], None]


class Pipeline:
    """A rank's part of the pipeline.

    `stages` are the modules of this rank: those of `config.stages_of(pp_rank)`. `boundaries` has one entry per cut of
    the model. `prepare_backward(stage, is_last_micro_batch)` is called before each backward pass of a stage;
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
        device: torch.device,
        loss: Loss,
        prepare_backward: PrepareBackward,
        finish_weights: FinishWeights,
    ) -> None:
        self._config, self._boundaries = config, boundaries
        self._group, self._device = group, device
        self._indices = config.stages_of(pp_rank)
        self._shells = [
            _StageShell(
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
            self._shells[0].before_second = partial(self._start_gathers, self._shells[1:])
        self._schedule: Any = None

    def run_step(self, inputs: tuple[torch.Tensor, ...], targets: Sequence[Any]) -> torch.Tensor:
        """Forward and backward passes of all micro-batches; the mean loss on ranks of the last stage, else zero.

        `inputs` hold this rank's samples of the step, `targets` one entry per micro-batch.
        """
        if self._schedule is None:
            self._schedule = self._build_schedule(inputs)
        for shell in self._shells:
            shell.start_step(targets)
        holds_first, holds_last = self._indices[0] == 0, self._indices[-1] == self._config.n_stages - 1
        if not holds_first:
            self._start_gathers(self._shells)
        unused_target = torch.zeros(self._config.n_micro_batches, device=self._device)
        arguments = inputs if holds_first else ()
        self._schedule.step(*arguments, target=unused_target if holds_last else None)
        losses = self._shells[-1].losses
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _start_gathers(self, shells: Sequence[_StageShell]) -> None:
        """Gather for these stages while the rank waits for its first input.

        The first stage of the model does not wait, and its host would only be late with the first kernels; so what it
        gathers for later stages of its rank begins when its first forward pass is on its way.
        """
        for shell in shells:
            start_gathers(shell.stage, config=self._config)

    def evaluate(self, batches: Sequence[tuple[Any, Any]]) -> torch.Tensor:
        """Forward passes only, one micro-batch after the other; the mean loss on ranks of the last stage, else zero.

        All ranks take (micro-batch, stage) in the same order, so each send meets its receive.
        """
        losses, config = [], self._config
        for inputs, targets in batches:
            tensors = flatten_tensors(inputs)
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
            sent = declared if boundary.requires_grad else _as_floats(declared)
            dist.send(sent, group=self._group, group_dst=target)

    def _receive(self, cut: int) -> tuple[torch.Tensor, ...]:
        source, received = self._config.rank_of_stage(cut), []
        for boundary in self._boundaries[cut]:
            tensor = torch.empty_like(boundary.sent(self._config), device=self._device, requires_grad=False)
            dist.recv(tensor, group=self._group, group_src=source)
            is_itself = boundary.requires_grad
            received.append(tensor if is_itself else _from_floats(tensor, boundary.example(self._config)))
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
        if config.n_chunks == 1:
            return _SINGLE[config.schedule](stages[0], **options)
        return _LOOPED[config.schedule](stages, **options)

    def _pipeline_stage(self, shell: nn.Module, index: int, inputs: tuple[torch.Tensor, ...]) -> PipelineStage:
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
        kind = _SplitStage if config.splits_backward else PipelineStage
        return kind(
            shell,
            stage_index=index,
            num_stages=config.n_stages,
            device=self._device,
            input_args=tuple(received),
            output_args=tuple(sent),
            group=self._group,
        )


_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_LOOPED: dict[str, Any] = {
    "gpipe": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


def _hold_gradients(stage: nn.Module, is_last_micro_batch: bool) -> None:
    hold_gradients(stage)


class _SplitStage(PipelineStage):
    """A pipeline stage whose shell is told of the end of each half for weights.

    torch 2.11 sends a first message between all neighbouring stages; where both are on one rank, gloo cannot.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        super().backward_weight_one_chunk(*args, **options)
        shell: Any = self.submod
        shell.end_weights()


class _StageShell(nn.Module):
    """One stage as torch's schedules run it; see the module docstring.

    `inputs` and `outputs` are examples of what crosses the cuts before and after it; empty for the first and for the
    last stage. Forward and backward passes of a stage run in the order of micro-batches.

    `before_second`, if any, is called before the second forward pass of a step.
    """

    def __init__(
        self,
        stage: nn.Module,
        *,
        n_micro_batches: int,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        loss: Loss,
        prepare_backward: PrepareBackward,
        finish_weights: FinishWeights,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.losses: list[torch.Tensor] = []
        self._n_micro_batches = n_micro_batches
        self._inputs, self._outputs = inputs, outputs
        self._loss = loss
        self._prepare_backward, self._finish_weights = prepare_backward, finish_weights
        self.before_second: Callable[[], None] | None = None
        self._targets: Sequence[Any] = ()
        self._n_forward = self._n_backward = self._n_weights = 0

    def start_step(self, targets: Sequence[Any]) -> None:
        """Forget the previous step."""
        self.losses = []
        self._targets = targets
        self._n_forward = self._n_backward = self._n_weights = 0

    def forward(self, *tensors: torch.Tensor) -> Any:
        self._n_forward += 1
        if self._n_forward == 2 and self.before_second is not None:
            self.before_second()
        if self._inputs:
            tensors = _Receive.apply(self._inputs, *tensors)  # type: ignore[no-untyped-call]
        outputs = self.stage(*tensors)
        if self._outputs:
            sent = outputs if isinstance(outputs, tuple) else (outputs,)
            return self._send(self._outputs, sent)
        loss = self.loss_of(outputs, self._targets[len(self.losses)]) / self._n_micro_batches
        self.losses.append(loss.detach())
        return self._send((loss,), (loss.view(1),))[0]

    def evaluate(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """What the stage makes of the inputs of one micro-batch; nothing is kept for a backward pass."""
        return self.stage(*tensors)

    def loss_of(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The mean loss of one micro-batch; of the last stage."""
        return self._loss(outputs, targets)

    def _send(self, examples: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        declared = (tensor.to(example.dtype) for example, tensor in zip(examples, tensors, strict=True))
        has_gradient = tuple(example.requires_grad for example in examples)
        sent: tuple[torch.Tensor, ...] = _Send.apply(  # type: ignore[no-untyped-call]
            has_gradient, self._start_backward, *declared
        )
        return sent

    def _start_backward(self) -> None:
        self._n_backward += 1
        self._prepare_backward(self.stage, self._n_backward == self._n_micro_batches)

    def end_weights(self) -> None:
        """The half for weights of a split backward pass is done."""
        self._n_weights += 1
        self._finish_weights(self.stage, self._n_weights == self._n_micro_batches)


class _Send(torch.autograd.Function):
    """What crosses a cut as it is sent; calls `start_backward` before anything else of the backward pass runs."""

    @staticmethod
    def forward(
        ctx: Any, has_gradient: tuple[bool, ...], start_backward: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.has_gradient, ctx.start_backward = has_gradient, start_backward
        pairs = zip(has_gradient, tensors, strict=True)
        return tuple(tensor.contiguous().detach() if is_trained else _as_floats(tensor) for is_trained, tensor in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.start_backward()
        pairs = zip(ctx.has_gradient, gradients, strict=True)
        return None, None, *(gradient if is_trained else None for is_trained, gradient in pairs)


class _Receive(torch.autograd.Function):
    """The inverse of `_Send` in the next stage; every tensor gets a contiguous gradient, zeros where it has none."""

    @staticmethod
    def forward(ctx: Any, examples: tuple[torch.Tensor, ...], *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = tuple(
            tensor.view_as(tensor) if example.requires_grad else _from_floats(tensor, example)
            for example, tensor in zip(examples, received, strict=True)
        )
        ctx.examples = examples
        ctx.received = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in received)
        without_gradient = (t for example, t in zip(examples, tensors, strict=True) if not example.requires_grad)
        ctx.mark_non_differentiable(*without_gradient)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = (
            gradient.contiguous() if example.requires_grad else torch.zeros(shape, dtype=dtype, device=device)
            for example, gradient, (shape, dtype, device) in zip(ctx.examples, gradients, ctx.received, strict=True)
        )
        return None, *whole


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor with the same bytes, padded with zeros."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return nn.functional.pad(flat, (0, -flat.numel() % _CARRIER.itemsize)).view(_CARRIER)


def _from_floats(floats: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor, of the shape and dtype of `example`, whose bytes `floats` holds."""
    n_bytes = example.numel() * example.element_size()
    return floats.detach().view(torch.uint8)[:n_bytes].view(example.dtype).view(example.shape)


def _examples(cut: tuple[Boundary, ...], config: Config) -> tuple[torch.Tensor, ...]:
    return tuple(boundary.example(config) for boundary in cut)
