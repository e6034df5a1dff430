"""The integer program of one mesh: how many segments of each run every stage gets, and how many it recomputes.

The segments between two legal cuts form a *piece*; equal neighbouring pieces form a *run* k of length L_k (the layers of
a transformer are one run). Variables, for each stage s:

    n_sk   pieces of run k in stage s                       integer
    r_skj  of them, how many recompute their j-th segment   integer, r_skj <= n_sk        `_add_counts`
    z_sk   run k is finished by the end of stage s          binary
    f1, f, b, b1, carry, left, cut, ...                     times of stage s, seconds / `unit_s`
    T      time of the step

    minimize T
    stages are contiguous      with N_sk = sum_{s' <= s} n_s'k:  L_k z_sk <= N_sk <= L_k - 1 + z_sk,
                               N_s(k+1) <= L_(k+1) z_sk,  sum_k n_sk >= 1                   `_add_contiguity`
    passes take their time     x_s >= compute and exposed communication of the pass         `_add_pass_times`
    reductions outlast b1      left_s >= what compute cannot hide                           `_add_leftovers`
    transfers                  cut_s >= transfer at the boundary after s                    `_add_cuts`
    paths bound the step       T >= sum counts x times + left + optimizer + per_step_s      `add_path`
    one rank alone             T >= all its communication, and all its compute, once        `_add_totals`
    memory of each rank        state + gathered + gradients + (saved + received) x in flight + working <= room,
                               at each moment of its schedule that may be the peak          `_add_memory`

**A relaxation, on purpose.** No plan that the simulator accepts is cut off, and T never exceeds its simulated step. The
times are those of `simulate.replay_pass`: with compute c and communication g beside each other a segment takes

    c + h(c, g),    h(c, g) = max(0, g - c) + (slowdown - 1) min(c, g)

which for equal neighbours is a constant per segment, hence linear in the counts. Where the relaxation is loose,
`add_path` adds the critical path of a simulated plan, and `forbid` removes a plan that has been judged.

Memory rows are in MiB as exact fractions. Rounding each coefficient up would refuse plans that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.parallel_plan import StagePlan
from autoplan.schedules import Schedule
from autoplan.search.bounds import (
    BACKWARD,
    CARRY,
    CUT,
    FIRST_FORWARD,
    FORWARD,
    LAST_BACKWARD,
    LAST_CARRY,
    Path,
    backward_s,
    forward_s,
    initial_paths,
    memory_room_bytes,
    step_bound_s,
)
from autoplan.search.linear_model import INFINITY, LinearModel
from autoplan.units import MiB

UNITS_PER_BOUND = 1000.0  # T is at least about this many units, so the solver's 1e-6 is 1e-9 of the step
ROOM_SLACK_MIB = 1e-5  # beyond the solver's tolerance: a plan that fits to the byte is never cut off

Terms = list[tuple[int, float]]
Values = dict[tuple[int, int, bool], float]  # (run, slot in the piece, recomputed) -> value per segment


@dataclass(frozen=True, slots=True)
class Run:
    """`length` equal pieces, one after the other, each of the segments `piece` (their kinds).

    Attributes:
        start: its first segment.
        inner_cut_s, inner_cut_bytes: of each boundary between two of its pieces.
        end_cut_s, end_cut_bytes: of the boundary after it; 0 after the last run.
    """

    start: int
    piece: tuple[int, ...]
    length: int
    inner_cut_s: float
    inner_cut_bytes: int
    end_cut_s: float
    end_cut_bytes: int


@dataclass(slots=True)
class Formulation:
    """A linear model with the meaning of its columns. Column lists are indexed [stage][run] (and [slot])."""

    table: CostTable
    runs: tuple[Run, ...]
    unit_s: float
    model: LinearModel = field(default_factory=LinearModel)
    one: int = 0
    total: int = 0
    count: list[list[int]] = field(default_factory=list)
    recomputed: list[list[list[int]]] = field(default_factory=list)
    finished: list[list[int]] = field(default_factory=list)
    times: dict[tuple[str, int], int] = field(default_factory=dict)
    present: dict[tuple[int, int, int], int] = field(default_factory=dict)
    shortfall: int | None = None

    @property
    def n_stages(self) -> int:
        """Stages of the mesh."""
        return self.table.mesh.n_stages


def runs_of(table: CostTable) -> tuple[Run, ...]:
    """The segments of the table as runs of equal pieces."""
    cuts = [index + 1 for index, cut_s in enumerate(table.cut_s) if cut_s is not None]
    edges = [0, *cuts, len(table.kinds)]
    pieces = [(start, table.kinds[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]
    runs: list[Run] = []
    for start, piece in pieces:
        end_s, end_bytes = _boundary(table, start + len(piece))
        last = runs[-1] if runs else None
        if last is not None and last.piece == piece and _continues(last):
            runs[-1] = Run(last.start, piece, last.length + 1, last.end_cut_s, last.end_cut_bytes, end_s, end_bytes)
        else:
            runs.append(Run(start, piece, 1, end_s, end_bytes, end_s, end_bytes))
    return tuple(runs)


def _continues(run: Run) -> bool:
    """Whether the boundary after the run may become one inside it: all of these cost the same."""
    return run.length == 1 or (run.end_cut_s, run.end_cut_bytes) == (run.inner_cut_s, run.inner_cut_bytes)


def _boundary(table: CostTable, segment: int) -> tuple[float, int]:
    """Transfer time and bytes of the boundary before `segment`; 0 after the last one."""
    if segment >= len(table.kinds):
        return 0.0, 0
    return table.cut_s[segment - 1] or 0.0, table.cut_bytes[segment - 1]


def repeated_segments(table: CostTable) -> tuple[int, ...]:
    """The segments that "full" recomputation covers: those whose kind occurs again; all when none does."""
    if len(table.recompute_choices) < 2:
        return ()
    repeated = {kind for kind in table.kinds if table.kinds.count(kind) > 1} or set(table.kinds)
    return tuple(segment for segment, kind in enumerate(table.kinds) if kind in repeated)


def obeys_recompute(table: CostTable, stages: tuple[StagePlan, ...], *, recompute: str | None) -> bool:
    """Whether a plan has the recomputation the user fixed."""
    chosen = {segment for stage in stages for segment in stage.recomputed}
    if recompute == "none":
        return not chosen
    if recompute == "full":
        return chosen >= set(repeated_segments(table))
    return recompute is None or bool(chosen)


def formulate(
    table: CostTable, schedule: Schedule, *, recompute: str | None = None, measures_shortfall: bool = False
) -> Formulation:
    """The program of one mesh.

    `recompute` is "none", "full" or "selective" when the user fixed it. With `measures_shortfall` memory may be exceeded
    and the objective is by how many MiB.
    """
    form = Formulation(table, runs_of(table), unit_s=max(step_bound_s(table), 1e-12) / UNITS_PER_BOUND)
    form.one = form.model.add_column("one", lower=1.0, upper=1.0)
    form.total = form.model.add_column("T", cost=0.0 if measures_shortfall else 1.0, upper=INFINITY)
    if measures_shortfall:
        form.shortfall = form.model.add_column("shortfall", cost=1.0, upper=INFINITY)
    _add_counts(form, recompute)
    _add_contiguity(form)
    _add_memory(form, schedule)
    if not measures_shortfall:
        _add_pass_times(form)
        _add_leftovers(form)
        _add_cuts(form)
        _add_totals(form)
        for path in initial_paths(table.mesh):
            add_path(form, path)
    return form


# ------------------------------------------------------------------------------------------------------- what is where


def _add_counts(form: Formulation, recompute: str | None) -> None:
    can_recompute = len(form.table.recompute_choices) > 1 and recompute != "none"
    repeated = {form.table.kinds[segment] for segment in repeated_segments(form.table)}
    for stage in range(form.n_stages):
        form.count.append([])
        form.recomputed.append([])
        for number, run in enumerate(form.runs):
            name = f"stage {stage} run {number}"
            least = run.length if form.n_stages == 1 else 0
            form.count[-1].append(_integer(form, f"count {name}", lower=least, upper=run.length))
            form.recomputed[-1].append(
                [_integer(form, f"recomputed {name} slot {slot}", upper=run.length * can_recompute)
                 for slot in range(len(run.piece))]
            )  # fmt: skip
            for slot, column in enumerate(form.recomputed[-1][-1]):
                must = recompute == "full" and can_recompute and run.piece[slot] in repeated
                terms = [(form.count[-1][number], 1.0), (column, -1.0)]
                form.model.add_row(f"recompute at most all {name}", terms, lower=0.0, upper=0.0 if must else INFINITY)
    if recompute == "selective":
        everything = [(column, 1.0) for per_run in form.recomputed for slots in per_run for column in slots]
        form.model.add_row("something is recomputed", everything, lower=1.0)


def _integer(form: Formulation, name: str, *, lower: float = 0.0, upper: float = 1.0) -> int:
    return form.model.add_column(name, lower=lower, upper=upper, is_integer=True)


def _add_contiguity(form: Formulation) -> None:
    model, last = form.model, form.n_stages - 1
    for stage in range(form.n_stages):
        lower = 1.0 if stage == last else 0.0
        form.finished.append(
            [_integer(form, f"finished stage {stage} run {run}", lower=lower) for run in range(len(form.runs))]
        )
    for number, run in enumerate(form.runs):
        for stage in range(form.n_stages):
            so_far = [(form.count[s][number], 1.0) for s in range(stage + 1)]
            name = f"run {number} by stage {stage}"
            end = form.finished[stage][number]
            model.add_row(f"finished {name}", [*so_far, (end, -float(run.length))], lower=0.0)
            model.add_row(f"not finished {name}", [*so_far, (end, -1.0)], upper=run.length - 1.0)
            if number > 0:
                before = [(form.finished[stage][number - 1], -float(run.length))]
                model.add_row(f"begun {name}", so_far + before, upper=0.0)
    for stage in range(form.n_stages):
        model.add_row(f"stage {stage} is not empty", [(column, 1.0) for column in form.count[stage]], lower=1.0)


def _ends_in(form: Formulation, stage: int) -> list[Terms]:
    """Per run k, terms that are 1 when k is the first run not finished by the end of `stage`, and 0 otherwise.

    Stage -1 ends before the first run.
    """
    if stage < 0:
        return [[(form.one, 1.0 if number == 0 else 0.0)] for number in range(len(form.runs))]
    ends: list[Terms] = []
    for number in range(len(form.runs)):
        before = form.one if number == 0 else form.finished[stage][number - 1]
        ends.append([(before, 1.0), (form.finished[stage][number], -1.0)])
    return ends


def _weighted(parts: list[Terms], weights: Iterable[float]) -> Terms:
    return [(column, value * weight) for terms, weight in zip(parts, weights, strict=True) for column, value in terms]


def _negative(terms: Terms) -> Terms:
    return [(column, -value) for column, value in terms]


# ------------------------------------------------------------------------------------------------------- time of a stage


def _cost_values(form: Formulation, value: Callable[[SegmentCost], float], *, scale: float) -> Values:
    """`value` of each segment's cost, divided by `scale`."""
    return {
        (number, slot, again): value(_cost(form, kind, again)) / scale
        for number, run in enumerate(form.runs)
        for slot, kind in enumerate(run.piece)
        for again in (False, True)
    }


