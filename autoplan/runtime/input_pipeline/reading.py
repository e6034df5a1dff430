"""Batches of a dataset: in which order samples come, and which data-parallel rank takes which.

    epoch 0:  | global batch 0 | global batch 1 | ... | what is left |   epoch 1: ...
              | dp rank 0 | 1 | dp rank 0 | 1 |

A dataset with `__getitem__` and `__len__` is shuffled by (seed, epoch). One that can only be iterated comes in its own
order, equal in every process, of which each reads all and keeps its part; it sees no workers to divide itself over
(give it `set_epoch(epoch)` to shuffle by itself). No two data-parallel ranks get the same sample of an epoch; tensor-
and pipeline-parallel ranks get those of their dp rank. What is left at the end of an epoch is dropped, or, with
`__getitem__`, filled up with the first samples of the same epoch.

The position is counted in samples of all ranks, so training goes on at the same sample under another plan. What
`__getitem__` draws from the generators of torch, Python's `random` and `numpy.random` follows from (seed, epoch,
sample) alone: it is the same on all ranks that share a sample, with any number of workers, and after a restart.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..config import Config
from ..refusal import DataError
from ..seeds import mixed_seed, scrambled, seeding_the_host
from .batches import Batch
from .rehearsal import Rehearsal
from .samples import Collating, Drawn, NoBatch, call_without_stop, check_first_batch

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come: `n_samples` of all data-parallel ranks in this epoch."""

    epoch: int = 0
    n_samples: int = 0


START = Position()
Stream = Generator[tuple[Batch, Position], None, None]  # a batch, and the position after it


@dataclass(frozen=True, slots=True)
class Reading:
    """How one data-parallel rank reads a dataset.

    Attributes:
        n_workers: processes that read ahead; 0 reads in the training process.
        shuffles, repeats: a new order in each epoch; epochs without end. Training does both, evaluation neither.
        fills: fill the last batch of an epoch up with its first samples, instead of dropping what is left; of a dataset
            with `__getitem__` and `__len__` only.
        collate: makes a batch of samples.
        dataset: the function of the model file that it is from.
        pins: hand out batches in page-locked memory, from which a GPU copies while it computes.
    """

    config: Config
    dp_rank: int
    seed: int = 0
    n_workers: int = 0
    shuffles: bool = True
    repeats: bool = True
    fills: bool = False
    pins: bool = False
    collate: Collate = default_collate
    dataset: str = "build_dataset"

    def part(self, samples: Sequence[Any]) -> Sequence[Any]:
        """The samples of this rank, of a global batch."""
        return samples[self.config.samples_of(self.dp_rank)]

    def check_first(self, batch: Batch, rehearsal: Rehearsal | None) -> None:
        """Refuse a batch with which no step can be taken; without a rehearsal take any."""
        if rehearsal is not None:
            check_first_batch(batch, rehearsal, config=self.config, dp_rank=self.dp_rank, dataset=self.dataset)

    def batches(self, dataset: Any, epoch: int, **options: Any) -> Iterator[Batch]:
        """The batches of one epoch, by a loader that draws no number from the generator of training.

        Raises: DataError when samples make no batch.
        """
        loader: DataLoader[Batch | NoBatch] = DataLoader(
            dataset,
            num_workers=self.n_workers,
            collate_fn=cast(Collate, Collating(self.collate, self.dataset)),  # of what `dataset` draws
            pin_memory=self.pins,
            generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch)),
            worker_init_fn=_outlive_signals,
            multiprocessing_context=_context() if self.n_workers else None,
            **options,
        )
        for batch in loader:
            if isinstance(batch, NoBatch):
                raise DataError(batch.reason)
            yield batch


class _Worker(multiprocessing.Process):
    """A process that the training process ends all the same, where it gives no batch and does not end by itself."""

    def terminate(self) -> None:
        self.kill()


def _context() -> BaseContext:
    context: Any = copy.copy(multiprocessing.get_context())
    context.Process = _Worker
    return cast(BaseContext, context)


