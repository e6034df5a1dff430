"""What is put into other words, the words, and what no other program has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.answers.answer import Workload
from autoplan.parallel_plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Subject:
    """What is put into other words.

    Attributes:
        classes: the class of each segment of the graph that is a block, "" of one that is none.
        synchronizes_batch_norm: whether the model has an `nn.SyncBatchNorm`.
        ties_weights: whether a parameter of the model has several names.
    """

    plan: Plan
    workload: Workload
    classes: tuple[str, ...]
    synchronizes_batch_norm: bool = False
    ties_weights: bool = False

    @property
    def n_replicas(self) -> int:
        """Data-parallel ranks that hold the same shards."""
        return self.plan.mesh.dp // self.plan.mesh.zero_shard_degree

    @property
    def global_batch_size(self) -> int:
        """Samples of a step in which every data-parallel rank takes what the first one does."""
        mesh = self.plan.mesh
        return mesh.dp * mesh.micro_batch_size * mesh.n_micro_batches

    def blocks_of(self, stage: StagePlan) -> tuple[int, ...]:
        """The blocks of a stage, as indices of segments."""
        return tuple(index for index in range(stage.start, stage.stop) if self.classes[index])

    def recomputed_first(self) -> int | None:
        """If every stage recomputes its first n blocks and no other, that n; None otherwise."""
        found = set()
        for stage in self.plan.stages:
            recomputes = [index in stage.recomputed for index in self.blocks_of(stage)]
            if recomputes != sorted(recomputes, reverse=True):
                return None
            found.add(sum(recomputes))
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Configuration:
    """One plan in other words.

    Attributes:
        file: name of the configuration file.
        use: the command, or where the file belongs.
        missing: what of the plan it does not express, a sentence each.
    """

    file: str
    text: str
    use: str
    missing: tuple[str, ...]


def everywhere_missing(subject: Subject) -> Iterator[str]:
    """What no target is told."""
    plan = subject.plan
    yield "The model: it must exist there by its own name; data, optimizer, learning rate and clipping are set there."
    if plan.mesh.tp > 1:
        yield "The tensor-parallel layout of each operator: the target splits as its own model code does."
    if plan.groups:
        yield "Pipeline ranks on several kinds of hosts: place the ranks by the order of the hosts."
    if plan.mesh.shares:
        yield "Unequal shares of the batch: every data-parallel rank takes what the first one does."
    if plan.precision == "fp64":
        yield "The precision fp64."
    if plan.precision == "tf32":
        yield 'Products in tf32: torch.set_float32_matmul_precision("high") before training.'
    if plan.loss == "chunked":
        yield "The loss in slices of the rows, which holds one slice of the logits at a time."
    if plan.mesh.memory_format == "channels_last":
        yield "Images in the order channels_last: call model.to(memory_format=torch.channels_last)."
    if plan.batch_norm == "synchronized" and not subject.synchronizes_batch_norm:
        yield "Synchronized BatchNorm: convert the model with torch.nn.SyncBatchNorm."
    if plan.batch_norm == "synchronized" and subject.synchronizes_batch_norm:
        yield "Synchronized BatchNorm where the model has nn.BatchNorm beside nn.SyncBatchNorm: convert those."
    if plan.batch_norm == "local" and subject.synchronizes_batch_norm:
        yield "BatchNorm over the micro-batch of a rank: the model's nn.SyncBatchNorm takes those of all ranks."
    if plan.grad_compression == "powersgd":
        yield "PowerSGD: register torch's DDP hook of that name where the model is wrapped by DDP."
    if plan.loss_average == "global_batch":
        yield "One mean of the loss over the targets of the global batch."
