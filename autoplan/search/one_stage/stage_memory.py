"""One stage per rank: what each range of pieces holds as a stage, and what it must recompute to fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.cost.table import CostTable
from autoplan.search.bounds import memory_room_bytes
from autoplan.search.ranges import ONE_BYTE, Array, Ranges, Segments
from autoplan.solver.linear_model import INFINITY


@dataclass(slots=True)
class StageMemory:
    """What each range holds.

    Attributes:
        running_bytes: the running micro-batch, nothing recomputed; `ending_bytes`: the least that its last segment or
            the one before needs beside all that is saved, whatever is recomputed; late_bytes: what the end of a
            forward pass after a backward pass does (see `Segments`).
    """

    segments: Segments
    resident_bytes: Array
    sent_bytes: Array
    gradient_bytes: Array
    saved_bytes: Array
    running_bytes: Array
    ending_bytes: Array
    late_bytes: Array
    spared_bytes: Array
    easy_bytes: Array
    n_micro_batches: int
    room_bytes: float
    known: dict[int, tuple[Array, Array]]

    @classmethod
    def of(cls, table: CostTable, segments: Segments, ranges: Ranges) -> StageMemory:
        """The memory of each range."""
        n, messages = table.mesh.n_micro_batches, table.message_bytes or (0,) * (len(table.kinds) - 1)
        by_piece = np.array([0, *(messages[edge - 1] for edge in ranges.edges[1:-1]), 0], dtype=float)
        received, sent = by_piece[ranges.start], by_piece[ranges.stop]  # in forward; in backward the other way round
        return cls(
            segments=segments,
            resident_bytes=ranges.total(segments.resident_bytes) + n * (received + sent) + received,
            sent_bytes=sent,
            gradient_bytes=ranges.total(segments.gradient_bytes),
            saved_bytes=ranges.total(segments.saved_bytes),
            running_bytes=ranges.largest_moment(saved_bytes=segments.saved_bytes, alone_bytes=segments.alone_bytes),
            ending_bytes=ranges.ending(segments.ending_bytes, alone=segments.least_alone_bytes),
            late_bytes=ranges.total(segments.late_bytes),
            spared_bytes=ranges.total(segments.spared_bytes),
            easy_bytes=ranges.total(segments.easy_bytes),
            n_micro_batches=n,
            room_bytes=memory_room_bytes(table) + ONE_BYTE,
            known={},
        )

    def recomputing(self, n_in_flight: int) -> tuple[Array, Array]:
        """Per range, the bytes to be spared, and the least time that takes; INFINITY where it does not help."""
        if n_in_flight not in self.known:
            self.known[n_in_flight] = self._recomputing(n_in_flight)
        return self.known[n_in_flight]

    def _recomputing(self, n_in_flight: int) -> tuple[Array, Array]:
        segments = self.segments
        held_bytes = self.resident_bytes + n_in_flight * self.sent_bytes
        beside_bytes = self.ending_bytes
        if n_in_flight < self.n_micro_batches:  # else no pass has made gradients while so many are in flight
            held_bytes = held_bytes + self.gradient_bytes
            beside_bytes = np.maximum(beside_bytes, self.late_bytes)
        can_end = self.resident_bytes + self.gradient_bytes <= self.room_bytes
        fits = held_bytes + (n_in_flight - 1) * self.saved_bytes + self.running_bytes <= self.room_bytes
        needed_bytes = held_bytes + n_in_flight * self.saved_bytes + beside_bytes
        fits &= needed_bytes <= self.room_bytes
        missing_bytes = np.where(fits, 0.0, np.maximum(needed_bytes - self.room_bytes, ONE_BYTE))
        again_s = np.where(fits, 0.0, INFINITY)
        can = segments.spared_bytes > segments.easy_bytes
        least_s = np.zeros(missing_bytes.shape)
        if can.any():
            per_segment_bytes = n_in_flight * segments.spared_bytes[can]
            hard_bytes = np.maximum(0.0, missing_bytes - n_in_flight * self.easy_bytes)
            n_segments = np.ceil(hard_bytes / per_segment_bytes.max())
            least_s = np.maximum(
                n_segments * segments.again_s[can].min(),
                hard_bytes * (segments.again_s[can] / per_segment_bytes).min(),
            )
        is_enough = missing_bytes <= n_in_flight * self.spared_bytes
        return missing_bytes, np.where(can_end, np.where(is_enough, least_s, again_s), INFINITY)
