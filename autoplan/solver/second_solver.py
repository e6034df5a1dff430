"""A second solver beside HiGHS: CP-SAT looks for what HiGHS says does not exist.

`find_counterexample` asks CP-SAT for a solution of a small model that is better than the bound HiGHS has proved, or for
any solution where HiGHS says that there is none. What it finds counts only if it satisfies the model when checked in
plain Python, so a mistake of CP-SAT is never blamed on HiGHS. It stops after `MAX_WORK` of its own deterministic time,
so the machine decides nothing. The linear presolve before CP-SAT's own is left out: it logs warnings of its limits to
standard error, and models this small do not need it.
"""

from __future__ import annotations

from typing import Any

from autoplan.solver.linear_model import INFINITY, LinearModel, Solution

MAX_COLUMNS = 64  # of a model that is solved again
MAX_WORK = 0.05  # in CP-SAT's deterministic seconds
CLEARLY_BETTER = 1e-4  # share of the objective; CP-SAT rounds coefficients
EXACT = 1e-9  # by how much a row may be broken, relative to its terms


def find_counterexample(model: LinearModel, solution: Solution, proto: Any) -> tuple[float, ...] | None:
    """Values that contradict what was proved of a small model; None when none are found, or the model is large.

    `proto` is the model as MathOpt's message.
    """
    if len(model.names) > MAX_COLUMNS or solution.status not in ("optimal", "infeasible"):
        return None
    values = _solve(proto)
    if values is None:
        return None
    rounded = tuple(
        float(round(value)) if is_integer else value for value, is_integer in zip(values, model.is_integer, strict=True)
    )
    return rounded if _satisfies(model, rounded) and _is_better(model, rounded, solution) else None


def _solve(proto: Any) -> tuple[float, ...] | None:
    """The values CP-SAT finds; None when it finds none in time, or cannot take the model."""
    from ortools.math_opt.python import mathopt
    from ortools.sat import sat_parameters_pb2

    limits = sat_parameters_pb2.SatParameters(
        max_deterministic_time=MAX_WORK, num_workers=1, random_seed=1, mip_presolve_level=0
    )
    try:
        result = mathopt.solve(
            mathopt.Model.from_model_proto(proto),
            mathopt.SolverType.CP_SAT,
            params=mathopt.SolveParameters(cp_sat=limits),
        )
    except (AttributeError, ValueError, RuntimeError):  # a model that it cannot take says nothing of HiGHS
        return None
    if result.termination.reason.name not in ("OPTIMAL", "FEASIBLE"):
        return None
    return tuple(value for _, value in sorted((column.id, value) for column, value in result.variable_values().items()))


def _satisfies(model: LinearModel, values: tuple[float, ...]) -> bool:
    """Whether the values break no bound and no row by more than rounding does."""
    columns = zip(values, model.lower, model.upper, strict=True)
    if not all(lower - EXACT <= value <= upper + EXACT for value, lower, upper in columns):
        return False
    for terms, lower, upper, _ in model.rows:
        parts = [coefficient * values[column] for column, coefficient in terms]
        slack = EXACT * (1.0 + sum(map(abs, parts)))
        if not lower - slack <= sum(parts) <= upper + slack:
            return False
    return True


def _is_better(model: LinearModel, values: tuple[float, ...], solution: Solution) -> bool:
    """Whether the values are clearly better than the proved bound, or than the limit where there should be none."""
    if solution.status == "infeasible":
        priced = (place for place, cost in enumerate(model.costs) if cost and model.upper[place] < INFINITY)
        margins = (
            (model.upper[place] - values[place], model.upper[place], model.is_integer[place]) for place in priced
        )
        return all(is_integer or margin > CLEARLY_BETTER * abs(upper) for margin, upper, is_integer in margins)
    assert solution.bound is not None
    objective = sum(cost * value for cost, value in zip(model.costs, values, strict=True))
    return objective < solution.bound - CLEARLY_BETTER * max(1.0, abs(solution.bound))
