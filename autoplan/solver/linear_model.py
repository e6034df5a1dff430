"""A mixed-integer linear program as data; `solve.minimize` is the only place that knows a solver.

minimize  cost . x   subject to   lower_r <= sum_c coefficient_rc x_c <= upper_r,   x within bounds
"""

from __future__ import annotations

from dataclasses import dataclass, field

INFINITY = float("inf")


@dataclass(slots=True)
class LinearModel:
    """Built column by column and row by row, then frozen by being handed to `minimize`."""

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[tuple[tuple[tuple[int, float], ...], float, float, str]] = field(default_factory=list)

    def add_column(
        self, name: str, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, is_integer: bool = False
    ) -> int:
        """A new variable; returns its index."""
        self.names.append(name)
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def add_row(
        self, name: str, terms: list[tuple[int, float]], *, lower: float = -INFINITY, upper: float = INFINITY
    ) -> None:
        """A new constraint `lower <= sum(coefficient * x[column]) <= upper`."""
        self.rows.append((tuple(terms), lower, upper, name))


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found.

    Attributes:
        status: "optimal", "feasible" (stopped by a limit), "infeasible", or "unknown" (stopped with nothing).
        values: one per column; empty unless the status is "optimal" or "feasible".
        objective: of `values`; None when there are none.
        bound: proved lower bound on the optimum; None when there is none.
        duals: of the optimum of a relaxed model, one per row: what the objective gains per unit of its limit.
    """

    status: str
    values: tuple[float, ...]
    objective: float | None
    bound: float | None
    duals: tuple[float, ...] = ()
