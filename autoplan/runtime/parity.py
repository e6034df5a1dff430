"""Parity: the program against plain training of the user's model in one process, on the same batches.

Every rank trains the whole model beside its own part, and compares what it owns; the largest differences over all
ranks are the result. Dropout, which draws other masks in every process, is left out of both (`without_dropout`).

One process means: the micro-batches of all data-parallel ranks one after the other, each with its own forward pass and
its own loss, averaged over samples. Where BatchNorm is synchronized, micro-batches i of all ranks go through one
forward pass together, and each still has its own loss; a model that returns its loss gives one for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .building.construction import build_whole_model
from .config import Config
from .input_pipeline.batches import Batch, batch_slice, for_users_code, map_tensors
from .input_pipeline.model_calls import call_model, loss_of
from .parallel import ParallelModel
from .stages.recompute import unchanged_buffers
from .update.learning_rate import LearningRate, build_scheduler_of, step_scheduler
from .update.loss_average import total_count, weigh
from .update.optimizer import LEARNING_RATE, build_optimizer_of

# Largest accepted difference of the loss (relative, above 1) and of gradients (relative to the largest gradient). In
# float64 only the order of additions differs. In float32 and tf32 the same, at their precision. In 16 bits the program
# rounds every activation and the reference, in float32, does not.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}
FLOAT32_INSIDE_TOLERANCE = 1e-5  # in float64, for a model that computes in float32 by itself


class PlainTraining:
    """The user's model trained in one process, micro-batch by micro-batch, with one optimizer step per global batch.

    Attributes:
        written_buffers: names of the buffers that the last step changed, such as running statistics.
    """

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
        learning_rates: LearningRate | None = None,
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
        self.scheduler = build_scheduler_of(model_file, self.optimizer, learning_rates)
        self.written_buffers: frozenset[str] = frozenset()
        self._count_of_sample = torch.ones((), device=device)  # targets that count, on average
        self.drifts: dict[str, float] = {}

    def step(self, batch: Batch, *, dp_rank: int = 0) -> float:
        """One optimizer step on a global batch; its mean loss. Buffers become those of one data-parallel rank."""
        self.model.zero_grad(set_to_none=True)  # of all parameters; the optimizer may have some of them
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        is_joint = self._config.batch_norm == "synchronized" and self._has_batch_norm()
        self._count_targets(batch)
        total = 0.0
        for loss in self._joint_losses(batch) if is_joint else self._single_losses(batch, dp_rank):
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.written_buffers = frozenset(
            name for name, buffer in self.model.named_buffers() if not torch.equal(buffer, buffers[name])
        )
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            step_scheduler(self.scheduler, torch.tensor(total))
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a global batch in evaluation mode."""
        self.model.eval()
        with unchanged_buffers(self.model):
            self._count_targets(batch)
            total = sum(loss.item() for loss in self._single_losses(batch, 0))
        self.model.train()
        return total

    def _count_targets(self, batch: Batch) -> None:
        if self._config.ignored_target is not None:
            total = total_count([batch[1]], ignored=self._config.ignored_target).to(self._device)
            self._count_of_sample = total / self._config.global_batch_size

    def _single_losses(self, batch: Batch, dp_rank: int) -> Iterator[torch.Tensor]:
        """Each micro-batch's share of the loss, by itself; the passes of other ranks leave the buffers as they are."""
        n_samples = self._config.global_batch_size
        for rank, samples in self._micro_batches():
            inputs, targets = map_tensors(self._to_device, batch_slice(batch, samples.start, samples.stop))
            with nullcontext() if rank == dp_rank else unchanged_buffers(self.model):
                loss = self._loss(self._outputs(inputs), targets, size=len(samples))
                yield loss / (n_samples / len(samples))

    def _micro_batches(self) -> Iterator[tuple[int, range]]:
        """Of all data-parallel ranks: (rank, samples)."""
        for rank in range(self._config.dp):
            own, (size, _) = self._config.samples_of(rank), self._config.micro_batches_of(rank)
            yield from ((rank, range(start, start + size)) for start in range(own.start, own.stop, size))

    def _joint_losses(self, batch: Batch) -> Iterator[torch.Tensor]:
        """The share of the loss of micro-batch i of all ranks, which go through the model together."""
        config, size = self._config, self._config.micro_batch_size
        for index in range(config.n_micro_batches):
            starts = [config.samples_of(rank).start + index * size for rank in range(config.dp)]
            samples = torch.cat([torch.arange(start, start + size) for start in starts])
            inputs, targets = map_tensors(self._to_device, map_tensors(itemgetter(samples), batch))
            outputs = self._outputs(inputs)
            parts = range(config.dp) if self._loss_fn is not None else ()
            losses = [self._loss(*self._part((outputs, targets), rank), size=size) for rank in parts]
            loss = torch.stack(losses).mean() if losses else self._loss(outputs, targets, size=size * config.dp)
            yield loss / config.n_micro_batches

    def _part(self, joint: tuple[Any, Any], rank: int) -> tuple[Any, Any]:
        """What belongs to one data-parallel rank's samples; a tensor without a batch dim belongs to all."""
        size, n_samples = self._config.micro_batch_size, self._config.micro_batch_size * self._config.dp
        own = slice(rank * size, (rank + 1) * size)
        outputs, targets = map_tensors(lambda t: t[own] if t.dim() and t.shape[0] == n_samples else t, joint)
        return outputs, targets

    def _outputs(self, inputs: Any) -> Any:
        return call_model(self.model, for_users_code(inputs, self._config))

    def _loss(self, outputs: Any, targets: Any, *, size: int) -> torch.Tensor:
        """Of a micro-batch of this size, weighted where some targets do not count."""
        loss = loss_of(self._loss_fn, outputs, for_users_code(targets, self._config))
        if self._config.ignored_target is None:
            return loss
        mean = self._count_of_sample * size
        return weigh(loss, targets, ignored=self._config.ignored_target, mean=mean)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._config.parameter_dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self._device, dtype=dtype)

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group, the largest so far of a schedule that begins or ends with it."""
        group = self.optimizer.param_groups[0]
        return max(float(group["lr"]), float(group.get("initial_lr", 0.0)))

    def add_drift(self, name: str, gradient_difference: float) -> None:
        """Add to `drifts` by how much rounding of a parameter's gradients may have moved it in this step.

        An optimizer that divides by sqrt(v) + eps turns a difference d of gradients far below eps into an update of up
        to 2 lr d / eps (d of the mean, d of the root). Such is a bias before BatchNorm, whose gradient is nothing else.
        An `eps` of several numbers, such as Adafactor's, means something else and explains nothing.
        """
        eps = self.optimizer.param_groups[0].get("eps")
        eps = eps if isinstance(eps, float) and eps else 1.0
        self.drifts[name] = self.drifts.get(name, 0.0) + 2.0 * self.learning_rate * gradient_difference / eps

    def _has_batch_norm(self) -> bool:
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())

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
        unexplained: of a parameter, beyond what rounding of its gradients explains (`PlainTraining.add_drift`).
        buffer: of the buffers that plain training changed, each relative to its largest element where that is above 1.
    """

    loss: float
    gradient: float
    parameter: float
    unexplained: float
    buffer: float

    def tolerances(self, config: Config, *, step: int, learning_rate: float) -> dict[str, float]:
        """The largest accepted value of each difference that the precision is judged by.

        Below float64, an optimizer that divides by the gradient's size may move a parameter whose gradient is nearly
        zero in the other direction, so parameters may differ by two updates per step.
        """
        tolerance = TOLERANCES[config.precision]
        if config.computes_in_float32:
            tolerance = max(tolerance, FLOAT32_INSIDE_TOLERANCE)
        found = {"loss": tolerance, "gradient": tolerance, "buffer": tolerance}
        if config.precision != "fp64":
            return found | {"parameter": tolerance + 2.0 * learning_rate * (step + 1)}
        if math.isfinite(self.unexplained):
            found["buffer"] += self.parameter - max(self.unexplained, 0.0)  # a running mean moves with its bias
        return found | {"unexplained": tolerance}

    def exceeds(self, tolerances: Mapping[str, float]) -> bool:
        """Whether a difference is above its tolerance, or NaN."""
        return any(not getattr(self, name) <= tolerance for name, tolerance in tolerances.items())


