"""What is wrong with the data of a dataset: samples that make no batch, and batches that are not as planned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from ..config import Config
from ..refusal import DataError, is_first_of_host
from .batches import Batch, micro_batches, tensors_in_place, with_paths
from .rehearsal import Rehearsal

Path = tuple[Any, ...]
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # what a wrong batch makes code raise


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples for one batch, and their numbers in the dataset."""

    samples: list[Any]
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class NoBatch:
    """Why samples make no batch: handed over in place of one, since torch would wrap the error of a worker."""

    reason: str


def call_without_stop(function: Callable[[Any], Any], name: str, argument: Any) -> Any:
    """`function(argument)`, whose StopIteration is an error: else it would end the epoch like a last sample."""
    try:
        return function(argument)
    except StopIteration as error:
        raise RuntimeError(f"{name} raised StopIteration, which would end the epoch") from error


@dataclass(frozen=True, slots=True)
class Collating:
    """(inputs, targets) of samples, by the model file's `collate` or torch's; workers get it by pickle.

    `NoBatch` where torch's fails for the samples, or where the result is no pair; other errors stay what they are, as
    those of the model file's own, or of a full /dev/shm.
    """

    collate: Callable[[list[Any]], Any]
    dataset: str

    def __call__(self, drawn: Drawn) -> Batch | NoBatch:
        is_own = self.collate is not default_collate
        try:
            batch = tensors_in_place(call_without_stop(self.collate, "collate", drawn.samples))
        except FAILURES:
            why = "" if is_own else _why_no_batch(drawn)
            if not why:
                raise
            return NoBatch(f"model.py: {self.dataset}: {why}")
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        found = f"collate(samples) returned {_form(batch)}" if is_own else f"a sample is {_form(drawn.samples[0])}"
        return NoBatch(
            f"model.py: {self.dataset}: {found}\n  expected: (inputs, targets)\n"
            "  fix: return pairs from the dataset, or from collate(samples); targets may be numbers that loss_fn"
            " does not read"
        )


def _why_no_batch(drawn: Drawn) -> str:
    """Which sample differs in which part, or which parts are nothing that torch puts together; "" if neither."""
    parts = [dict(_parts(sample)) for sample in drawn.samples]
    for path in dict.fromkeys(path for part in parts for path in part):
        kinds = [_kind_at(part, path) for part in parts]
        usual = max(kinds, key=kinds.count)
        odd = next((i for i, kind in enumerate(kinds) if kind != usual), None)
        if odd is not None:
            return (
                f"{_name(path)}: found {kinds[odd]} in sample {drawn.numbers[odd]}, {usual} in others\n"
                "  expected: the same in all samples of a batch\n"
                "  fix: make them alike in the dataset (pad or cut to one length), or in a function collate(samples) of"
                " the model file that returns (inputs, targets)"
            )
    wrong = [f"{_name(path)} of type {_kind(value)}" for path, value in parts[0].items() if not _is_numbers(value)]
    if not wrong:
        return ""
    return (
        f"found {', '.join(wrong)}\n  expected: tensors, arrays of numbers, or numbers, in tuples, lists or dicts\n"
        "  fix: make tensors of them in the dataset, or in a function collate(samples) of the model file"
    )


def _is_numbers(value: Any) -> bool:
    """Whether torch puts such together; text it puts into a list."""
    if isinstance(value, torch.Tensor | int | float | str | bytes):
        return True
    return getattr(getattr(value, "dtype", None), "kind", "O") in "biufc"


def _kind_at(parts: Mapping[Path, Any], path: Path) -> str:
    """Of what is there, or of what stands in place of all that it is part of."""
    for n_keys in range(len(path), -1, -1):
        if path[:n_keys] in parts:
            return _kind(parts[path[:n_keys]])
    return "nothing"


def _form(value: Any) -> str:
    """`a tuple of 3`, `float32 [16]`."""
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list | Mapping) else _kind(value)


