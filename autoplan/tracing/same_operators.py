"""Whether two runs of a model are the same: operator by operator, on the same results, with the same arguments.

Whole and decimal numbers may differ, since they may be sizes of the batch or follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch

Twins = dict[torch.fx.Node, torch.fx.Node]


def live_nodes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs of a graph, and the calls that its outputs depend on, as they run."""
    uses = nx.DiGraph((source, node) for node in graph.nodes for source in node.all_input_nodes)
    live = nx.ancestors(uses, graph.output_node()) if uses else set()
    return [node for node in graph.nodes if node.op == "placeholder" or (node.op == "call_function" and node in live)]


def are_same(first: Sequence[torch.fx.Node], second: Sequence[torch.fx.Node]) -> bool:
    """Whether two lists of nodes, each with its result in meta["val"], are the same up to numbers."""
    return first_difference(first, second) is None


def first_difference(first: Sequence[torch.fx.Node], second: Sequence[torch.fx.Node]) -> int | None:
    """Where two such lists begin to differ, which may be the end of the shorter; None if they do not."""
    twins = dict(zip(first, second, strict=False))
    found = next((index for index, (a, b) in enumerate(twins.items()) if not _is_same(a, b, twins)), None)
    return min(len(first), len(second)) if found is None and len(first) != len(second) else found


def _is_same(a: torch.fx.Node, b: torch.fx.Node, twins: Twins) -> bool:
    if a.op == "placeholder" or b.op == "placeholder":
        return a.op == b.op and a.target == b.target
    return (
        a.target == b.target
        and _are_same_arguments(a.args, b.args, twins)
        and _are_same_arguments(a.kwargs, b.kwargs, twins)
        and _is_same_kind(a.meta["val"], b.meta["val"])
    )


def _are_same_arguments(a: Any, b: Any, twins: Twins) -> bool:
    if isinstance(a, torch.fx.Node):
        return twins.get(a) is b
    if isinstance(a, list | tuple):
        is_alike = isinstance(b, list | tuple) and len(a) == len(b)
        return is_alike and all(_are_same_arguments(x, y, twins) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        is_alike = isinstance(b, dict) and a.keys() == b.keys()
        return is_alike and all(_are_same_arguments(a[key], b[key], twins) for key in a)
    return type(a) is type(b) and (type(a) in (int, float) or bool(a == b))


def _is_same_kind(a: Any, b: Any) -> bool:
    """Whether two results are tensors of one dtype and number of dims, or sequences of such."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.dim() == b.dim()
    if isinstance(a, list | tuple):
        is_alike = isinstance(b, list | tuple) and len(a) == len(b)
        return is_alike and all(map(_is_same_kind, a, b))
    return type(a) is type(b)
