"""Batches: every rank takes its own samples of the same global batch.

    global batch  | dp rank 0              | dp rank 1              |
                  | micro-batch 0 | 1 | .. | micro-batch 0 | 1 | .. |

Tensor- and pipeline-parallel ranks of one dp rank take the same samples. A dp rank may take more than another one, or
in larger micro-batches (`Config.shares`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..config import Config
from ..seeds import batch_seed, seeding_the_host

Batch = tuple[Any, Any]
InputPath = tuple[str | int, ...]  # keys and indices that lead to a tensor of the inputs; () to inputs that are one


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor inside its tuples, lists, dicts and dataclasses replaced.

    Other mappings, as what a tokenizer returns, become dicts.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    return _with_items(value, lambda item: map_tensors(function, item))


def _with_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """A mapping, tuple, list or dataclass with each item replaced; anything else as it is."""
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        return type(value)(**items) if isinstance(value, dict) and type(value) is not dict else items
    if isinstance(value, tuple | list):
        sequence = [function(item) for item in value]
        return type(value)(*sequence) if hasattr(value, "_fields") else type(value)(sequence)
    if is_dataclass(value):
        copied = copy.copy(value)
        for name, item in _fields_of(value):
            object.__setattr__(copied, name, function(item))  # frozen ones too
        return copied
    return value


def for_users_code(value: Any, config: Config) -> Any:
    """What the user's code is given of a batch: a copy, where it writes into that; micro-batches are parts of one."""
    return map_tensors(torch.clone, value) if config.writes_batch else value


def tensors_in_place(value: Any) -> Any:
    """`value` with tensors in place of NumPy's arrays of numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="))) if value.dtype.kind in "biufc" else value
    return _with_items(value, tensors_in_place)


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(value, field.name)) for field in fields(value))


def flatten_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors inside `value`, in order."""
    return tuple(tensor for _, tensor in with_paths(value))


def tensors_at(value: Any, paths: Sequence[InputPath]) -> tuple[torch.Tensor, ...]:
    """The tensors inside `value` by the keys and indices that lead to each, in whatever order its dicts have them.

    Where there is one only, it does not matter what leads to it.

    Raises: ValueError when it has others than these.
    """
    found = dict(with_paths(value))
    if len(found) == len(paths) == 1:
        return tuple(found.values())
    if found.keys() != set(paths):
        raise ValueError(
            f"the inputs of a batch: found {_paths_text(found)}, planned: {_paths_text(paths)}\n"
            "  fix: give the model what make_batch gives it, or plan again with a make_batch that gives the same"
        )
    return tuple(found[path] for path in paths)


def with_paths(value: Any, path: InputPath = ()) -> Iterator[tuple[InputPath, torch.Tensor]]:
    """The tensors inside `value`, in order, after what leads to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value):
        items = _fields_of(value)
    for key, item in items:
        yield from with_paths(item, (*path, key))


def _paths_text(paths: Iterable[InputPath]) -> str:
    """`ids, mask`; "one tensor" where nothing leads to it."""
    return ", ".join(".".join(map(str, path)) or "one tensor" for path in paths) or "no tensor"


def global_batch(make_batch: Callable[[int], Batch], *, batch_size: int, seed: int, step: int) -> Batch:
    """The batch of one step, equal on every rank; the random state of training is left as it was."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if on_cuda else []
    with torch.random.fork_rng(devices=devices), seeding_the_host() as seed_all:
        seed_all(batch_seed(seed, step=step))
        torch.manual_seed(batch_seed(seed, step=step))
        inputs, targets = tensors_in_place(make_batch(batch_size))
    return inputs, targets


def batch_slice(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` (exclusive) of a batch: of its tensors, and of lists of text as long as they are."""
    n_samples = max((len(tensor) for tensor in flatten_tensors(batch) if tensor.dim()), default=None)
    inputs, targets = map_tensors(lambda tensor: tensor[start:stop], _with_text(batch, n_samples, slice(start, stop)))
    return inputs, targets


def _with_text(value: Any, n_samples: int | None, samples: slice) -> Any:
    """`value` with these samples of each list of `n_samples` texts inside."""
    if isinstance(value, tuple | list) and len(value) == n_samples and all(isinstance(item, str) for item in value):
        return value[samples]
    return _with_items(value, lambda item: _with_text(item, n_samples, samples))


def local_batch(batch: Batch, *, config: Config, dp_rank: int) -> Batch:
    """The samples of one data-parallel rank of a global batch."""
    own = config.samples_of(dp_rank)
    return batch_slice(tensors_in_place(batch), own.start, own.stop)


def micro_batches(batch: Batch, config: Config, *, dp_rank: int) -> list[Batch]:
    """The micro-batches of one data-parallel rank's batch, in order.

    Raises: ValueError when a tensor does not have the planned number of samples.
    """
    found = {len(tensor) if tensor.dim() else 0 for tensor in flatten_tensors(batch)}
    size, n_micro_batches = config.micro_batches_of(dp_rank)
    if found != {size * n_micro_batches}:
        raise ValueError(
            f"the batch of one data-parallel rank has {sorted(found)} samples in its tensors, planned: "
            f"{n_micro_batches} micro-batches x {size} samples = {size * n_micro_batches}\n"
            "  fix: load that many for this rank, or plan again with the global batch that you load (global_batch, or"
            " --global-batch)"
        )
    return [batch_slice(batch, i * size, (i + 1) * size) for i in range(n_micro_batches)]
