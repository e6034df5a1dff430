"""The solver wrapper: right answers, one status table, and nothing believed that was not checked."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

import autoplan.solver.solve as solve_module
from autoplan.errors import SolverError
from autoplan.solver.linear_model import INFINITY, LinearModel
from autoplan.solver.solve import _quiet_stdout, minimize


def knapsack() -> LinearModel:
    """Maximize 5 a + 4 b with 3 a + 2 b <= 4: a or b alone fits, so the best is a = 1 (b = 1 gives 4)."""
    model = LinearModel()
    a = model.add_column("a", cost=-5.0, is_integer=True)
    b = model.add_column("b", cost=-4.0, is_integer=True)
    model.add_row("weight", [(a, 3.0), (b, 2.0)], upper=4.0)
    return model


def test_the_optimum_of_a_knapsack_is_found_with_its_bound() -> None:
    solution = minimize(knapsack(), time_limit_s=None)
    assert (solution.status, solution.values, solution.objective) == ("optimal", (1.0, 0.0), -5.0)
    assert solution.bound == pytest.approx(-5.0)


def test_the_relaxation_is_never_worse_than_the_integer_optimum() -> None:
    # b = 1 and a = 2/3: 4 + 10/3
    relaxed = minimize(knapsack(), time_limit_s=None, is_relaxed=True)
    assert relaxed.objective == pytest.approx(-4.0 - 10.0 / 3.0)


def test_an_infeasible_model_has_a_status_and_no_values() -> None:
    model = knapsack()
    model.add_row("too much", [(0, 1.0), (1, 1.0)], lower=3.0)
    solution = minimize(model, time_limit_s=None)
    assert (solution.status, solution.values, solution.objective) == ("infeasible", (), None)


def test_terms_of_one_column_in_one_row_are_added() -> None:
    model = LinearModel()
    x = model.add_column("x", cost=1.0, upper=9.0, is_integer=True)
    model.add_row("sum", [(x, 1.0), (x, 2.0)], lower=6.0)  # 3 x >= 6
    assert minimize(model, time_limit_s=None).values == (2.0,)


# ----------------------------------------------------------- memory in MiB equals brute force (google/or-tools#5293)

GROUPS = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def toy_planner(seed: int, largest: int) -> tuple[LinearModel, float | None]:
    """Three exactly-one groups, two options, three memory rows that an option may enforce; and the true optimum."""
    rng = random.Random(seed)
    costs = [float(rng.randint(1, 1000)) for _ in range(9)] + [-50.0, -70.0]
    rows = [
        ([rng.randint(1, largest) for _ in range(9)], rng.randint(largest, 3 * largest), rng.randrange(11))
        for _ in range(3)
    ]
    model = LinearModel()
    for column, cost in enumerate(costs):
        model.add_column(f"x{column}", cost=cost, is_integer=True)
    for group in GROUPS:
        model.add_row(f"one of {group}", [(column, 1.0) for column in group], lower=1.0, upper=1.0)
    for number, (weights, limit, enforcer) in enumerate(rows):
        big = float(sum(weights))  # with the enforcer off the row says nothing
        terms = [(column, float(weight)) for column, weight in enumerate(weights)]
        model.add_row(f"memory {number}", [*terms, (enforcer, big)], upper=limit + big)
    best = None
    for picked in itertools.product(*GROUPS):
        for options in itertools.product((0, 1), repeat=2):
            x = [int(column in picked) for column in range(9)] + list(options)
            if all(not x[e] or sum(w * v for w, v in zip(ws, x, strict=False)) <= cap for ws, cap, e in rows):
                total = sum(cost * value for cost, value in zip(costs, x, strict=True))
                best = total if best is None else min(best, total)
    return model, best


def test_memory_rows_in_mib_give_the_optimum_of_brute_force() -> None:
    for seed in range(60):
        model, best = toy_planner(seed, largest=80_000)
        solution = minimize(model, time_limit_s=None)
        assert (None if solution.objective is None else round(solution.objective)) == best, seed


def test_a_row_in_bytes_is_refused_by_name_before_the_solver_sees_it() -> None:
    model, _ = toy_planner(0, largest=80 * 10**9)
    with pytest.raises(SolverError, match=r"row 'memory 0'.*2\*\*31.*coarser units"):
        minimize(model, time_limit_s=None)


# --------------------------------------------------------------------------------------------- what must not get in


def test_a_nan_cost_names_its_column() -> None:
    model = knapsack()
    model.costs[1] = float("nan")
    with pytest.raises(SolverError, match="column 'b': cost is nan"):
        minimize(model, time_limit_s=None)


def test_an_infinite_coefficient_names_its_row_and_column() -> None:
    model = knapsack()
    model.add_row("stage 3 memory", [(0, INFINITY)], upper=1.0)
    with pytest.raises(SolverError, match="row 'stage 3 memory': coefficient of 'a' is inf"):
        minimize(model, time_limit_s=None)


def test_bounds_that_cross_name_their_column() -> None:
    model = knapsack()
    model.lower[0] = 2.0
    with pytest.raises(SolverError, match=r"column 'a': bounds \[2.0, 1.0\]"):
        minimize(model, time_limit_s=None)


# ------------------------------------------------------------------------------------------------ what must not get out


class FakeResult:
    """MathOpt's result with a given reason; `variable_values` may be forbidden."""

    def __init__(
        self, reason: str, *, values: tuple[float, ...] | None, objective: float = -5.0, bound: float = -6.0
    ) -> None:
        bounds = SimpleNamespace(dual_bound=bound)
        self.termination = SimpleNamespace(
            reason=SimpleNamespace(name=reason), detail="the detail", objective_bounds=bounds
        )
        self._values = values
        self._objective = objective

    def variable_values(self) -> dict[SimpleNamespace, float]:
        assert self._values is not None, "values must not be read without a solution"
        return {_Variable(index): value for index, value in enumerate(self._values)}  # type: ignore[misc]

    def objective_value(self) -> float:
        assert self._values is not None
        return self._objective


