"""One problem as the search sees it: the space of meshes, a price for each, and the way back to a plan.

OpGraph + HardwareProfile + Options --> SearchSpace, price(mesh) -> CostTable, make_plan(mesh, stages) -> Plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoplan.analysis.captured import may_recompute_captured
from autoplan.analysis.head_group import head_group
from autoplan.analysis.kept_attention import kinds_with_attention
from autoplan.answers.intervals import memory_margin
from autoplan.checks.fixes import check_fixed
from autoplan.checks.product_dtypes import check_product_dtypes
from autoplan.cost.boundaries import legal_cuts, why_uncut
from autoplan.cost.grad_compression import Compression
from autoplan.cost.price import Pricer, make_pricer
from autoplan.cost.table import CostTable
from autoplan.graph import OpGraph
from autoplan.hardware import HardwareProfile
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.options import AS_COMPUTED, Options
from autoplan.parallel_plan import Execution, Mesh, Plan
from autoplan.rules import load_rules
from autoplan.search.meshes import MakePlan, SearchSpace
from autoplan.space.choices import (
    attention_choices,
    capture_choices,
    check_execution,
    codes,
    compression_choice,
    executions,
    loss_choice,
    zero_stages,
)
from autoplan.space.current_code import with_current_code
from autoplan.space.layouts import of_size, shardings_by_size
from autoplan.space.plan_maker import PlanMaker


@dataclass(frozen=True, slots=True)
class PricedSpace:
    """What `search` is called with, besides the options; `pricers` are by the micro-batches of their layouts."""

    space: SearchSpace
    pricers: Mapping[int, Pricer]
    make_plan: MakePlan

    def price(self, mesh: Mesh) -> CostTable:
        """The cost table of a mesh of the space."""
        return of_size(self.pricers, mesh)(mesh)

    def with_confidence(self, memory_confidence: float) -> PricedSpace:
        """The same where memory must suffice with another confidence; what was priced is not priced again."""
        margin = partial(memory_margin, confidence=memory_confidence)
        return replace(self, pricers={size: price.with_margin(margin) for size, price in self.pricers.items()})


def priced_space(
    graph: OpGraph,
    hardware: HardwareProfile,
    options: Options,
    *,
    global_batch: int,
    n_devices: int | None = None,
    measured: MeasuredProfile | None = None,
) -> PricedSpace:
    """Solve the tensor-parallel programs of every degree, and offer everything to the search.

    With `n_devices` every plan uses exactly that many; otherwise the cluster's, or fewer where that is faster.
    """
    check_fixed(graph, options)
    rules = load_rules(options.rules)
    check_product_dtypes(graph, options.precision)
    by_size = shardings_by_size(graph, hardware, options, rules)
    measured = with_current_code(measured, graph, by_size.values(), precision=options.precision, rules=rules)
    keys: dict[int, list[str]] = {1: [""]}
    for degree, key in by_size[min(by_size)]:
        keys.setdefault(degree, []).append(key)
    captures = capture_choices(graph, options, device=hardware.device)
    space = SearchSpace(
        n_devices=n_devices or hardware.n_devices,
        uses_all_devices=n_devices is not None,
        n_devices_per_host=hardware.n_devices_per_host,
        n_devices_joined=hardware.n_devices_joined,
        global_batch=global_batch,
        kinds=tuple(segment.kind for segment in graph.segments),
        cuts=legal_cuts(graph),
        shardings=tuple((degree, tuple(names)) for degree, names in keys.items()),
        zero_stages=zero_stages(graph, options),
        executions=executions(graph, options, measured, device=hardware.device),
        generated=codes(graph, options, measured, captures=captures, device=hardware.device),
        wraps_head=bool(head_group(graph)),
        why_uncut=why_uncut(graph),
        keeps_attention=attention_choices(graph, options, device=hardware.device),
        cuda_graph=captures,
        lists_plain=not may_recompute_captured(graph),
    )
    pricers = {
        size: make_pricer(
            graph,
            hardware=hardware,
            precision=options.precision,
            shardings=shardings,
            rules=rules,
            measured=measured,
            loss=loss_choice(options),
            compression=compression_choice(options),
            memory_margin=partial(memory_margin, confidence=options.memory_confidence),
        )
        for size, shardings in by_size.items()
    }
    attention = kinds_with_attention(graph, precision=options.precision, attention=hardware.device.attention)
    content_hash = graph.content_hash()
    maker = PlanMaker(graph, content_hash, by_size, rules, options, hardware.name, hardware.n_hosts, attention)
    return PricedSpace(space, pricers, maker.plan)


def price_plan(
    graph: OpGraph,
    hardware: HardwareProfile,
    plan: Plan,
    *,
    rule_files: Sequence[str] = (),
    measured: MeasuredProfile | None = None,
    memory_confidence: float = AS_COMPUTED,
) -> CostTable:
    """The cost table of one given plan, with the tensor-parallel assignment that the plan carries."""
    way, degree, rules = plan.mesh.execution, plan.mesh.tp, load_rules(rule_files)
    shardings = {(degree, plan.mesh.sharding): plan.shardings}
    split = [shardings] if degree > 1 else []  # the whole model's were looked at where the measured profile was read
    measured = with_current_code(measured, graph, split, precision=plan.precision, rules=rules)
    if way.compile:
        check_execution(graph, measured, Execution(compile=True), where="plan: mesh.compile", degree=degree)
    if way != Execution():
        check_execution(graph, measured, way, where="plan: mesh.memory_format", degree=degree)
    pricer = make_pricer(
        graph,
        hardware=hardware,
        precision=plan.precision,
        shardings=shardings,
        rules=rules,
        measured=measured,
        loss=plan.loss,
        compression=Compression(plan.grad_compression, plan.powersgd_rank),
        memory_margin=partial(memory_margin, confidence=memory_confidence),
    )
    return pricer(plan.mesh)
