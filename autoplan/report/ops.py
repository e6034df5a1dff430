"""Which ops take the time of a plan's segments, as plain text: measured by `autoplan profile`, or computed, or both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoplan.measured_profile.op_times import OpComparison, OpTotals, SegmentComparison
from autoplan.plain_text import text_table
from autoplan.units import GB, TFLOP, format_seconds, format_share

N_SEGMENTS, N_OPS, N_SHAPES = 3, 8, 2
LEAST_SHARE = 0.01  # of a kind of segments that is shown


def ops_text(compared: tuple[SegmentComparison, ...], texts: Mapping[str, str] = MappingProxyType({})) -> str:
    """The longest ops of the kinds of segments that take most; nothing where none are known.

    `texts` say what segments are, by name.
    """
    seconds = {item: item.n_segments * _segment_s(item) for item in compared}
    longest = sorted(seconds, key=lambda item: -seconds[item])[:N_SEGMENTS]
    return "\n\n".join(
        _segment_text(i, texts.get(i.segment, i.segment))
        for i in longest
        if seconds[i] > LEAST_SHARE * sum(seconds.values())
    )


def beside_ops_text(compared: tuple[SegmentComparison, ...], *, n_micro_batches: int, compute_s: float) -> str:
    """How a rank's computing follows from the ops of all segments, where those were computed and run on that rank.

    What is left are the parameters: casts and copies around gathering and reducing, and adding up gradients.
    """
    if not compared or any(_measured_s(item) for item in compared):
        return ""
    pass_s = sum(item.n_segments * _sum_of(item).total_s for item in compared)
    left_s = compute_s - n_micro_batches * pass_s
    if left_s < LEAST_SHARE * compute_s:
        return ""
    return (
        f"Compute of {format_seconds(compute_s)} is {n_micro_batches} x {format_seconds(pass_s)} for the ops of all "
        f"segments, and {format_seconds(left_s)} to cast and copy parameters and to add up their gradients"
    )


def _segment_s(item: SegmentComparison) -> float:
    """The sum of its ops, forward and backward: as measured, or as computed where nothing was."""
    return _measured_s(item) or _sum_of(item).total_s


def _measured_s(item: SegmentComparison) -> float:
    return sum(row.measured.total_s for row in item.ops if row.measured is not None)


def _sum_of(item: SegmentComparison) -> OpTotals:
    """All computed ops together."""
    whole = OpTotals()
    for row in item.ops:
        whole = whole.plus(row.computed or OpTotals())
    return whole


def _segment_text(item: SegmentComparison, name: str) -> str:
    n_of_kind = f", 1 of {item.n_segments} alike" if item.n_segments > 1 else ""
    split = f", tp {item.tp}" if item.tp > 1 else ""
    title = f"Ops of {name}{n_of_kind}: micro-batch {item.micro_batch_size}{split}, forward and backward"
    if _measured_s(item):
        return f"{title}\n\n{_measured_table(item)}"
    return f"{title}, computed\n\n{_computed_table(item)}"


def _measured_table(item: SegmentComparison) -> str:
    whole_s, computed_s = _measured_s(item), _sum_of(item).total_s
    shown = [row for row in item.ops if row.measured is not None][:N_OPS]
    rows = [_measured_cells(row, whole_s) for row in shown]
    rows.append(("all", format_seconds(whole_s), format_seconds(computed_s), _ratio(whole_s, computed_s), "100%", ""))
    header = ("op", "measured", "computed", "ratio", "share", _more(item, len(shown)))
    return text_table(header, rows, right=frozenset({1, 2, 3, 4}))


def _measured_cells(row: OpComparison, whole_s: float) -> tuple[str, ...]:
    measured = row.measured or OpTotals()
    computed = None if row.computed is None else row.computed.total_s
    return (
        _name(row),
        format_seconds(measured.total_s),
        "-" if computed is None else format_seconds(computed),
        _ratio(measured.total_s, computed),
        format_share(measured.total_s / whole_s),
        _shapes(row),
    )


def _computed_table(item: SegmentComparison) -> str:
    whole, shown = _sum_of(item), item.ops[:N_OPS]
    rows = [(_name(row), *_computed_cells(row.computed or OpTotals(), whole), _shapes(row)) for row in shown]
    rows.append(("all", *_computed_cells(whole, whole), ""))
    header = ("op", "time", "share", "TFLOP/s", "GB/s", _more(item, len(shown)))
    return text_table(header, rows, right=frozenset({1, 2, 3, 4}))


def _computed_cells(totals: OpTotals, whole: OpTotals) -> tuple[str, ...]:
    """With the rates at which it computes and moves bytes: the larger part of what the device has is what bounds it."""
    return (
        format_seconds(totals.total_s),
        format_share(totals.total_s / whole.total_s),
        f"{totals.flops / totals.total_s / TFLOP:.1f}",
        f"{totals.moved_bytes / totals.total_s / GB:,.0f}",
    )


def _name(row: OpComparison) -> str:
    """Of several computed calls with their number."""
    n_calls = 0 if row.measured or row.computed is None else row.computed.n_calls
    return row.op.removeprefix("aten::") + (f" x {n_calls}" if n_calls > 1 else "")


def _shapes(row: OpComparison) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in row.shapes[:N_SHAPES])


def _more(item: SegmentComparison, n_shown: int) -> str:
    n_more = len(item.ops) - n_shown
    return f"({n_more} more ops)" if n_more else ""


def _ratio(measured_s: float, computed_s: float | None) -> str:
    return f"{measured_s / computed_s:.2f}" if computed_s else "-"
