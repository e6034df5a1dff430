"""The library: each function is a piece of the data flow and nothing else; the command line calls the same ones.

Problem = load_hardware + trace + options    planning.problem
Answer  = search over its prices             planning.deciding
folder  = generate + report                  program_files, emit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.answers.answer import Answer
from autoplan.checks.options import options_of
from autoplan.errors import UsageError
from autoplan.options import MEMORY_FORMATS
from autoplan.planning.deciding import cost_table, decide, judge, score, solve
from autoplan.planning.problem import (
    Overrides,
    Problem,
    check_precision,
    checked,
    make_problem,
    model_file,
    trace_model,
)
from autoplan.search.result import SearchResult

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from autoplan.parallel_plan import Plan
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
    """The fastest plan for a model file on a cluster; `options` are the fields of `Options`, such as `fix="tp=2"`.

    Raises: InputError, TraceError or UsageError; that nothing fits is a status of the result, not an error.
    """
    return solve(make_problem(model, hw=hw, hosts=hosts, overrides=overrides, options=options_of(options))).result


def estimate(
    model: str | Path, *, hw: str, plan: Plan, hosts: int = 1, overrides: Overrides | None = None, **options: Any
) -> Answer:
    """What one given plan costs, in its precision; nothing is searched.

    Raises: UsageError for another precision or global batch than the plan's, and what `plan` raises.
    """
    from autoplan.checks.plan import precision_to_judge

    options["precision"] = precision_to_judge(plan, asked=options.get("precision"))
    return score(make_problem(model, hw=hw, hosts=hosts, overrides=overrides, options=options_of(options)), plan)


def discover_rules(
    model: str | Path,
    *,
    overrides: Overrides | None = None,
    ops: Sequence[str] = (),
    rules: Sequence[str] = (),
    while_tracing: AbstractContextManager[object] | None = None,
) -> str:
    """A file of rules for these ops of the model, or for all that have none, found by trial."""
    from autoplan.analysis.model_flops import ops_without_rule
    from autoplan.rules import load_rules

    load_rules(rules)
    path, overrides = model_file(model, overrides or {})

    from autoplan.tensor_parallel import rule_discovery
    from autoplan.tracing import trace  # which takes seconds, only now
    from autoplan.tracing.model_source import model_source

    with while_tracing or nullcontext():
        graph = trace.trace_model(model_source(path, dict(overrides)))  # not cached: the file defines its ops
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
    while_tracing: AbstractContextManager[object] | None = None,
    **options: Any,
) -> dict[str, str | bytes]:
    """The folder that measures a model on one device of `hw`, as relative path -> content; see
    `measure_model.measurement_folder`.

    `degrees` are those of tensor parallelism; none stands for all that a host has and the model gains by. Blocks and
    the loss are measured eager (`compile` is "off"), compiled ("on") or "both"; what reads images with these
    "contiguous", "channels_last" or "both".

    Raises: InputError or TraceError for what the model file or the hardware is; UsageError for an option.
    """
    from autoplan.files import read_text_file
    from autoplan.hardware import load_hardware_profile
    from autoplan.measure_model.measurement_folder import (
        COMPILE_WAYS,
        FORMAT_WAYS,
        MeasurementRequest,
        measurement_files,
        value_ranges,
    )
    from autoplan.rules import load_rules
    from autoplan.tracing.local_modules import files_beside

    hardware, chosen = load_hardware_profile(hw), checked(options_of(options))
    check_precision(hardware, chosen)
    load_rules(chosen.rules)
    if chosen.module_level:
        raise UsageError("profile: whole modules have no segments to measure\n  fix: leave --module-level out")
    if compile not in COMPILE_WAYS:
        raise UsageError(f"profile: compile: found {compile!r}\n  expected: one of {', '.join(COMPILE_WAYS)}")
    if memory_format not in FORMAT_WAYS:
        expected = ", ".join(FORMAT_WAYS)
        raise UsageError(f"profile: memory_format: found {memory_format!r}\n  expected: one of {expected}")
    path, overrides = model_file(model, overrides or {})

    from autoplan.tracing.model_source import model_source
    from autoplan.tracing.trace import example_batch  # which takes seconds, only now

    with while_tracing or nullcontext():
        graph = trace_model(path, overrides=overrides)
    batch = example_batch(model_source(path, dict(overrides)), 1)
    request = MeasurementRequest(
        graph,
        hardware,
        chosen,
        model=path.name,
        model_text=read_text_file(path),
        local_files=files_beside(path),
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

    Raises: InputError, TraceError or UsageError for a question that cannot be asked.
    """
    from autoplan.what_if.asking import ask
    from autoplan.what_if.flags import OPTIONS, keyword_tables
    from autoplan.what_if.question import question_of, with_fields

    if "precision" in options and "precisions" in (asked or {}):
        raise UsageError('whatif: found precision and "precisions" among asked\n  fix: give one of them')
    tables = keyword_tables(
        hw=hw,
        hosts=hosts,
        overrides=overrides or {},
        n_tokens=n_tokens,
        n_samples=n_samples,
        usd_per_device_hour=prices_usd_per_device_hour or {},
        options=options,
    )
    others = options_of({name: value for name, value in options.items() if name not in OPTIONS})
    question = question_of(model, tables, where="whatif", options=others)
    if "time_limit_s" in options:
        question = replace(question, time_limit_s=options["time_limit_s"])
    return ask(with_fields(question, asked or {}), n_jobs=n_jobs, executor=executor, progress=progress).rows