def _cost(form: Formulation, kind: int, again: bool) -> SegmentCost:
    choices = form.table.costs[kind]
    return choices[1] if again and len(choices) > 1 else choices[0]


def _sum_of(form: Formulation, stage: int, values: Values, *, n_runs: int | None = None) -> Terms:
    """The sum of `values` over the segments of a stage (of its first `n_runs` runs)."""
    terms: Terms = []
    for number, run in enumerate(form.runs[:n_runs]):
        kept = sum(values[number, slot, False] for slot in range(len(run.piece)))
        terms.append((form.count[stage][number], kept))
        for slot, column in enumerate(form.recomputed[stage][number]):
            terms.append((column, values[number, slot, True] - values[number, slot, False]))
    return terms


def _time(form: Formulation, symbol: str, stage: int) -> int:
    """The column of a time of a stage."""
    if (symbol, stage) not in form.times:
        form.times[symbol, stage] = form.model.add_column(f"{symbol} of stage {stage}", upper=INFINITY)
    return form.times[symbol, stage]


def hidden_extra_s(compute_s: float, communication_s: float, *, slowdown: float) -> float:
    """h(c, g) of the module docstring: what communication adds to compute when compute must wait for its end."""
    both = min(compute_s, communication_s)
    return communication_s - both + (slowdown - 1.0) * both


