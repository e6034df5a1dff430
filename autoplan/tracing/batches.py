"""Batches of the user: as programs give them to the model, and what in them can be no input of a trace."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.errors import InputError, TraceError

BATCH_A, BATCH_B = 2, 3  # the sizes that are traced


def as_given(value: Any) -> Any:
    """A batch as programs give it to the model, of which the tensors can be traced.

    Other mappings, as what a tokenizer returns, are dicts, and NumPy's arrays of numbers tensors. Dataclasses are made
    known to torch.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        is_of_torch = value.dtype.kind in "biufc" and value.dtype != numpy.longdouble
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="))) if is_of_torch else value
    if isinstance(value, Mapping):
        return {key: as_given(item) for key, item in value.items()} if _is_plain(value) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(as_given, value))
    if type(value) in (tuple, list):
        return type(value)(map(as_given, value))
    if is_dataclass(value) and not isinstance(value, type):
        _make_known(type(value))
        return _with_fields(copy.copy(value), [as_given(item) for item in _values(value)])
    return value


def _is_plain(value: Mapping[Any, Any]) -> bool:
    """Whether it has nothing that a dict has not."""
    return type(value) is dict or not isinstance(value, dict)


def _make_known(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    pytree.register_pytree_node(
        kind,
        lambda value: (_values(value), None),
        lambda values, _: _with_fields(object.__new__(kind), values),
        flatten_with_keys_fn=lambda value: (
            [(pytree.GetAttrKey(field.name), getattr(value, field.name)) for field in fields(value)],
            None,
        ),
    )


def _values(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in fields(value)]


def _with_fields(value: Any, values: Any) -> Any:
    for field, item in zip(fields(value), values, strict=True):
        object.__setattr__(value, field.name, item)  # frozen ones too
    return value


def plain(value: Any) -> Any:
    """What a model returns, with tuples of the fields in place of dataclasses that torch does not know."""
    if is_dataclass(value) and type(value) not in pytree.SUPPORTED_NODES:
        return tuple(map(plain, _values(value)))
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if type(value) is dict else value


def check_samples(batch_of: Callable[[int], Any], *, where: str) -> None:
    """Return when what batches have for each sample are tensors, or texts among the targets.

    Raises: InputError for texts that the model is to read, and for numbers in lists, which nothing cuts into
        micro-batches.
    """
    first = dict(_lists(batch_of(BATCH_A), BATCH_A))
    second = dict(_lists(batch_of(BATCH_B), BATCH_B)) if first else {}
    for path in (path for path in first if path in second):
        is_text = all(isinstance(leaf, str) for leaf in pytree.tree_leaves(first[path]))
        if is_text and path[0] == "targets" and not hasattr(first[path], "dtype"):
            continue
        raise InputError.of(
            f"{where}: make_batch({BATCH_A}): {'.'.join(map(str, path))}",
            found=_text(first[path], is_text=is_text),
            expected="a tensor, or an array of numbers, with the batch as first dim",
            fix="turn text into numbers, as a tokenizer does, in make_batch, and in build_dataset or collate"
            if is_text
            else "make it a tensor, torch.tensor([...]) with lists padded to one length, in make_batch",
        )


def _lists(batch: Any, n_samples: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What in a batch has an item per sample without a tensor in it, after the names that lead to it."""
    pair = zip(("inputs", "targets"), batch, strict=True)
    pending: list[tuple[tuple[Any, ...], Any]] = [((role,), value) for role, value in pair]
    while pending:
        path, value = pending.pop(0)
        if isinstance(value, Mapping):
            pending += [((*path, key), item) for key, item in value.items()]
        elif is_dataclass(value):
            pending += zip([(*path, field.name) for field in fields(value)], _values(value), strict=True)
        elif isinstance(value, tuple | list) or hasattr(value, "dtype"):
            leaves = pytree.tree_leaves(value)
            if len(value) == n_samples and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                yield path, value
            elif isinstance(value, tuple | list):
                pending += [((*path, index), item) for index, item in enumerate(value)]


def _text(value: Any, *, is_text: bool) -> str:
    """`a list of text`, `an array of object`."""
    if hasattr(value, "dtype"):
        return f"an array of {value.dtype}"
    return f"a {type(value).__name__} of {'text' if is_text else 'numbers or objects'}"


def check_written(batch: tuple[Any, Any], written: Sequence[int], *, where: str) -> None:
    """Return when no other tensor of a batch changes with those that are written in place: the graph has each alone.

    `written` are positions among the leaves of the batch.

    Raises: TraceError naming tensors that share memory.
    """
    leaves = pytree.tree_flatten_with_path(batch)[0]
    for path, own in (leaves[index] for index in written):
        others = [_role(other_path) for other_path, other in leaves if other_path != path and _overlap(own, other)]
        if others:
            raise TraceError(
                f"{where}: a tensor of the batch is written in place, and another one changes with it\n"
                f"  found: {_role(path)} is written, and shares memory with {' and '.join(others)}\n"
                "  expected: memory of its own for what is written\n"
                "  fix: make a new tensor (x = x - 0.5, torch.where), or write .clone() in make_batch and the dataset"
            )


def _overlap(own: torch.Tensor, other: Any) -> bool:
    """Whether an element of one is an element of the other."""
    if not isinstance(other, torch.Tensor) or own.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if own.itemsize != other.itemsize:
        return True  # of one memory, counted in other units
    places = torch.arange(own.untyped_storage().nbytes() // own.itemsize)
    of_own, of_other = (places.as_strided(x.size(), x.stride(), x.storage_offset()).flatten() for x in (own, other))
    return bool(torch.isin(of_own, of_other).any())


def _role(path: tuple[Any, ...]) -> str:
    """`inputs['ids']`."""
    return ("inputs", "targets")[path[0].idx] + pytree.keystr(path[1:])
