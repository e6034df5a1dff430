"""Batches: every rank takes its own samples of the same global batch.

    global batch  | dp rank 0              | dp rank 1              |
                  | micro-batch 0 | 1 | .. | micro-batch 0 | 1 | .. |

Tensor- and pipeline-parallel ranks of one dp rank take the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .config import Config

Batch = tuple[Any, Any]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor inside its tuples, lists and dicts replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, tuple | list):
        sequence = [map_tensors(function, item) for item in value]
        return type(value)(*sequence) if hasattr(value, "_fields") else type(value)(sequence)
    return value


def flatten_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors inside `value`, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return tuple(tensor for item in items for tensor in flatten_tensors(item))


def global_batch(make_batch: Callable[[int], Batch], *, batch_size: int, seed: int, step: int) -> Batch:
    """The batch of one step, equal on every rank; the random state of training is left as it was."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if on_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed * 1_000_003 + step)
        inputs, targets = make_batch(batch_size)
    return inputs, targets


def batch_slice(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` (exclusive) of a batch."""
    inputs, targets = map_tensors(lambda tensor: tensor[start:stop], batch)
    return inputs, targets


def local_batch(batch: Batch, *, config: Config, dp_rank: int) -> Batch:
    """The samples of one data-parallel rank of a global batch."""
    return batch_slice(batch, dp_rank * config.local_batch_size, (dp_rank + 1) * config.local_batch_size)


def micro_batches(batch: Batch, config: Config) -> list[Batch]:
    """The micro-batches of one data-parallel rank's batch, in order.

    Raises: ValueError when a tensor does not have the planned number of samples.
    """
    found = {tensor.shape[0] for tensor in flatten_tensors(batch)}
    if found != {config.local_batch_size}:
        raise ValueError(
            f"the batch of one data-parallel rank has {sorted(found)} samples in its tensors, planned: "
            f"{config.n_micro_batches} micro-batches x {config.micro_batch_size} samples = {config.local_batch_size}"
        )
    size = config.micro_batch_size
    return [batch_slice(batch, i * size, (i + 1) * size) for i in range(config.n_micro_batches)]


def synthetic_batches(
    make_batch: Callable[[int], Batch], *, config: Config, dp_rank: int, seed: int, first_step: int = 0
) -> Iterator[Batch]:
    """One data-parallel rank's batches, drawn anew for each step, from `first_step` on."""
    step = first_step
    while True:
        batch = global_batch(make_batch, batch_size=config.global_batch_size, seed=seed, step=step)
        yield local_batch(batch, config=config, dp_rank=dp_rank)
        step += 1


class _ResumedSampler(DistributedSampler[Any]):
    """Leaves out the first `n_skipped` samples of this rank."""

    n_skipped = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.n_skipped, None)


def dataset_batches(
    dataset: Dataset[Any], *, config: Config, dp_rank: int, seed: int, n_seen: int = 0
) -> Iterator[Batch]:
    """One data-parallel rank's batches of a map-style dataset of (inputs, targets), shuffled anew in each epoch.

    They begin after the `n_seen` samples that all ranks together have trained on, under whatever plan.
    """
    sampler = _ResumedSampler(dataset, num_replicas=config.dp, rank=dp_rank, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=config.local_batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise ValueError(f"the dataset has fewer samples than one global batch ({config.global_batch_size})")
    epoch, n_seen_in_epoch = divmod(n_seen, len(loader) * config.global_batch_size)
    sampler.n_skipped = -(-n_seen_in_epoch // config.global_batch_size) * config.local_batch_size
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch, sampler.n_skipped = epoch + 1, 0
