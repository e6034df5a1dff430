"""Which ops of a plan's segments take the time: as measured by `autoplan profile`, beside what the roofline says.

Where no ops were measured the roofline speaks alone.

    measured    lines of what "ops": per op and shapes of its tensors, forward and backward
    computed    the ops of the graph on one rank, by name and local shapes: `cost.segment_work.timed`

Both are grouped by op and shapes. What remains on one side only is compared by the name of the op; a name that only one
side has (code may say reshape where the graph has view) stands alone, which is why a figure may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoplan.cost.local_segment import LocalSegment, local_segment
from autoplan.cost.segment_work import gradient_additions, segment_work, timed
from autoplan.cost.work_context import WorkContext, work_contexts
from autoplan.graph import PADDED_LINEAR, GraphFacts, OpGraph, Segment
from autoplan.hardware import HardwareProfile
from autoplan.measured_profile.op_times import OpComparison, OpTotals, SegmentComparison, SegmentOps, Shapes
from autoplan.measured_profile.segment_key import assignment_key, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Plan, SegmentSharding
from autoplan.rules import OpRule
from autoplan.tensor_parallel.sharding import read_sharding

OpKey = tuple[str, Shapes]

SUMS_OF_GRADIENTS, CASTS_AND_COPIES = "sums of gradients", "casts and copies"
NOTHING_S = 1e-12  # what rounding leaves


def compare_ops(
    graph: OpGraph, hardware: HardwareProfile, plan: Plan, measured: MeasuredProfile, *, rules: Mapping[str, OpRule]
) -> tuple[SegmentComparison, ...]:
    """Every kind of segment whose ops were measured split as in the plan, or, where they were not, whole."""
    facts, contexts = GraphFacts.of(graph), work_contexts(graph, hardware, plan.precision, rules)
    assignments = {assignment.kind: assignment for assignment in plan.shardings}
    found = []
    for kind, segment in graph.first_of_kind().items():
        content = content_key(graph, facts, segment)
        own = {(row.tp, row.assignment): row for row in measured.ops if row.content == content}
        for tp, assignment in ((plan.mesh.tp, assignments.get(kind)), (1, None)):
            row = own.get((tp, assignment_key(graph, segment, assignment)))
            if row is not None:
                computed = _computed(contexts(tp), _local(contexts(tp), segment, assignment), row.micro_batch_size)
                ops = _compared(_measured(row), computed)
                found.append(_of_segment(graph, segment, tp, row.micro_batch_size, ops))
                break
    return tuple(found)


def computed_ops(
    graph: OpGraph, hardware: HardwareProfile, plan: Plan, *, rules: Mapping[str, OpRule]
) -> tuple[SegmentComparison, ...]:
    """Every kind of segment as it is in the plan, where no ops were measured; what is run beside them included."""
    contexts, mesh = work_contexts(graph, hardware, plan.precision, rules), plan.mesh
    context = contexts(mesh.tp, mesh.memory_format, keeps_modules=not mesh.needs_generated_model)
    assignments = {assignment.kind: assignment for assignment in plan.shardings}
    found = []
    for kind, segment in graph.first_of_kind().items():
        local = _local(context, segment, assignments.get(kind))
        computed = _computed(context, local, plan.mesh.micro_batch_size)
        computed |= _beside_ops(context, local, plan.mesh.micro_batch_size, computed)
        rows = [OpComparison(*key, None, totals) for key, totals in computed.items() if totals.total_s > 0]
        ops = tuple(sorted(rows, key=lambda row: -_total_s(row.computed)))
        found.append(_of_segment(graph, segment, plan.mesh.tp, plan.mesh.micro_batch_size, ops))
    return tuple(found)


def _of_segment(
    graph: OpGraph, segment: Segment, tp: int, micro_batch_size: int, ops: tuple[OpComparison, ...]
) -> SegmentComparison:
    n_alike = sum(other.kind == segment.kind for other in graph.segments)
    return SegmentComparison(segment.name, n_alike, tp, micro_batch_size, ops)


def _total_s(totals: OpTotals | None) -> float:
    return 0.0 if totals is None else totals.total_s


def _measured(row: SegmentOps) -> dict[OpKey, OpTotals]:
    return {(item.op, item.shapes): OpTotals(item.forward_s, item.backward_s) for item in row.ops}


def _local(context: WorkContext, segment: Segment, assignment: SegmentSharding | None) -> LocalSegment:
    degree, facts = context.degree, context.facts
    layouts = read_sharding(context.graph, segment, assignment, degree=degree, rules=context.rules, facts=facts)
    return local_segment(context, segment, layouts)


def _computed(context: WorkContext, segment: LocalSegment, batch_size: int) -> dict[OpKey, OpTotals]:
    found: defaultdict[OpKey, OpTotals] = defaultdict(OpTotals)
    for local in segment.ops:
        time = timed(context, local, batch_size)
        shapes = tuple(spec.at(batch_size) for spec in local.operands if spec.shape)
        key = _profiled_name(local.op.target), shapes
        found[key] = found[key].plus(OpTotals(time.forward_s, time.backward_s, 1, time.flops, time.moved_bytes))
    return dict(found)


def _beside_ops(
    context: WorkContext, segment: LocalSegment, batch_size: int, computed: Mapping[OpKey, OpTotals]
) -> dict[OpKey, OpTotals]:
    """What no op of the graph is: gradients of values with several readers, casts for the loss, and copies."""
    work = segment_work(context, segment, batch_size)
    n_additions, additions_s, n_bytes = gradient_additions(context, segment, batch_size)
    copies_forward_s = work.forward_s - sum(totals.forward_s for totals in computed.values())
    copies_backward_s = work.backward_s - additions_s - sum(totals.backward_s for totals in computed.values())
    found: dict[OpKey, OpTotals] = {(SUMS_OF_GRADIENTS, ()): OpTotals(0.0, additions_s, n_additions, 0.0, n_bytes)}
    if copies_forward_s + copies_backward_s > NOTHING_S:
        found[CASTS_AND_COPIES, ()] = OpTotals(copies_forward_s, copies_backward_s)
    return found


def _profiled_name(target: str) -> str:
    """aten.linear.default is aten::linear to the profiler, and so is the product of a padded head."""
    if target == PADDED_LINEAR:
        return "aten::linear"
    namespace, _, rest = target.partition(".")
    return f"{namespace}::{rest.split('.')[0]}" if rest else target


def _compared(measured: Mapping[OpKey, OpTotals], computed: Mapping[OpKey, OpTotals]) -> tuple[OpComparison, ...]:
    rows = [OpComparison(*key, measured[key], computed[key]) for key in measured if key in computed]
    left = [_by_name({key: s for key, s in side.items() if not (key in measured and key in computed)})
            for side in (measured, computed)]  # fmt: skip
    for name in dict.fromkeys((*left[0], *left[1])):
        sides = [side.get(name) for side in left]
        if any(side is not None and side.total_s > 0 for side in sides):
            rows.append(OpComparison(name, (), *sides))
    return tuple(sorted(rows, key=lambda row: -_total_s(row.measured)))


def _by_name(side: Mapping[OpKey, OpTotals]) -> dict[str, OpTotals]:
    found: defaultdict[str, OpTotals] = defaultdict(OpTotals)
    for (name, _), seconds in side.items():
        found[name] = found[name].plus(seconds)
    return dict(found)
