"""The integer program of one mesh: how many segments of each run every stage gets, and how many it recomputes.

Run k has L_k pieces (see `plans`). Variables, for each stage s:

    n_sk   pieces of run k in stage s                       integer
    r_skj  of them, how many recompute their j-th segment   integer, r_skj <= n_sk        `_add_counts`
    z_sk   run k is finished by the end of stage s          binary
    f1, f, b, b1, carry, left, cut, ...                     times of stage s, seconds / `unit_s`
    T      time of the step

    minimize T
    stages are contiguous      with N_sk = sum_{s' <= s} n_s'k:  L_k z_sk <= N_sk <= L_k - 1 + z_sk,
                               N_s(k+1) <= L_(k+1) z_sk,  sum_k n_sk in `stage_sizes`         `_add_contiguity`
    passes take their time     x_s >= compute and exposed communication of the pass         `add_pass_times`
    reductions outlast b1      left_s >= what compute cannot hide                           `add_leftovers`
    transfers                  cut_s >= transfer at the boundary after s                    `add_cuts`
    paths bound the step       T >= sum counts x times + left + optimizer + per_step_s      `add_path`
    one rank alone             T >= all its communication, and all its compute, once        `_add_totals`
    batches are copied         T >= batch_copy_s                                            `formulate`
    memory of each rank        state + gathered + gradients + (saved + sent) x in flight + working <= room,
                               at each moment of its schedule that may be the peak          `add_memory`

**A relaxation, on purpose.** No plan that the simulator accepts is cut off, and T never exceeds its simulated step.
Where the relaxation is loose, `add_path` adds a critical path of a simulated plan, and `forbid` removes a plan that has
been judged.
"""

from __future__ import annotations

from autoplan.cost.table import CostTable, SegmentCost, backward_s, forward_s
from autoplan.parallel_plan import StagePlan
from autoplan.search.bounds import step_bound_s
from autoplan.search.paths.peak_moments import Shape
from autoplan.search.paths.schedule_paths import LAST_BACKWARD, Path, initial_paths, last_pass
from autoplan.search.plans import repeated_segments, runs_of, stage_sizes, staged
from autoplan.search.program.memory_rows import add_memory
from autoplan.search.program.pass_times import add_cuts, add_leftovers, add_pass_times, left_symbol
from autoplan.search.program.terms import (
    Formulation,
    Terms,
    Values,
    cost_values,
    integer_column,
    negative,
    sum_of,
    time_of,
)
from autoplan.solver.linear_model import INFINITY

UNITS_PER_BOUND = 1000.0  # T is at least about this many units, so the solver's 1e-6 is 1e-9 of the step


def formulate(
    table: CostTable, shape: Shape, *, recompute: str | None = None, measures_shortfall: bool = False
) -> Formulation:
    """The program of one mesh.

    `recompute` is "none", "full" or "selective" when the user fixed it. With `measures_shortfall` memory may be
    exceeded, and the objective is by how many MiB.
    """
    form = Formulation(table, runs_of(table), shape.ranks, unit_s=max(step_bound_s(table), 1e-12) / UNITS_PER_BOUND)
    form.one = form.model.add_column("one", lower=1.0, upper=1.0)
    copy = table.batch_copy_s / form.unit_s
    form.total = form.model.add_column("T", cost=0.0 if measures_shortfall else 1.0, lower=copy, upper=INFINITY)
    if measures_shortfall:
        form.shortfall = form.model.add_column("shortfall", cost=1.0, upper=INFINITY)
    _add_counts(form, recompute)
    _add_contiguity(form)
    add_memory(form, shape)
    if not measures_shortfall:
        add_pass_times(form)
        add_leftovers(form)
        add_cuts(form)
        _add_totals(form)
        for path in initial_paths(table.mesh):
            add_path(form, path)
    return form


def _add_counts(form: Formulation, recompute: str | None) -> None:
    repeated = {form.table.kinds[segment] for segment in repeated_segments(form.table)}
    for stage in range(form.n_stages):
        form.count.append([])
        form.recomputed.append([])
        for number, run in enumerate(form.runs):
            name = f"stage {stage} run {number}"
            least = run.length if form.n_stages == 1 else 0
            form.count[-1].append(integer_column(form, f"count {name}", lower=least, upper=run.length))
            most = [run.length * (recompute != "none" and form.table.has_choice(kind)) for kind in run.piece]
            form.recomputed[-1].append(
                [integer_column(form, f"recomputed {name} slot {slot}", upper=own) for slot, own in enumerate(most)]
            )
            for slot, column in enumerate(form.recomputed[-1][-1]):
                must = recompute == "full" and run.piece[slot] in repeated
                terms = [(form.count[-1][number], 1.0), (column, -1.0)]
                form.model.add_row(f"recompute at most all {name}", terms, lower=0.0, upper=0.0 if must else INFINITY)
    if recompute == "selective":
        everything = [(column, 1.0) for per_run in form.recomputed for slots in per_run for column in slots]
        form.model.add_row("something is recomputed", everything, lower=1.0)


