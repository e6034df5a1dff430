"""What one segment hands on to others and several of them keep: one memory, which only one counts, or each its share.

A value that all segments of a kind read, as those of a decoder what an encoder returned, is shared among them. A result
that autograd keeps where it is made, and again where it is read, is counted where it is made:

    block 1  ... add, relu -> y1        keeps y1, for the gradient of relu
    block 2  conv(y1), ... relu -> y2   keeps y1, for that of conv, and y2

A block that is recomputed frees what it made; who reads its result has that kept. So it counts the result in any case,
and its readers in none. Compiled blocks keep a mask in place of such a result, and are left alone. Under tensor
parallelism a block may keep a shard of its result, and its readers what was gathered of it: all count what they keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autoplan.cost.work_context import N_CONTEXTS, WorkContext
from autoplan.graph import Segment


@dataclass(frozen=True, slots=True)
class HandedOn:
    """By kind of segment, names of the first of it; segments of a kind cost the same, so it is for all of them.

    Attributes:
        common: inputs with a gradient that all of the kind read at the same place, and how many these are.
        inputs: those that the segments that made them count, for each of the kind.
        outputs: those that, for any of the kind, blocks behind it leave it to count.
    """

    common: Mapping[int, Mapping[str, int]]
    inputs: Mapping[int, frozenset[str]]
    outputs: Mapping[int, frozenset[str]]


@lru_cache(maxsize=N_CONTEXTS)
def handed_on(context: WorkContext) -> HandedOn:
    """Of the segments of a graph; all but `common` of eager ones."""
    kinds: dict[int, list[Segment]] = {}
    for segment in context.graph.segments:
        kinds.setdefault(segment.kind, []).append(segment)
    kept = _kept_results(context) if context.degree == 1 else frozenset[str]()
    left, common, inputs = set[str](), dict[int, dict[str, int]](), dict[int, frozenset[str]]()
    for kind, alike in kinds.items():
        places = list(zip(*(segment.inputs for segment in alike), strict=True))
        same = (place[0] for place in places if len(set(place)) == 1)
        common[kind] = {name: len(alike) for name in same if name in context.facts.gradients}
        found = [place for place in places if kept.issuperset(place)] if alike[0].is_block else []
        inputs[kind] = frozenset(place[0] for place in found)
        left.update(*found)
    outputs = {
        kind: frozenset(
            place[0]
            for place in zip(*(segment.outputs for segment in alike), strict=True)
            if not left.isdisjoint(place)
        )
        for kind, alike in kinds.items()
    }
    return HandedOn(common, inputs, outputs)


def _kept_results(context: WorkContext) -> frozenset[str]:
    """Those that autograd keeps for the op that makes them, in memory of their own."""
    return frozenset(
        op.name
        for op in context.graph.ops
        if op.name in context.facts.gradients
        and op.name not in context.idle
        and (rule := context.rules.get(op.target)) is not None
        and not rule.is_view
        and -1 in rule.saves
    )
