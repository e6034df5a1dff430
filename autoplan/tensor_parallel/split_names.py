"""What the tensor-parallel ranks of a plan split, in the field's words: OpGraph + Plan -> phrases of the report.

    sequence between blocks                 sequence parallelism
    rows of the query, keys whole           context parallelism
    heads, from all-to-alls of the rows     context parallelism, as in Ulysses
    whole experts                           expert parallelism

The program that picks layouts knows none of these names; they are read off the layouts that it has picked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autoplan.graph import PADDED_LINEAR, Op, OpGraph, Segment
from autoplan.layout import Layout, R, parse_layout, sharded
from autoplan.parallel_plan import Plan, SegmentSharding
from autoplan.rules import operand_names


@dataclass(frozen=True, slots=True)
class _Layouts:
    """The layouts of one kind of segment.

    Attributes:
        matrices: its parameters of two dims or more.
        made: the layout of each value as it is produced.
        read: (op, number of an operand) -> the layout in which it is read, where that is another one.
    """

    ops: Mapping[str, Op]
    matrices: frozenset[str]
    made: Mapping[str, Layout]
    read: Mapping[tuple[str, str], Layout]

    @classmethod
    def of(cls, graph: OpGraph, segment: Segment, sharding: SegmentSharding) -> _Layouts:
        own = frozenset(segment.parameters)
        return cls(
            ops={op.name: op for op in graph.ops_of(segment)},
            matrices=frozenset(p.name for p in graph.parameters if p.name in own and len(p.spec.shape) > 1),
            made={name: parse_layout(text) for name, text in sharding.values},
            read={(op_name, position): parse_layout(text) for op_name, position, text in sharding.uses},
        )

    def operand(self, op: Op, position: int) -> Layout:
        """The layout in which an op reads an operand."""
        return self.read.get((op.name, str(position)), self.made.get(operand_names(op)[position], R))


def splits(graph: OpGraph, plan: Plan) -> tuple[str, ...]:
    """One phrase for each way in which something is split, most common first; none without tensor parallelism."""
    if not plan.shardings:
        return ()
    first, found = graph.first_of_kind(), dict[str, int]()
    for sharding in plan.shardings:
        n_segments = sum(segment.kind == sharding.kind for segment in graph.segments)
        for phrase in set(_phrases(_Layouts.of(graph, first[sharding.kind], sharding))):
            found[phrase] = found.get(phrase, 0) + n_segments
    between = ["sequence between blocks (sequence parallelism)"] if plan.mesh.sharding == str(sharded(1)) else []
    return (*between, *sorted(found, key=lambda phrase: (-found[phrase], phrase)))


def _phrases(layouts: _Layouts) -> Iterator[str]:
    for op in layouts.ops.values():
        phrase = PHRASES[op.target](layouts, op) if op.target in PHRASES else ""
        if phrase:
            yield phrase


def _attention(layouts: _Layouts, op: Op) -> str:
    made, n_dims = layouts.made[op.name], len(op.outputs[0].shape)
    if made.kind != "S":
        return "nothing of attention: every rank computes it whole"
    if made.dim == n_dims - 2:
        return "attention by rows of the query (context parallelism)"
    if _is_exchanged(layouts, op):
        return "attention by heads, between all-to-alls of the sequence (context parallelism)"
    return "attention by heads"


def _is_exchanged(layouts: _Layouts, op: Op) -> bool:
    """Whether an all-to-all stands between the query and the product that it comes from."""
    reader: Op | None = op
    while reader is not None and operand_names(reader):
        name = operand_names(reader)[0]
        made, read = layouts.made.get(name, R), layouts.operand(reader, 0)
        if made.kind == read.kind == "S" and made != read:
            return True
        maker = layouts.ops.get(name)
        reader = None if maker is None or maker.target in _PRODUCTS else maker
    return False


def _product(layouts: _Layouts, op: Op) -> str:
    """Of a product with weights: which of their dims is split."""
    names = operand_names(op)
    weights = [i for i, name in enumerate(names) if name in layouts.matrices]
    kinds = {layouts.operand(op, i).kind for i in weights}
    if kinds != {"S"}:
        return ""
    others = {layouts.operand(op, i).kind for i in range(len(names)) if i not in weights}
    if others == {"S"} and layouts.made[op.name].kind == "S":  # a letter that all of them have
        return "stacks of weights matrix by matrix (of experts: expert parallelism)"
    return "weights by columns and rows"


def _grouped_product(layouts: _Layouts, op: Op) -> str:
    weight = layouts.operand(op, 1)
    if weight.kind != "S":
        return ""
    return "whole experts (expert parallelism, priced as equally busy)" if weight.dim == 0 else "every expert inside"


def _vocabulary(layouts: _Layouts, op: Op) -> str:
    """Of an embedding the rows, of a loss the columns of the logits."""
    first = layouts.operand(op, 0)
    is_loss = "loss" in op.target
    return "vocabulary" if first.kind == "S" and first.dim == (1 if is_loss else 0) else ""


_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "tensordot")
)
PHRASES: dict[str, Callable[[_Layouts, Op], str]] = {
    **dict.fromkeys((*_PRODUCTS, PADDED_LINEAR), _product),
    "aten._grouped_mm.default": _grouped_product,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.embedding.default": _vocabulary,
    "aten.cross_entropy_loss.default": _vocabulary,
}
