"""Calls: which segments call a block that others call, too, and which of them holds its weights.

    kinds in the graph      stem  A  B  A  B  A  B  head        A, B: blocks that are called in turns
    calls                   only  first  later  last  only
    kinds on one stage       0    4  5  6  7  8  9   3          behind the kinds 0 to 3 of the graph

In a pipeline each call holds the weights, as each stage with one of them does; which of them share a stage is not known
when a mesh is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.cost.parameters import FIRST_CALL, HOLDING_CALLS, LAST_CALL, LATER_CALL, ONLY_CALL
from autoplan.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Calls:
    """The kinds of segments where calls of a block that is called several times have kinds of their own.

    Attributes:
        kinds, graph_kinds: of each segment, here and in the graph.
        of_kinds: of each kind, that in the graph, and which of the calls of a block it is; those of the graph first.
    """

    kinds: tuple[int, ...]
    graph_kinds: tuple[int, ...]
    of_kinds: tuple[tuple[int, str], ...]

    def holders(self) -> Iterator[int]:
        """The kinds in the graph of the segments that hold weights."""
        return (kind for kind, call in map(self.of_kinds.__getitem__, self.kinds) if call in HOLDING_CALLS)


def calls_of(graph: OpGraph, *, is_cut: bool) -> Calls:
    """The calls of a graph on one stage or, where `is_cut`, in a pipeline.

    Segments between blocks are calls, too: those of one kind read the same weights.
    """
    graph_kinds = tuple(segment.kind for segment in graph.segments)
    numbers = {(kind, ONLY_CALL): kind for kind in graph.first_of_kind()}
    if is_cut:
        return Calls(graph_kinds, graph_kinds, tuple(numbers))
    places: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for place, segment in enumerate(graph.segments):
        places.setdefault((segment.kind, segment.parameters), []).append(place)
    kinds = []
    for place, segment in enumerate(graph.segments):
        own, call = places[segment.kind, segment.parameters], ONLY_CALL
        if len(own) > 1 and segment.parameters:
            call = FIRST_CALL if place == own[0] else LAST_CALL if place == own[-1] else LATER_CALL
        kinds.append(numbers.setdefault((segment.kind, call), len(numbers)))
    return Calls(tuple(kinds), graph_kinds, tuple(numbers))
