"""A pipeline stage as torch's schedules run it, and what crosses its cuts.

`StageShell` stands between torch's `PipelineStage` and the stage, for four reasons:
- Boundary tensors and their gradients are made contiguous, which sending needs.
- torch 2.11 sends only floating-point tensors that get a gradient. A boundary tensor without one (a mask, positions,
  an output that the loss does not read) travels as the float32 tensor with the same bytes, and zeros travel back; what
  made it gets no gradient, not zeros, which would decay its weights.
- The last stage returns its loss, divided by the number of micro-batches, so gradients need no scaling afterwards.
- `PipelineStage` sees no `fully_shard`. It would switch off every reduction and every freeing of parameters until all
  backward passes are done, which keeps gradients and gathered parameters whole under every ZeRO stage, and would
  then reduce with no computation beside it. Instead the shell prepares each backward pass, as without a pipeline, but
  that the last one does not wait for its reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# (outputs of the model, targets) -> mean loss of a micro-batch, in the dtype of the parameters
Loss = Callable[[Any, Any], torch.Tensor]
PrepareBackward = Callable[[nn.Module, bool], None]
FinishWeights = Callable[[nn.Module, bool], None]
CARRIER = torch.float32  # what a tensor without a gradient travels as


class StageShell(nn.Module):
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
        has_gradient = tuple(example.requires_grad for example in examples)
        declared = (
            tensor.to(example.dtype) if example.requires_grad else tensor.detach().to(example.dtype)
            for example, tensor in zip(examples, tensors, strict=True)
        )
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
        return tuple(tensor.contiguous().detach() if is_trained else as_floats(tensor) for is_trained, tensor in pairs)

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
            tensor.view_as(tensor) if example.requires_grad else from_floats(tensor, example)
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


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor with the same bytes, padded with zeros."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return nn.functional.pad(flat, (0, -flat.numel() % CARRIER.itemsize)).view(CARRIER)


def from_floats(floats: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor, of the shape and dtype of `example`, whose bytes `floats` holds."""
    n_bytes = example.numel() * example.element_size()
    return floats.detach().view(torch.uint8)[:n_bytes].view(example.dtype).view(example.shape)
