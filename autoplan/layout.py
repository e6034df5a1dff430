"""Layout: how one value lies on the ranks of the tensor-parallel axis, and what it costs to change that.

    R           replicated: every rank holds the value, and will hold its whole gradient
    V           varying gradient: every rank holds the value; the gradients sum to the whole one
    S(d)        sharded: each rank holds one contiguous part of dim d, of value and gradient alike
    S(d/k)      sharded in k blocks: dim d consists of k equal blocks, each sharded (fused QKV: k = 3)
    P           partial: the values sum to the whole; every rank will hold the whole gradient

Each conversion is one autograd function of `runtime.collectives`, so one table prices forward and backward together.
A value without gradient never is V: its R serves for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoplan.graph import PerSample, TensorSpec


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """One of R, V, S, P; `dim` and `blocks` only mean something for S."""

    kind: str
    dim: int = 0
    blocks: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}/{self.blocks})"


R, V, P = Layout("R"), Layout("V"), Layout("P")


def sharded(dim: int, blocks: int = 1) -> Layout:
    """The layout S(dim) or S(dim/blocks)."""
    return Layout("S", dim, blocks)


def parse_layout(text: str) -> Layout:
    """The layout that prints as `text`."""
    match = re.fullmatch(r"([RVP])|S\((\d+)(?:/(\d+))?\)", text)
    assert match is not None, f"not a layout: {text}"
    return Layout(match[1]) if match[1] else sharded(int(match[2]), int(match[3] or 1))


def can_shard(spec: TensorSpec, layout: Layout, degree: int) -> bool:
    """Whether the tensor has that dim and it divides evenly; the batch belongs to data parallelism and does not."""
    if layout.kind != "S":
        return True
    if layout.dim >= len(spec.shape):
        return False
    extent = spec.shape[layout.dim]
    return not isinstance(extent, PerSample) and extent > 0 and extent % (degree * layout.blocks) == 0


def local_spec(spec: TensorSpec, layout: Layout, degree: int) -> TensorSpec:
    """What one rank holds of a tensor."""
    if layout.kind != "S":
        return spec
    shape = list(spec.shape)
    extent = shape[layout.dim]
    assert isinstance(extent, int) and extent % (degree * layout.blocks) == 0, (spec, layout, degree)
    shape[layout.dim] = extent // degree
    return TensorSpec(tuple(shape), spec.dtype)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How to turn one layout into another.

    Attributes:
        function: name in `runtime.collectives`; "" when nothing has to run.
        forward, backward: the collective of each direction ("" for none); its full tensor is the global value.
    """

    function: str
    forward: str
    backward: str


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
}
NOTHING = Conversion("", "", "")


def conversion(source: Layout, target: Layout, *, has_gradient: bool) -> Conversion | None:
    """The conversion between two layouts of a value; None when there is none in one step.

    A value without gradient costs nothing in backward, and its R already serves as V.
    """
    if source == target:
        return NOTHING
    if source.kind == target.kind == "S" and not (source.blocks == target.blocks == 1 and source.dim != target.dim):
        return None
    found = _CONVERSIONS[source.kind, target.kind]
    return found if has_gradient else Conversion(found.function, found.forward, "")
