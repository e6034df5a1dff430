"""From a question to rows: hardware and model are read, every point is searched, and rows are made of the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product

from autoplan.answers.answer import tokens_per_sample
from autoplan.checks.options import check_batch
from autoplan.errors import InputError, UsageError
from autoplan.graph import OpGraph
from autoplan.hardware.cluster import Cluster, Hardware, is_cluster_file, load_hardware
from autoplan.hardware.file import with_ports
from autoplan.options import DEFAULT_TIME_LIMIT_S
from autoplan.planning.problem import checked, default_global_batch, model_file, trace_model
from autoplan.rules import load_rules
from autoplan.space.mixed_space import check_mixed_options
from autoplan.what_if.all_schedules import of_all_schedules
from autoplan.what_if.other_links import changed
from autoplan.what_if.other_sizes import of_other_sizes, with_judged
from autoplan.what_if.points import QUICK_SCHEDULE, Overrides, Point, combinations, points, searched
from autoplan.what_if.prices import read_prices
from autoplan.what_if.question import Question, checked_question
from autoplan.what_if.rows import Assumptions, WhatIfRow, row_of
from autoplan.what_if.sweep import Sweep, Task, run_sweep

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The rows of a question, in the order of its points.

    Attributes:
        sweep: how they were found.
        assumptions: what they rest on beside the searches.
    """

    rows: tuple[WhatIfRow, ...]
    sweep: Sweep
    assumptions: Assumptions


def ask(
    question: Question,
    *,
    n_jobs: int = 1,
    executor: Executor | None = None,
    today: date | None = None,
    progress: Progress = lambda done, total: None,
) -> WhatIf:
    """Search every point of a question and make its rows; for `executor` see `api.whatif`.

    Raises: InputError or UsageError for what cannot be asked; a cluster that cannot train the model is a row that says
        why.
    """
    question = checked_question(question, where="whatif")
    if question.options.profile is not None:
        raise UsageError("profile: measurements are of one device, whatif compares several\n  fix: leave it out")
    given = assumptions_of(question, today=today or date.today())
    clusters = clusters_of(question.hw, question.hosts)
    nics = question.nics or (None,)
    profiles = {(*cluster, n): _hardware(*cluster, n) for cluster, n in product(clusters, nics)}
    models = combinations(question.sweeps, fixed=question.overrides)
    asked = points(
        clusters,
        global_batches=question.global_batches or (_default_batch(question, profiles.values()),),
        precisions=question.precisions,
        overrides=models,
        network_scales=question.network_scales,
        host_links=question.host_links,
        nics=nics,
        scaling=question.scaling,
    )
    if not any(isinstance(hardware, Cluster) for hardware in profiles.values()):
        _check_batches({point.global_batch for point in asked}, question)
    traced = trace_all(question, models)
    hashes = {model: f"{graph.content_hash()} {graph.n_optimizer_states}" for model, graph in traced.items()}
    tasks = [
        task_of(point, profiles[point.hw, point.n_hosts, point.n_nics], question, graph=hashes[repr(point.overrides)])
        for point in asked
    ]
    graphs = {hashes[model]: graph for model, graph in traced.items()}
    sweep = run_sweep(tasks, graphs, n_jobs=n_jobs, executor=executor, progress=progress)
    judge = partial(run_sweep, graphs=graphs, n_jobs=n_jobs, executor=executor)
    sweep = _with_better(sweep, of_other_sizes(asked, tasks, sweep.results), judge)
    if QUICK_SCHEDULE not in question.options.fix:
        sweep = _with_better(sweep, of_all_schedules(tasks, sweep.results), judge)
    rows = tuple(
        row_of(
            point, result, replace(given, condition=condition), n_samples=question.n_samples, n_tokens=question.n_tokens
        )
        for point, result in zip(asked, sweep.results, strict=True)
        for condition in question.conditions
    )
    return WhatIf(rows, sweep, given)


