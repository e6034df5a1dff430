"""The library: each function is a piece of the data flow and nothing else; the command line calls the same ones.

Problem = load_profile + trace + options     make_problem
Answer  = search over its prices             solve, score
folder  = generate + report                  program_files, emit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.answer import Answer, Workload, tokens_per_sample
from autoplan.errors import InfeasibleError, InputError, UsageError
from autoplan.options import DEFAULT_MICRO_BATCH_SIZE, Options
from autoplan.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    from autoplan.graph import OpGraph
    from autoplan.hardware import HardwareProfile
    from autoplan.parallel_plan import Estimate, Plan
    from autoplan.space import PricedSpace
    from autoplan.what_if import WhatIfRow

Overrides = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: this model on that hardware under these options.

    Attributes:
        model_file: the file the graph was traced from; an emitted folder holds a copy of it.
        hw: the name or file that `profile` was read from, so that it can be read again with more hosts.
        overrides: (name, value) arguments of its build_model.
    """

    graph: OpGraph
    profile: HardwareProfile
    options: Options
    model_file: Path
    hw: str
    overrides: tuple[tuple[str, Any], ...] = ()


def plan(
    model: str | Path, *, hw: str, hosts: int = 1, overrides: Overrides | None = None, **options: Any
) -> SearchResult:
    """The fastest plan for a model file on a cluster; `options` are the fields of `Options`.

    Raises: InputError, TraceError or UsageError; that nothing fits is a status of the result, not an error.
    """
    return solve(make_problem(model, hw=hw, hosts=hosts, overrides=overrides, options=Options(**options))).result


def estimate(
    model: str | Path, *, hw: str, plan: Plan, hosts: int = 1, overrides: Overrides | None = None, **options: Any
) -> Answer:
    """What one given plan costs; nothing is searched."""
    return score(make_problem(model, hw=hw, hosts=hosts, overrides=overrides, options=Options(**options)), plan)


def trace_model(model: str | Path, *, overrides: Overrides | None = None) -> OpGraph:
    """The graph of a model file; it runs the file's code, on meta tensors, unless the trace is cached."""
    from autoplan.graph_cache import cached_graph

    def trace_now() -> OpGraph:
        from autoplan import trace

        return trace.trace_model(trace.model_source(Path(model), dict(overrides or {})))

    return cached_graph(Path(model), overrides or {}, trace_now)


def make_problem(
    model: str | Path, *, hw: str, hosts: int = 1, overrides: Overrides | None = None, options: Options
) -> Problem:
    """The hardware first and the options, since they are checked at once; then the trace, which takes seconds."""
    profile = _load_profile(hw, hosts)
    options = checked(options)
    overrides = overrides or {}
    graph = trace_model(model, overrides=overrides)
    if options.strict:
        _refuse_ops_without_rule(graph)
    return Problem(graph, profile, options, Path(model), hw, tuple(overrides.items()))


