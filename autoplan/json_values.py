"""Frozen dataclasses as JSON values and back, strict about names and types."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from autoplan.errors import InputError


def loads_finite(text: str) -> Any:
    """The value of a JSON text; raises ValueError for NaN and Infinity too, which JSON does not have."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def encode(value: Any) -> Any:
    """Dataclasses as objects, tuples as arrays; fields that do not take part in comparison are left out."""
    if is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.compare}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(hint: Any, value: Any, where: str) -> Any:
    """The value of type `hint` that `encode` turned into JSON values; strict about names and types.

    A field that has a default may be missing: what was written before there was such a field.
    """
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_optional(hint, value, where)
    if origin is tuple:
        return _decode_tuple(hint, value, where)
    if is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if type(value) is not hint:
        _refuse(value, expected=hint.__name__, where=where)
    return value


def _decode_optional(hint: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    (inner,) = (item for item in typing.get_args(hint) if item is not type(None))
    return decode(inner, value, where)


def _decode_tuple(hint: Any, value: Any, where: str) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if not isinstance(value, list):
        _refuse(value, expected="an array", where=where)
    if items[-1] is Ellipsis:
        return tuple(decode(items[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(items):
        _refuse(value, expected=f"an array of {len(items)}", where=where)
    return tuple(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, value, strict=True)))


def _decode_dataclass(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(value, expected="an object", where=where)
    hints = typing.get_type_hints(hint)
    names = [f.name for f in fields(hint) if f.compare]
    required = {f.name for f in fields(hint) if f.compare and f.default is MISSING}
    wrong = sorted((set(value) - set(names)) | (required - set(value)))
    if wrong:
        found = f"missing or unknown: {', '.join(wrong)}"
        raise InputError.of(where, found=found, expected=", ".join(names), fix="plan again")
    return hint(**{name: decode(hints[name], value[name], f"{where}.{name}") for name in names if name in value})


def _refuse(value: Any, *, expected: str, where: str) -> typing.NoReturn:
    shown = repr(value) if len(repr(value)) < 60 else type(value).__name__
    raise InputError(f"{where}: found {shown}\n  expected: {expected}\n  fix: make the plan again, do not edit it")
