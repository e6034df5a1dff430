"""1F1B: each rank starts with as many forward passes as there are ranks after it, then alternates F and B.

    rank 0 of 2: 0F0 | 0F1 0B0 0F2 0B1 | 0B2       warm-up | steady | drain
    rank 1 of 2:     | 1F0 1B0 1F1 1B1 1F2 1B2 |

At most min(n_micro_batches, n_ranks - rank) micro-batches are in flight, however many there are.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019; with the
flush at the end of the step, "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
"""

from __future__ import annotations

from autoplan.schedules import Action, Schedule, ScheduleKind, require_one_chunk


def one_f_one_b(n_ranks: int, n_chunks: int, n_micro_batches: int) -> Schedule:
    """Rank r warms up with `n_ranks - 1 - r` forward passes."""
    require_one_chunk("1f1b", n_chunks)
    return tuple(
        warm_up_then_alternate(
            tuple(Action(rank, "F", micro_batch) for micro_batch in range(n_micro_batches)),
            tuple(Action(rank, "B", micro_batch) for micro_batch in range(n_micro_batches)),
            n_warm_up=n_ranks - 1 - rank,
        )
        for rank in range(n_ranks)
    )


def warm_up_then_alternate(
    forwards: tuple[Action, ...], backwards: tuple[Action, ...], *, n_warm_up: int
) -> tuple[Action, ...]:
    """`n_warm_up` forward passes, then F B F B ... until no forward pass is left, then the other backward passes."""
    n_pairs = max(0, len(forwards) - n_warm_up)
    pairs = zip(forwards[n_warm_up:], backwards[:n_pairs], strict=True)
    return (*forwards[:n_warm_up], *(action for pair in pairs for action in pair), *backwards[n_pairs:])


SCHEDULES = {"1f1b": ScheduleKind(one_f_one_b)}
