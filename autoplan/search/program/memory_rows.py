"""Rows that keep the memory of each rank within its room, at each moment of its schedule that may be the peak.

    state + gathered + gradients of earlier passes + (saved + sent) x in flight + pending x between halves
        + what the running stage needs besides <= room

in MiB, as exact fractions: rounding each coefficient up would refuse plans that fit. A segment that runs needs its
working bytes while what the segments behind it in the stage save is not there, so for each segment s

    what the running stage needs >= working bytes of s - saved bytes of the segments behind s

After the first pass of a rank all its gradients are there: state + gathered + gradients <= room.
"""

from __future__ import annotations

from functools import partial

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.search.bounds import (
    after_pass_bytes,
    alone_bytes,
    least_message_bytes,
    leaves_all_gradients,
    memory_room_bytes,
)
from autoplan.search.paths.peak_moments import Shape
from autoplan.search.program.terms import (
    Formulation,
    Terms,
    Values,
    cost_values,
    integer_column,
    negative,
    sum_of,
    weighted,
)
from autoplan.solver.linear_model import INFINITY
from autoplan.units import MiB

ROOM_SLACK_MIB = 1e-5  # beyond the solver's tolerance: a plan that fits to the byte is never cut off


def add_memory(form: Formulation, shape: Shape) -> None:
    """No rank exceeds its room at any moment that may be its peak."""
    table = form.table
    held = [_largest(form, stage) for stage in range(form.n_stages)]
    state = cost_values(form, lambda cost: _resident_bytes(table, cost), scale=MiB)
    left = cost_values(form, partial(after_pass_bytes, table), scale=MiB)
    gradients = cost_values(form, lambda cost: cost.gradient_bytes, scale=MiB)
    saved = cost_values(form, lambda cost: cost.saved_bytes, scale=MiB)
    pending = cost_values(form, lambda cost: cost.pending_bytes, scale=MiB)
    for rank in range(table.mesh.pp):
        room = memory_room_bytes(table, stages=form.stages_of(rank)) / MiB + ROOM_SLACK_MIB
        always = [term for stage in form.stages_of(rank) for term in sum_of(form, stage, state)]
        for moment in shape.moments[rank]:
            terms = [*always, *held[moment.stage]]
            for stage, n_in_flight in moment.in_flight:
                terms += [(c, n_in_flight * v) for c, v in sum_of(form, stage, saved)]
            for stage, n_pending in moment.pending if any(pending.values()) else ():
                terms += [(c, n_pending * v) for c, v in sum_of(form, stage, pending)]
            for stage in moment.accumulating:
                terms += sum_of(form, stage, gradients)
            if form.shortfall is not None:
                terms.append((form.shortfall, -1.0))
            n_sent = sum(n_in_flight for stage, n_in_flight in moment.in_flight if stage < form.n_stages - 1)
            name = f"memory of rank {rank} in stage {moment.stage}"
            form.model.add_row(name, terms, upper=room - n_sent * least_message_bytes(table) / MiB)
        if leaves_all_gradients(table):
            terms = [term for stage in form.stages_of(rank) for term in sum_of(form, stage, left)]
            if form.shortfall is not None:
                terms.append((form.shortfall, -1.0))
            form.model.add_row(f"memory of rank {rank} after a pass", terms, upper=room)


def _resident_bytes(table: CostTable, cost: SegmentCost) -> int:
    return cost.state_bytes + (cost.gathered_bytes if table.keeps_gathered else 0)


def _largest(form: Formulation, stage: int) -> Terms:
    """A new column, in MiB: what the running stage needs, at least that of each segment."""
    alone = cost_values(form, partial(alone_bytes, form.table), scale=MiB)
    if not any(alone.values()):
        return []
    saved = cost_values(form, lambda cost: cost.saved_bytes, scale=MiB)
    column = form.model.add_column(f"working of stage {stage}", upper=INFINITY)
    for number, run in enumerate(form.runs):
        behind = [(column, 1.0), *_saved_after(form, stage, number, saved)]
        most = [max(saved[number, slot, False], saved[number, slot, True]) for slot in range(len(run.piece))]
        has_any = _presence(form, stage, number, at_least=1)
        for slot, again_column in enumerate(form.recomputed[stage][number]):
            kept, again = alone[number, slot, False], alone[number, slot, True]
            in_piece = sum(most[slot + 1 :])
            name = f"working of stage {stage} run {number} slot {slot}"
            terms = [*behind, *negative(weighted([has_any], [min(kept, again) - in_piece]))]
            form.model.add_row(name, terms, lower=0.0)
            if again > kept:
                terms += _recomputing(form, again_column, [kept - again], most=run.length, name=name)
                # of a run the first recompute: the others are behind them
                others = [(form.count[stage][number], sum(most)), (again_column, -sum(most))]
                form.model.add_row(f"{name} again", [*terms, *others], lower=0.0)
    return [(column, 1.0)]


def _recomputing(form: Formulation, column: int, weights: list[float], *, most: int, name: str) -> Terms:
    """The weight, when at least one of at most so many segments is recomputed."""
    terms = [(column, 1.0)]
    return weighted([terms if most == 1 else [(_add_indicator(form, terms, most=most, name=name), 1.0)]], weights)


def _saved_after(form: Formulation, stage: int, number: int, saved: Values) -> Terms:
    """What the runs after `number` save in the stage, in MiB."""
    until = sum_of(form, stage, saved, n_runs=number + 1)
    return sum_of(form, stage, saved)[len(until) :]


def _presence(form: Formulation, stage: int, number: int, *, at_least: int) -> Terms:
    """Terms that are 1 when the stage has at least so many pieces of the run (1 or 2), 0 when it has none."""
    length, count = form.runs[number].length, form.count[stage][number]
    if form.n_stages == 1:
        return [(form.one, 1.0 if length >= at_least else 0.0)]
    if length == 1:
        return [(count, 1.0)]
    more = [(count, 1.0), (form.one, 1.0 - at_least)]
    most = length + 1 - at_least
    if most == 1:
        return more
    key = (stage, number, at_least)
    if key not in form.present:
        form.present[key] = _add_indicator(form, more, most=most, name=f"{at_least} of run {number} in stage {stage}")
    return [(form.present[key], 1.0)]


def _add_indicator(form: Formulation, terms: Terms, *, most: int, name: str) -> int:
    """A binary column that is 1 whenever `terms` (at most `most`) are positive."""
    column = integer_column(form, f"has {name}")
    form.model.add_row(f"has {name}", [*terms, (column, -float(most))], upper=0.0)
    return column
