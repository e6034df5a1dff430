"""Batches: every rank takes its own samples of the same global batch.

    global batch  | dp rank 0              | dp rank 1              |
                  | micro-batch 0 | 1 | .. | micro-batch 0 | 1 | .. |

Tensor- and pipeline-parallel ranks of one dp rank take the same samples. A dp rank may take more than another one, or
in larger micro-batches (`Config.shares`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .config import Config
from .seeds import batch_seed

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
        torch.manual_seed(batch_seed(seed, step=step))
        inputs, targets = make_batch(batch_size)
    return inputs, targets


def batch_slice(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` (exclusive) of a batch."""
    inputs, targets = map_tensors(lambda tensor: tensor[start:stop], batch)
    return inputs, targets


def local_batch(batch: Batch, *, config: Config, dp_rank: int) -> Batch:
    """The samples of one data-parallel rank of a global batch."""
    own = config.samples_of(dp_rank)
    return batch_slice(batch, own.start, own.stop)


def micro_batches(batch: Batch, config: Config, *, dp_rank: int) -> list[Batch]:
    """The micro-batches of one data-parallel rank's batch, in order.

    Raises: ValueError when a tensor does not have the planned number of samples.
    """
    found = {tensor.shape[0] for tensor in flatten_tensors(batch)}
    size, n_micro_batches = config.micro_batches_of(dp_rank)
    if found != {size * n_micro_batches}:
        raise ValueError(
            f"the batch of one data-parallel rank has {sorted(found)} samples in its tensors, planned: "
            f"{n_micro_batches} micro-batches x {size} samples = {size * n_micro_batches}; load that many "
            "for this rank, or plan again with the global batch that you load (global_batch, or --global-batch)"
        )
    return [batch_slice(batch, i * size, (i + 1) * size) for i in range(n_micro_batches)]