def compare(model: ParallelModel, plain: PlainTraining, *, loss: float, plain_loss: float) -> Differences:
    """Loss, gradients, parameters and written buffers of both after the same step; all ranks must call it.

    `plain.step` must have been given this rank's `dp_rank`.
    """
    found = _Distances.of(model, plain)
    for name in found.of_parameters:
        plain.add_drift(name, found.of_gradients.get(name, 0.0) * found.scale)
    figures = [
        abs(loss - plain_loss) / max(1.0, abs(plain_loss)),
        max(found.of_gradients.values(), default=0.0),
        max(found.of_parameters.values(), default=0.0),
        max(found.unexplained(plain).values(), default=0.0),
        max(_buffer_differences(model, plain).values(), default=0.0),
    ]
    worst = torch.tensor(figures, dtype=torch.float64, device=model.mesh.device).nan_to_num(nan=torch.inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Differences(*worst.tolist())


def largest_difference(
    model: ParallelModel, plain: PlainTraining, *, loss: float, tolerances: Mapping[str, float]
) -> str:
    """Which tensor is furthest above its tolerance, by what `compare` just found, in words; all ranks must call it.

    The loss, of this difference, where none is.
    """
    found = _Distances.of(model, plain)
    kinds = (
        ("gradient", "the gradient of ", found.of_gradients),
        ("parameter", "", found.of_parameters),
        ("unexplained", "", found.unexplained(plain)),
        ("buffer", "the buffer ", _buffer_differences(model, plain)),
    )
    above = [
        (value / tolerances[kind], value, f"{words}{name}")
        for kind, words, values in kinds
        if kind in tolerances
        for name, value in values.items()
        if value > tolerances[kind]
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, max(above, default=(0.0, loss, "the loss alone")))
    _, value, name = max(of_ranks)
    return f"{name} ({value:.1e})"


@dataclass(frozen=True, slots=True)
class _Distances:
    """What of this rank's weights differs how much, by name, as the largest ones in `Differences`.

    `of_gradients` are relative to `scale`.
    """

    of_gradients: dict[str, float]
    of_parameters: dict[str, float]
    scale: float

    @classmethod
    def of(cls, model: ParallelModel, plain: PlainTraining) -> _Distances:
        reference = dict(plain.model.named_parameters(remove_duplicate=False))
        gradients = [p.grad.abs().max() for p in plain.model.parameters() if p.grad is not None]
        largest = float(torch.stack(gradients).max())
        scale = max(1.0, largest) if model.config.precision == "fp64" else max(largest, 1e-30)
        of_gradients = {name: _distance(found, reference[name].grad) / scale for name, found in model.full_gradients()}
        of_parameters = {name: _distance(found, reference[name].data) for name, found in model.full_parameters()}
        return cls(of_gradients, of_parameters, scale)

    def unexplained(self, plain: PlainTraining) -> dict[str, float]:
        """Of each parameter, less what rounding of its gradients explains."""
        return {name: found - plain.drifts[name] for name, found in self.of_parameters.items()}


def _buffer_differences(model: ParallelModel, plain: PlainTraining) -> dict[str, float]:
    """Of this rank's buffers that plain training changed, by name, as the largest one in `Differences`."""
    reference = dict(plain.model.named_buffers(remove_duplicate=False))
    return {
        name: _distance(found, reference[name]) / max(1.0, float(reference[name].abs().max()))
        for name, found in model.full_buffers()
        if name in plain.written_buffers
    }


def _distance(found: torch.Tensor, expected: torch.Tensor | None) -> float:
    """The largest difference of two tensors; infinite where one is not a number or the shapes differ."""
    expected = torch.zeros_like(found) if expected is None else expected
    if found.shape != expected.shape:
        return torch.inf
    dtype = torch.promote_types(expected.dtype, torch.float32)  # counts are integers
    difference = (found.to(dtype) - expected.to(dtype)).abs().nan_to_num(nan=torch.inf)
    return float(difference.max()) if found.numel() else 0.0