def _parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(item, (*path, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _parts(item, (*path, index))
    else:
        yield path, value


def _name(path: Path) -> str:
    """`inputs.x`, of what leads to it in (inputs, targets)."""
    role = {0: "inputs", 1: "targets"}.get(path[0], str(path[0])) if path else "sample"
    return ".".join([role, *map(str, path[1:])])


def _kind(value: Any) -> str:
    """`float32 [16]`, `text`, `NoneType`."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple | list) and value and all(isinstance(item, str) for item in value):
        return "text"
    return "text" if isinstance(value, str) else type(value).__name__


def check_first_batch(batch: Batch, rehearsal: Rehearsal, *, config: Config, dp_rank: int, dataset: str) -> None:
    """Refuse the first batch of a data-parallel rank before a step is taken with it.

    One that is unlike those planned for is tried on the meta device; the first rank of a host tells what came of it.

    Raises: DataError when the model's own code fails with it and not with a planned one, or when its size is another.
    """
    planned = rehearsal.planned()
    different = _difference(batch, planned)
    error = rehearsal.failure(batch) if different else None
    if error is not None and rehearsal.failure(planned) is None:
        said = str(error).strip().partition("\n")[0]
        raise DataError(
            f"model.py: {dataset}: {different}\n  with it the model fails: {type(error).__name__}: {said}\n"
            "  fix: change the dataset (or collate), or change make_batch and plan again"
        )
    if different and is_first_of_host():
        taken = "the model takes it" if error is None else "whether the model takes it could not be tried"
        print(
            f"model.py: {dataset}: {different}\n  {taken}; time and memory are predicted for what was planned",
            file=sys.stderr,
        )
    try:
        micro_batches(batch, config, dp_rank=dp_rank)
    except ValueError as wrong_size:
        raise DataError(f"model.py: {dataset}: {wrong_size}") from None


@contextmanager
def naming_differences(batch: Batch, model_file: Any, *, dataset: str) -> Iterator[None]:
    """Note on an error what may be wrong with the batch: how it differs from those planned for, or its values."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except FloatingPointError as error:
        for path, tensor in with_paths(batch):
            n_wrong = int((~tensor.isfinite()).sum())
            if n_wrong:
                error.add_note(f"model.py: {dataset}: {_name(path)}: found {n_wrong} numbers that are not finite")
        raise
    except FAILURES as error:
        planned = tensors_in_place(model_file.make_batch(1)) if hasattr(model_file, "make_batch") else ()
        different = _difference(batch, planned)
        if different:
            error.add_note(
                f"model.py: {dataset}: {different}\n  fix: if that is why, change the dataset (or collate), or change"
                " make_batch and plan again"
            )
        elif isinstance(error, IndexError):
            for path, tensor in with_paths(batch):
                if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
                    values = f"values from {tensor.min()} to {tensor.max()}"
                    error.add_note(f"model.py: {dataset}: {_name(path)}: found {values} in this batch")
        if "device-side assert" in str(error):
            error.add_note("often a class or an index out of range; with --device cpu the message says which")
        raise


def _difference(found: Any, planned: Any) -> str:
    """The first tensor that is planned and has no like in what was found, or is an input more; nothing if all have."""
    tensors, expected = dict(with_paths(found)), dict(with_paths(planned))
    for path, tensor in expected.items():
        if path not in tensors:
            return f"{_name(path)}: found {_found_at(found, path)}, planned {_per_sample(tensor)}"
        if _per_sample(tensors[path]) != _per_sample(tensor):
            return f"{_name(path)}: found {_per_sample(tensors[path])}, planned {_per_sample(tensor)}"
    more = [path for path in tensors if path[0] == 0 and path not in expected] if expected else []
    return f"{_name(more[0])}: found {_per_sample(tensors[more[0]])}, planned nothing" if more else ""


def _found_at(batch: Any, path: Path) -> str:
    """What is there in place of a tensor."""
    role = path[0]
    others = [_name((role, *other)) for other, _ in with_paths(batch[role])]
    return ", ".join(others) or _kind(batch[role])


def _per_sample(tensor: torch.Tensor) -> str:
    """Every precision is one, since programs compute in that of the plan."""
    kind = "floating-point numbers" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape[1:])} per sample"
