"""Where the memory of one device goes at its peak, with the sums that the table of all ranks shows."""

from __future__ import annotations

from autoplan.parallel_plan import Estimate
from autoplan.plain_text import text_table
from autoplan.report.plan import BAR_WIDTH
from autoplan.units import GiB

DIGITS = 3  # of GiB
_SUMS = {"working": "= allocated", "fragmentation": "= reserved"}  # after which part which sum stands


def memory_parts_table(estimate: Estimate, *, word: str = "rank") -> str:
    """The parts of what the fullest rank needs, in the order in which they add up to it; none that rounds to nothing.

    A part is shown as the difference of two rounded sums, so that the digits add up.
    """
    rank = estimate.tightest_rank
    needed_bytes = estimate.needed_bytes[rank]
    rows, sum_bytes = [], 0
    for part, part_bytes in estimate.memory_parts_bytes[rank]:
        shown = _rounded(sum_bytes + part_bytes) - _rounded(sum_bytes)
        sum_bytes += part_bytes
        share = part_bytes / needed_bytes
        if shown:
            rows.append((part.replace("_", " "), _text(shown), f"{share:.1%}", "#" * round(share * BAR_WIDTH)))
        if part in _SUMS:
            rows.append((_SUMS[part], _text(_rounded(sum_bytes)), f"{sum_bytes / needed_bytes:.1%}", ""))
    rows.append(("= needed", _text(_rounded(sum_bytes)), "100.0%", ""))
    title = "where the memory goes" + f", {word} {rank}" * estimate.has_several_ranks
    return text_table((title, "GiB", "", ""), rows, right=frozenset({1, 2}))


def _rounded(n_bytes: int) -> int:
    """In units of the last digit that is shown."""
    return round(n_bytes / GiB * 10**DIGITS)


def _text(rounded: int) -> str:
    return f"{rounded / 10**DIGITS:.{DIGITS}f}"