def program_files(problem: Problem, answer: Answer) -> dict[str, str | bytes]:
    """Every file of the output folder but its manifest, by relative path."""
    from autoplan.codegen import generate
    from autoplan.codegen.libraries import libraries_of
    from autoplan.files import read_text_file
    from autoplan.output.folder import launch_command, report_files
    from autoplan.report.plan import program_header
    from autoplan.rules import load_rules
    from autoplan.tracing.hugging_face import is_hugging_face
    from autoplan.tracing.local_modules import files_beside

    model_text, beside = read_text_file(problem.model_file), files_beside(problem.model_file)
    program = generate(
        problem.graph,
        answer.best.plan,
        rules=load_rules(problem.options.rules),
        header=program_header(answer, launch_line=launch_command(answer)),
        model_text=model_text,
        local_files=beside,
        overrides={} if is_hugging_face(problem.model) else dict(problem.overrides),
        device_bytes=answer.best.estimate.allocator_bytes,
        workload={
            "flops_per_sample": answer.workload.flops_per_sample,
            "tokens_per_sample": answer.workload.tokens_per_sample,
            "peak_flops_per_s": answer.workload.peak_flops_per_s,
            "device": answer.workload.device,
            "libraries": libraries_of((model_text, *beside.values())),
        },
    )
    return {**dict(program.files), **report_files(answer, memory=memory_curves(problem, answer.best.plan))}


def memory_curves(problem: Problem, plan: Plan) -> tuple[tuple[tuple[float, int], ...], ...]:
    """What each pipeline rank has allocated over the step; see `simulator.simulate.memory_over_time`."""
    from autoplan.simulator.simulate import memory_over_time

    return memory_over_time(cost_table(problem, plan), plan.stages)


def emit(
    problem: Problem, answer: Answer, folder: str | Path, *, force: bool = False, targets: tuple[str, ...] = ()
) -> None:
    """Write the program and its reports as a folder, whole or not at all; `targets` are those of `interop.targets`."""
    from autoplan.files import write_folder
    from autoplan.interop.subject import Subject
    from autoplan.interop.targets import interop_files

    files = program_files(problem, answer)
    if targets:
        classes = tuple(segment.class_name for segment in problem.graph.segments)
        subject = Subject(
            answer.best.plan,
            answer.workload,
            classes,
            synchronizes_batch_norm=problem.graph.synchronizes_batch_norm,
            ties_weights=any(len(parameter.aliases) > 1 for parameter in problem.graph.parameters),
        )
        files |= interop_files(targets, subject)
    write_folder(Path(folder), files, force=force)
