"""A step in which ranks of several kinds share a batch: each kind replayed by itself, joined here.

They work side by side and meet when gradients are reduced, so the step takes as long as the slowest kind, whose
breakdown is that of the step. Left out: that a reduction waits for the last rank that has the gradient, which hides
less of the communication of a fast rank; it has the time, because the slowest one does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from autoplan.parallel_plan import Estimate


def slowest_of(estimates: Sequence[Estimate]) -> Estimate:
    """One estimate of these kinds of rank, numbered in this order, each of which has one rank so far."""
    slowest_rank = max(range(len(estimates)), key=lambda rank: estimates[rank].step_s)
    limits_bytes = tuple(estimate.memory_limit_bytes for estimate in estimates)
    return replace(
        estimates[slowest_rank],
        slowest_rank=slowest_rank,
        allocated_bytes=tuple(chain.from_iterable(estimate.allocated_bytes for estimate in estimates)),
        needed_bytes=tuple(chain.from_iterable(estimate.needed_bytes for estimate in estimates)),
        memory_parts_bytes=tuple(chain.from_iterable(estimate.memory_parts_bytes for estimate in estimates)),
        memory_limit_bytes=min(limits_bytes),
        rank_limits_bytes=limits_bytes if len(set(limits_bytes)) > 1 else (),
        timeline=tuple(
            replace(event, rank=rank) for rank, estimate in enumerate(estimates) for event in estimate.timeline
        ),
    )
