"""The longest path through the actions of a schedule to the end of each rank, for given times of passes and transfers.

Nodes are the actions and the transfers between ranks, in an order in which each comes after those it waits for:

    an action waits for the one before it on its rank and what that leaves to be reduced, and for its input
    a transfer waits for its action and for that of the receiving rank behind which it is called, and for the transfer
    that goes the same way before it (see `simulator.replay`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autoplan.parallel_plan import Mesh
from autoplan.schedules import (
    GRADIENT_KINDS,
    KEPT_SCHEDULES,
    OrderedSchedule,
    receives_ahead,
    result_boundary,
    schedule_of,
)
from autoplan.search.paths.rank_paths import SYMBOLS
from autoplan.search.paths.schedule_paths import CUT, carry_symbol, symbol_of

Array = Any  # numpy.ndarray

_Node = tuple[int, int, int, int]  # what it takes; the two nodes it waits for; what the first of these takes besides
_START = 0  # the node before all others


@dataclass(frozen=True, slots=True)
class _Graph:
    """`nodes` from the second on; `last`: of each rank, its last node, with the stage of that."""

    nodes: tuple[_Node, ...]
    last: tuple[tuple[int, int], ...]


def longest_paths(mesh: Mesh, times_s: Array) -> Iterator[tuple[Array, int]]:
    """Per rank, how often each pass and transfer is on the longest path to its last action, and the stage of that.

    `times_s` and the counts are (symbol, stage), in the order of `rank_paths.SYMBOLS`.
    """
    assert receives_ahead(mesh.schedule)  # otherwise a transfer waits for the rank that needs it
    graph = _graph(schedule_of(mesh))
    seconds = [*times_s.ravel().tolist(), 0.0]
    ends_s, is_by_rank = [0.0], [True]
    for number, one, other, besides in graph.nodes:
        one_s, other_s = ends_s[one] + seconds[besides], ends_s[other]
        is_by_rank.append(one_s >= other_s)
        ends_s.append(max(one_s, other_s) + seconds[number])
    for place, stage in graph.last:
        on_path = []
        while place != _START:
            number, one, other, besides = graph.nodes[place - 1]
            on_path += [number, besides] if is_by_rank[place] else [number]
            place = one if is_by_rank[place] else other
        counts = np.bincount(on_path, minlength=times_s.size + 1)[:-1]
        yield counts.reshape(times_s.shape).astype(float), stage


@lru_cache(maxsize=KEPT_SCHEDULES)
def _graph(ordered: OrderedSchedule) -> _Graph:
    n_ranks, n_stages = len(ordered.schedule), len(ordered.ranks)
    nothing = len(SYMBOLS) * n_stages
    nodes: list[_Node] = []
    last: list[tuple[int, int]] = [(_START, nothing)] * n_ranks  # the node, and what it leaves
    stages = [0] * n_ranks  # of the last node of each
    own: list[int] = []  # the node of each action, by its place in the order
    arrivals: dict[int | None, int] = {None: _START}  # of what each sends, likewise

    def number(symbol: str, stage: int) -> int:
        return SYMBOLS.index(symbol) * n_stages + stage

    def add(node: _Node) -> int:
        nodes.append(node)
        return len(nodes)

    for place, (cue, awaited, call) in enumerate(zip(ordered.cues, ordered.awaited, ordered.calls, strict=True)):
        stage, kind, _ = ordered.passes[cue]
        rank, symbol = ordered.ranks[stage], symbol_of(ordered.passes[cue])
        before, left = last[rank]
        own.append(add((number(symbol, stage), before, arrivals[awaited], left)))
        last[rank] = own[place], number(carry_symbol(symbol), stage) if kind in GRADIENT_KINDS else nothing
        stages[rank] = stage
        if call is not None:
            called = add((nothing, own[place], _START if call.after is None else own[call.after], nothing))
            cut = number(CUT, result_boundary(stage, kind))
            arrivals[place] = add((cut, called, arrivals[call.behind], nothing))
    return _Graph(tuple(nodes), tuple((place, stage) for (place, _), stage in zip(last, stages, strict=True)))
