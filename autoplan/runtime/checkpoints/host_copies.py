"""Copies of a rank's tensors in host memory, made beside the training.

    training   | step n |     forward, backward of step n + 1     | update, once they are copied |
    copies              | buffers | parameters, optimizer state |
    a thread                                                     | writes them to disk ...

Nothing changes parameters and the optimizer's state between two updates, so a GPU copies them on a stream of its own
while the next step runs. What passes change (buffers, errors of compressed reductions) is copied first, on the stream
of the training. A save holds up a step by

    max(0, bytes of the rank / rate of copies to the host - forward and backward pass)

and what the host takes to hand over the copies: for Llama-1B under ZeRO 1 or 2 on two ranks 7.4 GB at 54 GB/s, 0.14 s
of copying behind passes of 1 s (a save held up a step of 1.02 s by 0.05 s: 2 H200, 2026-11-22,
benchmarks/checkpoint_times.py). The memory is page-locked, without which copies are slow and hold up the host. It is
touched and locked block by block, beside the first steps, and kept for the next time; for Llama-8B, 48 GB a rank, that
took 31 and 40 s, for which a save in the first of them waits (2 H200, 2026-11-23); one after them held up training by
0.5 s (2026-11-25).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from mmap import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch

from ..stages.pieces import Piece

BLOCK_BYTES = 2**28  # while a block is locked, no kernel is launched
_ALIGNMENT = 64


class HostCopies:
    """Host memory for the pieces of one rank; one set of copies at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._locked: list[torch.Tensor] = []
        self._can_lock = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Set memory aside for those that have none yet; any thread may call it, while no other method runs."""
        missing = [piece for piece in pieces if not self._has_place(piece)]
        with self._on_device():
            for group in _blocks(missing):
                self._add_block(group)

    def start(self, lasting: Sequence[Piece], passing: Sequence[Piece]) -> tuple[list[Piece], torch.cuda.Event | None]:
        """Start to copy pieces: the copies, and on a GPU the event after which they are complete.

        `lasting` ones are changed by nothing before that event; on a CPU all are copied at once.
        """
        self.reserve([*passing, *lasting])
        copies = [self._copy(piece) for piece in passing]
        if self._stream is None:
            return copies + [self._copy(piece) for piece in lasting], None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies += [self._copy(piece) for piece in lasting]
        self._copied = self._stream.record_event()
        return copies, self._copied

    def wait(self) -> None:
        """Wait until the copies are complete; the thread that writes them calls it."""
        if self._copied is not None:
            with self._on_device():
                self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.wait()
        for block in self._locked:
            _cuda().cudaHostUnregister(block.data_ptr())
        self._locked.clear()
        self._places.clear()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Inside, CUDA is called for this rank's device; a new thread would take the first one."""
        return nullcontext() if self._stream is None else torch.cuda.device(self._device)

    def _has_place(self, piece: Piece) -> bool:
        place = self._places.get((piece.key, piece.offsets))
        return place is not None and place.shape == piece.tensor.shape and place.dtype == piece.tensor.dtype

    def _add_block(self, pieces: Sequence[Piece]) -> None:
        memory = mmap(-1, sum(map(_aligned_bytes, pieces)), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        if self._can_lock:
            memory.madvise(MADV_DONTFORK)  # a worker that shares pages would take them away from the GPU at a write
            self._lock(torch.frombuffer(memory, dtype=torch.uint8))
        offset = 0
        for piece in pieces:  # each has a storage of its own, as what is written must have
            place = torch.frombuffer(memory, dtype=piece.tensor.dtype, count=piece.tensor.numel(), offset=offset)
            self._places[piece.key, piece.offsets] = place.view(piece.tensor.shape)
            offset += _aligned_bytes(piece)

    def _lock(self, block: torch.Tensor) -> None:
        block.zero_()  # what is touched already is locked sooner
        error = int(_cuda().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if error:
            self._can_lock = False
            print(
                f"checkpoints: CUDA error {error} on locking {block.numel()} bytes of host memory: saving stops the "
                "training for longer\n  fix: raise the limit of locked memory",
                file=sys.stderr,
            )
        else:
            self._locked.append(block)

    def _copy(self, piece: Piece) -> Piece:
        place = self._places[piece.key, piece.offsets]
        place.copy_(piece.tensor, non_blocking=True)
        return Piece(piece.key, piece.whole_shape, piece.offsets, place)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _aligned_bytes(piece: Piece) -> int:
    return math.ceil(piece.tensor.numel() * piece.tensor.element_size() / _ALIGNMENT) * _ALIGNMENT


def _blocks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces of `BLOCK_BYTES` or a little more, and what is left."""
    block: list[Piece] = []
    n_bytes = 0
    for piece in pieces:
        block.append(piece)
        n_bytes += _aligned_bytes(piece)
        if n_bytes >= BLOCK_BYTES:
            yield block
            block, n_bytes = [], 0
    if block:
        yield block