@dataclass(frozen=True, slots=True)
class _Pass:
    """One kind of pass: what it computes per segment, and which communication it does."""

    symbol: str
    compute: Callable[[SegmentCost], float]
    is_forward: bool
    gathers: bool
    reduces: bool


def _passes(table: CostTable) -> tuple[_Pass, ...]:
    always, every = table.gathers_per_micro_batch, table.reduces_per_micro_batch
    return (
        _Pass(FIRST_FORWARD, forward_s, True, gathers=True, reduces=False),
        _Pass(FORWARD, forward_s, True, gathers=always, reduces=False),
        _Pass(BACKWARD, backward_s, False, gathers=always, reduces=every),
        _Pass(LAST_BACKWARD, backward_s, False, gathers=always, reduces=True),
    )


def _add_pass_times(form: Formulation) -> None:
    for kind in _passes(form.table):
        extra = _extra_values(form, kind)
        for stage in range(form.n_stages):
            _add_hidden_row(form, kind, stage)
            if kind.gathers:
                _add_neighbour_row(form, kind, stage, extra=extra)


def _left_symbol(kind: _Pass) -> str:
    return f"left by {kind.symbol}"


def _add_hidden_row(form: Formulation, kind: _Pass, stage: int) -> None:
    """All communication of the pass is waited for (the first gather), hidden (at the slowdown), or left over.

    pass + (slowdown - 1) left >= compute + (slowdown - 1) (gathers + reductions) + (2 - slowdown) first gather
    """
    extra = min(form.table.overlap_slowdown, 2.0) - 1.0

    def per_segment(cost: SegmentCost) -> float:
        gather_s = cost.gather_s if kind.gathers else 0.0
        return kind.compute(cost) + extra * (gather_s + (cost.reduce_s if kind.reduces else 0.0))

    terms = _negative(_sum_of(form, stage, _cost_values(form, per_segment, scale=form.unit_s)))
    terms.append((_time(form, kind.symbol, stage), 1.0))
    if kind.reduces:
        terms.append((_time(form, _left_symbol(kind), stage), extra))
    if kind.gathers:
        terms += [(column, -(1.0 - extra) * value) for column, value in _first_gather(form, kind, stage)]
    form.model.add_row(f"{kind.symbol} of stage {stage} hides communication", terms, lower=0.0)


