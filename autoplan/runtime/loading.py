"""Training data: in which order samples come, which rank takes which, and how far training has come.

    epoch 0:  | global batch 0 | global batch 1 | ... | what is left |   epoch 1: ...
              | dp rank 0 | 1 | dp rank 0 | 1 |

A dataset with `__getitem__` and `__len__` is shuffled by (seed, epoch); one that can only be iterated comes in its own
order, of which every rank reads all and keeps its part (give it `set_epoch(epoch)` to shuffle by itself). No two
data-parallel ranks get the same sample of an epoch; tensor- and pipeline-parallel ranks get those of their dp rank.
What is left at the end of an epoch is dropped, or filled up with the first samples of the same epoch.

The position is counted in samples of all ranks, so training goes on at the same sample under another plan. What
`__getitem__` draws from the generators of torch, Python's `random` and `numpy.random` follows from (seed, epoch,
sample) alone: it is the same on all ranks that share a sample, with any number of workers, and after a restart.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from .batches import Batch, flatten_tensors, global_batch, local_batch, map_tensors
from .config import Config
from .refusal import DataError, OptionError
from .rehearsal import Rehearsal
from .samples import Collating, Drawn, NoBatch, check_first_batch, naming_differences
from .seeds import mixed_seed, scrambled, seeding_the_host

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come: `n_samples` of all data-parallel ranks in this epoch."""

    epoch: int = 0
    n_samples: int = 0


Stream = Generator[tuple[Batch, Position], None, None]  # a batch, and the position after it


@dataclass(frozen=True, slots=True)
class Reading:
    """How one data-parallel rank reads a dataset.

    Attributes:
        n_workers: processes that read ahead; 0 reads in the training process.
        shuffles, repeats: a new order in each epoch; epochs without end. Training does both, evaluation neither.
        fills: fill the last batch of an epoch up with its first samples, instead of dropping what is left.
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


class TrainingData:
    """One data-parallel rank's batches, step after step, from a position that can be kept and set.

    `stream` gives the batches from a position on. On a GPU the next batch is copied there while a step runs.
    `check` may refuse the first batch that is handed out.
    Under `explaining(batch)` an error has a note on how the batch differs from those planned for, if it does.
    """

    def __init__(
        self,
        stream: Callable[[Position], Stream],
        *,
        device: torch.device,
        check: Callable[[Batch], None] = lambda _: None,
        explaining: Callable[[Batch], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._stream, self._device, self._check, self.explaining = stream, device, check, explaining
        self._is_checked = False
        self._position = Position()
        self._batches: Stream | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            batches = self._stream(self._position)
            self._batches = _one_ahead(batches, self._device) if self._device.type == "cuda" else batches
        batch, self._position = next(self._batches)
        if not self._is_checked:
            self._check(batch)
            self._is_checked = True
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: where the next batch begins."""
        return asdict(self._position)

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from what `state_dict` returned, under this plan or another."""
        self.close()
        self._position = Position(epoch=int(state_dict["epoch"]), n_samples=int(state_dict["n_samples"]))

    def close(self) -> None:
        """End the worker processes; the next batch starts new ones."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def training_data(
    model_file: Any,
    *,
    config: Config,
    dp_rank: int,
    device: torch.device,
    seed: int,
    n_different: int | None = None,
    rehearsal: Rehearsal | None = None,
    **reading: Any,
) -> TrainingData:
    """The batches of the model file's `build_dataset`, or random ones of its `make_batch`.

    With `n_different` they are so many batches of `make_batch`, again and again, so that a step is timed without what
    it takes to draw or read a batch. With a `rehearsal` the first batch of a dataset is checked before it is handed
    out. `reading` has further fields of `Reading`. A function `collate(samples)` in the model file replaces torch's.

    Raises: OptionError when `n_different` is below 1; DataError when a dataset is none.
    """
    if n_different is not None and n_different < 1:
        raise OptionError(
            f"--repeat-batches: found {n_different}, expected 1 or more\n  fix: leave it out for new ones"
        )
    if n_different is None and hasattr(model_file, "build_dataset"):
        dataset = _dataset_of(model_file, "build_dataset")
        how = _reading(model_file, "build_dataset", config, dp_rank, device, seed=seed, **reading)
        return _dataset_data(dataset, how, model_file, device, rehearsal=rehearsal)
    draw = partial(
        synthetic_batches,
        model_file.make_batch,
        config=config,
        dp_rank=dp_rank,
        seed=seed,
        pins=device.type == "cuda",
    )
    if n_different is None:
        return TrainingData(lambda start: draw(start=start), device=device)
    drawn = list(islice(draw(), n_different))
    return TrainingData(lambda start: repeated_batches(drawn, config, start), device=device)


