"""Which measurements of generated code are of the code that is generated today.

A line says by its key (`segment_key.code_key`) which code ran. It counts

    where the same code is generated today for its content and layouts
    where nobody can say: it has no key, as in files of before there were any, or its layouts are not found today

and not where a line that is sure says the same. Lines of the user's own modules always count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from autoplan.cost.works import Shardings
from autoplan.graph import GraphFacts, OpGraph
from autoplan.measured_profile.op_times import SegmentOps
from autoplan.measured_profile.segment_key import assignment_key, code_key, content_key
from autoplan.measured_profile.segment_times import FailedSegment, MeasuredProfile, SegmentTime
from autoplan.parallel_plan import Mesh, Plan, SegmentSharding, StagePlan
from autoplan.rules import OpRule

Codes = Mapping[tuple[str, str, int], str]  # (content, assignment, degree) -> key of what is generated
WHOLE_MODEL: Shardings = {(1, ""): ()}
_Row = TypeVar("_Row", SegmentTime, SegmentOps)
_Measured = TypeVar("_Measured", MeasuredProfile, MeasuredProfile | None)


def with_current_code(
    measured: _Measured,
    graph: OpGraph,
    splits: Iterable[Shardings],
    *,
    precision: str,
    rules: Mapping[str, OpRule],
) -> _Measured:
    """Only the measurements that count, as far as these splits tell; code is generated for those that were measured."""
    if measured is None:
        return measured
    named = {
        (row.content, row.assignment, row.tp)
        for row in (*measured.segments, *measured.ops, *measured.failed)
        if row.code is not None
    }
    codes: dict[tuple[str, str, int], str] = {}
    for (degree, boundary), assignments in (item for found in splits if named for item in found.items()):
        keys = _keys(graph, degree, assignments)
        if not named.isdisjoint(keys.values()):
            plan = one_stage_plan(graph, precision, degree, boundary, assignments)
            codes |= _codes(graph, plan, keys, rules=rules)
    if not codes:
        return measured
    return replace(
        measured,
        segments=_counting(measured.segments, codes),
        ops=_counting(measured.ops, codes),
        failed=tuple(row for row in measured.failed if not _is_old(row, codes)),
    )


def one_stage_plan(
    graph: OpGraph, precision: str, degree: int, boundary: str, assignments: tuple[SegmentSharding, ...]
) -> Plan:
    """The whole model as one stage: what segments are generated from to be measured."""
    stage = StagePlan(0, len(graph.segments))
    return Plan(Mesh(tp=degree, sharding=boundary), (stage,), precision=precision, shardings=assignments)


def _keys(graph: OpGraph, degree: int, assignments: tuple[SegmentSharding, ...]) -> dict[int, tuple[str, str, int]]:
    """(content, assignment, degree) of each kind."""
    facts, by_kind = GraphFacts.of(graph), {assignment.kind: assignment for assignment in assignments}
    return {
        kind: (content_key(graph, facts, segment), assignment_key(graph, segment, by_kind.get(kind)), degree)
        for kind, segment in graph.first_of_kind().items()
    }


def _codes(
    graph: OpGraph, plan: Plan, keys: Mapping[int, tuple[str, str, int]], *, rules: Mapping[str, OpRule]
) -> dict[tuple[str, str, int], str]:
    from autoplan.codegen.segment_modules import segment_modules

    _, classes = segment_modules(graph, plan, rules=rules)
    return {key: code_key(classes[kind].text) for kind, key in keys.items()}


def _counting(rows: tuple[_Row, ...], codes: Codes) -> tuple[_Row, ...]:
    sure = {row.subject for row in rows if row.code is not None and not _is_old(row, codes)}
    return tuple(row for row in rows if not _is_old(row, codes) and (row.code is not None or row.subject not in sure))


def _is_old(row: SegmentTime | SegmentOps | FailedSegment, codes: Codes) -> bool:
    return row.code is not None and row.code != codes.get((row.content, row.assignment, row.tp), row.code)