def _first_gather(form: Formulation, kind: _Pass, stage: int) -> Terms:
    """Time of the gather before the pass can start: of its first segment forward, of its last one backward."""
    if kind.is_forward:
        return _at_start(form, stage, lambda cost: cost.gather_s / form.unit_s)
    last = [_least_of(form, run.piece[-1], lambda cost: cost.gather_s / form.unit_s) for run in form.runs]
    if stage == form.n_stages - 1:
        return [(form.one, last[-1])]
    inner = [min(last[k], last[k - 1]) if k > 0 else last[0] for k in range(len(last))]
    exact = [last[k - 1] if run.length == 1 and k > 0 else inner[k] for k, run in enumerate(form.runs)]
    return _weighted(_ends_in(form, stage), exact)


def _at_start(form: Formulation, stage: int, value: Callable[[SegmentCost], float]) -> Terms:
    """The least `value` of the first segment of a stage."""
    return _weighted(_ends_in(form, stage - 1), (_least_of(form, run.piece[0], value) for run in form.runs))


def _least_of(form: Formulation, kind: int, value: Callable[[SegmentCost], float]) -> float:
    return min(value(cost) for cost in form.table.costs[kind])


def _extra_values(form: Formulation, kind: _Pass) -> Values:
    """The least that communication adds while each segment computes, between any neighbours it may have."""
    return {
        (number, slot, again): min(_extras(form, kind, number=number, slot=slot, again=again, alone=False), default=0.0)
        / form.unit_s
        for number, run in enumerate(form.runs)
        for slot in range(len(run.piece))
        for again in (False, True)
    }


def _extras(form: Formulation, kind: _Pass, *, number: int, slot: int, again: bool, alone: bool) -> list[float]:
    """H over the positions of a slot that have a segment after them in the pass; `alone`: with none before them.

    While a segment computes, the gather of the next one and the reduction of the one before it run beside it.
    """
    run, table = form.runs[number], form.table
    step = 1 if kind.is_forward else -1
    extras = []
    for segment in range(run.start + slot, run.start + len(run.piece) * run.length, len(run.piece)):
        following, previous = segment + step, segment - step
        if not 0 <= following < len(table.kinds):
            continue
        gather_s = _least_of(form, table.kinds[following], lambda cost: cost.gather_s)
        reduce_s = 0.0
        if kind.reduces and not alone and 0 <= previous < len(table.kinds):
            reduce_s = _least_of(form, table.kinds[previous], lambda cost: cost.reduce_s)
        compute_s = kind.compute(_cost(form, run.piece[slot], again))
        extra_s = hidden_extra_s(compute_s, gather_s + reduce_s, slowdown=min(table.overlap_slowdown, 2.0))
        extras.append(extra_s if gather_s > 0.0 else 0.0)
    return extras