class _Variable:
    def __init__(self, index: int) -> None:
        self.id = index


@pytest.mark.parametrize(
    ("reason", "values", "status"),
    [
        ("OPTIMAL", (1.0, 0.0), "optimal"),
        ("FEASIBLE", (1.0, 0.0), "feasible"),
        ("INFEASIBLE", None, "infeasible"),
        ("NO_SOLUTION_FOUND", None, "unknown"),
    ],
)
def test_values_are_read_only_when_the_status_says_there_are_some(
    monkeypatch: pytest.MonkeyPatch, reason: str, values: tuple[float, ...] | None, status: str
) -> None:
    monkeypatch.setattr(solve_module, "_run", lambda *_, **__: FakeResult(reason, values=values))
    model = knapsack()
    if status == "infeasible":  # in truth, too: a second solver looks
        model.add_row("too much", [(0, 1.0), (1, 1.0)], lower=3.0)
    solution = minimize(model, time_limit_s=None)
    assert (solution.status, solution.values) == (status, values or ())
    assert solution.bound == (None if status == "infeasible" else -6.0)


@pytest.mark.parametrize(
    "reason", ["UNBOUNDED", "INFEASIBLE_OR_UNBOUNDED", "IMPRECISE", "NUMERICAL_ERROR", "OTHER_ERROR"]
)
def test_every_other_status_is_an_error_with_its_detail(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(solve_module, "_run", lambda *_, **__: FakeResult(reason, values=None))
    with pytest.raises(SolverError, match=f"{reason}: the detail"):
        minimize(knapsack(), time_limit_s=None)


@pytest.mark.parametrize(
    ("values", "objective", "message"),
    [
        ((1.0, 1.0), -9.0, "row 'weight': 5.0 is outside"),
        ((2.0, 0.0), -10.0, "column 'a': 2.0 is outside"),
        ((1.0, 0.0), -7.0, "objective: -7.0 reported, -5.0 found"),
    ],
)
def test_an_answer_that_breaks_the_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...], objective: float, message: str
) -> None:
    fake = FakeResult("OPTIMAL", values=values, objective=objective)
    monkeypatch.setattr(solve_module, "_run", lambda *_, **__: fake)
    with pytest.raises(SolverError, match=message):
        minimize(knapsack(), time_limit_s=None)


@pytest.mark.parametrize(
    "wrong",
    [FakeResult("INFEASIBLE", values=None), FakeResult("OPTIMAL", values=(0.0, 1.0), objective=-4.0, bound=-4.0)],
    ids=["no solution", "no better one"],
)
def test_a_second_solver_refutes_what_is_wrongly_proved(monkeypatch: pytest.MonkeyPatch, wrong: FakeResult) -> None:
    monkeypatch.setattr(solve_module, "_run", lambda *_, **__: wrong)
    with pytest.raises(SolverError, match="CP-SAT found a better solution"):
        minimize(knapsack(), time_limit_s=None)


def test_a_second_solver_does_not_object_to_a_limit_met_to_the_last_digit() -> None:
    model = LinearModel()
    total = model.add_column("T", cost=1.0, upper=2.5)
    count = model.add_column("count", upper=9.0, is_integer=True)
    model.add_row("path", [(total, 1.0), (count, -0.5)], lower=1.0)
    model.add_row("enough", [(count, 1.0)], lower=3.0)
    assert minimize(model, time_limit_s=None).objective == pytest.approx(2.5)  # 1 + 0.5 x 3, its own limit
    model.upper[total] = 2.5 * (1.0 - 1e-7)
    assert minimize(model, time_limit_s=None).status in ("infeasible", "optimal")  # within the tolerance of HiGHS


def test_a_refusal_by_the_solver_shows_its_true_text(monkeypatch: pytest.MonkeyPatch) -> None:
    mathopt = pytest.importorskip("ortools.math_opt.python.mathopt")

    def refuse(*_: object, **__: object) -> None:
        try:
            raise RuntimeError("HiGHS is not linked in")
        except RuntimeError:  # MathOpt 9.15 fails while it translates the first error
            raise AttributeError("'StatusNotOk' object has no attribute 'canonical_code'")  # noqa: B904

    monkeypatch.setattr(mathopt, "solve", refuse)
    with pytest.raises(SolverError, match="HiGHS is not linked in"):
        minimize(knapsack(), time_limit_s=None)


def test_native_output_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    with _quiet_stdout():
        libc.puts(b"noise from native code")
        os.write(1, b"more noise")
    libc.puts(b"kept")
    libc.fflush(None)
    assert capfd.readouterr().out == "kept\n"


def test_importing_the_search_does_not_import_the_solver() -> None:
    code = "import sys, autoplan.search; sys.exit(any(name.startswith('ortools') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