def _outlive_signals(_: int) -> None:
    """In a worker: read on when told to stop.

    Schedulers and terminals tell every process of a job, and the step that is to be finished may need a batch. With a
    handler: programs that a worker starts would inherit signals that it ignores or blocks.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def batches_from(dataset: Any, reading: Reading, start: Position) -> Stream:
    """The batches of one data-parallel rank from a position on.

    Raises: DataError when samples make no batch, or an epoch has fewer than one global batch.
    """
    return (_map_style_batches if is_map_style(dataset) else _iterable_batches)(dataset, reading, start)


def is_map_style(dataset: Any) -> bool:
    """Whether any sample can be read by its number."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def _map_style_batches(dataset: Dataset[Any], reading: Reading, start: Position) -> Stream:
    """Batches of a dataset with `__getitem__` and `__len__`.

    Raises: DataError when it has fewer samples than one global batch.
    """
    n_samples, size = len(dataset), reading.config.global_batch_size  # type: ignore[arg-type]
    if n_samples < size:
        raise _too_small(f"{n_samples} samples", reading)
    for epoch in count(start.epoch):
        order = torch.arange(n_samples)
        if reading.shuffles:
            order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(mixed_seed(reading.seed, epoch)))
        samples = _SeededSamples(dataset, seed=scrambled(mixed_seed(reading.seed, epoch)))
        taken = start.n_samples if epoch == start.epoch else 0
        for batch in reading.batches(samples, epoch, batch_sampler=_RankBatches(order, reading, taken)):
            taken += size
            yield batch, Position(epoch, taken)
        if not reading.repeats:
            return


class _RankBatches:
    """The samples of one rank, batch by batch, of an order that all ranks have."""

    def __init__(self, order: torch.Tensor, reading: Reading, n_taken: int) -> None:
        self._order, self._reading, self._n_taken = order, reading, n_taken

    def __iter__(self) -> Iterator[list[int]]:
        size = self._reading.config.global_batch_size
        for first in range(self._n_taken, len(self._order), size):
            samples = self._order[first : first + size]
            if len(samples) < size:
                if not self._reading.fills:
                    return
                samples = torch.cat([samples, self._order[: size - len(samples)]])
            yield list(self._reading.part(samples.tolist()))


class _SeededSamples(Dataset[Any]):
    """The samples of a dataset, each drawn with a seed of its own; the generators are left as they were."""

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, indices: list[int]) -> Drawn:
        return Drawn(call_without_stop(self._samples, "__getitem__", indices), indices)

    def _samples(self, indices: list[int]) -> Any:
        samples = []
        with seeding_the_host() as seed_all:
            if hasattr(self._dataset, "__getitems__"):
                seed_all(mixed_seed(self._seed, indices[0]))
                return self._dataset.__getitems__(indices)
            for index in indices:
                seed_all(mixed_seed(self._seed, index))
                samples.append(self._dataset[index])
        return samples


def _iterable_batches(dataset: Any, reading: Reading, start: Position) -> Stream:
    """Batches of a dataset that can only be iterated.

    Raises: DataError when an epoch has fewer samples than one global batch.
    """
    size = reading.config.global_batch_size
    for epoch in count(start.epoch):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        n_skipped = taken = start.n_samples if epoch == start.epoch else 0
        parts = _RankParts(dataset, reading, n_skipped)
        for batch in reading.batches(parts, epoch, batch_size=None):
            taken += size
            yield batch, Position(epoch, taken)
        if taken == 0:
            again = "an object with __iter__ in place of a generator, which is read only once"
            raise _too_small("fewer samples", reading, more=again if epoch else "more data")
        if not reading.repeats:
            return


class _RankParts(IterableDataset[Drawn]):
    """The samples of one rank, batch by batch, of a stream that all ranks read; a worker takes every n-th batch."""

    def __init__(self, dataset: Any, reading: Reading, n_skipped: int) -> None:
        self._dataset, self._reading, self._n_skipped = dataset, reading, n_skipped

    def __iter__(self) -> Iterator[Drawn]:
        worker = get_worker_info()
        own, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size = self._reading.config.global_batch_size
        with _without_worker_info():
            stream = islice(iter(self._dataset), self._n_skipped, None)
        for index in count():
            with _without_worker_info():
                samples = list(islice(stream, size))
            if len(samples) < size:
                return
            if index % n_workers == own:
                first = self._n_skipped + index * size
                yield Drawn(list(self._reading.part(samples)), self._reading.part(range(first, first + size)))


@contextmanager
def _without_worker_info() -> Iterator[None]:
    """Let a dataset take this process for the only one: it would give its own part of what is divided already."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    assert get_worker_info() is None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _too_small(found: str, reading: Reading, *, more: str = "more data") -> DataError:
    return DataError(
        f"model.py: {reading.dataset}: found {found}, expected at least one global batch"
        f" ({reading.config.global_batch_size})\n  fix: {more}, or a plan for a smaller --global-batch"
    )
