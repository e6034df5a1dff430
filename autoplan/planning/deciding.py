"""Problem -> Answer: the search over its prices, or one given plan judged.

decide    the best plan
solve     the same, and what would make something fit where nothing does
score     one given plan, checked and judged
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from autoplan.answers.answer import Answer
from autoplan.cost.table import CostTable
from autoplan.errors import InfeasibleError, InputError, UsageError
from autoplan.hardware import HardwareProfile
from autoplan.hardware.cluster import Cluster, load_hardware
from autoplan.options import AS_COMPUTED, Options
from autoplan.parallel_plan import Estimate, Plan
from autoplan.plan_words import describe_mesh
from autoplan.planning.answering import answer_of
from autoplan.planning.confidence import search_confidently
from autoplan.planning.problem import Problem, global_batch_size
from autoplan.search.result import Candidate, Remedy, SearchResult
from autoplan.units import GiB, format_seconds


def solve(problem: Problem) -> Answer:
    """`decide`, and when nothing fits, the changes that would make something fit; Ctrl-C keeps those found so far."""
    from autoplan.search.remedies import find_remedies

    answer = _with_ops(problem, decide(problem))
    if answer.result.status != "infeasible" or answer.result.n_meshes == 0:
        return answer
    found: list[Remedy] = []
    stopped_by = answer.result.stopped_by
    try:
        for remedy in find_remedies(
            problem.options,
            n_hosts=problem.hardware.n_hosts,
            retry=partial(_retry, problem),
            shared_batch=_shared_batch(problem),
        ):
            found.append(remedy)
    except KeyboardInterrupt:
        stopped_by = "interrupted"
    first = _in_one_sentence(found[0]) if found else ""
    result = replace(answer.result, remedies=tuple(found), nearest_fix=first, stopped_by=stopped_by)
    return replace(answer, result=result)


def _shared_batch(problem: Problem) -> int | None:
    """Another batch near the one asked for, which all devices share alike; None where that one is, or none is near.

    Groups of a mixed cluster share any batch, each as it can.
    """
    from autoplan.search.meshes import nearest_shared_batch

    if isinstance(problem.hardware, Cluster):
        return None
    batch = global_batch_size(problem)
    near = nearest_shared_batch(batch, n_devices=problem.hardware.n_devices)
    return None if near == batch else near


def _in_one_sentence(remedy: Remedy) -> str:
    figures = f"{format_seconds(remedy.step_s)} a step, {remedy.peak_bytes / GiB:.1f} GiB"
    return f"{remedy.change}: {figures}, {describe_mesh(remedy.mesh)}, recompute {remedy.recompute}"


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
        met = _with_confidence(problem, result.memory_confidence)
        result = replace(result, best=replace(result.best, estimate=judge(met, result.best.plan)))
    return answer_of(problem, result)


def _with_confidence(problem: Problem, confidence: float) -> Problem:
    return replace(problem, options=replace(problem.options, memory_confidence=confidence))


def _with_ops(problem: Problem, answer: Answer) -> Answer:
    """The answer with the ops of its best plan; on hosts of one kind."""
    from autoplan.measure_model.lookup import ops_of_plan

    if isinstance(problem.hardware, Cluster) or answer.result.best is None:
        return answer
    plan = answer.result.best.plan
    return replace(answer, ops=ops_of_plan(problem.options, problem.graph, problem.hardware, plan, problem.measured))


def score(problem: Problem, plan: Plan) -> Answer:
    """One given plan, judged; the status of the answer is "given".

    A plan of before, or of other versions of libraries, may have a CUDA graph of a model that waits for the device: it
    is judged as its program runs, without.

    Raises: UsageError for another global batch than the plan's; PlanMismatchError when the plan was made for another
        model or needs more devices; InputError naming the field when it is impossible in itself.
    """
    from autoplan.checks.plan import check_plan

    if problem.graph.waits_at and not plan.mesh.needs_generated_model:
        plan = replace(plan, mesh=replace(plan.mesh, cuda_graph=False))
    check_plan(plan, problem.graph, problem.hardware, rule_files=problem.options.rules)
    batch = problem.options.global_batch
    if batch not in (None, plan.mesh.global_batch_size):
        raise UsageError.of(
            "--global-batch",
            found=batch,
            expected=f"{plan.mesh.global_batch_size}, as the given plan has",
            fix="leave it out, or plan again with it",
        )
    if problem.measured is not None and plan.precision != problem.options.precision:
        raise UsageError(
            f"--profile: read for {problem.options.precision}, the plan is in {plan.precision}\n"
            f"  fix: add --precision {plan.precision}"
        )
    estimate = judge(_with_confidence(problem, AS_COMPUTED), plan)
    best = Candidate(plan, estimate, bound_s=estimate.step_s)
    result = SearchResult("given", best, (), (), (), bound_s=None, n_meshes=1, search_s=0.0)
    problem = replace(problem, options=replace(problem.options, precision=plan.precision))
    return answer_of(problem, result)


def _nothing(status: str, why: str) -> SearchResult:
    """The result when not one mesh could be tried."""
    return SearchResult(status, None, (), (), (), bound_s=None, n_meshes=0, search_s=0.0, nearest_fix=why)


def judge(problem: Problem, plan: Plan) -> Estimate:
    """Time and memory of one plan of this problem, which is trusted; see `score` for any other."""
    from autoplan.simulator.simulate import simulate

    return simulate(cost_table(problem, plan), plan.stages, with_timeline=True)


def cost_table(problem: Problem, plan: Plan) -> CostTable:
    """What one plan of this problem, which is trusted, is judged by."""
    from autoplan.space.mixed_space import price_mixed_plan
    from autoplan.space.priced import price_plan

    graph, hardware, options = problem.graph, problem.hardware, problem.options
    rules, confidence = options.rules, options.memory_confidence
    if isinstance(hardware, Cluster):
        return price_mixed_plan(graph, hardware, plan, rule_files=rules, memory_confidence=confidence)
    return price_plan(graph, hardware, plan, rule_files=rules, measured=problem.measured, memory_confidence=confidence)


def _search(
    problem: Problem,
    *,
    warm_start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
    patience_s: float | None = None,
) -> SearchResult:
    """The search, whatever comes of it; where it is done twice (`confidence`), the space is priced once."""
    from autoplan.search import search
    from autoplan.search.mixed.search import search_mixed
    from autoplan.search.outlook import seems_hopeless
    from autoplan.space.mixed_space import mixed_space
    from autoplan.space.priced import PricedSpace, priced_space

    graph, hardware, batch = problem.graph, problem.hardware, global_batch_size(problem)

    @cache
    def offered(hardware: HardwareProfile) -> PricedSpace:
        return priced_space(graph, hardware, problem.options, global_batch=batch, measured=problem.measured)

    def under(options: Options, planless_share: float) -> SearchResult:
        try:
            if isinstance(hardware, Cluster):
                mixed = mixed_space(graph, hardware, options, global_batch=batch)
                return search_mixed(
                    mixed, options=options, clock=clock, patience_s=patience_s, planless_share=planless_share
                )
            own = offered(hardware).with_confidence(options.memory_confidence)
            return search(
                own.space,
                price=own.price,
                options=options,
                make_plan=own.make_plan,
                warm_start=warm_start,
                clock=clock,
                patience_s=patience_s,
                planless_share=planless_share,
            )
        except InfeasibleError as error:
            return _nothing("infeasible", str(error))

    def looks_hopeless() -> bool:
        if isinstance(hardware, Cluster):
            return False
        own = offered(hardware).with_confidence(AS_COMPUTED)
        return seems_hopeless(own.space, problem.options, price=own.price)

    return search_confidently(under, problem.options, is_patient=patience_s is not None, seems_hopeless=looks_hopeless)


def _retry(problem: Problem, options: Options, n_hosts: int) -> SearchResult:
    """The same global batch, unless these have one, under other options, on that many hosts; a cluster that cannot be
    has no plan.
    """
    try:
        is_same = n_hosts == problem.hardware.n_hosts
        hardware = problem.hardware if is_same else load_hardware(problem.hw, n_hosts=n_hosts)
        options = replace(options, global_batch=options.global_batch or global_batch_size(problem))
        return _search(replace(problem, hardware=hardware, options=options))
    except InputError as error:
        return _nothing("unusable", str(error))
