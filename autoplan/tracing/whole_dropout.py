"""Dropout that `run_decompositions` took apart, as one operator again: `native_dropout` also returns its mask."""

from __future__ import annotations

import operator

import torch

_ATEN = torch.ops.aten


def with_whole_dropout(graph: torch.fx.Graph) -> None:
    """Write `dropout` for each `native_dropout` of which only the result is read, in place."""
    for node in list(graph.nodes):
        if node.target is not _ATEN.native_dropout.default:
            continue
        readers = [reader for reader in node.users if reader.target is operator.getitem and reader.args[1] == 0]
        if len(readers) != len(node.users):
            continue
        for reader in readers:
            x, p, training = node.args
            reader.target, reader.args = _ATEN.dropout.default, (x, p, training is not False)
        graph.erase_node(node)
