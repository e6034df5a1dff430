"""Interleaved 1F1B: each rank owns `n_chunks` stages, so that the bubble is `n_chunks` times shorter.

With one stage per rank it is 1F1B with twice the warm-up, whose transfers pass while ranks compute.

Micro-batches travel in groups of `n_ranks`: a group passes through a rank's first stage, then its second, ...,
then the next group follows. The backward passes take the stages in reverse. With 2 ranks and 2 chunks:

    forward passes of rank 0:   0F0 0F1   2F0 2F1   0F2 0F3   2F2 2F3
    backward passes of rank 0:  2B0 2B1   0B0 0B1   2B2 2B3   0B2 0B3

    n_warm_up = (n_chunks - 1) n_ranks + 2 (n_ranks - 1 - rank)   forward passes, then F and B alternate

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 2.2.2.
"""

from __future__ import annotations

from autoplan.errors import InputError
from autoplan.schedules import Action, Schedule, ScheduleKind
from autoplan.schedules.one_f_one_b import warm_up_then_alternate


def interleaved(n_ranks: int, n_chunks: int, n_micro_batches: int) -> Schedule:
    """The schedule of the module docstring; `n_micro_batches` is a multiple of `n_ranks`."""
    _check_micro_batches(n_ranks, n_micro_batches)
    return tuple(
        warm_up_then_alternate(
            _passes("F", rank, range(n_chunks), n_ranks=n_ranks, n_micro_batches=n_micro_batches),
            _passes("B", rank, range(n_chunks - 1, -1, -1), n_ranks=n_ranks, n_micro_batches=n_micro_batches),
            n_warm_up=(n_chunks - 1) * n_ranks + 2 * (n_ranks - 1 - rank),
        )
        for rank in range(n_ranks)
    )


def _passes(kind: str, rank: int, chunks: range, *, n_ranks: int, n_micro_batches: int) -> tuple[Action, ...]:
    return tuple(
        Action(chunk * n_ranks + rank, kind, first + offset)
        for first in range(0, n_micro_batches, n_ranks)
        for chunk in chunks
        for offset in range(n_ranks)
    )


def _check_micro_batches(n_ranks: int, n_micro_batches: int) -> None:
    if n_micro_batches % n_ranks != 0:
        raise InputError.of(
            "mesh.n_micro_batches",
            found=n_micro_batches,
            expected=f'a multiple of pp = {n_ranks} with schedule "interleaved"',
            fix="change the number of micro-batches or the schedule",
        )


SCHEDULES = {"interleaved": ScheduleKind(interleaved, receives_ahead=True)}
