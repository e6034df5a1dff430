"""The library: each function is a piece of the data flow and nothing else; the command line calls the same ones.

Problem = load_hardware + trace + options    problem.make_problem
Answer  = search over its prices             decide; solve, which adds what would make something fit; score
folder  = generate + report                  program_files, emit
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.answer import Answer
from autoplan.answering import answer_of
from autoplan.errors import InfeasibleError, InputError, UsageError
from autoplan.hardware.cluster import Cluster, load_hardware
from autoplan.options import MEMORY_FORMATS, Options
from autoplan.problem import Overrides, Problem, checked, global_batch_size, make_problem, model_file, trace_model
from autoplan.search.result import Candidate, Remedy, SearchResult

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from autoplan.cost.table import CostTable
    from autoplan.hardware import HardwareProfile
    from autoplan.parallel_plan import Estimate, Plan
    from autoplan.what_if.rows import WhatIfRow

__all__ = [
    "Problem",
    "decide",
    "discover_rules",
    "emit",
    "estimate",
    "judge",
    "make_problem",
    "measurement_folder",
    "memory_curves",
    "plan",
    "program_files",
    "score",
    "solve",
    "trace_model",
    "whatif",
]
DEFAULT_MEASURED_SIZES = (1, 2, 4)  # micro-batches that `autoplan profile` measures


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


def discover_rules(
    model: str | Path, *, overrides: Overrides | None = None, ops: Sequence[str] = (), rules: Sequence[str] = ()
) -> str:
    """A file of rules for these ops of the model, or for all that have none, found by trial."""
    from autoplan.space import ops_without_rule
    from autoplan.tensor_parallel import rule_discovery
    from autoplan.tracing import trace

    path, overrides = model_file(model, overrides or {})
    graph = trace.trace_model(trace.model_source(path, dict(overrides)))  # not cached: the file defines its operators
    targets = ops or ops_without_rule(graph, rule_files=rules)
    return rule_discovery.rules_text(rule_discovery.discover_rules(graph, targets))


def measurement_folder(
    model: str | Path,
    *,
    hw: str,
    overrides: Overrides | None = None,
    degrees: Sequence[int] = (),
    micro_batch_sizes: Sequence[int] = DEFAULT_MEASURED_SIZES,
    compile: str = "off",
    memory_format: str = MEMORY_FORMATS[0],
    **options: Any,
) -> dict[str, str | bytes]:
    """The folder that measures a model on one device of `hw`, as relative path -> content; see
    `profile.measurement_folder`.

    `degrees` are those of tensor parallelism; none stands for all that a host has and the model gains by. Blocks and
    the loss are measured eager (`compile` is "off"), compiled ("on") or "both"; what reads images with these
    "contiguous", "channels_last" or "both".
    """
    from autoplan.output_folder import read_text_file
    from autoplan.profile.measurement_folder import (
        COMPILE_WAYS,
        FORMAT_WAYS,
        MeasurementRequest,
        measurement_files,
        value_ranges,
    )
    from autoplan.tracing.trace import example_batch, model_source

    profile, chosen = _load_profile(hw, 1), checked(Options(**options))
    if chosen.module_level:
        raise UsageError("profile: whole modules have no segments to measure\n  fix: leave --module-level out")
    if compile not in COMPILE_WAYS:
        raise UsageError(f"profile: compile: found {compile!r}\n  expected: one of {', '.join(COMPILE_WAYS)}")
    if memory_format not in FORMAT_WAYS:
        expected = ", ".join(FORMAT_WAYS)
        raise UsageError(f"profile: memory_format: found {memory_format!r}\n  expected: one of {expected}")
    path, overrides = model_file(model, overrides or {})
    graph = trace_model(path, overrides=overrides)
    batch = example_batch(model_source(path, dict(overrides)), 1)
    request = MeasurementRequest(
        graph,
        profile,
        chosen,
        model=path.name,
        model_text=read_text_file(path),
        overrides=overrides,
        degrees=tuple(degrees),
        micro_batch_sizes=tuple(micro_batch_sizes),
        ranges=value_ranges(batch),
        compile=compile,
        memory_format=memory_format,
    )
    return measurement_files(request)


def whatif(
    model: str | Path,
    *,
    hw: Sequence[str] = (),
    hosts: Sequence[int] = (),
    n_samples: float | None = None,
    n_tokens: float | None = None,
    prices_usd_per_device_hour: Mapping[str, float] | None = None,
    overrides: Overrides | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    n_jobs: int = 1,
    executor: Executor | None = None,
    asked: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[WhatIfRow, ...]:
    """One row per cluster, batch, precision and link, each a search of its own; the model is traced once.

    A MODEL that ends in .toml is a question in a file, see `what_if.question`; what else is given takes the place of
    its values. `asked` are further fields of `what_if.question.Question` (global_batches, sweeps, network_scales,
    money, reliability, ...). Without `hosts` it is one host.
    Without `global_batch` it is `DEFAULT_MICRO_BATCH_SIZE` per device of the largest cluster. A cluster that cannot
    train the model so (no such precision, or a fixed degree that it has no devices for) is a row that says why.

    `n_jobs` processes search at once; with more than one, a script that calls this needs `if __name__ == "__main__"`.
    Larger sweeps run on any `executor` of concurrent.futures, on other machines too where these have autoplan, such as
    `distributed.Client(...).get_executor()` of Dask: points are independent, and results are the same.
    """
    from autoplan.what_if.asking import ask
    from autoplan.what_if.flags import OPTIONS, keyword_tables
    from autoplan.what_if.question import Question, read_question, with_fields

    if "precision" in options and "precisions" in (asked or {}):
        raise UsageError('whatif: found precision and "precisions" among asked\n  fix: give one of them')
    if str(model).endswith(".toml"):
        changes = keyword_tables(
            hw=hw,
            hosts=hosts,
            overrides=overrides or {},
            n_tokens=n_tokens,
            n_samples=n_samples,
            usd_per_device_hour=prices_usd_per_device_hour or {},
            options=options,
        )
        others = Options(**{name: value for name, value in options.items() if name not in OPTIONS})
        question = read_question(model, changes=changes, options=others)
    else:
        question = Question(
            model=str(model),
            hw=tuple(hw),
            hosts=tuple(hosts) or (1,),
            overrides=tuple((overrides or {}).items()),
            n_tokens=n_tokens,
            n_samples=n_samples,
            given_usd=tuple((prices_usd_per_device_hour or {}).items()),
            options=Options(**options),
        )
    if "time_limit_s" in options:
        question = replace(question, time_limit_s=options["time_limit_s"])
    return ask(with_fields(question, asked or {}), n_jobs=n_jobs, executor=executor, progress=progress).rows


def solve(problem: Problem) -> Answer:
    """`decide`, and when nothing fits, the changes that would make something fit; Ctrl-C keeps those found so far."""
    from autoplan.report.plan import remedy_text
    from autoplan.search.remedies import find_remedies

    answer = _with_ops(problem, decide(problem))
    if answer.result.status != "infeasible" or answer.result.n_meshes == 0:
        return answer
    found: list[Remedy] = []
    stopped_by = answer.result.stopped_by
    try:
        for remedy in find_remedies(problem.options, n_hosts=problem.profile.n_hosts, retry=partial(_retry, problem)):
            found.append(remedy)
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    first = remedy_text(found[0]) if found else ""
    result = replace(answer.result, remedies=tuple(found), nearest_fix=first, stopped_by=stopped_by)
    return replace(answer, result=result)


def decide(
    problem: Problem,
    *,
    warm_start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float | None = None,
) -> Answer:
    """Search the whole space, `warm_start` first; the estimate of the best plan carries its timeline.

    That no mesh divides devices and batch is an infeasible answer, whose `nearest_fix` lists the numbers that would.
    `clock` is what the time limit is measured with; see `search.search` for patience.
    """
    result = _search(problem, warm_start=warm_start, clock=clock, patience_s=patience_s)
    if result.best is not None:
        result = replace(result, best=replace(result.best, estimate=judge(problem, result.best.plan)))
    return answer_of(problem, result)


def _with_ops(problem: Problem, answer: Answer) -> Answer:
    """The answer with the ops of its best plan, where `autoplan profile` measured them."""
    from autoplan.profile.lookup import ops_of_plan

    if problem.measured is None or isinstance(problem.profile, Cluster) or answer.result.best is None:
        return answer
    plan = answer.result.best.plan
    return replace(answer, ops=ops_of_plan(problem.options, problem.graph, problem.profile, plan, problem.measured))


def score(problem: Problem, plan: Plan) -> Answer:
    """One given plan, judged; the status of the answer is "given".

    Raises: PlanMismatchError when the plan was made for another model or needs more devices; InputError naming the
        field when it is impossible in itself.
    """
    from autoplan.plan_checks import check_plan

    check_plan(plan, problem.graph, problem.profile, rule_files=problem.options.rules)
    if problem.measured is not None and plan.precision != problem.options.precision:
        raise UsageError(
            f"--profile: read for {problem.options.precision}, the plan is in {plan.precision}\n"
            f"  fix: add --precision {plan.precision}"
        )
    estimate = judge(problem, plan)
    best = Candidate(plan, estimate, bound_s=estimate.step_s)
    result = SearchResult("given", best, (), (), (), bound_s=None, n_meshes=1, search_s=0.0)
    problem = replace(problem, options=replace(problem.options, precision=plan.precision))
    return answer_of(problem, result)


def program_files(problem: Problem, answer: Answer) -> dict[str, str | bytes]:
    """Every file of the output folder but its manifest, by relative path."""
    from autoplan.codegen import generate
    from autoplan.output_folder import launch_command, read_text_file, report_files
    from autoplan.report.plan import program_header
    from autoplan.space import load_rules
    from autoplan.tracing.hugging_face import is_hugging_face

    program = generate(
        problem.graph,
        answer.best.plan,
        rules=load_rules(problem.options.rules),
        header=program_header(answer, launch_line=launch_command(answer)),
        model_text=read_text_file(problem.model_file),
        overrides={} if is_hugging_face(problem.model) else dict(problem.overrides),
        device_bytes=answer.best.estimate.allocator_bytes,
        workload={
            "flops_per_sample": answer.workload.flops_per_sample,
            "tokens_per_sample": answer.workload.tokens_per_sample,
            "peak_flops_per_s": answer.workload.peak_flops_per_s,
            "device": answer.workload.device,
        },
    )
    return {**dict(program.files), **report_files(answer, memory=memory_curves(problem, answer.best.plan))}


def memory_curves(problem: Problem, plan: Plan) -> tuple[tuple[tuple[float, int], ...], ...]:
    """What each pipeline rank has allocated over the step; see `simulator.simulate.memory_over_time`."""
    from autoplan.simulator.simulate import memory_over_time

    return memory_over_time(_price(problem, plan), plan.stages)


def emit(
    problem: Problem, answer: Answer, folder: str | Path, *, force: bool = False, targets: tuple[str, ...] = ()
) -> None:
    """Write the program and its reports as a folder, whole or not at all; `targets` are those of `interop.TARGETS`."""
    from autoplan.interop import Subject, interop_files
    from autoplan.output_folder import write_folder

    files = program_files(problem, answer)
    if targets:
        classes = tuple(segment.class_name for segment in problem.graph.segments)
        files |= interop_files(targets, Subject(answer.best.plan, answer.workload, classes))
    write_folder(Path(folder), files, force=force)


def _nothing(status: str, why: str) -> SearchResult:
    """The result when not one mesh could be tried."""
    return SearchResult(status, None, (), (), (), bound_s=None, n_meshes=0, search_s=0.0, nearest_fix=why)


def judge(problem: Problem, plan: Plan) -> Estimate:
    """Time and memory of one plan of this problem, which is trusted; see `score` for any other."""
    from autoplan.simulator.simulate import simulate

    return simulate(_price(problem, plan), plan.stages, with_timeline=True)


def _price(problem: Problem, plan: Plan) -> CostTable:
    from autoplan.cluster_space import price_mixed_plan
    from autoplan.space import price_plan

    graph, profile, rules = problem.graph, problem.profile, problem.options.rules
    if isinstance(profile, Cluster):
        return price_mixed_plan(graph, profile, plan, rule_files=rules)
    return price_plan(graph, profile, plan, rule_files=rules, measured=problem.measured)


def _search(
    problem: Problem,
    *,
    warm_start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float | None = None,
) -> SearchResult:
    from autoplan.cluster_space import mixed_space
    from autoplan.search import search
    from autoplan.search.mixed import search_mixed
    from autoplan.space import priced_space

    graph, profile, options, batch = problem.graph, problem.profile, problem.options, global_batch_size(problem)
    try:
        if isinstance(profile, Cluster):
            mixed = mixed_space(graph, profile, options, global_batch=batch)
            return search_mixed(mixed, options=options, clock=clock, patience_s=patience_s)
        offered = priced_space(graph, profile, options, global_batch=batch, measured=problem.measured)
        return search(
            offered.space,
            price=offered.price,
            options=options,
            make_plan=offered.make_plan,
            warm_start=warm_start,
            clock=clock,
            patience_s=patience_s,
        )
    except InfeasibleError as error:
        return _nothing("infeasible", str(error))


def _retry(problem: Problem, options: Options, n_hosts: int) -> SearchResult:
    """The same global batch under other options, on that many hosts; a cluster that cannot be has no plan."""
    try:
        is_same = n_hosts == problem.profile.n_hosts
        profile = problem.profile if is_same else load_hardware(problem.hw, n_hosts=n_hosts)
        options = replace(options, global_batch=global_batch_size(problem))
        return _search(replace(problem, profile=profile, options=options))
    except InputError as error:
        return _nothing("unusable", str(error))


def _load_profile(name: str, n_hosts: int) -> HardwareProfile:
    from autoplan.hardware import load_profile

    return load_profile(name, n_hosts=n_hosts)
