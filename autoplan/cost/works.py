"""Works: how segments run, and what share of them a rank has -> SegmentWork of each kind, as measured where it was.

    ops of a rank, in a memory format --> eager work --+--------------------------------> eager work
                                                       +--> compiled parts of it fused --> compiled work
                                                       +--> `cost.measured` -------------> measured work

What is measured is set beside eager work, also where it ran compiled. Each part is worked out once for all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from autoplan.analysis.attention_kernel import scattered_masks
from autoplan.analysis.executions import execution_of, image_kinds
from autoplan.cost.compiled_work import as_compiled
from autoplan.cost.measured import Correction
from autoplan.cost.rank_segments import rank_passes, rank_segments
from autoplan.cost.segment_work import SegmentWork
from autoplan.cost.work_context import CONTIGUOUS, ContextOf
from autoplan.graph import GraphFacts, OpGraph
from autoplan.measured_profile.segment_key import assignment_key, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile
from autoplan.parallel_plan import Execution, Mesh, SegmentSharding

Shardings = Mapping[tuple[int, str], tuple[SegmentSharding, ...]]  # (tp, boundary layout) -> one per kind
Works = tuple[tuple[SegmentWork, str], ...]  # per kind, with the source of its times (see `cost.measured`)
# Products beside a receive of 4 thread blocks that waits: 1.726 ms in place of 1.621 (2 H200, 2026-11-22,
# benchmarks/results/sends_h200_x2_2026-11-22.jsonl). Ranks that receive ahead nearly always have one; taken for all
# that they compute, on all GPUs.
BESIDE_RECEIVES = 1.065


class Share(NamedTuple):
    """What a rank has of every segment: the shards of a boundary layout, and the samples of a micro-batch."""

    tp: int
    sharding: str
    micro_batch_size: int


class WorkKey(NamedTuple):
    """What the work of segments depends on; meshes share it.

    `keeps_modules`: blocks are the user's own modules.
    """

    share: Share
    execution: Execution
    keeps_modules: bool

    @classmethod
    def of(cls, mesh: Mesh) -> WorkKey:
        """That of a mesh."""
        share = Share(mesh.tp, mesh.sharding, mesh.micro_batch_size)
        return cls(share, mesh.execution, not mesh.needs_generated_model)


class _Order(NamedTuple):
    """How values lie in memory: images in a format, and masks as the user's own modules leave them, or dense."""

    memory_format: str
    keeps_modules: bool


_WorkPricer = Callable[[Share, _Order], Mapping[int, SegmentWork]]  # without any measurement


def make_works_pricer(
    graph: OpGraph,
    contexts: ContextOf,
    *,
    shardings: Shardings,
    measured: MeasuredProfile | None,
) -> Callable[[WorkKey], Works]:
    """The work of each kind of segment, as measured where it was."""
    are_masks_apart = bool(scattered_masks(graph))  # else the user's modules and generated code take the same
    eager = _eager_pricer(graph, contexts, shardings=shardings)
    compiled = _compiled_pricer(contexts, shardings=shardings, eager=eager)

    @cache
    def correction(execution: Execution, keeps_modules: bool) -> Correction | None:
        if measured is None:
            return None
        return _correction(
            graph, measured, shardings=shardings, eager=eager, execution=execution, keeps_modules=keeps_modules
        )

    @cache
    def works(key: WorkKey) -> Works:
        as_measured = correction(key.execution, key.keeps_modules)
        work_of = compiled if as_measured is None and key.execution.compile else eager
        found = work_of(key.share, _Order(key.execution.memory_format, key.keeps_modules and are_masks_apart))
        if as_measured is None:
            return tuple((work, "") for work in found.values())
        return tuple(as_measured.corrected(work, kind=kind, **key.share._asdict()) for kind, work in found.items())

    return works


def make_running_works(works: Callable[[WorkKey], Works]) -> Callable[[WorkKey, bool, bool], tuple[SegmentWork, ...]]:
    """(key, whether passes are a CUDA graph, whether receives wait beside them) -> the work of each kind as it runs."""

    @cache
    def running(key: WorkKey, is_captured: bool, is_slowed: bool) -> tuple[SegmentWork, ...]:
        found = tuple(work.captured() if is_captured else work for work, _ in works(key))
        return tuple(work.slowed(BESIDE_RECEIVES, BESIDE_RECEIVES) for work in found) if is_slowed else found

    return running


def _eager_pricer(graph: OpGraph, contexts: ContextOf, *, shardings: Shardings) -> _WorkPricer:
    """The work of operators one by one."""
    images = image_kinds(graph)

    @cache
    def in_order(share: Share, order: _Order) -> Mapping[int, SegmentWork]:
        found = shardings.get((share.tp, share.sharding), ())
        context = contexts(share.tp, order.memory_format, keeps_modules=order.keeps_modules)
        return rank_segments(context).work(found, share.micro_batch_size)

    @cache
    def eager(share: Share, order: _Order) -> Mapping[int, SegmentWork]:
        """Only segments that read images read them in this format."""
        found = in_order(share, order._replace(memory_format=CONTIGUOUS))
        if order.memory_format == CONTIGUOUS:
            return found
        of_images = in_order(share, order)
        return {kind: of_images[kind] if kind in images else work for kind, work in found.items()}

    return eager


def _compiled_pricer(contexts: ContextOf, *, shardings: Shardings, eager: _WorkPricer) -> _WorkPricer:
    """The same, with what is compiled as it runs then."""

    @cache
    def compiled(share: Share, order: _Order) -> Mapping[int, SegmentWork]:
        found, assignments = eager(share, order), shardings.get((share.tp, share.sharding), ())
        context = contexts(share.tp, keeps_modules=order.keeps_modules)
        of_passes = rank_passes(context, order.memory_format)(assignments, share.micro_batch_size)
        return {**found} | {kind: as_compiled(found[kind], own) for kind, own in of_passes.items()}

    return compiled


def _correction(
    graph: OpGraph,
    measured: MeasuredProfile,
    *,
    shardings: Shardings,
    eager: _WorkPricer,
    execution: Execution,
    keeps_modules: bool,
) -> Correction:
    first, facts = graph.first_of_kind(), GraphFacts.of(graph)

    def compute(tp: int, sharding: str, micro_batch_size: int, kind: int, is_own: bool) -> SegmentWork:
        return eager(Share(tp, sharding, micro_batch_size), _Order(execution.memory_format, is_own))[kind]

    assignments = {}
    for split, found in {(1, ""): (), **shardings}.items():
        by_kind = {assignment.kind: assignment for assignment in found}
        assignments[split] = {kind: assignment_key(graph, s, by_kind.get(kind)) for kind, s in first.items()}
    return Correction.of(
        measured,
        contents={kind: content_key(graph, facts, segment) for kind, segment in first.items()},
        assignments=assignments,
        compute=compute,
        executions={kind: execution_of(graph, kind, execution) for kind in first},
        keeps_modules=keeps_modules,
    )
