"""Which ops take the time of a plan's segments, as plain text: measured by `autoplan profile` beside computed."""

from __future__ import annotations

from autoplan.measured_profile.op_times import OpComparison, OpSeconds, SegmentComparison
from autoplan.plain_text import text_table
from autoplan.units import format_seconds, format_share

N_SEGMENTS, N_OPS, N_SHAPES = 3, 8, 2


def ops_text(compared: tuple[SegmentComparison, ...]) -> str:
    """The longest ops of the kinds of segments that take most; nothing where no ops were measured."""
    longest = sorted(compared, key=lambda item: -item.n_segments * measured_s(item))[:N_SEGMENTS]
    return "\n\n".join(_segment_text(item) for item in longest if measured_s(item) > 0)


def measured_s(item: SegmentComparison) -> float:
    """The sum of its ops, forward and backward."""
    return sum(row.measured.total_s for row in item.ops if row.measured is not None)


def _segment_text(item: SegmentComparison) -> str:
    whole_s = measured_s(item)
    shown = [row for row in item.ops if row.measured is not None][:N_OPS]
    computed = sum((row.computed.total_s for row in item.ops if row.computed is not None), 0.0)
    rows = [_cells(row, whole_s) for row in shown]
    n_more = len(item.ops) - len(shown)
    rows.append(("all", format_seconds(whole_s), format_seconds(computed), _ratio(whole_s, computed), "100%", ""))
    n_of_kind = f", 1 of {item.n_segments} alike" if item.n_segments > 1 else ""
    split = f", tp {item.tp}" if item.tp > 1 else ""
    title = f"Ops of {item.segment}{n_of_kind}: micro-batch {item.micro_batch_size}{split}, forward and backward"
    header = ("op", "measured", "computed", "ratio", "share", f"({n_more} more)" if n_more else "")
    return f"{title}\n\n{text_table(header, rows, right=frozenset({1, 2, 3, 4}))}"


def _cells(row: OpComparison, whole_s: float) -> tuple[str, ...]:
    measured = row.measured or OpSeconds()
    computed = None if row.computed is None else row.computed.total_s
    return (
        row.op.removeprefix("aten::"),
        format_seconds(measured.total_s),
        "-" if computed is None else format_seconds(computed),
        _ratio(measured.total_s, computed),
        format_share(measured.total_s / whole_s),
        " x ".join(str(list(shape)).replace(" ", "") for shape in row.shapes[:N_SHAPES]),
    )


def _ratio(measured_s: float, computed_s: float | None) -> str:
    return f"{measured_s / computed_s:.2f}" if computed_s else "-"
