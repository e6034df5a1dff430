"""Where the wall time goes, as a table for a terminal: shares in numbers, and as a bar of letters where there is room.

cluster          goodput  compute #  dp comm d  rest -
2 x dgx_a100_x8   99.8%      85.0%      14.1%    0.9%  ####################ddd-
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.plain_text import WIDTH, folded, text_table
from autoplan.what_if.rows import WhatIfRow

LEAST_SHARE = 0.005  # a loss that is less everywhere is part of the rest
MIN_BAR, MAX_BAR = 16, 48


@dataclass(frozen=True, slots=True)
class Loss:
    """A column: its letter in the bars, and the shares of `rows.SHARES` that it sums."""

    name: str
    letter: str
    parts: tuple[str, ...]

    @property
    def title(self) -> str:
        """The head of the column, which is the key of the bars too."""
        return f"{self.name} {self.letter}"


LOSSES = (
    Loss("compute", "#", ("compute",)),
    Loss("recompute", "r", ("recompute",)),
    Loss("tp comm", "t", ("exposed_tp",)),
    Loss("dp comm", "d", ("exposed_dp",)),
    Loss("pp comm", "p", ("exposed_pp",)),
    Loss("bubble", ".", ("bubble",)),
    Loss("optimizer", "o", ("optimizer",)),
    Loss("launch", "l", ("launch",)),
    Loss("batch copy", "b", ("exposed_batch_copy",)),
    Loss("stragglers", "s", ("stragglers",)),
    Loss("loading", "w", ("loading",)),
    Loss("checkpoints", "c", ("checkpoints",)),
    Loss("failures", "x", ("failures",)),
    Loss("no spare", "n", ("no_spare",)),
)


def loss_table(rows: Sequence[WhatIfRow], labels: Sequence[str], *, width: int = WIDTH) -> str:
    """Shares of wall time, which sum to 100 %: those that count somewhere, and the rest; all rows have shares."""
    shown = _shown(rows)
    header = ["share of wall time", "goodput", *(loss.title for loss in shown)]
    shares = [[_share(row, loss) for loss in shown] for row in rows]
    cells = [
        [label, "" if row.goodput is None else f"{row.goodput:.1%}", *(f"{share:.1%}" for share in line)]
        for row, label, line in zip(rows, labels, shares, strict=True)
    ]
    right = frozenset(range(1, len(header)))
    table = text_table(header, cells, right=right, width=None)
    room = width - max(map(len, table.splitlines())) - 2
    if room >= MIN_BAR:
        letters = [loss.letter for loss in shown]
        bars = [bar(letters, line, width=min(room, MAX_BAR)) for line in shares]
        lines = [[*line, drawn] for line, drawn in zip(cells, bars, strict=True)]
        return text_table([*header, ""], lines, right=right, width=None)
    return table if room >= -2 else _transposed(shown, labels, cells, shares, width=width)


def bar(letters: Sequence[str], shares: Sequence[float], *, width: int) -> str:
    """A line of `width` letters, as many of each as it has of the whole: the largest remainders are rounded up."""
    exact = [share * width for share in shares]
    lengths = [int(length) for length in exact]
    order = sorted(range(len(exact)), key=lambda index: exact[index] - lengths[index], reverse=True)
    for index in order[: max(0, width - sum(lengths))]:
        lengths[index] += 1
    return "".join(letter * length for letter, length in zip(letters, lengths, strict=True))


def _shown(rows: Sequence[WhatIfRow]) -> tuple[Loss, ...]:
    large = tuple(loss for loss in LOSSES if any(_share(row, loss) >= LEAST_SHARE for row in rows))
    small = tuple(part for loss in LOSSES if loss not in large for part in loss.parts)
    is_any = any(dict(row.shares)[part] > 0.0 for row in rows for part in small)
    return (*large, Loss("rest", "-", small)) if is_any else large


def _share(row: WhatIfRow, loss: Loss) -> float:
    return sum(dict(row.shares)[part] for part in loss.parts)


def _transposed(
    shown: Sequence[Loss],
    labels: Sequence[str],
    cells: Sequence[Sequence[str]],
    shares: Sequence[Sequence[float]],
    *,
    width: int,
) -> str:
    """Where even the numbers are too wide: each point on two lines, its name and its largest losses in words."""
    lines = ["share of wall time", "-" * len("share of wall time")]
    for label, cell, line in zip(labels, cells, shares, strict=True):
        parts = sorted(zip(shown, line, strict=True), key=lambda item: -item[1])
        said = ", ".join(f"{loss.name} {share:.1%}" for loss, share in parts if share >= LEAST_SHARE)
        lines += [label, folded(f"    goodput {cell[1]}: {said}", width=width, indent=8)]
    return "\n".join(lines)
