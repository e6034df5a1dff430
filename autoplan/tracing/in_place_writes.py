"""Whether the user's forward writes in place across the borders of blocks, before the trace makes new values of it.

    x = embed(tokens); block: x += y     a block writes what was made outside of it
    y = block(x); y += x                 what a block made is written outside of it

A program of the user's own classes then needs `runtime.stages.in_place`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from autoplan.tracing.overlaid_graph import module_path_of
from autoplan.tracing.segments import block_path, nested_containers

Blocks = frozenset[str | None]  # paths of blocks; None for what is outside of them


def writes_across_blocks(program: torch.export.ExportedProgram) -> bool:
    """Whether an op writes into memory that an op of another block made, or showed in another way."""
    paths = {node: module_path_of(node) for node in program.graph.nodes if node.op == "call_function"}
    nested = nested_containers(paths.values())
    seen_in: dict[torch.fx.Node, Blocks] = {}
    for node, path in paths.items():
        own = block_path(path, nested)
        shared = [(seen_in[read], writes) for read, writes in _aliased(node) if read in seen_in]
        if any(writes and blocks != {own} for blocks, writes in shared):
            return True
        seen_in[node] = frozenset({own}).union(*(blocks for blocks, _ in shared))
    return False


def _aliased(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, bool]]:
    """The operands whose memory the op hands on, and whether it writes into them."""
    if node.target is operator.getitem:
        yield node.all_input_nodes[0], False
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    given = [
        *zip(arguments, node.args, strict=False),
        *((a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs),
    ]
    for argument, value in given:
        if argument.alias_info is not None:
            items = value if isinstance(value, list | tuple) else (value,)
            yield from ((item, argument.alias_info.is_write) for item in items if isinstance(item, torch.fx.Node))
