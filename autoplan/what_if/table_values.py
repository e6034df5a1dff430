"""Values of a question's tables: a text, a count, a list, the figures of a dataclass; each refused by its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.errors import InputError
from autoplan.hardware.fields import Quantity, Table, check_keys, number

MAX_AMOUNT = 1e20  # of tokens or samples


def fields_at(
    table: Table,
    label: str,
    quantities: Mapping[str, tuple[str, Quantity]],
    numbers: Mapping[str, tuple[str, float, float]],
    *,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """The keywords that a table gives for a dataclass."""
    check_keys(table, label, (*quantities, *numbers, *others))
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in quantities:
            field, quantity = quantities[key]
            if not isinstance(value, str):
                raise InputError.of(
                    f"{label}.{key}",
                    found=value,
                    expected=f'text with a unit, such as "{quantity.example}"',
                    fix="add it",
                )
            found[field] = number(value, f"{label}.{key}", quantity)
        elif key in numbers:
            field, low, high = numbers[key]
            found[field] = number_at(value, f"{label}.{key}", low, high, cls=int if isinstance(low, int) else float)
    return found


def number_at(value: Any, label: str, low: float, high: float, *, cls: type = float) -> Any:
    """The number, once it is one in this range."""
    kinds = (int,) if cls is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        word = "a whole number" if cls is int else "a number"
        raise InputError.of(label, found=value, expected=f"{word}, {low:g} to {high:g}", fix="give one in this range")
    return cls(value)


def table_at(table: Table, label: str, key: str) -> Table:
    """The table inside of this one; empty where it is absent."""
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        raise InputError.of(
            field_path(label, key), found=inner, expected=f"a table [{key}]", fix=f"write [{key}] before its lines"
        )
    return inner


def text_at(table: Table, label: str, key: str, *, default: str | None = None) -> str:
    """The text, which must be there unless there is a default."""
    value = table.get(key, default)
    if not isinstance(value, str) or not value:
        raise InputError.of(field_path(label, key), found=value, expected="a text", fix=f'add {key} = "..."')
    return value


def texts_at(table: Table, label: str, key: str, *, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The texts of a list, or the only one, each once."""
    values = table.get(key, list(default))
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise InputError.of(field_path(label, key), found=values, expected="texts", fix=f'write {key} = ["...", "..."]')
    return tuple(dict.fromkeys(values))


def values_at(values: Any, label: str, name: str) -> tuple[Any, ...]:
    """What a model argument is swept over."""
    if not isinstance(values, list) or not values:
        raise InputError.of(f"{label}.sweep.{name}", found=values, expected="a list", fix=f"write {name} = [1, 2]")
    return tuple(values)


def counts_at(table: Table, label: str, key: str, most: int) -> tuple[int, ...]:
    """Whole numbers from 1 to `most`, each once; none where the key is absent."""
    values = table.get(key, [])
    values = values if isinstance(values, list) else [values]
    return tuple(dict.fromkeys(number_at(value, field_path(label, key), 1, most, cls=int) for value in values))


def scales_at(table: Table, label: str) -> tuple[float, ...]:
    """Factors on a bandwidth; 1 where none is given."""
    values = table.get("network_scale", [1.0])
    values = values if isinstance(values, list) else [values]
    return tuple(
        dict.fromkeys(number_at(value, field_path(label, "network_scale"), 0.001, 1000.0) for value in values)
    ) or (1.0,)


def amount_at(table: Table, label: str, key: str) -> float | None:
    """How many tokens or samples; None where it is absent."""
    return None if key not in table else number_at(table[key], field_path(label, key), 1.0, MAX_AMOUNT)


def field_path(label: str, key: str) -> str:
    """How messages call a field."""
    return f"{label}.{key}" if ": " in label else f"{label}: {key}"
