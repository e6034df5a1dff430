"""Mixtures of experts: grouped products of one rank's experts, and in float64 on CPU, where torch has none.

grouped product    out[i] = x[i] @ weight[expert of row i]
x: [rows, in], sorted by expert; weight: [experts, in, out]; ends: [experts], where the rows of each expert end
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch.distributed import ProcessGroup


@cache  # a registration lasts as long as the object that is returned
def use_float64_grouped_products() -> torch.library.Library:
    """Give `torch.nn.functional.grouped_mm` a CPU kernel that takes any dtype; the user's own calls get it too."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": on purpose
        library.impl("_grouped_mm", _grouped_mm, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
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


def own_experts_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tp: ProcessGroup) -> torch.Tensor:
    """The grouped product of the rows that belong to this rank's experts; other rows are zero.

    x: [rows, in], all rows; weight: [experts / ranks, in, out], this rank's experts; ends: [experts], of all experts.
    The gradient of other rows is zero, so that the gradients of `x` over the ranks sum to the whole one.
    """
    n_own, n_rows = weight.shape[0], x.shape[0]
    first = tp.rank() * n_own
    start = ends[first - 1] if first else torch.zeros_like(ends[0])
    own_ends = ends[first : first + n_own] - start
    # Own rows go to the front, so that the groups start at row 0. What the kernel leaves behind them is undefined.
    order = (torch.arange(n_rows, device=x.device) + start) % n_rows
    is_own = (torch.arange(n_rows, device=x.device) < own_ends[-1])[:, None]
    own_rows = torch.where(is_own, x[order], 0)
    products = torch.nn.functional.grouped_mm(own_rows, weight, offs=own_ends)
    return torch.zeros_like(products).index_copy(0, order, torch.where(is_own, products, 0))
