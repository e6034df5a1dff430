"""Rows that bound the time of each pass of a stage from below, as `simulator.stage_pass.replay_pass` does from above.

With compute c and communication g beside each other a segment takes

    c + h(c, g),    h(c, g) = g - q + beta q,    q = min(r c, g)                              `hidden_extra_s`

(beta, r: see `Overlap`), which for equal neighbours is a constant per segment, hence linear in the counts
(`_add_neighbour_row`). Where a segment may have several neighbours, the most favourable ones are taken. A second row
bounds the pass by the sum of its compute and communication (`_add_hidden_row`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autoplan.cost.table import CostTable, SegmentCost, backward_part_s, backward_s, forward_s
from autoplan.schedules import splits_backward
from autoplan.search.paths.schedule_paths import (
    BACKWARD,
    CARRY,
    CUT,
    FIRST_FORWARD,
    FORWARD,
    INPUTS,
    LAST_BACKWARD,
    LAST_CARRY,
    LAST_WEIGHTS,
    WEIGHTS,
)
from autoplan.search.program.terms import (
    Formulation,
    Terms,
    Values,
    at_start,
    cost_of_kind,
    cost_values,
    cut_s_at,
    ends_in,
    least_of,
    negative,
    sum_of,
    time_of,
    weighted,
)
from autoplan.search.ranges import hidden_extra_s, slowing_s


@dataclass(frozen=True, slots=True)
class _Pass:
    """One kind of pass: what it computes per segment, and which communication it does."""

    symbol: str
    compute: Callable[[SegmentCost], float]
    is_forward: bool
    gathers: bool
    reduces: bool

    def gather_s(self, cost: SegmentCost) -> float:
        """One gathering of the parameters of a segment."""
        return cost.gather_s if self.is_forward else cost.gather_back_s

    def reduce_s(self, cost: SegmentCost) -> float:
        """One reduction of the gradients of a segment."""
        return cost.last_reduce_s if self.symbol in (LAST_BACKWARD, LAST_WEIGHTS) else cost.reduce_s


def _passes(table: CostTable, *, is_first: bool) -> tuple[_Pass, ...]:
    """The passes of the first stage, or of any other one."""
    always, every = table.gathers_per_micro_batch, table.reduces_per_micro_batch
    waits = is_first or not table.gathers_at_start  # or its gathers may be done when its input arrives
    forward = (
        _Pass(FIRST_FORWARD, forward_s, True, gathers=waits, reduces=False),
        _Pass(FORWARD, forward_s, True, gathers=always, reduces=False),
    )
    if not splits_backward(table.mesh.schedule):
        return (
            *forward,
            _Pass(BACKWARD, backward_s, False, gathers=always, reduces=every),
            _Pass(LAST_BACKWARD, backward_s, False, gathers=always, reduces=True),
        )
    inputs, weights = (partial(backward_part_s, kind=kind, is_first=is_first) for kind in "IW")
    return (
        *forward,
        _Pass(INPUTS, inputs, False, gathers=always, reduces=False),
        _Pass(WEIGHTS, weights, False, gathers=always, reduces=every),
        _Pass(LAST_WEIGHTS, weights, False, gathers=always, reduces=True),
    )


def _stages_alike(form: Formulation) -> tuple[tuple[range, tuple[_Pass, ...]], ...]:
    """The first stage and the other ones, with their passes."""
    stages = (range(1), range(1, form.n_stages))
    return tuple((alike, _passes(form.table, is_first=0 in alike)) for alike in stages)


def add_pass_times(form: Formulation) -> None:
    """Every pass of every stage takes its compute and the communication that it must wait for."""
    for stages, passes in _stages_alike(form):
        for kind in passes if stages else ():
            extra = _extra_values(form, kind)
            for stage in stages:
                _add_hidden_row(form, kind, stage)
                if kind.gathers or kind.reduces:
                    _add_neighbour_row(form, kind, stage, extra=extra)


def left_symbol(symbol: str) -> str:
    """The communication that a pass leaves to be done when it ends."""
    return f"left by {symbol}"


def _add_hidden_row(form: Formulation, kind: _Pass, stage: int) -> None:
    """All communication of the pass is waited for (the first gather), hidden (beta of it adds), or left over.

    pass + beta left >= compute + beta (gathers + reductions) + (1 - beta) first gather
    """
    beta = form.table.overlap.communication_exposed

    def per_segment(cost: SegmentCost) -> float:
        gather_s = kind.gather_s(cost) if kind.gathers else 0.0
        return kind.compute(cost) + beta * (gather_s + (kind.reduce_s(cost) if kind.reduces else 0.0))

    terms = negative(sum_of(form, stage, cost_values(form, per_segment, scale=form.unit_s)))
    terms.append((time_of(form, kind.symbol, stage), 1.0))
    if kind.reduces:
        terms.append((time_of(form, left_symbol(kind.symbol), stage), beta))
    if kind.gathers:
        terms += [(column, -(1.0 - beta) * value) for column, value in _first_gather(form, kind, stage)]
    action = form.table.action_s / form.unit_s
    form.model.add_row(f"{kind.symbol} of stage {stage} hides communication", terms, lower=action)


def _first_gather(form: Formulation, kind: _Pass, stage: int) -> Terms:
    """Time of the gather before the pass can start: of its first segment forward, of its last one backward."""
    if kind.is_forward:
        return at_start(form, stage, lambda cost: cost.gather_s / form.unit_s)
    last = [least_of(form, run.piece[-1], lambda cost: cost.gather_back_s / form.unit_s) for run in form.runs]
    if stage == form.n_stages - 1:
        return [(form.one, last[-1])]
    inner = [min(last[k], last[k - 1]) if k > 0 else last[0] for k in range(len(last))]
    exact = [last[k - 1] if run.length == 1 and k > 0 else inner[k] for k, run in enumerate(form.runs)]
    return weighted(ends_in(form, stage), exact)


def _extra_values(form: Formulation, kind: _Pass) -> Values:
    """The least that communication adds while each segment computes, between any neighbours it may have."""
    return {
        (number, slot, is_recomputed): min(_extras(form, kind, (number, slot, is_recomputed)), default=0.0)
        / form.unit_s
        for number, run in enumerate(form.runs)
        for slot in range(len(run.piece))
        for is_recomputed in (False, True)
    }


def _extras(form: Formulation, kind: _Pass, place: tuple[int, int, bool], *, opens_pass: bool = False) -> list[float]:
    """H over the positions of a place that have a segment after them in the pass; none before them if it `opens_pass`.

    A place is (run, slot of its piece, whether it is recomputed). While a segment computes, the gather of the next one
    and the reduction of the one before it run beside it.
    """
    number, slot, is_recomputed = place
    run, table = form.runs[number], form.table
    step = 1 if kind.is_forward else -1
    extras = []
    for segment in range(run.start + slot, run.start + len(run.piece) * run.length, len(run.piece)):
        following, previous = segment + step, segment - step
        if not 0 <= following < len(table.kinds):
            continue
        gather_s = least_of(form, table.kinds[following], kind.gather_s)
        reduce_s = 0.0
        if kind.reduces and not opens_pass and 0 <= previous < len(table.kinds):
            reduce_s = least_of(form, table.kinds[previous], kind.reduce_s)
        compute_s = kind.compute(cost_of_kind(form, run.piece[slot], is_recomputed))
        if kind.gathers and gather_s > 0.0:
            extras.append(float(hidden_extra_s(compute_s, gather_s + reduce_s, table.overlap)))
        else:  # nothing to wait for: reductions only slow what they run beside
            extras.append(float(slowing_s(compute_s, reduce_s, table.overlap)))
    return extras


def _add_neighbour_row(form: Formulation, kind: _Pass, stage: int, *, extra: Values) -> None:
    """Pass >= first gather + sum (compute + extra) - what the two ends of the stage do not have."""
    values = cost_values(form, kind.compute, scale=form.unit_s)
    summed = sum_of(form, stage, {key: value + extra[key] for key, value in values.items()})
    terms = [(time_of(form, kind.symbol, stage), 1.0), *negative(summed)]
    if kind.gathers:
        terms += negative(_first_gather(form, kind, stage))
    both = (False, True)  # recomputed or not
    ends = [max(extra[k, len(run.piece) - 1, choice] for choice in both) for k, run in enumerate(form.runs)]
    starts = [max(extra[k, 0, choice] for choice in both) for k, run in enumerate(form.runs)]
    if not kind.is_forward:  # a backward pass ends with the first segment of its stage
        terms += weighted(ends_in(form, stage - 1), starts)
        terms.append((form.one, _lonely_loss(form, kind, extra)))
    elif stage == form.n_stages - 1:
        terms.append((form.one, ends[-1]))
    else:
        either = [max(ends[k], ends[k - 1]) if k > 0 else ends[0] for k in range(len(ends))]
        terms += weighted(ends_in(form, stage), either)
    action = form.table.action_s / form.unit_s
    form.model.add_row(f"{kind.symbol} of stage {stage} waits for neighbours", terms, lower=action)


def _lonely_loss(form: Formulation, kind: _Pass, extra: Values) -> float:
    """How much less a segment may be slowed when it opens the pass, with no reduction before it."""
    losses = [0.0]
    for place, value in extra.items():
        lonely = _extras(form, kind, place, opens_pass=True)
        losses.append(value - min(lonely, default=value * form.unit_s) / form.unit_s)
    return max(losses)


def add_leftovers(form: Formulation) -> None:
    """Reductions that cannot be hidden: that of the last segment reduced, and those that outlast compute."""
    pairs = [(stage, kind) for stages, passes in _stages_alike(form) for kind in passes for stage in stages]
    for stage, kind in pairs:
        if kind.reduces:
            column = time_of(form, left_symbol(kind.symbol), stage)
            _add_first_row(form, kind, stage, column)
            if not kind.gathers:
                _add_queue_rows(form, kind, stage, column)
    _add_carries(form)


def _add_first_row(form: Formulation, kind: _Pass, stage: int, column: int) -> None:
    """The reduction of the segment that closes the pass is left."""
    first = at_start(form, stage, lambda cost: kind.reduce_s(cost) / form.unit_s)
    form.model.add_row(f"first {left_symbol(kind.symbol)} {stage}", [(column, 1.0), *negative(first)], lower=0.0)


def _add_carries(form: Formulation) -> None:
    """What a backward pass leaves is in the way of the next pass of its rank.

    A pass that gathers waits for it, because it is queued first; another pass is slowed while it goes on.
    """
    table = form.table
    for symbol, reduces in ((CARRY, table.reduces_per_micro_batch), (LAST_CARRY, True)):
        for stage in range(form.n_stages) if reduces else ():
            added = at_start(form, stage, lambda cost: _carried_s(table, cost) / form.unit_s)
            terms = [(time_of(form, symbol, stage), 1.0), *negative(added)]
            form.model.add_row(f"{symbol} of stage {stage}", terms, lower=0.0)


def _carried_s(table: CostTable, cost: SegmentCost) -> float:
    """The least that a reduction adds to any pass that follows on its rank."""
    everything = [cost for choices in table.costs for cost in choices]
    back_and_forth = (min(cost.gather_s, cost.gather_back_s) for cost in everything)
    if table.gathers_per_micro_batch and min(back_and_forth) > 0.0:
        return cost.reduce_s
    if splits_backward(table.mesh.schedule):
        return 0.0  # the pass of the first stage for inputs does nothing
    shortest_s = min(min(forward_s(cost), backward_s(cost)) for cost in everything)
    return float(slowing_s(shortest_s, cost.reduce_s, table.overlap))


def _add_queue_rows(form: Formulation, kind: _Pass, stage: int, column: int) -> None:
    """Without gathers the queue of reductions is left by what comes in during its last stretch of the pass.

    left >= sum (reduction - r compute) over the first runs of the stage (+ r times the compute before the stretch)
    """
    r = form.table.overlap.hidden_per_compute
    values = cost_values(form, lambda cost: kind.reduce_s(cost) - r * kind.compute(cost), scale=form.unit_s)
    least_s = r * min(kind.compute(cost) for choices in form.table.costs for cost in choices) / form.unit_s
    for n_runs in range(1, len(form.runs) + 1):
        is_whole = n_runs == len(form.runs)
        terms = [(column, 1.0), *negative(sum_of(form, stage, values, n_runs=n_runs))]
        form.model.add_row(f"queue of stage {stage} run {n_runs}", terms, lower=least_s if is_whole else 0.0)


def add_cuts(form: Formulation) -> None:
    """A transfer after a stage takes what the boundary there takes."""
    for stage in range(form.n_stages - 1):
        cut_s = [cut_s_at(form, number) / form.unit_s for number in range(len(form.runs))]
        terms = [(time_of(form, CUT, stage), 1.0), *negative(weighted(ends_in(form, stage), cut_s))]
        form.model.add_row(f"cut after stage {stage}", terms, lower=0.0)
