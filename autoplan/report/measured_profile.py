"""What `autoplan profile` measured, as a table: its rows -> text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.measured_profile.segment_times import MEASURED, NOISY, NOT_COMPILED, OWN
from autoplan.plain_text import text_table
from autoplan.units import MiB, format_seconds


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per measured segment."""
    header = ("segment", "tp", "micro", "forward", "backward", "host", "saved MiB", "")
    return text_table(header, [_cells(row) for row in rows if row["what"] == "segment"], right=frozenset(range(1, 7)))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    split = f"{row['tp']} {row['boundary']}".strip()
    first = (row["segment"], split, str(row["micro_batch_size"]))
    is_compiled = row.get("compiled", False) and row["status"] != NOT_COMPILED
    is_own = row.get("module") == OWN
    note = ", ".join(
        ["own module"] * is_own
        + ["compiled"] * is_compiled
        + [row[name] for name in ("memory_format",) if row.get(name, "contiguous") != "contiguous"]
        + [row["status"]] * (row["status"] != MEASURED)
    )
    if row["status"] not in (MEASURED, NOISY):
        return (*first, "-", "-", "-", "-", note)
    host_s = row["host_forward_s"] + row["host_backward_s"]
    times = (format_seconds(row["forward_s"]), format_seconds(row["backward_s"]), format_seconds(host_s))
    return (*first, *times, f"{row['saved_bytes'] / MiB:.1f}", note)
