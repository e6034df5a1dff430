"""What a run trains on and is evaluated on, step by step: a dataset of the model file, or random batches.

The next batch is copied to the GPU while a step runs, and the first one is checked before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ..config import Config
from ..refusal import DatasetError, OptionError
from ..seeds import seeding_the_host
from .batches import Batch, flatten_tensors, global_batch, local_batch, map_tensors
from .reading import START, Position, Reading, Stream, batches_from, is_map_style
from .rehearsal import Rehearsal
from .samples import naming_differences


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
        self._position = START
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

    Raises: OptionError when `n_different` is below 1, or `fills` is true of a dataset that can only be iterated;
        DatasetError when a dataset is none.
    """
    if n_different is not None and n_different < 1:
        raise OptionError(
            f"--repeat-batches: found {n_different}, expected 1 or more\n  fix: leave it out for new ones"
        )
    if n_different is None and hasattr(model_file, "build_dataset"):
        dataset = _dataset_of(model_file, "build_dataset")
        how = _reading(model_file, "build_dataset", config, dp_rank, device, seed=seed, **reading)
        if how.fills and not is_map_style(dataset):
            raise OptionError(
                f"--fill-last-batch: does nothing, as build_dataset() gives {type(dataset).__name__}, which can only be"
                " iterated\n  expected: a dataset with __getitem__ and __len__\n  fix: leave the option out"
            )
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

    With a `rehearsal` the first batch is read and checked at once, where batches are read; generators stay as they are.

    Raises: OptionError when the model file has none; DatasetError when it is no dataset; DataError when the check finds
        a fault.
    """
    if not hasattr(model_file, "build_eval_dataset"):
        raise OptionError(
            "--eval-every: the model file has no build_eval_dataset()\n"
            "  expected: a function that returns a dataset of (inputs, targets)\n  fix: add it, or leave the option out"
        )
    dataset = _dataset_of(model_file, "build_eval_dataset")
    if isinstance(dataset, Iterator) and not isinstance(dataset, Dataset):
        raise DatasetError(
            f"model.py: build_eval_dataset: found {type(dataset).__name__}, which is read only once, expected a dataset"
            " that each evaluation reads from its start\n"
            "  fix: return a list, or an IterableDataset whose __iter__ begins anew"
        )
    options = {"n_workers": n_workers, "shuffles": False, "repeats": False}
    how = _reading(model_file, "build_eval_dataset", config, dp_rank, device, **options)
    if rehearsal is not None:
        first = batches_from(dataset, replace(how, n_workers=min(1, n_workers), pins=False), START)
        with seeding_the_host(), closing(first):
            how.check_first(next(first)[0], rehearsal)
    return _dataset_data(dataset, how, model_file, device)


def _dataset_of(model_file: Any, name: str) -> Any:
    dataset = getattr(model_file, name)()
    if isinstance(dataset, DataLoader) or not (is_map_style(dataset) or hasattr(dataset, "__iter__")):
        raise DatasetError(
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
        lambda start: batches_from(dataset, reading, start),
        device=device,
        check=lambda batch: reading.check_first(batch, rehearsal),
        explaining=lambda batch: naming_differences(batch, model_file, dataset=reading.dataset),
    )


def synthetic_batches(
    make_batch: Callable[[int], Batch],
    *,
    config: Config,
    dp_rank: int,
    seed: int,
    pins: bool = False,
    start: Position = START,
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
