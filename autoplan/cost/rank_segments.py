"""Each kind of segment on one tensor-parallel rank, and its work, under every assignment that anyone asks for.

    WorkContext + assignments --local_segment--> LocalSegment --+--segment_work-----> SegmentWork of a micro-batch
                                                                +--compiled_segment-> CompiledPasses of one

Problems with the same context share one `RankSegments` and one `RankPasses`, which compute each of these once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from autoplan.analysis.executions import compiled_kinds, image_kinds
from autoplan.cost.chunked_loss import with_chunked_loss
from autoplan.cost.compiled_work import CompiledPasses, CompiledSegment, compiled_passes, compiled_segment
from autoplan.cost.fusions import fused_segment
from autoplan.cost.local_segment import LocalSegment, local_segment
from autoplan.cost.segment_work import SegmentWork, segment_work
from autoplan.cost.work_context import N_CONTEXTS, WorkContext
from autoplan.graph import Op
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import Strategy
from autoplan.tensor_parallel.op_strategies import legal_strategies
from autoplan.tensor_parallel.sharding import SegmentLayouts, read_assignment, read_sharding

Assignments = tuple[SegmentSharding, ...]  # one per kind that is split; other kinds are replicated
# Of what is compiled, by kind: under these assignments, for a micro-batch of this size.
RankPasses = Callable[[Assignments, int], Mapping[int, CompiledPasses]]


@dataclass(frozen=True, slots=True)
class RankSegments:
    """What a rank holds and does, by kind of segment.

    Attributes:
        local: of these assignments.
        work: of these assignments and a micro-batch of this size.
    """

    local: Callable[[Assignments], Mapping[int, LocalSegment]]
    work: Callable[[Assignments, int], Mapping[int, SegmentWork]]


@lru_cache(maxsize=N_CONTEXTS)
def rank_segments(context: WorkContext) -> RankSegments:
    """Those of one context; layouts of one degree share the legal strategies."""
    graph, facts = context.graph, context.facts
    first = graph.first_of_kind()

    @cache
    def legal(kind: int) -> Mapping[Op, tuple[Strategy, ...]]:
        return legal_strategies(graph.ops_of(first[kind]), facts.specs, facts.gradients, context.degree, context.rules)

    def layouts(kind: int, by_kind: Mapping[int, SegmentSharding]) -> SegmentLayouts:
        if kind in by_kind:
            return read_assignment(by_kind[kind], legal(kind))
        return read_sharding(graph, first[kind], None, degree=context.degree, rules=context.rules, facts=facts)

    @cache
    def local(assignments: Assignments) -> Mapping[int, LocalSegment]:
        by_kind = {assignment.kind: assignment for assignment in assignments}
        return {kind: local_segment(context, segment, layouts(kind, by_kind)) for kind, segment in first.items()}

    @cache
    def work(assignments: Assignments, micro_batch_size: int) -> Mapping[int, SegmentWork]:
        return {
            kind: with_chunked_loss(context, found, segment_work(context, found, micro_batch_size), micro_batch_size)
            for kind, found in local(assignments).items()
        }

    return RankSegments(local, work)


@lru_cache(maxsize=N_CONTEXTS)
def rank_passes(context: WorkContext, memory_format: str) -> RankPasses:
    """Those of a context whose values are contiguous, but for images: segments that read these get them in a format."""
    graph, of_images = context.graph, replace(context, memory_format=memory_format)
    first, images = graph.first_of_kind(), image_kinds(graph)

    @cache
    def compiled(assignments: Assignments) -> Mapping[int, CompiledSegment]:
        found = rank_segments(context).local(assignments)
        return {
            kind: compiled_segment(context, found[kind], fused_segment(context, first[kind], found[kind]))
            for kind in compiled_kinds(graph)
        }

    @cache
    def passes(assignments: Assignments, micro_batch_size: int) -> Mapping[int, CompiledPasses]:
        return {
            kind: compiled_passes(of_images if kind in images else context, own, micro_batch_size)
            for kind, own in compiled(assignments).items()
        }

    return passes
