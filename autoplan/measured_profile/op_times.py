"""Times of the ops of measured segments: lines of what "ops", which `autoplan profile` writes, one per segment.

Beside them what `op_comparison` makes of them: the ops of a plan's segments, measured and computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.errors import InputError

OPS = "ops"
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OpMeasurement:
    """All calls of one op with tensors of these shapes, in one pass of a segment.

    Attributes:
        op: as torch's profiler names it, such as aten::linear.
        shapes: of its tensors that have dims.
        forward_s, backward_s: on the device, of all `n_calls` together.
    """

    op: str
    shapes: Shapes
    n_calls: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class SegmentOps:
    """The ops of one eager segment; all other fields are those of `SegmentTime`."""

    content: str
    assignment: str
    tp: int
    boundary: str
    micro_batch_size: int
    ops: tuple[OpMeasurement, ...]
    code: str | None = None

    @property
    def subject(self) -> tuple[object, ...]:
        """What was measured, whatever its code was."""
        return self.content, self.assignment, self.tp, self.micro_batch_size


@dataclass(frozen=True, slots=True)
class OpTotals:
    """All calls of one op in one forward and backward pass of a segment.

    Attributes:
        n_calls, flops, moved_bytes: of computed ones; 0 of measured ones, whose calls nobody counts so.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    n_calls: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """Of both passes."""
        return self.forward_s + self.backward_s

    def plus(self, other: OpTotals) -> OpTotals:
        """Of the calls of both."""
        return OpTotals(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.n_calls + other.n_calls,
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True, slots=True)
class OpComparison:
    """One op with tensors of these shapes, of which there are none where several shapes are taken together.

    Attributes:
        measured, computed: None where only the other side has an op of this name, or nothing was measured.
    """

    op: str
    shapes: Shapes
    measured: OpTotals | None
    computed: OpTotals | None


@dataclass(frozen=True, slots=True)
class SegmentComparison:
    """The ops of one kind of segment, one micro-batch, one rank, without communication; the longest one first.

    Attributes:
        segment: the first of its kind.
        n_segments: of this kind, in the whole model.
        tp, micro_batch_size: at which its ops were measured, or else those of the plan.
    """

    segment: str
    n_segments: int
    tp: int
    micro_batch_size: int
    ops: tuple[OpComparison, ...]


def about(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checked line that say what was measured, alike in `SegmentOps` and `SegmentTime`."""
    names = ("content", "assignment", "tp", "boundary", "micro_batch_size")
    return {name: row[name] for name in names} | {"code": row.get("code")}


def segment_ops(row: Mapping[str, Any]) -> SegmentOps:
    """The ops of a checked line."""
    return SegmentOps(
        **about(row),
        ops=tuple(
            OpMeasurement(
                op=item["op"],
                shapes=tuple(map(tuple, item["shapes"])),
                n_calls=float(item["n_calls"]),
                forward_s=float(item["forward_s"]),
                backward_s=float(item["backward_s"]),
            )
            for item in row["ops"]
        ),
    )


def check_ops(row: Mapping[str, Any], where: str) -> None:
    """Refuse a line whose ops are not as they are written.

    Raises: InputError naming the field.
    """
    items = row.get("ops")
    if not isinstance(items, list):
        raise _error(f"{where}: ops", items, "a list")
    for index, item in enumerate(items):
        place = f"{where}: ops[{index}]"
        if not isinstance(item, dict) or not isinstance(item.get("op"), str):
            raise _error(place, item, "an object with op, shapes, n_calls, forward_s and backward_s")
        if not _are_shapes(item.get("shapes")):
            raise _error(f"{place}.shapes", item.get("shapes"), "lists of counts")
        for name in ("n_calls", "forward_s", "backward_s"):
            value = item.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise _error(f"{place}.{name}", value, "0 or more")


def _are_shapes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(shape, list) and all(isinstance(extent, int) and extent >= 0 for extent in shape) for shape in value
    )


def _error(where: str, found: object, expected: str) -> InputError:
    return InputError.of(where, found=found, expected=expected, fix="profile again")
