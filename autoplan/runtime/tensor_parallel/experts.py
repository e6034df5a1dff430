"""Mixtures of experts: rows and products of one rank's experts; in float64 on CPU, for which torch has none, of all.

grouped product    out[i] = x[i] @ weight[expert of row i]
x: [rows, in], sorted by expert; weight: [experts, in, out]; ends: [experts], where the rows of each expert end

How many rows are a rank's changes from step to step. In a compiled block the functions for them run as they are, and
what lies between is compiled once for any number of rows (but for none and for one).
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.distributed import ProcessGroup
from torch.nn import functional as F


@cache  # a registration lasts as long as the object that is returned
def use_float64_grouped_products() -> torch.library.Library:
    """Give `torch.nn.functional.grouped_mm` a CPU kernel that takes any dtype; the user's own calls get it too.

    torch.compile, which lets no other dtype than bfloat16 pass, goes around them.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": on purpose
        library.impl("_grouped_mm", _grouped_mm, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    F.grouped_mm = torch.compiler.disable(F.grouped_mm)  # type: ignore[no-untyped-call]
    return library


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Every form of the operator: groups of rows, of columns, of the contracted dim, or whole matrices."""
    if offs is None:
        result = torch.bmm(left, right)
    else:
        ends = offs.tolist()
        groups = list(enumerate(zip([0, *ends], ends, strict=False)))
        if left.dim() == 2 and right.dim() == 3:
            result = left.new_zeros(left.shape[0], right.shape[2])
            for number, (start, stop) in groups:
                result[start:stop] = left[start:stop] @ right[number]
        elif left.dim() == 3 and right.dim() == 2:
            result = left.new_zeros(left.shape[1], right.shape[1])
            for number, (start, stop) in groups:
                result[:, start:stop] = left[number] @ right[:, start:stop]
        else:
            result = torch.stack([left[:, start:stop] @ right[start:stop] for _, (start, stop) in groups])
    return result if bias is None else result + bias


@torch.compiler.disable  # type: ignore[untyped-decorator]
def own_rows(values: torch.Tensor, ends: torch.Tensor, tp: ProcessGroup) -> torch.Tensor:
    """The rows of this rank's experts; waits for the device, which alone knows where they end.

    values: [rows, ...], sorted by expert; ends: [experts], of all experts. Rows behind the last end, which no expert
    computes, are the last rank's, so that every row is some rank's.
    """
    start, stop = _own_bounds(ends, tp).tolist()
    return _any_number(values[start:] if tp.rank() == tp.size() - 1 else values[start:stop])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def own_experts_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tp: ProcessGroup) -> torch.Tensor:
    """The grouped product of the rows of this rank's experts.

    x: [own rows, in]; weight: [experts / ranks, in, out], this rank's experts; ends: [experts], of all experts.
    """
    n_own = weight.shape[0]
    first = tp.rank() * n_own
    if not x.shape[0]:  # no token came; the weights take part all the same
        return _any_number(x @ weight[0])
    return _any_number(F.grouped_mm(x, weight, offs=ends[first : first + n_own] - _own_bounds(ends, tp)[0]))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def own_rows_sum(x: torch.Tensor, index: torch.Tensor, n: int, ends: torch.Tensor, tp: ProcessGroup) -> torch.Tensor:
    """What this rank adds to `rows[index].reshape(-1, n, ...).sum(1)` of all rows, of which it has its own.

    x: [own rows, ...]; index: [tokens * n], numbers among all rows, which are as many (-1: the last one);
    ends: [experts], of all experts.
    """
    place = index % len(index) - _own_bounds(ends, tp)[0]
    own = ((place >= 0) & (place < x.shape[0])).nonzero()[:, 0]
    result: torch.Tensor = _SumByToken.apply(  # type: ignore[no-untyped-call]
        x.index_select(0, place[own]), own // n, len(index) // n
    )
    return result


class _SumByToken(torch.autograd.Function):
    """In float32 at least; unlike `index_add_`, keeps no copy of the rows for the backward pass.

    rows: [rows, ...]; token: [rows], which one a row belongs to; n_tokens: how many there are.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token: torch.Tensor, n_tokens: int) -> torch.Tensor:
        ctx.save_for_backward(token)
        found = rows.new_zeros((n_tokens, *rows.shape[1:]), dtype=torch.promote_types(rows.dtype, torch.float32))
        return found.index_add_(0, token, rows.to(found.dtype)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return gradients[0].index_select(0, token), None, None


def _own_bounds(ends: torch.Tensor, tp: ProcessGroup) -> torch.Tensor:
    """[2]: the first row of this rank's experts, and the one behind their last."""
    n_own = ends.shape[0] // tp.size()
    first = tp.rank() * n_own
    return F.pad(ends, (1, 0))[first : first + n_own + 1 : n_own]


def _any_number(rows: torch.Tensor) -> torch.Tensor:
    """The rows, for whatever number of which code that takes them is to be compiled."""
    maybe_mark_dynamic(rows, 0)
    return rows