def _add_neighbour_row(form: Formulation, kind: _Pass, stage: int, *, extra: Values) -> None:
    """Pass >= first gather + sum (compute + extra) - what the two ends of the stage do not have."""
    values = _cost_values(form, kind.compute, scale=form.unit_s)
    summed = _sum_of(form, stage, {key: value + extra[key] for key, value in values.items()})
    terms = [(_time(form, kind.symbol, stage), 1.0), *_negative(summed), *_negative(_first_gather(form, kind, stage))]
    ends = [max(extra[k, len(run.piece) - 1, again] for again in (False, True)) for k, run in enumerate(form.runs)]
    starts = [max(extra[k, 0, again] for again in (False, True)) for k, run in enumerate(form.runs)]
    if not kind.is_forward:  # a backward pass ends with the first segment of its stage
        terms += _weighted(_ends_in(form, stage - 1), starts)
        terms.append((form.one, _lonely_loss(form, kind, extra)))
    elif stage == form.n_stages - 1:
        terms.append((form.one, ends[-1]))
    else:
        either = [max(ends[k], ends[k - 1]) if k > 0 else ends[0] for k in range(len(ends))]
        terms += _weighted(_ends_in(form, stage), either)
    form.model.add_row(f"{kind.symbol} of stage {stage} waits for neighbours", terms, lower=0.0)


def _lonely_loss(form: Formulation, kind: _Pass, extra: Values) -> float:
    """How much less a segment may be slowed when it opens the pass, with no reduction before it."""
    losses = [0.0]
    for (number, slot, again), value in extra.items():
        lonely = _extras(form, kind, number=number, slot=slot, again=again, alone=True)
        losses.append(value - min(lonely, default=value * form.unit_s) / form.unit_s)
    return max(losses)


def _add_leftovers(form: Formulation) -> None:
    """Reductions that cannot be hidden: that of the last segment reduced, and those that outlast compute."""
    for kind in _passes(form.table):
        if not kind.reduces:
            continue
        for stage in range(form.n_stages):
            column = _time(form, _left_symbol(kind), stage)
            first = _at_start(form, stage, lambda cost: cost.reduce_s / form.unit_s)
            form.model.add_row(f"{_left_symbol(kind)} {stage}: first", [(column, 1.0), *_negative(first)], lower=0.0)
            if not kind.gathers:
                _add_queue_rows(form, kind, stage, column)
    _add_carries(form)


def _add_carries(form: Formulation) -> None:
    """What a backward pass leaves is in the way of the next pass of its rank.

    A pass that gathers waits for it, because it is queued first; another pass is slowed while it goes on.
    """
    table = form.table
    for symbol, reduces in ((CARRY, table.reduces_per_micro_batch), (LAST_CARRY, True)):
        for stage in range(form.n_stages) if reduces else ():
            added = _at_start(form, stage, lambda cost: _carried_s(table, cost) / form.unit_s)
            terms = [(_time(form, symbol, stage), 1.0), *_negative(added)]
            form.model.add_row(f"{symbol} of stage {stage}", terms, lower=0.0)


def _carried_s(table: CostTable, cost: SegmentCost) -> float:
    """The least that a reduction adds to any pass that follows on its rank."""
    everything = [cost for choices in table.costs for cost in choices]
    if table.gathers_per_micro_batch and min(cost.gather_s for cost in everything) > 0.0:
        return cost.reduce_s
    shortest_s = min(min(forward_s(cost), backward_s(cost)) for cost in everything)
    return (min(table.overlap_slowdown, 2.0) - 1.0) * min(cost.reduce_s, shortest_s)


def _add_queue_rows(form: Formulation, kind: _Pass, stage: int, column: int) -> None:
    """Without gathers the queue of reductions is left by what comes in during its last stretch of the pass.

    left >= sum (reduction - compute) over the first runs of the stage (+ the compute before the stretch begins)
    """
    values = _cost_values(form, lambda cost: cost.reduce_s - kind.compute(cost), scale=form.unit_s)
    least_s = min(kind.compute(cost) for choices in form.table.costs for cost in choices) / form.unit_s
    for n_runs in range(1, len(form.runs) + 1):
        is_whole = n_runs == len(form.runs)
        terms = [(column, 1.0), *_negative(_sum_of(form, stage, values, n_runs=n_runs))]
        form.model.add_row(f"queue of stage {stage} run {n_runs}", terms, lower=least_s if is_whole else 0.0)