def whatif(
    model: str | Path,
    *,
    hw: Sequence[str],
    hosts: Sequence[int] = (1,),
    n_samples: float | None = None,
    n_tokens: float | None = None,
    prices_usd_per_device_hour: Mapping[str, float] | None = None,
    overrides: Overrides | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[WhatIfRow, ...]:
    """One row per hardware and host count, each a whole search of the same global batch; the model is traced once.

    Without `global_batch` it is `DEFAULT_MICRO_BATCH_SIZE` per device of the largest cluster. A cluster that cannot
    train the model so (no such precision, or a fixed degree that it has no devices for) is a row that says why.
    """
    from autoplan.what_if import compare

    profiles = {(name, count): _load_profile(name, count) for name in hw for count in hosts}
    first = make_problem(model, hw=hw[0], hosts=hosts[0], overrides=overrides, options=Options(**options))
    n_most = max(profile.n_devices for profile in profiles.values())
    global_batch = first.options.global_batch or default_global_batch(n_most)
    first = replace(first, options=replace(first.options, global_batch=global_batch))

    def solve_cluster(name: str, count: int) -> Answer:
        progress(f"searching {name} x {count}")
        problem = replace(first, profile=profiles[name, count], hw=name)
        try:
            return solve(problem)
        except UsageError:
            raise
        except InputError as error:
            return Answer(_workload(problem), _nothing("unusable", str(error)))

    return compare(
        tuple(profiles),
        solve=solve_cluster,
        global_batch=global_batch,
        n_samples=n_samples,
        n_tokens=n_tokens,
        prices_usd_per_device_hour=prices_usd_per_device_hour,
    )


def solve(problem: Problem) -> Answer:
    """Search the whole space; the estimate of the best plan carries its timeline.

    That no mesh divides devices and batch is an infeasible answer, whose `nearest_fix` lists the numbers that would.
    """
    from autoplan.search import search
    from autoplan.space import priced_space

    graph, options = problem.graph, problem.options
    global_batch = global_batch_size(problem)

    def space_on(profile: HardwareProfile) -> PricedSpace:
        return priced_space(graph, profile, options, global_batch=global_batch)

    def with_hosts(n_hosts: int) -> tuple[Any, Any]:
        other = space_on(_load_profile(problem.hw, n_hosts))
        return other.space, other.price

    offered = space_on(problem.profile)
    try:
        result = search(
            offered.space, price=offered.price, options=options, make_plan=offered.make_plan, with_hosts=with_hosts
        )
    except InfeasibleError as error:
        result = _nothing("infeasible", str(error))
    if result.best is not None:
        result = replace(result, best=replace(result.best, estimate=_judge(problem, result.best.plan)))
    return Answer(_workload(problem), result)


def score(problem: Problem, plan: Plan) -> Answer:
    """One given plan, judged; the status of the answer is "given".

    Raises: PlanMismatchError when the plan was made for another model or needs more devices; InputError naming the
        field when it is impossible in itself.
    """
    from autoplan.plan_checks import check_plan

    check_plan(plan, problem.graph, problem.profile)
    estimate = _judge(problem, plan)
    best = Candidate(plan, estimate, bound_s=estimate.step_s)
    result = SearchResult("given", best, (), (), (), bound_s=None, n_meshes=1, search_s=0.0)
    return Answer(_workload(replace(problem, options=replace(problem.options, precision=plan.precision))), result)


def program_files(problem: Problem, answer: Answer) -> dict[str, str | bytes]:
    """Every file of the output folder but its manifest, by relative path."""
    from autoplan.codegen import generate
    from autoplan.launch_scripts import launch_line
    from autoplan.output_folder import launch_size, read_text_file, report_files
    from autoplan.report import program_header
    from autoplan.simulate import memory_over_time
    from autoplan.space import load_rules, price_plan

    program = generate(
        problem.graph,
        answer.best.plan,
        rules=load_rules(),
        header=program_header(answer, launch_line=launch_line(**launch_size(answer))),
        model_text=read_text_file(problem.model_file),
        overrides=dict(problem.overrides),
    )
    plan = answer.best.plan
    memory = memory_over_time(price_plan(problem.graph, problem.profile, plan), plan.stages)
    return {**dict(program.files), **report_files(answer, memory=memory)}


def emit(problem: Problem, answer: Answer, folder: str | Path, *, force: bool = False) -> None:
    """Write the program and its reports as a folder, whole or not at all."""
    from autoplan.output_folder import write_folder

    write_folder(Path(folder), program_files(problem, answer), force=force)


def global_batch_size(problem: Problem) -> int:
    """Samples of one step; by default one micro-batch of `DEFAULT_MICRO_BATCH_SIZE` per device."""
    return problem.options.global_batch or default_global_batch(problem.profile.n_devices)


def default_global_batch(n_devices: int) -> int:
    """Samples of one step when the user names none."""
    return DEFAULT_MICRO_BATCH_SIZE * n_devices


def checked(options: Options) -> Options:
    """The options, unchanged; raises UsageError for a value that is not possible."""
    from autoplan.option_checks import check_options
    from autoplan.registry import load_table

    return check_options(options, schedules=load_table("autoplan.schedules", "SCHEDULES"))


def _nothing(status: str, why: str) -> SearchResult:
    """The result when not one mesh could be tried."""
    return SearchResult(status, None, (), (), (), bound_s=None, n_meshes=0, search_s=0.0, nearest_fix=why)


def _judge(problem: Problem, plan: Plan) -> Estimate:
    from autoplan.simulate import simulate
    from autoplan.space import price_plan

    table = price_plan(problem.graph, problem.profile, plan)
    return simulate(table, plan.stages, with_timeline=True)


def _workload(problem: Problem) -> Workload:
    from autoplan.space import flops_per_sample, ops_without_rule

    graph, profile = problem.graph, problem.profile
    return Workload(
        model=problem.model_file.name,
        hardware=profile.name,
        device=profile.device.name,
        n_hosts=profile.n_hosts,
        n_devices=profile.n_devices,
        n_parameters=graph.n_parameters(),
        flops_per_sample=flops_per_sample(graph),
        tokens_per_sample=tokens_per_sample(graph),
        peak_flops_per_s=dict(profile.device.peak_flops_per_s).get(problem.options.precision),
        price_usd_per_device_hour=profile.price_usd_per_device_hour,
        segment_names=tuple(segment.name for segment in graph.segments),
        provenance=profile.sources,
        ops_without_rule=ops_without_rule(graph),
        objective=problem.options.objective,
    )


def _refuse_ops_without_rule(graph: OpGraph) -> None:
    from autoplan.space import ops_without_rule

    names = ops_without_rule(graph)
    if names:
        raise InputError(
            f"--strict: found ops without a cost rule: {', '.join(names)}\n"
            "  expected: a rule for every op\n"
            "  fix: add an entry for each to a RULES table in cost_models/, or leave --strict out"
        )


def _load_profile(name: str, n_hosts: int) -> HardwareProfile:
    from autoplan.hardware import load_profile

    return load_profile(name, n_hosts=n_hosts)
