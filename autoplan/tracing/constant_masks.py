"""Attention masks that say nothing: libraries build them while traced, and leave them out when they run.

A mask that depends on no input and no parameter has the same values in every step. It is computed here once per traced
batch size, on the CPU, and read:

    keeps every score             ->  no mask
    keeps what is not to come     ->  no mask, is_causal=True

Flash attention takes no mask, and others read it in vain. A mask of any other values, or that differs between the two
runs, stays. What made a mask that is gone, nothing reads any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx.node import Argument as NodeArgument
from torch.fx.node import map_aggregate

from autoplan.graph import Argument, Op, Ref

Meaning = Literal["everything", "causal"]

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASK, _IS_CAUSAL = 3, 5  # positions of the arguments
_DEFAULTS = (None, 0.0, False)  # attn_mask, dropout_p, is_causal
_MOST_ELEMENTS = 2**30  # of one value; a mask of 3 samples of 18 900 tokens
# Results that are whatever lay in memory, and results that read nothing of their first operand but its shape.
_UNSET = frozenset({"empty_permuted", "empty_strided", "new_empty_strided"})
_READ_SHAPE = frozenset({"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"})


def constant_masks(
    first: Sequence[torch.fx.Node], second: Sequence[torch.fx.Node], *, traced_dtype: torch.dtype
) -> dict[str, Meaning]:
    """Names of the constant masks that both runs of a model read alike, and what they say.

    The nodes are the same operators at two batch sizes, in one order; the names are those of the first.
    `traced_dtype` stands for the precision of the plan; what is computed in it must say the same in float64.
    """
    meanings_a = _meanings(first, traced_dtype)
    meanings_b = _meanings(second, traced_dtype) if meanings_a else {}
    return {
        a.name: meanings_a[a.name]
        for a, b in zip(first, second, strict=True)
        if a.name in meanings_a and meanings_b.get(b.name) == meanings_a[a.name]
    }


def fold_masks(ops: Iterable[Op], meanings: Mapping[str, Meaning]) -> tuple[Op, ...]:
    """The ops, whose attentions no longer read a mask of known meaning."""
    return tuple(_without_mask(op, meanings) for op in ops)


def _without_mask(op: Op, meanings: Mapping[str, Meaning]) -> Op:
    mask = op.args[_MASK] if op.target == _ATTENTION and len(op.args) > _MASK else None
    meaning = meanings.get(mask.name) if isinstance(mask, Ref) else None
    if meaning is None:
        return op
    options: list[Argument] = [None, *op.args[_MASK + 1 :]]
    options += _DEFAULTS[len(options) :]
    options[_IS_CAUSAL - _MASK] = meaning == "causal"
    while options and options[-1] == _DEFAULTS[len(options) - 1]:
        options.pop()
    return replace(op, args=(*op.args[:_MASK], *options))


# ---------------------------------------------------------------- values of one trace


def _meanings(nodes: Sequence[torch.fx.Node], traced_dtype: torch.dtype) -> dict[str, Meaning]:
    constants = _constants(nodes)
    decided: dict[tuple[str, ...], Meaning | None] = {}  # each layer may make its own mask in the same way
    found: dict[str, Meaning] = {}
    for mask in _masks(nodes):
        if mask in constants:
            order = _order(mask, nodes)
            formula = _formula(order)
            if formula not in decided:
                decided[formula] = _meaning(order, traced_dtype)
            meaning = decided[formula]
            if meaning is not None:
                found[mask.name] = meaning
    return found


def _masks(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """What attentions read as their masks, each once."""
    attentions = (node for node in nodes if str(node.target) == _ATTENTION and len(node.args) > _MASK)
    masks = (node.args[_MASK] for node in attentions)
    return list(dict.fromkeys(mask for mask in masks if isinstance(mask, torch.fx.Node)))


def _constants(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Results that no input, parameter, buffer or random number has a part in."""
    found: set[torch.fx.Node] = set()
    for node in nodes:
        if _is_computable(node) and found.issuperset(_sources(node)):
            found.add(node)
    return found


def _is_computable(node: torch.fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        target.namespace == "aten"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].numel() <= _MOST_ELEMENTS
        and torch.Tag.nondeterministic_seeded not in target.tags
        and _operator(node) not in _UNSET
    )


def _operator(node: torch.fx.Node) -> str:
    target: Any = node.target
    return str(target._schema.name.removeprefix("aten::"))


def _sources(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The results whose values a node reads."""
    return [
        source
        for source in node.all_input_nodes
        if not (_operator(node) in _READ_SHAPE and source is node.args[0] and source not in node.args[1:])
    ]


def _meaning(order: Sequence[torch.fx.Node], traced_dtype: torch.dtype) -> Meaning | None:
    """What a constant mask says, None where it says something else or no CPU kernel computes it."""
    depends_on_precision = any(node.meta["val"].dtype == traced_dtype for node in order)
    dtypes = (traced_dtype, torch.float64) if depends_on_precision else (traced_dtype,)
    try:
        with torch.inference_mode():
            said = {_reading(_value(order, {traced_dtype: dtype}), traced_dtype) for dtype in dtypes}
    except (RuntimeError, IndexError):
        return None
    return said.pop() if len(said) == 1 else None


def _order(mask: torch.fx.Node, nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The nodes that a constant depends on and itself, as they run."""
    needed = {mask}
    for node in reversed(nodes):
        if node in needed:
            needed.update(_sources(node))
    return [node for node in nodes if node in needed]


def _formula(order: Sequence[torch.fx.Node]) -> tuple[str, ...]:
    """How a constant is made, whatever the names: equal formulas have equal values."""
    places: dict[Any, str] = {node: f"%{place}" for place, node in enumerate(order)}

    def text(argument: Any) -> str:
        if isinstance(argument, torch.fx.Node):
            return places.get(argument) or f"{argument.meta['val'].dtype}{list(argument.meta['val'].shape)}"
        return repr(argument)

    return tuple(f"{node.target} {map_aggregate(node.args, text)} {map_aggregate(node.kwargs, text)}" for node in order)


def _value(order: Sequence[torch.fx.Node], dtypes: Mapping[torch.dtype, torch.dtype]) -> torch.Tensor:
    """The last value of a run on the CPU, with some dtypes replaced; a value goes after its last reader."""
    values: dict[torch.fx.Node, torch.Tensor] = {}
    last_reader = {source: node for node in order for source in _sources(node)}

    def argument(leaf: NodeArgument) -> Any:
        if isinstance(leaf, torch.fx.Node):
            return values[leaf] if leaf in values else _of_shape(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return dtypes.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    for node in order:
        target: Any = node.target
        values[node] = target(*map_aggregate(node.args, argument), **map_aggregate(node.kwargs, argument))
        for source in _sources(node):
            if last_reader[source] is node:
                values.pop(source, None)
    return values[order[-1]]


def _of_shape(node: torch.fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _reading(mask: torch.Tensor, traced_dtype: torch.dtype) -> Meaning | None:
    """What the values of a mask say: true or 0 keeps a score, false or the least number drops it."""
    keeps = mask if mask.dtype == torch.bool else mask == 0
    if keeps.all():
        return "everything"
    if mask.dtype != torch.bool and not torch.all(keeps | (mask <= torch.finfo(traced_dtype).min)):
        return None
    n_queries, n_keys = mask.shape[-2:]
    is_causal = n_queries == n_keys and bool((keeps == torch.ones(n_queries, n_keys, dtype=torch.bool).tril()).all())
    return "causal" if is_causal else None
