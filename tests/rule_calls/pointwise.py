"""Calls of operators on each element: of one tensor, of two, with numbers."""

import torch
from torch.nn import functional as F

from rule_calls.toys import ATEN, operator


def each(names, *, arguments=None, shift=0.0):
    """A call of each named operator on x times a parameter, between 0 and 1."""

    def function(x, w):
        u = 0.4 * x * w + shift
        return [operator(name)(u, *(arguments or {}).get(name, ())) for name in names.split()]

    return function, [(12,)]


def pairs(names):
    """A call of each named operator on two tensors, the second broadcast."""
    return (lambda x, w, v: [operator(name)(x * w, x + v) for name in names.split()], [(12,), (8, 1)])


def with_numbers(names, number):
    return (lambda x, w: [operator(name)(x * w, number) for name in names.split()], [(12,)])


def whole_numbers(names):
    """Operators on integers and booleans: with a tensor, and with a number."""

    def function(x, w):
        a, b = (x * 5).to(torch.int64), (w * 3).to(torch.int64) + 1
        return [operator(name)(a, 2 if name.endswith(".Scalar") else b) for name in names.split()]

    return function, [(12,)]


def chosen(x, w, slopes):
    y = x * w
    return [
        torch.where(x > 0.5, y, x), torch.where(x > 0.5, y, 0.0), torch.where(x > 0.5, 0.0, y),
        torch.where(x > 0.5, 1.0, 0.0), y.masked_fill(x > 0.5, 1.0), y.masked_fill(x > 0.5, w.sum()),
        F.prelu(y, slopes), F.prelu(y, slopes[:1]), torch.lerp(x, y, 0.3), torch.lerp(x, y, w), torch.addcmul(x, y, w),
        torch.addcdiv(x, y, w, value=2.0), torch.clamp(y, w - 0.3, w + 0.1), F.dropout(y, 0.0),
    ]  # fmt: skip


def written(x, w):
    """A write into a slice, which is a `copy` into it."""
    y = torch.zeros_like(x)
    y[:, :2] = (x * w)[:, :2]
    return [y]


def below_zero(x, w):
    """Numbers below zero on the left of an operator."""
    signs = torch.arange(12, device=x.device)
    return [(-2.0) ** (x > 0.5).to(x.dtype), (-1) ** signs, -1.5 - x * w, -2 / (x * w), -((x * w) ** 2), (-x * w) ** 2]


CALLS = {
    "below zero": (below_zero, [(12,)]),
    "written": (written, [(12,)]),
    "unary": each(
        "abs acos asin asinh atan atanh celu cos cosh digamma elu erf erfc erfinv exp2 expm1 frac hardshrink"
        " hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid logit mish relu6 selu silu"
        " sin sinc sinh softplus softshrink square tan threshold clamp clamp_min clamp_max nan_to_num exp reciprocal"
        " rsqrt sqrt ceil floor round trunc sign sgn logical_not isnan isinf isfinite neg positive gelu relu sigmoid"
        " tanh",
        arguments={"clamp": (0.2, 0.3), "clamp_min": (0.2,), "clamp_max": (0.3,), "threshold": (0.2, 0.1)},
    ),
    "unary above one": each("acosh", shift=1.5),
    "with numbers": with_numbers(
        "pow.Tensor_Scalar add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar"
        " le.Scalar gt.Scalar ge.Scalar remainder.Scalar fmod.Scalar",
        0.7,
    ),
    "powers and rounded quotients": (
        lambda x, w: [
            torch.pow(2.0, x * w),
            torch.div(x * w, 0.3, rounding_mode="floor"),
            ATEN.div.Scalar_mode(x * w, 0.3, rounding_mode="trunc"),
            ATEN.div.Tensor_mode(x * w, x, rounding_mode=None),
            2.0 * w - x,
            torch.add(x, x * w, alpha=2.0),
        ],
        [(12,)],
    ),
    "pairs": pairs(
        "maximum minimum max.other min.other atan2 pow.Tensor_Tensor xlogy.Tensor hypot logaddexp logaddexp2"
        " remainder.Tensor fmod.Tensor copysign.Tensor clamp_min.Tensor clamp_max.Tensor add.Tensor sub.Tensor"
        " mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor"
    ),
    "whole numbers": whole_numbers(
        " ".join(f"bitwise_{n}.{k} __{n}__.{k}" for n in ("and", "or", "xor") for k in ("Scalar", "Tensor"))
        + " logical_and logical_or logical_xor floor_divide floor_divide.Scalar"
    ),
    "not": (lambda x, w: [~(x * w > 0.5)], [(12,)]),
    "chosen": (chosen, [(12,), (8,)]),
    "add broadcast rows": (lambda x, w: x + w, [(8, 1)]),
}
