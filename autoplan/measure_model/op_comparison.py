"""Which ops of a plan's segments take the time: as measured by `autoplan profile`, beside what the roofline says.

    measured    lines of what "ops": per op and shapes of its tensors, forward and backward
    computed    the ops of the graph on one rank, by name and local shapes: `cost.segment_work.timed`

Both are grouped by op and shapes. What remains on one side only is compared by the name of the op; a name that only one
side has (code may say reshape where the graph has view) stands alone, which is why a figure may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import timed
from autoplan.cost.work_context import WorkContext, work_contexts
from autoplan.graph import PADDED_LINEAR, GraphFacts, OpGraph, Segment
from autoplan.hardware import HardwareProfile
from autoplan.measured_profile.op_times import OpComparison, OpSeconds, SegmentComparison, SegmentOps, Shapes
from autoplan.measured_profile.segment_key import assignment_key, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Plan, SegmentSharding
from autoplan.rules import OpRule
from autoplan.tensor_parallel.sharding import read_sharding

OpKey = tuple[str, Shapes]


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
                computed = _computed(contexts(tp), segment, assignment, row.micro_batch_size)
                n_segments = sum(other.kind == kind for other in graph.segments)
                ops = _compared(_measured(row), computed)
                found.append(SegmentComparison(segment.name, n_segments, tp, row.micro_batch_size, ops))
                break
    return tuple(found)


def _measured(row: SegmentOps) -> dict[OpKey, OpSeconds]:
    return {(item.op, item.shapes): OpSeconds(item.forward_s, item.backward_s) for item in row.ops}


def _computed(
    context: WorkContext, segment: Segment, assignment: SegmentSharding | None, batch_size: int
) -> dict[OpKey, OpSeconds]:
    degree, facts = context.degree, context.facts
    layouts = read_sharding(context.graph, segment, assignment, degree=degree, rules=context.rules, facts=facts)
    found: defaultdict[OpKey, OpSeconds] = defaultdict(OpSeconds)
    for local in local_segment(context, segment, layouts).ops:
        time = timed(context, local, batch_size)
        shapes = tuple(spec.at(batch_size) for spec in local.operands if spec.shape)
        key = _profiled_name(local.op.target), shapes
        found[key] = found[key].plus(OpSeconds(time.forward_s, time.backward_s))
    return dict(found)


def _profiled_name(target: str) -> str:
    """aten.linear.default is aten::linear to the profiler, and so is the product of a padded head."""
    if target == PADDED_LINEAR:
        return "aten::linear"
    namespace, _, rest = target.partition(".")
    return f"{namespace}::{rest.split('.')[0]}" if rest else target


def _compared(measured: Mapping[OpKey, OpSeconds], computed: Mapping[OpKey, OpSeconds]) -> tuple[OpComparison, ...]:
    rows = [OpComparison(*key, measured[key], computed[key]) for key in measured if key in computed]
    left = [_by_name({key: s for key, s in side.items() if not (key in measured and key in computed)})
            for side in (measured, computed)]  # fmt: skip
    for name in dict.fromkeys((*left[0], *left[1])):
        sides = [side.get(name) for side in left]
        if any(side is not None and side.total_s > 0 for side in sides):
            rows.append(OpComparison(name, (), *sides))
    return tuple(sorted(rows, key=lambda row: -(row.measured or OpSeconds()).total_s))


def _by_name(side: Mapping[OpKey, OpSeconds]) -> dict[str, OpSeconds]:
    found: defaultdict[str, OpSeconds] = defaultdict(OpSeconds)
    for (name, _), seconds in side.items():
        found[name] = found[name].plus(seconds)
    return dict(found)