def evaluation_data(
    model_file: Any,
    *,
    config: Config,
    dp_rank: int,
    device: torch.device,
    rehearsal: Rehearsal | None = None,
    n_workers: int = 0,
) -> TrainingData:
    """The batches of one pass over the model file's `build_eval_dataset`, in its order; what is left is dropped.

    With a `rehearsal` the first batch is read and checked at once, by this process, as if it had not been.

    Raises: OptionError when the model file has none; DataError when it is no dataset, or when the check finds a fault.
    """
    if not hasattr(model_file, "build_eval_dataset"):
        raise OptionError(
            "--eval-every: the model file has no build_eval_dataset()\n"
            "  expected: a function that returns a dataset of (inputs, targets)\n  fix: add it, or leave the option out"
        )
    dataset = _dataset_of(model_file, "build_eval_dataset")
    if isinstance(dataset, Iterator) and not isinstance(dataset, Dataset):
        raise DataError(
            f"model.py: build_eval_dataset: found {type(dataset).__name__}, which is read only once, expected a dataset"
            " that each evaluation reads from its start\n"
            "  fix: return a list, or an IterableDataset whose __iter__ begins anew"
        )
    options = {"n_workers": n_workers, "shuffles": False, "repeats": False}
    how = _reading(model_file, "build_eval_dataset", config, dp_rank, device, **options)
    if rehearsal is not None:
        first = _batches(dataset, replace(how, n_workers=0, pins=False), Position())
        with seeding_the_host(), closing(first):
            how.check_first(next(first)[0], rehearsal)
    return _dataset_data(dataset, how, model_file, device)


def _dataset_of(model_file: Any, name: str) -> Any:
    dataset = getattr(model_file, name)()
    if isinstance(dataset, DataLoader) or not (_is_map_style(dataset) or hasattr(dataset, "__iter__")):
        raise DataError(
            f"model.py: {name}: found {type(dataset).__name__}, expected a dataset of (inputs, targets)\n"
            "  fix: return what has __getitem__ and __len__, or __iter__; the program makes the batches"
        )
    return dataset


def _reading(model_file: Any, name: str, config: Config, dp_rank: int, device: torch.device, **fields: Any) -> Reading:
    collate = getattr(model_file, "collate", default_collate)
    pins = device.type == "cuda"
    return Reading(config=config, dp_rank=dp_rank, pins=pins, collate=collate, dataset=name, **fields)


def _dataset_data(
    dataset: Any, reading: Reading, model_file: Any, device: torch.device, *, rehearsal: Rehearsal | None = None
) -> TrainingData:
    return TrainingData(
        lambda start: _batches(dataset, reading, start),
        device=device,
        check=lambda batch: reading.check_first(batch, rehearsal),
        explaining=lambda batch: naming_differences(batch, model_file, dataset=reading.dataset),
    )


def _batches(dataset: Any, reading: Reading, start: Position) -> Stream:
    return (map_style_batches if _is_map_style(dataset) else iterable_batches)(dataset, reading, start)


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def synthetic_batches(
    make_batch: Callable[[int], Batch],
    *,
    config: Config,
    dp_rank: int,
    seed: int,
    pins: bool = False,
    start: Position = Position(),
) -> Stream:
    """Batches drawn anew for each step; there is one epoch."""
    size = config.global_batch_size
    for step in count(start.n_samples // size):
        batch = global_batch(make_batch, batch_size=size, seed=seed, step=step)
        own: Any = local_batch(batch, config=config, dp_rank=dp_rank)
        yield map_tensors(torch.Tensor.pin_memory, own) if pins else own, Position(0, (step + 1) * size)


def repeated_batches(drawn: Sequence[tuple[Batch, Position]], config: Config, start: Position) -> Stream:
    """The same few batches again and again."""
    size = config.global_batch_size
    for step in count(start.n_samples // size):
        yield drawn[step % len(drawn)][0], Position(0, (step + 1) * size)


def map_style_batches(dataset: Dataset[Any], reading: Reading, start: Position = Position()) -> Stream:
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
        samples = []
        with seeding_the_host() as seed_all:
            if hasattr(self._dataset, "__getitems__"):
                seed_all(mixed_seed(self._seed, indices[0]))
                return Drawn(self._dataset.__getitems__(indices), indices)
            for index in indices:
                seed_all(mixed_seed(self._seed, index))
                samples.append(self._dataset[index])
        return Drawn(samples, indices)


def iterable_batches(dataset: Any, reading: Reading, start: Position = Position()) -> Stream:
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
        stream = islice(iter(self._dataset), self._n_skipped, None)
        for index in count():
            samples = list(islice(stream, size))
            if len(samples) < size:
                return
            if index % n_workers == own:
                first = self._n_skipped + index * size
                yield Drawn(list(self._reading.part(samples)), self._reading.part(range(first, first + size)))


def _one_ahead(batches: Stream, device: torch.device) -> Stream:
    """The same batches on the GPU; each is copied there on a stream of its own while the one before it is used."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with closing(batches):
        ready = None
        for batch, position in batches:
            with torch.cuda.stream(stream):
                moved: Any = map_tensors(lambda t: t.to(device, non_blocking=True), batch)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            if ready is not None:
                yield _handed_over(*ready)
            ready = moved, position, copied
        if ready is not None:
            yield _handed_over(*ready)


def _handed_over(batch: Batch, position: Position, copied: torch.cuda.Event) -> tuple[Batch, Position]:
    """The batch for kernels of the current stream, which waits until it is copied."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in flatten_tensors(batch):
        tensor.record_stream(current)
    return batch, position


def _too_small(found: str, reading: Reading, *, more: str = "more data") -> DataError:
    return DataError(
        f"model.py: {reading.dataset}: found {found}, expected at least one global batch"
        f" ({reading.config.global_batch_size})\n  fix: {more}, or a plan for a smaller --global-batch"
    )
