"""Parity: the program against plain training of the user's model in one process, on the same batches.

Every rank trains the whole model beside its own part, and compares what it owns; the largest differences over all
ranks are the result. Dropout draws differently in every process, so parity needs a model built without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config import Config
from .construction import build_whole_model
from .data import Batch, batch_slice, map_tensors
from .parallel import LEARNING_RATE, ParallelModel, build_optimizer_of, call_model, loss_of

# Largest accepted difference of the loss (relative, above 1) and of gradients (relative to the largest gradient). In
# float64 only the order of additions differs. In float32 the same, at its precision. In 16 bits the program rounds
# every activation and the reference, in float32, does not.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}


class PlainTraining:
    """The user's model trained in one process, micro-batch by micro-batch, with one optimizer step per global batch."""

    def __init__(
        self,
        config: Config,
        model_file: Any,
        *,
        build_device: torch.device,
        device: torch.device,
        overrides: Mapping[str, Any] | None = None,
        seed: int = 0,
        learning_rate: float = LEARNING_RATE,
        max_grad_norm: float | None = None,
    ) -> None:
        self._config, self._device = config, device
        self._loss_fn = getattr(model_file, "loss_fn", None)
        self._max_grad_norm = max_grad_norm
        self.model = build_whole_model(
            lambda: model_file.build_model(**(overrides or {})),
            seed=seed,
            dtype=config.parameter_dtype,
            device=build_device,
        ).to(device)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer_of(model_file, trainable, learning_rate)

    def step(self, batch: Batch) -> float:
        """One optimizer step on a global batch; its mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        n_micro_batches = self._config.dp * self._config.n_micro_batches
        size = self._config.micro_batch_size
        total = 0.0
        for index in range(n_micro_batches):
            inputs, targets = map_tensors(self._to_device, batch_slice(batch, index * size, (index + 1) * size))
            loss = loss_of(self._loss_fn, call_model(self.model, inputs), targets) / n_micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        return total

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._config.parameter_dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self._device, dtype=dtype)

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def has_dropout(self) -> bool:
        """Whether a module of the model drops activations at random."""
        return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in self.model.modules())


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest differences between the program and plain training after one step, over all ranks.

    Attributes:
        loss: relative to the loss where it is above 1.
        gradient: relative to the largest gradient where that is above 1 (float64), or always (other precisions).
        parameter: absolute.
    """

    loss: float
    gradient: float
    parameter: float

    def exceeds(self, config: Config, *, step: int, learning_rate: float) -> bool:
        """Whether a difference is above the tolerance of the precision.

        Below float64, an optimizer that divides by the gradient's size may move a parameter whose gradient is nearly
        zero in the other direction, so parameters may differ by two updates per step.
        """
        tolerance = TOLERANCES[config.precision]
        parameter_tolerance = tolerance if config.precision == "fp64" else tolerance + 2.0 * learning_rate * (step + 1)
        within = self.loss <= tolerance and self.gradient <= tolerance and self.parameter <= parameter_tolerance
        return not within  # also true for NaN


def compare(model: ParallelModel, plain: PlainTraining, *, loss: float, plain_loss: float) -> Differences:
    """Loss, gradients and parameters of both after the same step; all ranks must call it."""
    reference = dict(plain.model.named_parameters(remove_duplicate=False))
    gradients = [p.grad.abs().max() for p in plain.model.parameters() if p.grad is not None]
    largest = float(torch.stack(gradients).max())
    scale = max(1.0, largest) if model.config.precision == "fp64" else max(largest, 1e-30)
    gradient = max([_distance(found, reference[name].grad) for name, found in model.full_gradients()], default=0.0)
    parameter = max([_distance(found, reference[name].data) for name, found in model.full_parameters()], default=0.0)
    figures = [abs(loss - plain_loss) / max(1.0, abs(plain_loss)), gradient / scale, parameter]
    worst = torch.tensor(figures, dtype=torch.float64, device=model.mesh.device).nan_to_num(nan=torch.inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Differences(*worst.tolist())


def _distance(found: torch.Tensor, expected: torch.Tensor | None) -> float:
    """The largest difference of two tensors; infinite where one is not a number or the shapes differ."""
    expected = torch.zeros_like(found) if expected is None else expected
    if found.shape != expected.shape:
        return torch.inf
    difference = (found.to(expected.dtype) - expected).abs().nan_to_num(nan=torch.inf)
    return float(difference.max()) if found.numel() else 0.0