def _add_contiguity(form: Formulation) -> None:
    model, last = form.model, form.n_stages - 1
    for stage in range(form.n_stages):
        lower = 1.0 if stage == last else 0.0
        form.finished.append(
            [integer_column(form, f"finished stage {stage} run {run}", lower=lower) for run in range(len(form.runs))]
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
    sizes = stage_sizes(form.table.mesh, n_pieces=sum(run.length for run in form.runs))
    for stage, own in enumerate(sizes):
        terms = [(column, 1.0) for column in form.count[stage]]
        model.add_row(f"size of stage {stage}", terms, lower=float(own[0]), upper=float(own[-1]))


def _add_totals(form: Formulation) -> None:
    """With one stage nothing is ever idle, so compute and communication of the whole step bound it together.

    T >= compute + beta communication + (1 - beta) left;   T >= communication + gamma compute        (`Overlap`)
    """
    table = form.table
    if form.n_stages > 1:
        return
    n, beta, gamma = table.mesh.n_micro_batches, table.overlap.communication_exposed, table.overlap.compute_exposed
    n_gathers, n_gathers_back = (n, n) if table.gathers_per_micro_batch else (1, 0)
    n_reduces = n if table.reduces_per_micro_batch else 1

    def communication_s(cost: SegmentCost) -> float:
        gathers_s = n_gathers * cost.gather_s + n_gathers_back * cost.gather_back_s
        return gathers_s + n_reduces * cost.reduce_s + cost.replicas_s

    def mixed(compute: float, communication: float) -> Values:
        return cost_values(
            form,
            lambda cost: compute * n * (forward_s(cost) + backward_s(cost)) + communication * communication_s(cost),
            scale=form.unit_s,
        )

    left = [(time_of(form, left_symbol(LAST_BACKWARD), 0), 1.0 - beta)]
    _add_step_row(form, "compute", [*sum_of(form, 0, mixed(1.0, beta)), *left], rank=0)
    _add_step_row(form, "communication", sum_of(form, 0, mixed(gamma, 1.0)), rank=0)


def add_path(form: Formulation, path: Path) -> None:
    """The step takes at least as long as this path."""
    terms = [(time_of(form, symbol, stage), float(count)) for (symbol, stage), count in path.counts]
    terms.append((time_of(form, left_symbol(last_pass(form.table.mesh)), path.last_stage), 1.0))
    _add_step_row(form, "path", terms, rank=form.ranks[path.last_stage])


def _add_step_row(form: Formulation, name: str, terms: Terms, *, rank: int) -> None:
    """T >= terms + the optimizer of the rank's stages + per_step_s."""
    optimizer = cost_values(form, lambda cost: cost.optimizer_s, scale=form.unit_s)
    for stage in form.stages_of(rank):
        terms = [*terms, *sum_of(form, stage, optimizer)]
    terms = [(form.total, 1.0), *negative(terms)]
    form.model.add_row(f"step {len(form.model.rows)} {name}", terms, lower=form.table.per_step_s / form.unit_s)


def decode(form: Formulation, values: tuple[float, ...]) -> tuple[StagePlan, ...]:
    """The stages that the values mean."""
    counts = [[round(values[column]) for column in per_run] for per_run in form.count]
    again = tuple(tuple(round(values[column]) for slots in per_run for column in slots) for per_run in form.recomputed)
    return staged([list(zip(per_run, form.runs, strict=True)) for per_run in counts], again)


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
            up = integer_column(form, f"more than {value} in {column}")
            model.add_row(f"above {up}", [(column, 1.0), (up, lower - value - 1.0)], lower=lower)
            choices.append((up, 1.0))
        if value > lower:
            down = integer_column(form, f"less than {value} in {column}")
            model.add_row(f"below {down}", [(column, 1.0), (down, upper - value + 1.0)], upper=upper)
            choices.append((down, 1.0))
    model.add_row(f"another plan {len(model.rows)}", choices, lower=1.0 - n_fixed)
