"""Goodput: the share of wall time that is training, when devices fail and weights are saved.

    Tf   mean time between failures of the whole cluster:   1 / (n_devices x rate of one device)
    Ts   time that training stands still for one checkpoint
    Tr   time from a failure to the step after the last checkpoint, without repeating work
    w    work between two checkpoints, a whole number of steps

    w      = sqrt(Ts^2 + 2 (Tf + Tr) Ts)                      `best_interval_s`
    wall   = Tf exp(Tr / Tf) (exp((w + Ts) / Tf) - 1)         `expected_wall_s`, of w seconds of work
    shares = w / wall, Ts / wall, the rest: lost work and restarts

`best_interval_s` is the cycle Ts + sqrt(Ts^2 + 2 (Tf + Tr) Ts) that keeps a cluster available longest, less its
checkpoint (arXiv:2410.18124); for Tf >> Ts, Tr it is Young's sqrt(2 Tf Ts). `expected_wall_s` is Daly's: failures come
at a constant rate, during restarts too. Both leave out failures that come in groups, and that take devices with them:
`share_without_spares` says how often a host is missing.

Where more than half of the time is lost, a constant rate and a best interval mean little, so nothing is said (`None`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOSS = 0.5  # above this share of wall time no figure is given


@dataclass(frozen=True, slots=True)
class Goodput:
    """How wall time is spent; the three shares sum to 1.

    Attributes:
        n_steps: steps between two checkpoints.
        interval_s: their time.
        mtbf_s: of the whole cluster.
        work_share: training; `checkpoint_share`: standing still to save; `failure_share`: repeated work and restarts.
    """

    n_steps: int
    interval_s: float
    mtbf_s: float
    work_share: float
    checkpoint_share: float
    failure_share: float


def best_interval_s(*, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Work between two checkpoints that loses the least time."""
    return math.sqrt(checkpoint_s**2 + 2.0 * (mtbf_s + restart_s) * checkpoint_s)


def first_order_loss(*, interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Share of time lost while failures are rare:  Ts / Tc + Tc / (2 Tf) + Tr / Tf,  with the cycle Tc = w + Ts."""
    cycle_s = interval_s + checkpoint_s
    return checkpoint_s / cycle_s + cycle_s / (2.0 * mtbf_s) + restart_s / mtbf_s


def expected_wall_s(*, interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Wall time of one interval of work and its checkpoint."""
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)


def goodput(*, mtbf_s: float, checkpoint_s: float, restart_s: float, step_s: float) -> Goodput | None:
    """At the best whole number of steps between checkpoints; None where more than `MAX_LOSS` is lost."""
    best_s = best_interval_s(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    n_steps = max(1, round(best_s / step_s))
    interval_s = n_steps * step_s
    times = {"interval_s": interval_s, "mtbf_s": mtbf_s, "checkpoint_s": checkpoint_s, "restart_s": restart_s}
    if first_order_loss(**times) > MAX_LOSS:
        return None
    wall_s = expected_wall_s(**times)
    work, saving = interval_s / wall_s, checkpoint_s / wall_s
    return Goodput(n_steps, interval_s, mtbf_s, work, saving, 1.0 - work - saving)


def share_without_spares(*, n_hosts: int, host_mtbf_s: float, repair_s: float, n_spare_hosts: int) -> float:
    """Share of time in which more hosts are in repair than there are spares.

    Hosts in repair are Poisson distributed with mean n_hosts x repair_s / host_mtbf_s (failures at a constant rate,
    each host repaired by itself); this is the chance of more than `n_spare_hosts`.
    """
    mean = n_hosts * repair_s / host_mtbf_s
    term = covered = math.exp(-mean)
    for count in range(1, n_spare_hosts + 1):
        term *= mean / count
        covered += term
    return max(0.0, 1.0 - covered)
