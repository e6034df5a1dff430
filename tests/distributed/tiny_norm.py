"""A small classifier with BatchNorm, as a user's model file, and as hand-written pipeline stages in generated form."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoplan.runtime import Boundary, Buffer, PerSample, Weights, attach

WIDTH, N_BLOCKS, N_CLASSES, POINTS = 6, 4, 3, 5
STATISTICS = {"running_mean": Buffer((WIDTH,)), "running_var": Buffer((WIDTH,))}


class Block(nn.Module):
    """x + relu(norm(linear(x))), over points."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)  # with a bias its gradient would be rounding noise
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Classifier(nn.Module):
    """Blocks, a norm without parameters, a head; with `own_checkpoint` its own forward recomputes the blocks."""

    def __init__(self, *, own_checkpoint=False):
        super().__init__()
        self.own_checkpoint = own_checkpoint
        self.blocks = nn.ModuleList(Block() for _ in range(N_BLOCKS))
        self.last_norm = nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.head = nn.Linear(WIDTH, N_CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own_checkpoint else block(x)
        return self.head(self.last_norm(x.mean(dim=2)))


def build_model():
    return Classifier()


def make_batch(batch_size):
    # Each sample has its own scale, so that statistics of different samples differ.
    scale = torch.linspace(0.5, 2.0, batch_size).view(-1, 1, 1)
    return scale * torch.randn(batch_size, WIDTH, POINTS), torch.randint(N_CLASSES, (batch_size,))


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)


class StageBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Weights(weight=(WIDTH, WIDTH, 1))
        counter = Buffer((), "int64")
        self.norm = Weights(weight=(WIDTH,), bias=(WIDTH,), num_batches_tracked=counter, **STATISTICS)

    def forward(self, x):
        norm = self.norm
        y = F.conv1d(x, self.linear.weight)
        y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.1, 1e-05)
        norm.num_batches_tracked.add_(1)
        return x + F.relu(y)


class Stage(nn.Module):
    def __init__(self, first, stop):
        super().__init__()
        self.first, self.stop = first, stop
        for index in range(first, stop):
            attach(self, f"blocks.{index}", StageBlock())
        if stop == N_BLOCKS:
            self.last_norm = Weights(num_batches_tracked=Buffer((), "int64"), **STATISTICS)
            self.head = Weights(weight=(N_CLASSES, WIDTH), bias=(N_CLASSES,))
        self.BLOCKS = tuple(f"blocks.{index}" for index in range(first, stop))

    def forward(self, x):
        for index in range(self.first, self.stop):
            x = self.get_submodule(f"blocks.{index}")(x)
        if self.stop < N_BLOCKS:
            return x
        norm = self.last_norm
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked)
        x = F.batch_norm(x.mean(dim=2), norm.running_mean, norm.running_var, training=self.training, momentum=momentum)
        return F.linear(x, self.head.weight, self.head.bias)


def parallel_model(n_stages):
    """The namespace of a generated parallel_model.py."""
    per_stage = N_BLOCKS // n_stages

    def stage_class(first):
        own = {"__init__": lambda self, tp: Stage.__init__(self, first, first + per_stage)}
        return type("Stage", (Stage,), own)

    return SimpleNamespace(
        SHARDS={},
        PARTIAL_GRADIENTS=(),
        STAGES=tuple(stage_class(first) for first in range(0, N_BLOCKS, per_stage)),
        INPUTS=((),),
        BOUNDARIES=((Boundary((PerSample(1), WIDTH, POINTS)),),) * (n_stages - 1),
        TIED=(),
    )
