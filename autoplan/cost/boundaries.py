"""What passes over the boundaries between segments: where a pipeline may be cut, bytes and seconds, tied weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

from autoplan.cost.collective_time import Group, send_s, sendrecv_s
from autoplan.cost.parameters import element_bytes
from autoplan.cost.work_context import N_GRAPHS
from autoplan.graph import GraphFacts, OpGraph, TensorSpec, changing_buffers, crossings
from autoplan.hardware import HardwareProfile
from autoplan.layout import Layout, can_shard, local_spec, parse_layout
from autoplan.parallel_plan import Mesh

Cuts = tuple[float | None, ...]  # as in `CostTable`
Sent = tuple[Cuts, Cuts, tuple[int, ...]]  # of each boundary; see `make_cuts_pricer`
CutsPricer = Callable[[int, str, int, bool, Group], Sent]


def make_cuts_pricer(graph: OpGraph, hardware: HardwareProfile, precision: str) -> CutsPricer:
    """(tp, sharding, micro-batch size, whether ranks receive ahead, their ranks) -> three figures of each boundary.

    Seconds to send over it, seconds in a sendrecv (as much the other way at once), and bytes; the second empty where it
    is no more than the first. None, and 0 bytes, where nothing may be sent.
    """
    boundary_bytes = make_boundary_sizer(graph, precision)

    @cache
    def cuts(tp: int, sharding: str, micro_batch_size: int, is_ahead: bool, stages: Group) -> Sent:
        sizes = boundary_bytes(tp, sharding, micro_batch_size)
        allowed = {n_bytes for n_bytes in sizes if n_bytes is not None}
        seconds = {size: send_s(size, pair=stages, hardware=hardware, is_ahead=is_ahead) for size in allowed}
        both_s = {size: sendrecv_s(size, pair=stages, hardware=hardware, alone_s=seconds[size]) for size in allowed}
        alone, both = (tuple(None if size is None else of[size] for size in sizes) for of in (seconds, both_s))
        return alone, () if both == alone else both, tuple(size or 0 for size in sizes)

    return cuts


def make_boundary_sizer(graph: OpGraph, precision: str) -> Callable[[int, str, int], tuple[int | None, ...]]:
    """(tp, sharding, micro-batch size) -> bytes a rank sends over each boundary; None where the model is not cut."""
    crossing, legal = _crossing_specs(graph), legal_cuts(graph)

    @cache
    def of_specs(specs: tuple[TensorSpec, ...], tp: int, sharding: str, micro_batch_size: int) -> int:
        layout = parse_layout(sharding or "R")
        return sum(_boundary_spec(spec, layout, tp).n_bytes(micro_batch_size, precision) for spec in specs)

    @cache
    def sizes(tp: int, sharding: str, micro_batch_size: int) -> tuple[int | None, ...]:
        return tuple(
            of_specs(specs, tp, sharding, micro_batch_size) if is_legal else None
            for specs, is_legal in zip(crossing, legal, strict=True)
        )

    return sizes


@lru_cache(maxsize=N_GRAPHS)
def _crossing_specs(graph: OpGraph) -> tuple[tuple[TensorSpec, ...], ...]:
    """Per boundary: the values that cross it."""
    facts = GraphFacts.of(graph)
    of_segments = crossings(graph, invariant=facts.invariant)
    return tuple(tuple(facts.specs[name] for name in names) for names in of_segments[1:])


def legal_cuts(graph: OpGraph) -> tuple[bool, ...]:
    """Per boundary between neighbouring segments, whether the pipeline may be cut there.

    The model's outputs must come from the last stage, whose rank computes the loss: it makes them, or its last segment
    takes them. Whole modules are not cut: what passes between them was not traced. Nor is a model with gradients of its
    own, which generated stages would not have. Nor is one cut between two calls of a module that writes a buffer, of
    which each stage would have its own.
    """
    first_made = _first_made_output(graph) if _is_cuttable(graph) else 0
    inside = _between_writes(graph)
    return tuple(
        segment.stop <= first_made and number not in inside for number, segment in enumerate(graph.segments[:-1])
    )


def why_uncut(graph: OpGraph) -> str:
    """Which output of the model keeps pipelines from being cut behind it, and what to do; "" where none does."""
    first_made = _first_made_output(graph)
    behind = [segment for segment in graph.segments[:-1] if segment.stop > first_made]
    if not behind or not _is_cuttable(graph):
        return ""
    op = graph.ops[first_made]
    return (
        f"{op.label or op.target} of {behind[0].name} is an output of the model, and all outputs must come from the"
        " last stage: to have later cuts, let the last part of the model take it, or do not return it"
    )


def _is_cuttable(graph: OpGraph) -> bool:
    return not graph.is_module_level and not graph.has_own_gradients


def _first_made_output(graph: OpGraph) -> int:
    """The place among the ops of the first output that is not handed to the last segment."""
    made_by_last = (set(graph.model_outputs) or {graph.loss}).difference(graph.segments[-1].inputs)
    return next((i for i, op in enumerate(graph.ops) if op.name in made_by_last), len(graph.ops))


def _between_writes(graph: OpGraph) -> frozenset[int]:
    """The boundaries, by the segment before them, between segments that have the same buffer, which is written."""
    found: set[int] = set()
    for buffer in changing_buffers(graph):
        readers = [number for number, segment in enumerate(graph.segments) if buffer in segment.parameters]
        found.update(range(readers[0], readers[-1]) if readers else ())
    return frozenset(found)


def _boundary_spec(spec: TensorSpec, layout: Layout, degree: int) -> TensorSpec:
    """What a rank sends of a value."""
    return local_spec(spec, layout, degree) if can_shard(spec, layout, degree) and spec.is_float else spec


def tied_elements(graph: OpGraph) -> tuple[int, ...]:
    """Of each weight that several segments read: its elements."""
    readers: dict[str, int] = {}
    for segment in graph.segments:
        for name in segment.parameters:
            readers[name] = readers.get(name, 0) + 1
    return tuple(p.spec.n_elements(1) for p in graph.parameters if p.is_trainable and readers.get(p.name, 0) > 1)


def tied_weight_bytes(tied: tuple[int, ...], mesh: Mesh, precision: str) -> int:
    """Gradients of weights of so many elements, as a rank sums them with one other stage, if more hold them."""
    if mesh.pp == 1:
        return 0
    master_bytes = element_bytes(precision).master
    return sum(n * master_bytes // (mesh.tp * mesh.zero_shard_degree) for n in tied)