def _add_cuts(form: Formulation) -> None:
    for stage in range(form.n_stages - 1):
        cut_s = [_at_boundary(form, number, "cut_s") / form.unit_s for number in range(len(form.runs))]
        terms = [(_time(form, CUT, stage), 1.0), *_negative(_weighted(_ends_in(form, stage), cut_s))]
        form.model.add_row(f"cut after stage {stage}", terms, lower=0.0)


def _at_boundary(form: Formulation, number: int, what: str) -> float:
    """The least of what a boundary costs when `number` is the first run not finished there."""
    run = form.runs[number]
    inner = float(getattr(run, f"inner_{what}"))
    if number == 0:
        return inner
    before = float(getattr(form.runs[number - 1], f"end_{what}"))
    return before if run.length == 1 else min(before, inner)


def _add_totals(form: Formulation) -> None:
    """With one stage nothing is ever idle, so compute and communication of the whole step bound it together.

    T >= compute + (slowdown - 1) communication + (2 - slowdown) left;   T >= communication + (slowdown - 1) compute
    """
    table = form.table
    if form.n_stages > 1:
        return
    n, extra = table.mesh.n_micro_batches, min(table.overlap_slowdown, 2.0) - 1.0
    n_gathers = 2 * n if table.gathers_per_micro_batch else 1
    n_reduces = n if table.reduces_per_micro_batch else 1

    def mixed(compute: float, communication: float) -> Values:
        return _cost_values(
            form,
            lambda cost: (
                compute * n * (forward_s(cost) + backward_s(cost))
                + communication * (n_gathers * cost.gather_s + n_reduces * cost.reduce_s)
            ),
            scale=form.unit_s,
        )

    left = [(_time(form, f"left by {LAST_BACKWARD}", 0), 1.0 - extra)]
    _add_step_row(form, "compute", [*_sum_of(form, 0, mixed(1.0, extra)), *left], rank=0)
    _add_step_row(form, "communication", _sum_of(form, 0, mixed(extra, 1.0)), rank=0)


def add_path(form: Formulation, path: Path) -> None:
    """The step takes at least as long as this path."""
    terms = [(_time(form, symbol, stage), float(count)) for (symbol, stage), count in path.counts]
    terms.append((_time(form, f"left by {LAST_BACKWARD}", path.last_stage), 1.0))
    _add_step_row(form, "path", terms, rank=path.last_stage % form.table.mesh.pp)


def _add_step_row(form: Formulation, name: str, terms: Terms, *, rank: int) -> None:
    """T >= terms + the optimizer of the rank's stages + per_step_s."""
    optimizer = _cost_values(form, lambda cost: cost.optimizer_s, scale=form.unit_s)
    for stage in range(rank, form.n_stages, form.table.mesh.pp):
        terms = [*terms, *_sum_of(form, stage, optimizer)]
    terms = [(form.total, 1.0), *_negative(terms)]
    form.model.add_row(f"step {len(form.model.rows)} {name}", terms, lower=form.table.per_step_s / form.unit_s)


