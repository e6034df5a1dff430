"""The columns of a mesh's program with their meaning, and the sums over them that its rows are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoplan.cost.table import CostTable, SegmentCost
from autoplan.search.plans import Run
from autoplan.solver.linear_model import INFINITY, LinearModel

Terms = list[tuple[int, float]]
Values = dict[tuple[int, int, bool], float]  # (run, slot in the piece, recomputed) -> value per segment


@dataclass(slots=True)
class Formulation:
    """A linear model with the meaning of its columns. Column lists are indexed [stage][run] (and [slot]).

    `ranks`: of each stage.
    """

    table: CostTable
    runs: tuple[Run, ...]
    ranks: tuple[int, ...]
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

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def integer_column(form: Formulation, name: str, *, lower: float = 0.0, upper: float = 1.0) -> int:
    """A new integer column, binary unless bounds are given."""
    return form.model.add_column(name, lower=lower, upper=upper, is_integer=True)


def time_of(form: Formulation, symbol: str, stage: int) -> int:
    """The column of a time of a stage."""
    if (symbol, stage) not in form.times:
        form.times[symbol, stage] = form.model.add_column(f"{symbol} of stage {stage}", upper=INFINITY)
    return form.times[symbol, stage]


def ends_in(form: Formulation, stage: int) -> list[Terms]:
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


def weighted(parts: list[Terms], weights: Iterable[float]) -> Terms:
    """The sum of the parts, each times its weight."""
    return [(column, value * weight) for terms, weight in zip(parts, weights, strict=True) for column, value in terms]


def negative(terms: Terms) -> Terms:
    """The terms with the opposite sign."""
    return [(column, -value) for column, value in terms]


def cost_values(form: Formulation, value: Callable[[SegmentCost], float], *, scale: float) -> Values:
    """`value` of each segment's cost, divided by `scale`."""
    return {
        (number, slot, is_recomputed): value(cost_of_kind(form, kind, is_recomputed)) / scale
        for number, run in enumerate(form.runs)
        for slot, kind in enumerate(run.piece)
        for is_recomputed in (False, True)
    }


def cost_of_kind(form: Formulation, kind: int, is_recomputed: bool) -> SegmentCost:
    """The cost of a kind of segment."""
    choices = form.table.costs[kind]
    return choices[1] if is_recomputed and len(choices) > 1 else choices[0]


def sum_of(form: Formulation, stage: int, values: Values, *, n_runs: int | None = None) -> Terms:
    """The sum of `values` over the segments of a stage (of its first `n_runs` runs)."""
    terms: Terms = []
    for number, run in enumerate(form.runs[:n_runs]):
        kept = sum(values[number, slot, False] for slot in range(len(run.piece)))
        terms.append((form.count[stage][number], kept))
        for slot, column in enumerate(form.recomputed[stage][number]):
            terms.append((column, values[number, slot, True] - values[number, slot, False]))
    return terms


def at_start(form: Formulation, stage: int, value: Callable[[SegmentCost], float]) -> Terms:
    """The least `value` of the first segment of a stage."""
    return weighted(ends_in(form, stage - 1), (least_of(form, run.piece[0], value) for run in form.runs))


def least_of(form: Formulation, kind: int, value: Callable[[SegmentCost], float]) -> float:
    """The least `value` over the recompute choices of a kind."""
    return min(value(cost) for cost in form.table.costs[kind])


def cut_s_at(form: Formulation, number: int) -> float:
    """The least time of a transfer over a boundary when `number` is the first run not finished there."""
    run = form.runs[number]
    if number == 0:
        return run.inner_cut_s
    before_s = form.runs[number - 1].end_cut_s
    return before_s if run.length == 1 else min(before_s, run.inner_cut_s)
