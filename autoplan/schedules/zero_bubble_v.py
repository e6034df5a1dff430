"""Zero-bubble V: two stages per rank, laid out as a V, and a backward pass in two halves.

Rank r has stage r and stage 2 n_ranks - 1 - r, so rank 0 has the first and the last stage. With 2 ranks:

    stages of rank 0:  0 .     . 3
    stages of rank 1:     1 . 2           activations go down the V and up again

The gradients of inputs (I) are what other ranks wait for; the gradients of weights (W) fill the time in which a rank
would wait. If F, I and W take equally long, only the start and the end of a step have a bubble, of
n_ranks - 1 passes altogether (`test_zero_bubble_v_...`).

    warm-up  2 (n_ranks - r) - 1 times  F of the first stage
             r times                    F of the second, F of the first
             n_ranks - r times          F I W of the second
    steady   F I W of the first, F I W of the second; once the forward passes of the first are done, without these
    drain    r times                    I of the first, I of the second
             n_ranks - r times          I W of the first
             the W that are left, of the second, then of the first

With fewer than 2 n_ranks - 1 micro-batches, the order is that of 2 n_ranks - 1, without those that do not exist.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6; order of actions as in
torch.distributed.pipelining.ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from autoplan.errors import InputError
from autoplan.schedules import Action, Schedule, ScheduleKind


def zero_bubble_v(n_ranks: int, n_chunks: int, n_micro_batches: int) -> Schedule:
    """The schedule of the module docstring.

    Raises: InputError unless each rank has two stages.
    """
    if n_chunks != 2:
        raise InputError.of(
            "mesh.n_chunks",
            found=n_chunks,
            expected='2, because schedule "zero_bubble_v" has two stages per rank',
            fix="set n_chunks to 2, or use another schedule",
        )
    n_planned = max(n_micro_batches, 2 * n_ranks - 1)
    rows = (_rank_actions(rank, n_ranks, n_planned) for rank in range(n_ranks))
    return tuple(tuple(action for action in row if action.micro_batch < n_micro_batches) for row in rows)


def _rank_actions(rank: int, n_ranks: int, n_micro_batches: int) -> list[Action]:
    """The actions of a rank; `n_micro_batches` is at least 2 n_ranks - 1."""
    after = n_ranks - rank  # this rank and those below it in the V
    row = _Row(first=rank, second=2 * n_ranks - 1 - rank)
    row.add("F", times=2 * after - 1)
    row.add("fF", times=rank)
    row.add("fiw", times=after)
    n_left = n_micro_batches - (2 * after - 1) - rank  # forward passes of the first stage
    row.add("FIWfiw", times=n_left)
    row.add("IWfiw", times=n_micro_batches - n_left - n_ranks)  # forward passes left of the second
    row.add("Ii", times=rank)
    row.add("IW", times=after)
    row.add("w", times=rank)
    row.add("W", times=rank)
    return row.actions


class _Row:
    """Actions of one rank; each pass takes the next micro-batch."""

    def __init__(self, *, first: int, second: int) -> None:
        self.actions: list[Action] = []
        self._first, self._second = first, second
        self._n_done = dict.fromkeys("FIWfiw", 0)

    def add(self, passes: str, *, times: int) -> None:
        """Append `passes` so many times: F, I, W of the first stage, f, i, w of the second."""
        for name in passes * times:
            stage = self._first if name.isupper() else self._second
            self.actions.append(Action(stage, name.upper(), self._n_done[name]))
            self._n_done[name] += 1


SCHEDULES = {"zero_bubble_v": ScheduleKind(zero_bubble_v, splits_backward=True, receives_ahead=True)}