# ---------------------------------------------------------------------------------------------------- memory of a rank


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment at which the memory of a rank may peak: a pass of `stage` runs.

    Attributes:
        in_flight: (stage, micro-batches in flight) of the rank's stages, the running one included.
        accumulating: its stages that have begun a backward pass.
    """

    stage: int
    is_backward: bool
    in_flight: tuple[tuple[int, int], ...]
    accumulating: frozenset[int]


def moments_of(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """The moments of a rank that no other moment with the same running stage exceeds."""
    in_flight: dict[int, int] = {action.stage: 0 for action in schedule[rank]}
    begun: set[int] = set()
    found: dict[Moment, None] = {}
    for action in schedule[rank]:
        is_backward = action.kind == "B"
        in_flight[action.stage] += not is_backward
        begun |= {action.stage} if is_backward else set()
        found[Moment(action.stage, is_backward, tuple(sorted(in_flight.items())), frozenset(begun))] = None
        in_flight[action.stage] -= is_backward
    return tuple(m for m in found if not any(_exceeds(other, m) for other in found if other is not m))


def _exceeds(one: Moment, other: Moment) -> bool:
    same = one.stage == other.stage and one.is_backward >= other.is_backward and one.accumulating >= other.accumulating
    return same and all(a >= b for (_, a), (_, b) in zip(one.in_flight, other.in_flight, strict=True))


def _add_memory(form: Formulation, schedule: Schedule) -> None:
    table = form.table
    held = [_held(form, stage) for stage in range(form.n_stages)]
    unreduced = [_unreduced(form, stage) for stage in range(form.n_stages)]
    state = _cost_values(form, lambda cost: _resident_bytes(table, cost), scale=MiB)
    gradients = _cost_values(form, lambda cost: cost.gradient_bytes, scale=MiB)
    saved = _cost_values(form, lambda cost: cost.saved_bytes, scale=MiB)
    room = memory_room_bytes(table) / MiB + ROOM_SLACK_MIB
    for rank in range(table.mesh.pp):
        own = range(rank, form.n_stages, table.mesh.pp)
        always = [term for stage in own for term in _sum_of(form, stage, state)]
        for moment in moments_of(schedule, rank):
            terms = [*always, *held[moment.stage]]
            terms += unreduced[moment.stage] if moment.is_backward else []
            for stage, n_in_flight in moment.in_flight:
                terms += [(c, n_in_flight * v) for c, v in _sum_of(form, stage, saved) + _received(form, stage)]
            for stage in moment.accumulating if _accumulates(table) else ():
                terms += _sum_of(form, stage, gradients)
            if form.shortfall is not None:
                terms.append((form.shortfall, -1.0))
            form.model.add_row(f"memory of rank {rank} in stage {moment.stage}", terms, upper=room)


def _accumulates(table: CostTable) -> bool:
    """Whether whole gradients are kept from one micro-batch to the next."""
    return not table.reduces_per_micro_batch and table.mesh.n_micro_batches > 1


def _resident_bytes(table: CostTable, cost: SegmentCost) -> int:
    return cost.state_bytes + (cost.gathered_bytes if table.keeps_gathered else 0)


def _received(form: Formulation, stage: int) -> Terms:
    """The input of a stage, in MiB."""
    if stage == 0:
        return []
    sizes = [_at_boundary(form, number, "cut_bytes") / MiB for number in range(len(form.runs))]
    return _weighted(_ends_in(form, stage - 1), sizes)


def _held(form: Formulation, stage: int) -> Terms:
    """What a running pass holds: working memory, and parameters gathered for it."""
    terms = _largest(form, stage, "working", lambda cost: cost.working_bytes)
    if form.table.keeps_gathered:
        return terms
    return terms + _neighbours(form, stage, "gathered", lambda cost: cost.gathered_bytes)


def _unreduced(form: Formulation, stage: int) -> Terms:
    """Gradients that a running backward pass holds until they are reduced."""
    if _accumulates(form.table):
        return []
    return _neighbours(form, stage, "gradients", lambda cost: cost.gradient_bytes)


def _largest(form: Formulation, stage: int, name: str, value: Callable[[SegmentCost], int]) -> Terms:
    """A new column, in MiB, that is at least `value` of each segment of the stage."""
    values = _cost_values(form, value, scale=MiB)
    if not any(values.values()):
        return []
    column = form.model.add_column(f"{name} of stage {stage}", upper=INFINITY)
    for number, run in enumerate(form.runs):
        for slot, again_column in enumerate(form.recomputed[stage][number]):
            kept, again = values[number, slot, False], values[number, slot, True]
            count = form.count[stage][number]
            has_any = _presence(form, stage, number, at_least=1)
            more = [(again_column, 1.0)] if again >= kept else [(count, 1.0), (again_column, -1.0)]
            terms = [(column, 1.0), *_negative(_weighted([has_any], [min(kept, again)]))]
            if kept != again:
                if run.length > 1:
                    more = [(_add_indicator(form, more, most=run.length, name=f"{name} {stage} {number} {slot}"), 1.0)]
                terms += _weighted([more], [-abs(again - kept)])
            form.model.add_row(f"{name} of stage {stage} run {number} slot {slot}", terms, lower=0.0)
    return [(column, 1.0)]


def _neighbours(form: Formulation, stage: int, name: str, value: Callable[[SegmentCost], int]) -> Terms:
    """A new column, in MiB, that is at least the sum of `value` over any two neighbours in the stage."""
    sizes = [[_least_of(form, kind, value) / MiB for kind in run.piece] for run in form.runs]
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
            terms = [(column, 1.0), *_negative(_weighted([when], [size]))]
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
    column = _integer(form, f"has {name}")
    form.model.add_row(f"has {name}", [*terms, (column, -float(most))], upper=0.0)
    return column


# ------------------------------------------------------------------------------------------------- plans and cuts


def decode(form: Formulation, values: tuple[float, ...]) -> tuple[StagePlan, ...]:
    """The stages that the values mean."""
    counts = [[round(values[column]) for column in per_run] for per_run in form.count]
    again = tuple(tuple(round(values[column]) for slots in per_run for column in slots) for per_run in form.recomputed)
    return _staged([list(zip(per_run, form.runs, strict=True)) for per_run in counts], again)


def count_plans(form: Formulation) -> int:
    """How many plans the mesh has, whatever is fixed."""
    n_pieces = sum(run.length for run in form.runs)
    ways = {0: 1}  # stop of the stages so far, in pieces -> plans
    for _ in range(form.n_stages):
        following: dict[int, int] = {}
        for start, number in ways.items():
            for stop in range(start + 1, n_pieces + 1):
                choices = math.prod(count + 1 for count, run in _shares(form, start, stop) for _ in run.piece)
                following[stop] = following.get(stop, 0) + number * choices
        ways = following
    return ways.get(n_pieces, 0)


def all_plans(form: Formulation) -> Iterator[tuple[StagePlan, ...]]:
    """Every plan of the mesh; of each run in a stage the first segments are recomputed."""
    n_pieces = sum(run.length for run in form.runs)
    for cuts in combinations(range(1, n_pieces), form.n_stages - 1):
        edges = (0, *cuts, n_pieces)
        shares = [_shares(form, start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        per_stage = [list(product(*(range(count + 1) for count, run in stage for _ in run.piece))) for stage in shares]
        for again in product(*per_stage):
            yield _staged(shares, again)


def _shares(form: Formulation, start: int, stop: int) -> list[tuple[int, Run]]:
    """How many pieces of each run lie between two pieces; runs with none are left out."""
    shares, first = [], 0
    for run in form.runs:
        count = min(stop, first + run.length) - max(start, first)
        if count > 0:
            shares.append((count, run))
        first += run.length
    return shares


def _staged(shares: list[list[tuple[int, Run]]], again: tuple[tuple[int, ...], ...]) -> tuple[StagePlan, ...]:
    """Stages from the pieces of each run they hold and how often each slot of these is recomputed."""
    stages: list[StagePlan] = []
    position = 0
    for stage, counts in zip(shares, again, strict=True):
        start, recomputed, numbers = position, [], iter(counts)
        for count, run in stage:
            for slot in range(len(run.piece)):
                recomputed += [position + slot + piece * len(run.piece) for piece in range(next(numbers))]
            position += count * len(run.piece)
        stages.append(StagePlan(start, position, tuple(sorted(recomputed))))
    return tuple(stages)


def forbid(form: Formulation, values: tuple[float, ...]) -> None:
    """Remove exactly this plan: some count must be larger or smaller than its value."""
    model = form.model
    choices: Terms = []
    n_fixed = 0
    per_stage = zip(form.count, form.recomputed, strict=True)
    columns = [c for counts, again in per_stage for c in (*counts, *(x for slots in again for x in slots))]
    for column in columns:
        value, lower, upper = round(values[column]), model.lower[column], model.upper[column]
        if upper - lower == 1.0:
            choices.append((column, 1.0 if value == lower else -1.0))
            n_fixed += 0 if value == lower else round(upper)
            n_fixed -= round(lower) if value == lower else 0
            continue
        if value < upper:
            up = _integer(form, f"more than {value} in {column}")
            model.add_row(f"above {up}", [(column, 1.0), (up, lower - value - 1.0)], lower=lower)
            choices.append((up, 1.0))
        if value > lower:
            down = _integer(form, f"less than {value} in {column}")
            model.add_row(f"below {down}", [(column, 1.0), (down, upper - value + 1.0)], upper=upper)
            choices.append((down, 1.0))
    model.add_row(f"another plan {len(model.rows)}", choices, lower=1.0 - n_fixed)
