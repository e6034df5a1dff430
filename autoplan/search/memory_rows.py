"""Rows that keep the memory of each rank within its room, at each moment of its schedule that may be the peak.

    state + gathered + gradients + (saved + received) x in flight + pending x between halves + working <= room

in MiB, as exact fractions: rounding each coefficient up would refuse plans that fit.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.search.bounds import memory_room_bytes
from autoplan.search.linear_model import INFINITY
from autoplan.search.paths import Shape
from autoplan.search.terms import (
    Formulation,
    Terms,
    at_boundary,
    cost_values,
    ends_in,
    integer_column,
    least_of,
    negative,
    sum_of,
    weighted,
)
from autoplan.units import MiB

ROOM_SLACK_MIB = 1e-5  # beyond the solver's tolerance: a plan that fits to the byte is never cut off


def add_memory(form: Formulation, shape: Shape) -> None:
    """No rank exceeds its room at any moment that may be its peak."""
    table = form.table
    held = [_held(form, stage) for stage in range(form.n_stages)]
    unreduced = [_unreduced(form, stage) for stage in range(form.n_stages)]
    state = cost_values(form, lambda cost: _resident_bytes(table, cost), scale=MiB)
    gradients = cost_values(form, lambda cost: cost.gradient_bytes, scale=MiB)
    saved = cost_values(form, lambda cost: cost.saved_bytes, scale=MiB)
    pending = cost_values(form, lambda cost: cost.pending_bytes, scale=MiB)
    room = memory_room_bytes(table) / MiB + ROOM_SLACK_MIB
    for rank in range(table.mesh.pp):
        always = [term for stage in form.stages_of(rank) for term in sum_of(form, stage, state)]
        for moment in shape.moments[rank]:
            terms = [*always, *held[moment.stage]]
            terms += unreduced[moment.stage] if moment.makes_gradients else []
            for stage, n_in_flight in moment.in_flight:
                terms += [(c, n_in_flight * v) for c, v in sum_of(form, stage, saved) + _received(form, stage)]
            for stage, n_pending in moment.pending if any(pending.values()) else ():
                terms += [(c, n_pending * v) for c, v in sum_of(form, stage, pending)]
            for stage in moment.accumulating if table.accumulates else ():
                terms += sum_of(form, stage, gradients)
            if form.shortfall is not None:
                terms.append((form.shortfall, -1.0))
            form.model.add_row(f"memory of rank {rank} in stage {moment.stage}", terms, upper=room)


def _resident_bytes(table: CostTable, cost: SegmentCost) -> int:
    return cost.state_bytes + (cost.gathered_bytes if table.keeps_gathered else 0)


def _received(form: Formulation, stage: int) -> Terms:
    """The input of a stage, in MiB."""
    if stage == 0:
        return []
    sizes = [at_boundary(form, number, "cut_bytes") / MiB for number in range(len(form.runs))]
    return weighted(ends_in(form, stage - 1), sizes)


def _held(form: Formulation, stage: int) -> Terms:
    """What a running pass holds: working memory, and parameters gathered for it."""
    terms = _largest(form, stage, "working", lambda cost: cost.working_bytes)
    if form.table.keeps_gathered:
        return terms
    return terms + _neighbours(form, stage, "gathered", lambda cost: cost.gathered_bytes)


def _unreduced(form: Formulation, stage: int) -> Terms:
    """Gradients that a running backward pass holds until they are reduced."""
    if form.table.accumulates:
        return []
    return _neighbours(form, stage, "gradients", lambda cost: cost.gradient_bytes)


def _largest(form: Formulation, stage: int, name: str, value: Callable[[SegmentCost], int]) -> Terms:
    """A new column, in MiB, that is at least `value` of each segment of the stage."""
    values = cost_values(form, value, scale=MiB)
    if not any(values.values()):
        return []
    column = form.model.add_column(f"{name} of stage {stage}", upper=INFINITY)
    for number, run in enumerate(form.runs):
        for slot, again_column in enumerate(form.recomputed[stage][number]):
            kept, again = values[number, slot, False], values[number, slot, True]
            count = form.count[stage][number]
            has_any = _presence(form, stage, number, at_least=1)
            more = [(again_column, 1.0)] if again >= kept else [(count, 1.0), (again_column, -1.0)]
            terms = [(column, 1.0), *negative(weighted([has_any], [min(kept, again)]))]
            if kept != again:
                if run.length > 1:
                    more = [(_add_indicator(form, more, most=run.length, name=f"{name} {stage} {number} {slot}"), 1.0)]
                terms += weighted([more], [-abs(again - kept)])
            form.model.add_row(f"{name} of stage {stage} run {number} slot {slot}", terms, lower=0.0)
    return [(column, 1.0)]


def _neighbours(form: Formulation, stage: int, name: str, value: Callable[[SegmentCost], int]) -> Terms:
    """A new column, in MiB, that is at least the sum of `value` over any two neighbours in the stage."""
    sizes = [[least_of(form, kind, value) / MiB for kind in run.piece] for run in form.runs]
    if not any(map(any, sizes)):
        return []
    column = form.model.add_column(f"{name} of stage {stage}", upper=INFINITY)
    for number, piece in enumerate(sizes):
        has_one = _presence(form, stage, number, at_least=1)
        inside = max([piece[0], *(a + b for a, b in zip(piece, piece[1:], strict=False))])
        pairs = [(has_one, inside)]
        if form.runs[number].length > 1:
            pairs.append((_presence(form, stage, number, at_least=2), piece[-1] + piece[0]))
        if number > 0:
            joint = [*has_one, *_presence(form, stage, number - 1, at_least=1), (form.one, -1.0)]
            pairs.append((joint, sizes[number - 1][-1] + piece[0]))
        for place, (when, size) in enumerate(pairs):
            terms = [(column, 1.0), *negative(weighted([when], [size]))]
            form.model.add_row(f"{name} of stage {stage} run {number} pair {place}", terms, lower=0.0)
    return [(column, 1.0)]


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