def _with_better(sweep: Sweep, others: Mapping[int, Task], judge: Callable[[Sequence[Task]], Sweep]) -> Sweep:
    """The sweep, and what these other searches of its places find in place of slower plans."""
    if not others or sweep.is_interrupted:
        return sweep
    return with_judged(sweep, others, judge(list(others.values())))


def continued(progress: Progress, *, n_before: int, n_all: int) -> Progress:
    """The progress of one question of several, after `n_before` points of `n_all`."""
    return lambda done, total: progress(n_before + done, n_all)


def _hardware(name: str, n_hosts: int, n_nics: int | None) -> Hardware:
    if n_nics is not None and is_cluster_file(name):
        raise InputError.of("nics", found=name, expected="one kind of host", fix="edit its file, or leave nics out")
    return load_hardware(name if n_nics is None else with_ports(name, n_nics), n_hosts=n_hosts)


def assumptions_of(question: Question, *, today: date) -> Assumptions:
    """What rows of a question are made with, under its first condition."""
    return Assumptions(
        shipped=read_prices(),
        today=today,
        condition=question.conditions[0],
        prices=None if question.prices_file is None else read_prices(question.prices_file),
        given_usd=question.given_usd,
        memory_confidence=question.options.memory_confidence,
    )


def clusters_of(hw: Sequence[str], hosts: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(hardware, hosts) pairs; the file of a mixed cluster counts its hosts itself."""
    return tuple((name, count) for name in hw for count in (hosts if not is_cluster_file(name) else (1,)))


def trace_all(question: Question, models: Sequence[Overrides]) -> dict[str, OpGraph]:
    """The graph of the model under each set of arguments, by the `repr` of these.

    Raises: UsageError for an option that is not possible and InputError for a file of rules, before the first trace;
        UsageError when tokens are asked for and the model reads none.
    """
    load_rules(checked(question.options).rules)
    found = {}
    for overrides in models:
        path, arguments = model_file(question.model, dict(overrides))
        graph = trace_model(path, overrides=arguments, module_level=question.options.module_level)
        if question.n_tokens is not None and tokens_per_sample(graph) is None:
            raise UsageError("--tokens: this model does not read tokens\n  fix: use --samples instead")
        found[repr(overrides)] = graph
    return found


def task_of(point: Point, hardware: Hardware, question: Question, *, graph: str) -> Task:
    """The search of a point."""
    options = replace(question.options, global_batch=point.global_batch, precision=point.precision)
    is_brief = question.search == "quick" and question.time_limit_s is None
    # batches that groups share are tried last, so a mixed cluster gets its time with a plan, too
    limit_s = DEFAULT_TIME_LIMIT_S if is_brief and isinstance(hardware, Cluster) else question.time_limit_s
    options = checked(searched(options, search=question.search, time_limit_s=limit_s))
    refused = ""
    try:
        hardware = changed(hardware, point)
        if isinstance(hardware, Cluster):
            check_mixed_options(options, hardware)
    except UsageError:
        raise
    except InputError as error:
        refused = str(error)
    return Task(graph, hardware, options, point.hw, refused, DEFAULT_TIME_LIMIT_S if is_brief else None)


def _check_batches(batches: Collection[int], question: Question) -> None:
    """Refuse fixed values that divide none of the batches, before the trace; where some do, rows say which not.

    Raises: UsageError.
    """
    refused = []
    for batch in sorted(batches):
        options = replace(question.options, global_batch=batch if question.global_batches else None)
        try:
            check_batch(checked(options), default_batch=batch)
        except UsageError as error:
            refused.append(error)
    if len(refused) == len(batches):
        raise refused[0]


def _default_batch(question: Question, profiles: Iterable[Hardware]) -> int:
    """`DEFAULT_MICRO_BATCH_SIZE` samples per device of the largest cluster; of the smallest where batches grow."""
    sizes = [hardware.n_devices for hardware in profiles]
    n_devices = min(sizes) if question.scaling == "weak" else max(sizes)
    return default_global_batch(n_devices)
