"""Whether the head may be a group of `fully_shard` by itself: OpGraph -> the path of its module.

What is outside of blocks is one group: the head would be gathered with the embedding, before the first block, and its
gradients reduced with those of the embedding, after the last one. By itself it is gathered beside the last blocks, and
reduced beside their backward passes. Its module is called once, nothing else reads its parameters, and it has nearly
all of those behind the blocks, which are priced together.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.graph import Op, OpGraph, Parameter

# 34 MB to gather and 67 MB to reduce in 16 bits: sending them takes longer than the host takes for a group more.
SMALLEST_HEAD_ELEMENTS = 2**24
SMALLEST_SHARE = 0.9


def head_group(graph: OpGraph) -> str:
    """The module behind the blocks that has nearly all parameters, if it may and they are enough; else ""."""
    last = graph.segments[-1]
    if graph.is_module_level or last.is_block or not any(segment.is_block for segment in graph.segments):
        return ""
    sizes = {path: _n_elements(graph, path) for path in dict.fromkeys(op.module_path for op in graph.ops_of(last))}
    path = max(sizes, key=lambda name: sizes[name], default="")
    behind = sum(parameter.spec.n_elements(1) for parameter in graph.parameters if parameter.name in last.parameters)
    is_large = path and sizes[path] >= max(SMALLEST_HEAD_ELEMENTS, SMALLEST_SHARE * behind)
    return path if is_large else ""


def _n_elements(graph: OpGraph, path: str) -> int:
    """Of the parameters of this module; 0 where another part of the model reads one of them."""
    if not path:
        return 0
    own = [parameter for parameter in graph.parameters if _is_in(path, parameter)]
    readers = [op for parameter in own for op in _readers(graph, parameter.name)]
    is_alone = all(len(parameter.aliases) == 1 for parameter in own) and len(readers) == len(own)
    is_one_call = len({op.name for op in readers}) == 1 and readers[0].module_path == path
    return sum(parameter.spec.n_elements(1) for parameter in own) if is_alone and is_one_call else 0


def _is_in(path: str, parameter: Parameter) -> bool:
    return parameter.name.startswith(f"{path}.")


def _readers(graph: OpGraph, name: str) -> Iterator[Op]:
    return (op for op in graph.ops if name in op.input_names())
