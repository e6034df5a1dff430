"""What advice is made of: the facts that its rules look at, comparisons of two rows, and what a rule says.

On n devices

    speed-up = samples/s on n / samples/s on one          efficiency = speed-up / n,  or by hosts where one has no plan
    cost of a token on n / on one = 1 / efficiency
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.hardware import HardwareProfile
from autoplan.what_if.rows import WhatIfRow

LITTLE, MUCH = 0.10, 0.30  # of the wall time, waiting for communication
DEARER = 1.10  # cost of a token against the cheapest
STOPPED = "none yet: interrupted before all clusters were searched"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at; rows without a plan have a status that says why.

    Attributes:
        one, half, host, split: one device, half of a host's, a whole host's, and as many as that over two hosts.
        between: 2, 4, ... devices of a host, fewer than half of its.
        hosts: 1, 2, 4, ... whole hosts.
        batches: (global batch, row) of the whole host with larger batches, until these feed all devices.
        state_bytes: weights, gradients and optimizer state on a device that shares nothing.
        layer_bytes: likewise of the largest segment.
        can_compile: whether blocks may be compiled at all; at module level they may not.
    """

    hardware: HardwareProfile
    one: WhatIfRow
    between: tuple[WhatIfRow, ...]
    half: WhatIfRow
    host: WhatIfRow
    split: WhatIfRow
    hosts: tuple[WhatIfRow, ...]
    batches: tuple[tuple[int, WhatIfRow], ...]
    state_bytes: int
    layer_bytes: int
    layer: str
    deadline_s: float | None
    can_compile: bool

    @property
    def in_a_host(self) -> tuple[WhatIfRow, ...]:
        """Within one host, the fewest devices first."""
        return (self.one, *self.between, self.half, self.host)


@dataclass(frozen=True, slots=True)
class Advice:
    """One rule: whether it applies here, what it says, and the figures it says it by."""

    situation: str
    applies: bool
    advice: str
    figures: str


@dataclass(frozen=True, slots=True)
class AdviceAnswer:
    """All rules in order, and the rows behind them; `verdict` is the advice of those that apply, in order.

    After an interrupt there are the rows found until then, and no rules, which need them all.
    """

    verdict: str
    rules: tuple[Advice, ...]
    rows: tuple[WhatIfRow, ...]
    is_interrupted: bool = False


def speed_up(row: WhatIfRow, than: WhatIfRow) -> float | None:
    """Samples per second against those of another row, on the wall."""
    if row.goodput is None or than.goodput is None or not row.step_s or not than.step_s:
        return None
    return (row.goodput / row.step_s * row.global_batch) / (than.goodput / than.step_s * than.global_batch)


def efficiency(row: WhatIfRow, than: WhatIfRow) -> float | None:
    """Speed-up / times as many devices: 1 / the cost of a token against the other row."""
    gain = speed_up(row, than)
    return None if gain is None else gain * than.n_devices / row.n_devices


def as_fast_as(row: WhatIfRow, *, than: WhatIfRow) -> bool:
    """Whether a step of a row may be as fast: within the interval of the step of the other."""
    if row.step_s is None or than.step_s is None:
        return False
    return row.step_s <= (than.step_s_interval or (than.step_s, than.step_s))[1]


def passes(rows: Sequence[WhatIfRow], share: float) -> WhatIfRow | None:
    """The first row in which devices wait longer than this share of the time for communication."""
    return next((row for row in rows if row.exposed_share is not None and row.exposed_share > share), None)


def is_starved(row: WhatIfRow) -> bool:
    """Whether the batch is too small for the devices: some idle, or all wait much for communication."""
    return bool(row.n_idle_devices) or (row.exposed_share or 0.0) > LITTLE


def stop_at(rows: Sequence[WhatIfRow]) -> WhatIfRow | None:
    """The most hosts on which a token costs at most `DEARER` times as much as on the cheapest; None without plans."""
    known = [row for row in rows if row.goodput is not None]
    if not known:
        return None
    per_device = [(speed_up(row, known[0]) or 0.0) / row.n_devices for row in known]
    best = max(per_device)
    return [row for row, value in zip(known, per_device, strict=True) if value * DEARER >= best][-1]
