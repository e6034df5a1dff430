"""What a run of measurements tells: one line per case, with its count and the time left; a bar below on a terminal.

    [7/40] blocks.0, tp 2 S(1), micro-batch 4, compiled: forward 1.203 ms, backward 2.511 ms; about 3 min left
    [#####-------------------------] measuring blocks.0, tp 2 S(1), micro-batch 8, compiled

The time left is that of the cases still to be measured; each is taken to need the mean of those measured so far that
are compiled, or of single ops, or neither, as it is.
"""

import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

from .results import CONTIGUOUS, OPS, OWN, Row

MINUTE_S = 60.0
BAR_WIDTH = 30


class Progress:
    """Counts the cases of a run; `waiting` are those that have to be measured, `n_cases` all."""

    def __init__(self, n_cases: int, waiting: Iterable[Row]) -> None:
        self._n_cases, self._n_done = n_cases, 0
        self._waiting = Counter(map(_way, waiting))
        self._seconds: defaultdict[Any, list[float]] = defaultdict(list)

    def known(self, row: Row, how: str) -> str:
        """The line of a case that was not measured now."""
        return self._line(row, how)

    def measured(self, row: Row, *, seconds: float) -> str:
        """The line of a case that was measured in so many seconds."""
        self._waiting[_way(row)] -= 1
        self._seconds[_way(row)].append(seconds)
        left_s = self._left_s()
        return self._line(row, _result(row) + (f"; {_about(left_s)} left" if left_s else ""))

    def bar(self, row: Row) -> str:
        """How far the run is while this case is measured."""
        done = "#" * (BAR_WIDTH * self._n_done // self._n_cases)
        return f"[{done.ljust(BAR_WIDTH, '-')}] measuring {_described(row)}"

    def _left_s(self) -> float:
        all_s = [seconds for found in self._seconds.values() for seconds in found]
        return sum(count * mean(self._seconds.get(way, all_s)) for way, count in self._waiting.items())

    def _line(self, row: Row, text: str) -> str:
        self._n_done += 1
        return f"[{self._n_done}/{self._n_cases}] {_described(row)}: {text}"


def show(text: str) -> None:
    """A line on stderr, in the place of a bar."""
    sys.stderr.write(_over_bar() + text + "\n")
    sys.stderr.flush()


def show_bar(text: str) -> None:
    """Below all lines, until the next one; on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(_over_bar() + text[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()


@contextmanager
def no_bar_left() -> Iterator[None]:
    """Take the bar away in the end, also where an error is told next."""
    try:
        yield
    finally:
        sys.stderr.write(_over_bar())


def _over_bar() -> str:
    return "\r\033[2K" if sys.stderr.isatty() else ""


def _way(row: Row) -> tuple[bool, bool]:
    return bool(row.get("compiled")), row["what"] == OPS


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 1.5 * MINUTE_S else f"about {seconds / MINUTE_S:.0f} min"


def _described(row: Row) -> str:
    if row["what"] == "optimizer":
        return "optimizer"
    boundary = f" {row['boundary']}" if row["boundary"] else ""
    way = ", compiled" if row["compiled"] else ""
    way += f", {row['memory_format']}" if row["memory_format"] != CONTIGUOUS else ""
    way += ", own module" if row["module"] == OWN else ""
    way += ", its ops" if row["what"] == OPS else ""
    return f"{row['segment']}, tp {row['tp']}{boundary}, micro-batch {row['micro_batch_size']}{way}"


def _result(row: Row) -> str:
    if row["status"] not in ("measured", "noisy"):
        return f"{row['status']} {row.get('why', '')}".strip()
    if row["what"] == OPS:
        return f"{len(row['ops'])} of different kind or shape"
    if row["what"] == "optimizer":
        return f"{row['per_element_s'] * 1e12:.2f} ps per element"
    times = f"forward {row['forward_s'] * 1e3:.3f} ms, backward {row['backward_s'] * 1e3:.3f} ms"
    return times + (" (noisy)" if row["status"] == "noisy" else "")
