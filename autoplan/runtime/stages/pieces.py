"""Which part of each whole tensor a rank holds: boxes of elements, whatever the plan.

A checkpoint knows only the user's tensors: whole, under their own names. What a rank holds of one is a few boxes:

    whole [9, 4]  --tensor parallel: Shard(0, blocks=3)-->  rows 0, 3, 6 on rank 0  --ZeRO over 2-->  rows 0, 3 | 6

    box = (offsets in the whole tensor, view of this rank's memory)

so saving is writing boxes, and loading under another plan is reading the boxes that overlap. Zeros that pad a shard lie
outside of the whole tensor and belong to no box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn
from torch.distributed import tensor as dtensor

from ..building.weights import Shard
from .zero import local_part

# Along one dim: (first index in this rank's memory, first index in the whole tensor, length)
Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """The tensors of the user's model that a checkpoint holds: parameters and persistent buffers.

    Attributes:
        first_name: for each name of a tensor, the first name of the same tensor (they differ where weights are tied).
        shapes: of each whole tensor, by its first name.
    """

    first_name: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor and the memory of this rank that holds it; `tensor` is a view of it."""

    key: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def whole_tensors(full: nn.Module) -> WholeTensors:
    """What a checkpoint holds of the user's whole model."""
    first_names: dict[int, str] = {}
    found = WholeTensors({}, {})
    for name, tensor in (*full.named_parameters(remove_duplicate=False), *_persistent_buffers(full)):
        first = first_names.setdefault(id(tensor), name)
        found.first_name[name] = first
        found.shapes[first] = tuple(tensor.shape)
    return found


def _persistent_buffers(full: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in full.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def pieces_of(
    key: str,
    tensor: torch.Tensor,
    *,
    whole_shape: tuple[int, ...],
    shard: Shard | None = None,
    tp_rank: int = 0,
    tp_degree: int = 1,
) -> list[Piece]:
    """The boxes of one whole tensor that `tensor` (a parameter, or something of its shape) holds on this rank."""
    local = local_part(tensor.detach())
    if not whole_shape:  # a vector of one element may stand for it, of which a rank may hold nothing
        return [Piece(key, (), (), local.view(()))] if local.numel() else []
    spans: list[list[Span]] = [[(0, 0, extent)] for extent in whole_shape]
    if shard is not None and tp_degree > 1:
        dim = shard.dim % len(whole_shape)
        spans[dim] = _tensor_parallel_spans(whole_shape[dim], shard.blocks, tp_rank, tp_degree)
    for dim, start, stop in _data_parallel_rows(tensor):
        spans[dim] = [cut for span in spans[dim] if (cut := _cut(span, start, stop)) is not None]
    pieces = []
    for box in product(*spans):
        view = local
        for dim, (start, _, length) in enumerate(box):
            view = view.narrow(dim, start, length)
        pieces.append(Piece(key, whole_shape, tuple(offset for _, offset, _ in box), view))
    return [piece for piece in pieces if piece.tensor.numel()]


def _tensor_parallel_spans(n: int, n_blocks: int, tp_rank: int, tp_degree: int) -> list[Span]:
    """The part of each block that a tensor-parallel rank holds of a dim of `n` elements, without its padding."""
    part = -(-n // (n_blocks * tp_degree))
    starts = [(block * tp_degree + tp_rank) * part for block in range(n_blocks)]
    return [(block * part, start, min(part, n - start)) for block, start in enumerate(starts) if start < n]


def _data_parallel_rows(tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(dim, start, stop) of what `fully_shard` left on this rank: equal parts rounded up, as `torch.chunk` gives."""
    if isinstance(tensor, dtensor.DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, dtensor.Shard):
                n, n_ranks = tensor.shape[placement.dim], tensor.device_mesh.size(axis)
                part = -(-n // n_ranks)
                start = min(n, tensor.device_mesh.get_local_rank(axis) * part)
                yield placement.dim, start, min(n, start + part)


def _cut(span: Span, start: int, stop: int) -> Span | None:
    """The part of a span that lies in `start` to `stop` of the memory, counted from `start`."""
    local, whole, length = span
    first, last = max(local, start), min(local + length, stop)
    return None if first >= last else (first - start, whole + first - local, last - first)
