"""A forward that fills a new tensor piece by piece: `y = x.new_empty(...); y[..., :4] = a; y[..., 4:] = b`.

The functional graph of an export writes each piece as a copy onto what is there. The copy takes nothing from what it
covers, and torch has no gradient for it, so it becomes what it gives: the source, in the dtype and shape of the place.

    copy(slice(y, ...), a)     ->  expand(to(a, dtype of y), shape of the slice); without what changes nothing
    new_empty(x, shape)        ->  new_zeros(x, shape), so that ranks that add up their parts agree
"""

from __future__ import annotations

import torch

_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.new_empty.default: _ATEN.new_zeros.default,
    _ATEN.empty.memory_format: _ATEN.zeros.default,
    _ATEN.empty_like.default: _ATEN.zeros_like.default,
}


def without_copies(graph: torch.fx.Graph) -> None:
    """Rewrite the copies and the empty tensors of an exported graph, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _EMPTY:
            node.target = _EMPTY[node.target]
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
        elif node.target is _ATEN.copy.default and isinstance(node.args[1], torch.fx.Node):
            _replace_copy(graph, node)


def _replace_copy(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    result = node.meta["val"]
    source = node.args[1]
    assert isinstance(source, torch.fx.Node)
    with graph.inserting_before(node):
        if source.meta["val"].dtype != result.dtype:
            source = _call(graph, node, _ATEN.to.dtype, source, result.dtype)
        if source.meta["val"].shape != result.shape:
            source = _call(graph, node, _ATEN.expand.default, source, [int(size) for size in result.shape])
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _call(
    graph: torch.fx.Graph, like: torch.fx.Node, target: object, source: torch.fx.Node, to: object
) -> torch.fx.Node:
    node = graph.call_function(target, (source, to))  # type: ignore[arg-type]
    node.meta.update(like.meta)
    node.meta["val"] = target(source.meta["val"], to)  # type: ignore[operator]
    return node
