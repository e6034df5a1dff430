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
from autoplan.errors import PlanMismatchError
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
        overrides: (name, value) arguments of its build_model.
    """

    graph: OpGraph
    profile: HardwareProfile
    options: Options
    model_file: Path
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
    options = _checked(options)
    overrides = overrides or {}
    return Problem(trace_model(model, overrides=overrides), profile, options, Path(model), tuple(overrides.items()))


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
    """One row per hardware and host count, each a whole search; the model is traced once."""
    from autoplan.what_if import compare

    profiles = {(name, count): _load_profile(name, count) for name in hw for count in hosts}
    first = make_problem(model, hw=hw[0], hosts=hosts[0], overrides=overrides, options=Options(**options))

    def solve_cluster(name: str, count: int) -> Answer:
        progress(f"searching {name} x {count}")
        return solve(replace(first, profile=profiles[name, count]))

    return compare(
        tuple(profiles),
        solve=solve_cluster,
        n_samples=n_samples,
        n_tokens=n_tokens,
        prices_usd_per_device_hour=prices_usd_per_device_hour,
    )


def solve(problem: Problem) -> Answer:
    """Search the whole space; the estimate of the best plan carries its timeline."""
    from autoplan.search import search
    from autoplan.space import priced_space

    graph, options = problem.graph, problem.options
    global_batch = global_batch_size(problem)

    def space_on(profile: HardwareProfile) -> PricedSpace:
        return priced_space(graph, profile, options, global_batch=global_batch)

    def with_hosts(n_hosts: int) -> tuple[Any, Any]:
        from autoplan.hardware import load_profile

        other = space_on(load_profile(problem.profile.name, n_hosts=n_hosts))
        return other.space, other.price

    offered = space_on(problem.profile)
    result = search(
        offered.space, price=offered.price, options=options, make_plan=offered.make_plan, with_hosts=with_hosts
    )
    if result.best is not None:
        result = replace(result, best=replace(result.best, estimate=_judge(problem, result.best.plan)))
    return Answer(_workload(problem), result)


def score(problem: Problem, plan: Plan) -> Answer:
    """One given plan, judged; the status of the answer is "given".

    Raises: PlanMismatchError when the plan was made for another model or needs more devices.
    """
    _check_belongs(problem, plan)
    estimate = _judge(problem, plan)
    best = Candidate(plan, estimate, bound_s=estimate.step_s)
    result = SearchResult("given", best, (), (), (), bound_s=None, n_meshes=1, search_s=0.0)
    return Answer(_workload(problem), result)


def program_files(problem: Problem, answer: Answer) -> dict[str, str | bytes]:
    """Every file of the output folder but its manifest, by relative path."""
    from autoplan.codegen import generate
    from autoplan.launch_scripts import launch_line
    from autoplan.output_folder import launch_size, read_text_file, report_files
    from autoplan.report import program_header
    from autoplan.space import load_rules

    program = generate(
        problem.graph,
        answer.best.plan,
        rules=load_rules(),
        header=program_header(answer, launch_line=launch_line(**launch_size(answer))),
        model_text=read_text_file(problem.model_file),
        overrides=dict(problem.overrides),
    )
    return {**dict(program.files), **report_files(answer)}


def emit(problem: Problem, answer: Answer, folder: str | Path, *, force: bool = False) -> None:
    """Write the program and its reports as a folder, whole or not at all."""
    from autoplan.output_folder import write_folder

    write_folder(Path(folder), program_files(problem, answer), force=force)


def global_batch_size(problem: Problem) -> int:
    """Samples of one step; by default one micro-batch of `DEFAULT_MICRO_BATCH_SIZE` per device."""
    return problem.options.global_batch or DEFAULT_MICRO_BATCH_SIZE * problem.profile.n_devices


def _judge(problem: Problem, plan: Plan) -> Estimate:
    from autoplan.simulate import simulate
    from autoplan.space import price_plan

    table = price_plan(problem.graph, problem.profile, plan)
    return simulate(table, plan.stages, with_timeline=True)


def _workload(problem: Problem) -> Workload:
    from autoplan.space import flops_per_sample

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
    )


def _check_belongs(problem: Problem, plan: Plan) -> None:
    if plan.graph_hash and plan.graph_hash != problem.graph.content_hash():
        raise PlanMismatchError(
            f"the plan was made for another model than {problem.model_file}\n"
            "  expected: the same file, --set values and versions\n  fix: plan again"
        )
    if plan.mesh.n_devices > problem.profile.n_devices:
        raise PlanMismatchError(
            f"the plan needs {plan.mesh.n_devices} devices, {problem.profile.name} has {problem.profile.n_devices}\n"
            "  fix: raise --hosts, or plan again"
        )


def _load_profile(name: str, n_hosts: int) -> HardwareProfile:
    from autoplan.hardware import load_profile

    return load_profile(name, n_hosts=n_hosts)


def _checked(options: Options) -> Options:
    from autoplan.option_checks import check_options
    from autoplan.registry import load_table

    return check_options(options, schedules=load_table("autoplan.schedules", "SCHEDULES"))
