"""Operators that torch has under two names: one rule serves both.

Each second name has the overloads and the arguments of the first one, which a test checks against torch's schemas.
"""

from __future__ import annotations

SECOND_NAMES = {
    "absolute": "abs",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arctan2": "atan2",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_logsumexp": "logsumexp",
    "subtract": "sub",
    "true_divide": "div",
}


def first_name(target: str) -> str:
    """`aten.mul.Tensor` for `aten.multiply.Tensor`; any other target as it is."""
    parts = target.split(".")
    if len(parts) != 3 or parts[0] != "aten" or parts[1] not in SECOND_NAMES:
        return target
    return f"aten.{SECOND_NAMES[parts[1]]}.{parts[2]}"
