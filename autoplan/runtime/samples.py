"""What is wrong with the data of a dataset: samples that make no batch, and batches that are not as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from .batches import Batch, tensors_in_place, with_paths

Path = tuple[Any, ...]
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # what a wrong batch makes code raise


@dataclass(frozen=True, slots=True)
class Collating:
    """(inputs, targets) of samples, by the model file's `collate` or torch's; workers get it by pickle.

    Raises: ValueError when torch's fails, naming what differs between samples, or when the result is no pair.
    """

    collate: Callable[[list[Any]], Any]
    dataset: str

    def __call__(self, samples: list[Any]) -> Batch:
        try:
            batch = tensors_in_place(self.collate(samples))
        except FAILURES as error:
            if self.collate is default_collate:
                raise ValueError(f"model.py: {self.dataset}: {_why_no_batch(samples)}") from error
            raise
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                f"model.py: {self.dataset}: a sample is {_kind(samples[0])}\n  expected: (inputs, targets)\n"
                "  fix: return pairs from the dataset, or from collate(samples); targets may be numbers that loss_fn"
                " does not read"
            )
        return batch[0], batch[1]


def _why_no_batch(samples: Sequence[Any]) -> str:
    """Which part of the samples differs, or is nothing that torch puts together."""
    parts = [dict(_parts(sample)) for sample in samples]
    for path in dict.fromkeys(path for part in parts for path in part):
        kinds = list(dict.fromkeys(_kind(part[path]) if path in part else "nothing" for part in parts))
        if len(kinds) > 1:
            return (
                f"{_name(path)}: found {kinds[0]} in one sample, {kinds[1]} in another of a batch\n"
                "  expected: the same shape in all samples\n"
                "  fix: pad or cut them to one length, in the dataset or in a function collate(samples) of the model"
                " file that returns (inputs, targets)"
            )
    found = ", ".join(dict.fromkeys(f"{_name(path)}: {_kind(value)}" for path, value in parts[0].items()))
    return (
        f"a sample is {found}\n  expected: tensors, arrays of numbers, or numbers, in tuples, lists or dicts\n"
        "  fix: make tensors of them in the dataset, or in a function collate(samples) of the model file"
    )


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


@contextmanager
def naming_differences(batch: Batch, model_file: Any, *, dataset: str) -> Iterator[None]:
    """Note on an error how the batch differs from those that were planned for, where it does."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        planned = tensors_in_place(model_file.make_batch(1)) if hasattr(model_file, "make_batch") else ()
        different = _difference(batch, planned)
        if different:
            error.add_note(
                f"model.py: {dataset}: {different}\n  fix: if that is why, change the dataset (or collate), or change"
                " make_batch and plan again"
            )
        raise


def _difference(found: Any, planned: Any) -> str:
    """The first tensor that is planned and has no like in what was found; nothing if all have."""
    tensors = dict(with_paths(found))
    for path, tensor in with_paths(planned):
        if path not in tensors:
            return f"{_name(path)}: found {_found_at(found, path)}, planned {_per_sample(tensor)}"
        if _per_sample(tensors[path]) != _per_sample(tensor):
            return f"{_name(path)}: found {_per_sample(tensors[path])}, planned {_per_sample(tensor)}"
    return ""


def _found_at(batch: Any, path: Path) -> str:
    """What is there in place of a tensor."""
    role = path[0]
    others = [_name((role, *other)) for other, _ in with_paths(batch[role])]
    return ", ".join(others) or _kind(batch[role])


def _per_sample(tensor: torch.Tensor) -> str:
    """Every precision is one, since programs compute in that of the plan."""
    kind = "floating-point numbers" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(tensor.shape[1:])} per sample"
