"""Layout: how one value lies on the ranks of the tensor-parallel axis, and what it costs to change that.

    R           replicated: every rank holds the value, and will hold its whole gradient
    V           varying gradient: every rank holds the value; the gradients sum to the whole one
    S(d)        sharded: each rank holds one contiguous part of dim d, of value and gradient alike
    S(d/k)      sharded in k blocks: dim d consists of k equal blocks, each sharded (fused QKV: k = 3)
    S(d+)       sharded and padded: dim d does not divide, each rank holds ceil(extent / ranks) of it, and what lies
                beyond the end (on the last ranks) is padding
    E           expert rows: each rank holds the rows (dim 0) of its own experts, wherever the data says they end
    D           displaced: each rank holds the rows of its own experts, in the order of E, of a value that has them in
                another order; only the sum of every n of them reads it
    P           partial: the values sum to the whole; every rank will hold the whole gradient

Each conversion is one function of `runtime` with its own backward, so one table prices forward and backward together.
A value without gradient never is V: its R serves for both.

Padding never reaches a result. It holds finite numbers that mean nothing (zeros in a parameter), and its gradient is
exactly zero: conversions cut it off, and give it zeros on the way back. So an op may run on padded shards if it
neither contracts nor reduces the padded dim and is finite for finite operands (`OpRule.finite_in`). Norms of
gradients, weight decay and optimizers see only zeros there.

How many rows a rank has under E is known only when the model runs; prices take them for shared out evenly. Only a value
without gradient is converted to E: rows are picked by their numbers, which then lie so (see `cost_models/experts.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autoplan.graph import PerSample, TensorSpec


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """One of R, V, S, E, D, P; `dim`, `blocks` and `is_padded` only mean something for S."""

    kind: str
    dim: int = 0
    blocks: int = 1
    is_padded: bool = False

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        blocks = "" if self.blocks == 1 else f"/{self.blocks}"
        return f"S({self.dim}{'+' if self.is_padded else ''}{blocks})"


R, V, E, D, P = Layout("R"), Layout("V"), Layout("E"), Layout("D"), Layout("P")


def sharded(dim: int, blocks: int = 1) -> Layout:
    """The layout S(dim) or S(dim/blocks)."""
    return Layout("S", dim, blocks)


def padded(dim: int) -> Layout:
    """The layout S(dim+)."""
    return Layout("S", dim, is_padded=True)


def parse_layout(text: str) -> Layout:
    """The layout that prints as `text`."""
    match = re.fullmatch(r"([RVEDP])|S\((\d+)(?:(\+)|/(\d+))?\)", text)
    assert match is not None, f"not a layout: {text}"
    return Layout(match[1]) if match[1] else Layout("S", int(match[2]), int(match[4] or 1), bool(match[3]))


def can_shard(spec: TensorSpec, layout: Layout, degree: int) -> bool:
    """Whether the tensor has that dim and it divides evenly; the batch belongs to data parallelism and does not.

    Padded, it must not divide, so that a tensor has one way only to be split along a dim, and give each rank more
    than one. Rows in the layouts E and D need not divide.
    """
    if layout.kind != "S":
        return True
    if layout.dim >= len(spec.shape):
        return False
    extent = spec.shape[layout.dim]
    if isinstance(extent, PerSample):
        return False
    if layout.is_padded:
        return extent > degree and extent % degree != 0
    return extent > 0 and extent % (degree * layout.blocks) == 0


def local_spec(spec: TensorSpec, layout: Layout, degree: int) -> TensorSpec:
    """What one rank holds of a tensor; of expert rows its even share."""
    if layout.kind not in "SED":
        return spec
    shape = list(spec.shape)
    if layout.kind != "S":
        rows = shape[0]
        is_per_sample = isinstance(rows, PerSample)
        share = -(-(rows.count if isinstance(rows, PerSample) else rows) // degree)
        return TensorSpec((PerSample(share) if is_per_sample else share, *shape[1:]), spec.dtype)
    extent = shape[layout.dim]
    assert isinstance(extent, int) and (layout.is_padded or extent % (degree * layout.blocks) == 0), (spec, layout)
    shape[layout.dim] = -(-extent // degree)
    return TensorSpec(tuple(shape), spec.dtype)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How to turn one layout into another.

    Attributes:
        function: name in `collectives`, or in `experts`, of `runtime.tensor_parallel`; "" when nothing has to run.
        forward, backward: the collective of each direction ("" for none); its full tensor is the global value.
        is_in_order: whether the parts of the ranks lie one behind the other in the whole, so that none is moved.
    """

    function: str
    forward: str
    backward: str
    is_in_order: bool = False


_CONVERSIONS = {
    ("R", "V"): Conversion("copy_to_tp", "", "all_reduce"),
    ("V", "R"): Conversion("keep_first_rank_grad", "", ""),
    ("P", "R"): Conversion("all_reduce", "all_reduce", ""),
    ("P", "V"): Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    ("R", "P"): Conversion("first_rank_only", "", ""),
    ("V", "P"): Conversion("first_rank_only_both", "", ""),
    ("S", "R"): Conversion("all_gather", "all_gather", ""),
    ("S", "V"): Conversion("all_gather_reduce_grad", "all_gather", "reduce_scatter"),
    ("S", "P"): Conversion("pad_to_partial", "", ""),
    ("R", "S"): Conversion("shard", "", "all_gather"),
    ("V", "S"): Conversion("shard_partial_grad", "", ""),
    ("P", "S"): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    ("S", "S"): Conversion("all_to_all", "all_to_all", "all_to_all"),
    ("R", "E"): Conversion("own_rows", "", ""),
}
NOTHING = Conversion("", "", "")
EXCHANGE = Conversion("", "all_to_all", "all_to_all")  # inside of an op; see `rules.Strategy.exchanged`


def conversion(source: Layout, target: Layout, *, has_gradient: bool) -> Conversion | None:
    """The conversion between two layouts of a value; None when there is none in one step.

    A value without gradient costs nothing in backward, and its R already serves as V.
    """
    if source == target:
        return NOTHING
    if source.kind == target.kind == "S" and not _can_exchange(source, target):
        return None
    if target.kind == "E" and has_gradient:
        return None
    found = _CONVERSIONS.get((source.kind, target.kind))
    if found is None:
        return None
    shards = source if source.kind == "S" else target
    is_in_order = shards.kind == "S" and shards.dim == 0 and shards.blocks == 1 and source.kind != target.kind
    return replace(found, backward=found.backward if has_gradient else "", is_in_order=is_in_order)


def _can_exchange(source: Layout, target: Layout) -> bool:
    """Whether one all-to-all turns a split along one dim into a split along another."""
    is_plain = source.blocks == target.blocks == 1 and not (source.is_padded or target.is_padded)
    return is_plain and source.dim != target.dim
