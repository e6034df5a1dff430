"""A forward that fills a new tensor piece by piece: `y = x.new_empty(...); y[..., :4] = a; y[..., 4:] = b`.

The functional graph of an export writes each piece as a copy onto what is there. The copy takes nothing from what it
covers, and torch has no gradient for it, so it becomes what it gives: the source, in the dtype and shape of the place.

    copy(slice(y, ...), a)     ->  expand(to(a, dtype of y), shape of the slice); without what changes nothing
    new_empty(x, shape)        ->  new_zeros(x, shape), so that ranks that add up their parts agree

Pieces that cover the whole tensor are joined, which takes one copy instead of one for each piece:

    slice_scatter(slice_scatter(y, a, -1, 0, 4), b, -1, 4, 8)     ->  cat((a, b), -1)

Or it begins with nothing, `y = torch.tensor([])`, which `cat` passes over whatever the dims of the pieces are:

    cat((y, a), -1)     ->  cat((a,), -1), in the dtype that both have together
"""

from __future__ import annotations

from typing import Any

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
        elif node.target is _ATEN.cat.default:
            _pass_over_nothing(graph, node)
    for node in list(graph.nodes):
        if node.target is _ATEN.slice_scatter.default:
            _join_pieces(graph, node)


def _join_pieces(graph: torch.fx.Graph, last: torch.fx.Node) -> None:
    """Replace the result of writing a piece, where it and pieces before it are all of the tensor, once each."""
    extent, dim = last.meta["val"].shape[_dim(last)], _dim(last)
    pieces: dict[int, tuple[int, torch.fx.Node]] = {}  # start -> (end, source)
    node: Any = last
    while isinstance(node, torch.fx.Node) and node.target is _ATEN.slice_scatter.default and _dim(node) == dim:
        arguments: tuple[Any, ...] = (*node.args, *(0, 0, extent, 1)[len(node.args) - 2 :])
        base, source, _, start, end, step = arguments
        if step != 1 or start in pieces or not isinstance(source, torch.fx.Node):
            return
        pieces[start] = (min(end, extent), source)
        if sum(stop - begin for begin, (stop, _) in pieces.items()) >= extent:
            break
        node = base
    places = sorted((start, end) for start, (end, _) in pieces.items())
    if [start for start, _ in places] != [0, *(end for _, end in places[:-1])] or places[-1][1] != extent:
        return
    with graph.inserting_before(last):
        joined = graph.call_function(_ATEN.cat.default, ([pieces[start][1] for start, _ in places], dim))
    joined.meta.update(last.meta)
    last.replace_all_uses_with(joined)
    graph.erase_node(last)


def _pass_over_nothing(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    result, (pieces, *rest) = node.meta["val"], node.args
    assert isinstance(pieces, list | tuple)
    kept: list[Any] = [piece for piece in pieces if piece.meta["val"].dim() == result.dim()]  # type: ignore[union-attr]
    if len(kept) < len(pieces):
        with graph.inserting_before(node):
            is_same = {piece: piece.meta["val"].dtype == result.dtype for piece in kept}
            cast = [p if is_same[p] else _call(graph, node, _ATEN.to.dtype, p, result.dtype) for p in kept]
        node.args = (cast, *rest)


def _dim(node: torch.fx.Node) -> int:
    """The dim in which a piece lies, counted from the front."""
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    return int(dim % node.meta["val"].dim())


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
