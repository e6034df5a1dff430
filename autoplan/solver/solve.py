"""HiGHS through OR-tools' MathOpt; beside `second_solver`, the only place that knows a solver.

`minimize` trusts neither side. What goes in is checked first (`check_model`: no NaN, no infinite coefficient, no
integer row whose sum can pass 2^31); what comes out is checked again in plain Python (`check_solution`) before anyone
reads it. One thread, one seed and no gap tolerance: the same model always has the same answer.

HiGHS as shipped in OR-tools 9.15 prints a debugging line to file descriptor 1 when it repairs a solution, whatever the
output settings say. Our standard output carries results only, so it is closed to the solver (`_quiet_stdout`).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autoplan.errors import SolverError
from autoplan.solver.linear_model import INFINITY, LinearModel, Solution
from autoplan.solver.second_solver import find_counterexample

TOLERANCE = 1e-6  # of HiGHS, on each row (feasibility) and on each integer column
ROW_SUM_LIMIT = 2**31  # solvers with 32-bit sums answer wrongly beyond it (google/or-tools#5293)
RANDOM_SEED = 1

# MathOpt's reason of termination -> (status with a solution, status without one); any other reason is an error.
STATUSES = {
    "OPTIMAL": ("optimal", None),
    "FEASIBLE": ("feasible", None),
    "INFEASIBLE": (None, "infeasible"),
    "NO_SOLUTION_FOUND": (None, "unknown"),
}


def minimize(
    model: LinearModel,
    *,
    time_limit_s: float | None,
    relative_gap: float = 0.0,
    node_limit: int | None = None,
    is_relaxed: bool = False,
) -> Solution:
    """The optimum of `model`, or what was found and proved within the limits.

    Stops at the first solution proved to be within `relative_gap` of the optimum (the status is "optimal" then too, and
    `bound` says what is proved), or after `node_limit` nodes of the search tree. `is_relaxed` drops integrality: the
    objective is then a lower bound, found much sooner.

    Raises: SolverError for a model with impossible numbers, a failure of the solver, or an answer that does not
        satisfy the model, or that the second solver refutes.
    """
    check_model(model)
    limits = _Limits(time_limit_s, relative_gap, node_limit)
    proto = _to_proto(model, is_relaxed=is_relaxed)
    result = _run(proto, limits)
    solution = _read(result)
    if not is_relaxed and find_counterexample(model, solution, proto) is not None:
        raise SolverError(f"HiGHS says {solution.status}, bound {solution.bound}; CP-SAT found a better solution")
    if not solution.values:
        return solution
    values = solution.values if is_relaxed else _rounded(model, solution.values)
    check_solution(model, values, objective=solution.objective)
    duals = _in_order(result.dual_values()) if is_relaxed and result.has_dual_feasible_solution() else ()
    return Solution(solution.status, values, solution.objective, solution.bound, duals)


def check_model(model: LinearModel) -> None:
    """Refuse numbers no solver can take, by the name of their row or column."""
    for name, cost, lower, upper in zip(model.names, model.costs, model.lower, model.upper, strict=True):
        _require(math.isfinite(cost), f"column {name!r}: cost is {cost}, expected a finite number")
        _require(not math.isnan(lower + upper) and lower <= upper, f"column {name!r}: bounds [{lower}, {upper}]")
    for terms, lower, upper, name in model.rows:
        _require(not math.isnan(lower) and not math.isnan(upper), f"row {name!r}: bounds [{lower}, {upper}]")
        for column, coefficient in terms:
            if not math.isfinite(coefficient):
                raise SolverError(f"row {name!r}: coefficient of {model.names[column]!r} is {coefficient}")
        if all(model.is_integer[column] for column, _ in terms):
            total = sum(abs(value) * _magnitude(model, column) for column, value in terms)
            _require(
                total < ROW_SUM_LIMIT, f"row {name!r}: terms may sum to {total:.4g}, limit 2**31; use coarser units"
            )


def check_solution(model: LinearModel, values: tuple[float, ...], *, objective: float | None) -> None:
    """Refuse values that break a bound, a row or the objective by more than the solver's tolerance.

    The tolerance of a row is `TOLERANCE` x (1 + sum of |coefficient| x max(1, |value|)).
    """
    for name, value, lower, upper in zip(model.names, values, model.lower, model.upper, strict=True):
        slack = TOLERANCE * max(1.0, abs(value))
        _require(lower - slack <= value <= upper + slack, f"column {name!r}: {value} is outside [{lower}, {upper}]")
    for terms, lower, upper, name in model.rows:
        activity, slack = _activity(terms, values)
        _require(lower - slack <= activity <= upper + slack, f"row {name!r}: {activity} is outside [{lower}, {upper}]")
    total, slack = _activity(tuple(enumerate(model.costs)), values)
    _require(
        objective is not None and abs(total - objective) <= slack, f"objective: {objective} reported, {total} found"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SolverError(message)


def _magnitude(model: LinearModel, column: int) -> float:
    return max(abs(model.lower[column]), abs(model.upper[column]))


def _activity(terms: tuple[tuple[int, float], ...], values: tuple[float, ...]) -> tuple[float, float]:
    """The value of a row, and how far from a limit it may be."""
    activity = sum(coefficient * values[column] for column, coefficient in terms)
    scale = sum(abs(coefficient) * max(1.0, abs(values[column])) for column, coefficient in terms)
    return activity, TOLERANCE * (1.0 + scale)


def _rounded(model: LinearModel, values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(
        float(round(value)) if is_integer else value for value, is_integer in zip(values, model.is_integer, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Limits:
    """When the solver may stop."""

    time_s: float | None
    relative_gap: float
    n_nodes: int | None


def _run(proto: Any, limits: _Limits) -> Any:
    """MathOpt's result. MathOpt 9.15 hides a refusal behind an AttributeError; its true text is in the context."""
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    parameters = mathopt.SolveParameters(
        time_limit=None if limits.time_s is None else timedelta(seconds=max(0.0, limits.time_s)),
        random_seed=RANDOM_SEED,
        node_limit=limits.n_nodes,
        relative_gap_tolerance=limits.relative_gap,
        absolute_gap_tolerance=0.0,
        highs=highs_pb2.HighsOptionsProto(string_options={"parallel": "off"}),
    )
    try:
        built = mathopt.Model.from_model_proto(proto)
        with _quiet_stdout():
            return mathopt.solve(built, mathopt.SolverType.HIGHS, params=parameters)
    except (AttributeError, ValueError, RuntimeError) as error:
        raise SolverError(f"HiGHS refused the model: {error.__context__ or error}") from error


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Drop what native code writes to standard output meanwhile. Concerns the whole process, all its threads."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        flush(None)  # what is still in C's buffer belongs to the solver
        os.dup2(saved, 1)
        os.close(saved)


