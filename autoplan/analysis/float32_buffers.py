"""Buffers that stay in float32 where a program computes in 16 bits.

    running statistics      of BatchNorm: what a step adds to them is less than 16 bits resolve
    what forward widens     to float32 before it computes with it: rotary frequencies, whose error positions multiply
    what nothing reads      which the model may keep for another length

All others get the compute dtype, as by `model.to(dtype)`, because they meet activations: tables, masks. No other value
of a program has another dtype for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from autoplan.graph import COMPUTE, GraphFacts, Op, OpGraph
from autoplan.rules import operand_names

_STATISTICS = {"aten.batch_norm.default": slice(3, 5)}  # positions of what is normalized with
# Operators that hand elements of their first operand on as they are.
_MOVES = (
    "alias clone contiguous detach embedding expand flatten gather index index_select narrow permute repeat reshape"
    " select slice squeeze t transpose unflatten unsqueeze view"
)


@lru_cache(maxsize=4)
def float32_values(graph: OpGraph) -> frozenset[str]:
    """Names of these buffers, and of views of them; each is in float32 where the graph says "compute"."""
    if graph.is_module_level:
        return frozenset()
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.input_names():
            readers.setdefault(name, []).append(op)
    kept: set[str] = set()
    for parameter in graph.parameters:
        if parameter.is_buffer and parameter.spec.dtype == COMPUTE and parameter.name not in graph.model_outputs:
            kept |= _reach(graph, parameter.name, readers) or set()
    return frozenset(kept)


def float32_buffers(graph: OpGraph) -> frozenset[str]:
    """Names of these buffers."""
    return frozenset(parameter.name for parameter in graph.parameters) & float32_values(graph)


def running_statistics(graph: OpGraph) -> frozenset[str]:
    """Names of the running statistics of BatchNorm."""
    found = (name for op in graph.ops if op.target in _STATISTICS for name in _statistics_of(op))
    return frozenset(found) & {parameter.name for parameter in graph.parameters if parameter.is_buffer}


def patterns(names: Collection[str], *, others: Iterable[str] = ()) -> tuple[str, ...]:
    """The names with `*` for numbers, each once: `layers.*.norm.running_mean`; as they are where `others` fit, too."""
    foreign = {_without_numbers(name) for name in others if name not in names}
    starred = ((name, _without_numbers(name)) for name in sorted(names))
    return tuple(dict.fromkeys(name if pattern in foreign else pattern for name, pattern in starred))


def _without_numbers(name: str) -> str:  # as in runtime.building.buffers
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _reach(graph: OpGraph, name: str, readers: Mapping[str, list[Op]]) -> set[str] | None:
    """A value and its views, up to ops whose results have the same dtype in any case; None where there are others."""
    found = {name}
    for op in readers.get(name, ()):
        if op.target in _STATISTICS and name in _statistics_of(op) or all(s.dtype != COMPUTE for s in op.outputs):
            continue
        if not _is_move(graph, op, name) or op.name in (*graph.model_outputs, graph.loss):
            return None
        further = _reach(graph, op.name, readers)
        if further is None:
            return None
        found |= further
    return found


def _statistics_of(op: Op) -> tuple[str, ...]:
    return tuple(ref.name for ref in op.args[_STATISTICS[op.target]] if hasattr(ref, "name"))


def _is_move(graph: OpGraph, op: Op, name: str) -> bool:
    specs = GraphFacts.of(graph).specs
    operator = op.target.split(".")[1] if "." in op.target else ""
    return operator in _MOVES.split() and [n for n in operand_names(op) if specs[n].is_float] == [name]