def _to_proto(model: LinearModel, *, is_relaxed: bool = False) -> Any:
    """The model as MathOpt's message, filled by whole arrays (an object per coefficient takes six times as long)."""
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto()
    columns, rows, matrix = proto.variables, proto.linear_constraints, proto.linear_constraint_matrix
    columns.ids.extend(range(len(model.names)))
    columns.lower_bounds.extend(model.lower)
    columns.upper_bounds.extend(model.upper)
    columns.integers.extend([is_integer and not is_relaxed for is_integer in model.is_integer])
    priced = [column for column, cost in enumerate(model.costs) if cost]
    proto.objective.linear_coefficients.ids.extend(priced)
    proto.objective.linear_coefficients.values.extend([model.costs[column] for column in priced])
    rows.ids.extend(range(len(model.rows)))
    rows.lower_bounds.extend([lower for _, lower, _, _ in model.rows])
    rows.upper_bounds.extend([upper for _, _, upper, _ in model.rows])
    for number, (terms, _, _, _) in enumerate(model.rows):
        merged = _merged(terms)
        matrix.row_ids.extend([number] * len(merged))
        matrix.column_ids.extend([column for column, _ in merged])
        matrix.coefficients.extend([coefficient for _, coefficient in merged])
    return proto


def _merged(terms: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """Terms by column, each column once, without zeros."""
    sums: dict[int, float] = {}
    for column, coefficient in terms:
        sums[column] = sums.get(column, 0.0) + coefficient
    return sorted((column, coefficient) for column, coefficient in sums.items() if coefficient)


def _read(result: Any) -> Solution:
    """MathOpt's result as a Solution; values are read only when the status says that there are some."""
    termination = result.termination
    reason = termination.reason.name
    if reason not in STATUSES:
        raise SolverError(f"HiGHS stopped with {reason}: {termination.detail or 'no detail given'}")
    found, empty = STATUSES[reason]
    bound = termination.objective_bounds.dual_bound
    if found is None:
        return Solution(str(empty), (), None, None if empty == "infeasible" or abs(bound) == INFINITY else bound)
    values = _in_order(result.variable_values())
    return Solution(found, values, result.objective_value(), bound if abs(bound) < INFINITY else None)


def _in_order(values: Any) -> tuple[float, ...]:
    """The values of MathOpt's variables, or of its constraints, as the model has them."""
    return tuple(value for _, value in sorted((owner.id, value) for owner, value in values.items()))
