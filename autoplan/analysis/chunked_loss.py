"""Where the loss may be computed in slices of its rows: OpGraph -> the product of the head and all up to the loss.

    x --linear (a module of its own)--> views of whole rows, casts --> cross_entropy (mean or sum) --> loss

What these ops compute between x and the loss, nothing else reads. How a slice is computed says
`runtime.stages.chunked_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoplan.equations import argument
from autoplan.graph import LOSS_PATH, PADDED_LINEAR, GraphFacts, Op, OpGraph, Ref, TensorSpec
from autoplan.layout import conversion
from autoplan.parallel_plan import Mesh, SegmentSharding
from autoplan.rules import OpRule, operand_names
from autoplan.tensor_parallel.sharding import SegmentLayouts, read_sharding

# Of a slice: enough that its products run near their full rate, and few enough that its logits with all that their loss
# needs, half as much when it is compiled, take 3.8 GB at the most (benchmarks/chunked_rows.py, 2026-11-28).
SLICE_ELEMENTS, MAX_SLICE_ROWS, ROWS_MULTIPLE = 2**28, 4096, 256
COMPILED_SLICE_ELEMENTS = 2 * SLICE_ELEMENTS

_MEAN, _SUM = 1, 2  # reductions, as ATen numbers them
LINEAR, _LOSS = "aten.linear.default", "aten.cross_entropy_loss.default"
_PRODUCTS = (LINEAR, PADDED_LINEAR)
_KEEPS_ROWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "slice.Tensor",
        "contiguous.default", "clone.default", "alias.default", "_to_copy.default", "to.dtype",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """The ops that a chunked loss computes slice by slice.

    Attributes:
        kind: of the last segment, which holds them.
        ops: in order; the first is the product, the last the loss.
    """

    kind: int
    ops: tuple[Op, ...]

    @property
    def names(self) -> frozenset[str]:
        """The values they make."""
        return frozenset(op.name for op in self.ops)

    def slice_rows(self, *, is_compiled: bool) -> int:
        """How many rows a slice has, whatever part of the classes a rank has."""
        n_elements = COMPILED_SLICE_ELEMENTS if is_compiled else SLICE_ELEMENTS
        most = n_elements // self.ops[0].outputs[0].at(1)[-1]
        return max(ROWS_MULTIPLE, min(most // ROWS_MULTIPLE * ROWS_MULTIPLE, MAX_SLICE_ROWS))


@lru_cache(maxsize=4)
def chunked_head(graph: OpGraph) -> ChunkedHead | None:
    """What may be sliced; None where `why_whole` gives a reason."""
    return None if why_whole(graph) else ChunkedHead(graph.segments[-1].kind, _head_ops(graph))


def why_whole(graph: OpGraph) -> str:
    """Why the loss cannot be computed in slices; "" when it can."""
    ops, specs = _head_ops(graph), graph.specs()
    if graph.is_module_level or not any(_is_plain(op, specs) for op in graph.ops):
        return "no cross-entropy of class numbers with reduction mean or sum"
    if not ops:
        return "no linear layer in the last part of the model whose result only cross-entropy reads, row by row"
    if graph.has_own_gradients:
        return "a model with gradients of its own"
    if "autocast" in graph.dissolved:
        return "a model that enters torch.autocast"
    return ""


def can_chunk(graph: OpGraph, mesh: Mesh, shardings: Sequence[SegmentSharding], *, rules: Mapping[str, OpRule]) -> bool:
    """Whether a plan may have its loss chunked."""
    head = chunked_head(graph)
    if head is None or is_in_compiled(graph, mesh):
        return False
    assignment = next((found for found in shardings if found.kind == head.kind), None)
    facts = GraphFacts.of(graph)
    layouts = read_sharding(graph, graph.segments[-1], assignment, degree=mesh.tp, rules=rules, facts=facts)
    return is_sliceable(head, layouts, facts)


def is_in_compiled(graph: OpGraph, mesh: Mesh) -> bool:
    """Whether the loss of a slice is not compiled by itself: a model without blocks is compiled as a whole."""
    return mesh.compile and not any(segment.is_block for segment in graph.segments)


def is_sliceable(head: ChunkedHead, layouts: SegmentLayouts, facts: GraphFacts) -> bool:
    """Whether nothing is converted between the product and the loss under this tensor-parallel assignment."""
    made = head.names
    read = [
        pair
        for op in head.ops[1:]
        for pair in zip(operand_names(op), layouts.strategies[op.name].operands, strict=True)
    ]
    for name, layout in (*read, *layouts.leaves_as.items()):
        if name in made and name != head.ops[-1].name:
            step = conversion(layouts.produced[name], layout, has_gradient=name in facts.gradients)
            if step is None or step.function:
                return False
    return True


def _head_ops(graph: OpGraph) -> tuple[Op, ...]:
    """From the product to the loss; of several such chains that with most classes. Empty when there is none."""
    last = graph.segments[-1]
    if last.is_block:
        return ()
    made, specs = {op.name: op for op in graph.ops_of(last)}, graph.specs()
    n_readers: dict[str, int] = {}
    for op in graph.ops:
        for name in op.input_names():
            n_readers[name] = n_readers.get(name, 0) + 1
    chains = [_chain(loss, made, n_readers) for loss in made.values() if _is_plain(loss, specs)]
    return max(chains, key=lambda ops: specs[ops[0].name].n_elements(1) if ops else 0, default=())


def _is_plain(op: Op, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether it is the cross-entropy of rows with a class number each, which weigh the same, as one number."""
    if op.target != _LOSS or argument(op, 2, "weight") is not None:
        return False
    targets = specs[op.input_names()[1]]
    reduction = argument(op, 3, "reduction", default=_MEAN)
    return reduction in (_MEAN, _SUM) and targets.dtype == "int64" and len(targets.shape) == 1


def _chain(loss: Op, made: dict[str, Op], n_readers: dict[str, int]) -> tuple[Op, ...]:
    ops = [loss]
    while ops[0].target not in _PRODUCTS:
        source = made.get(_first_name(ops[0]))
        if source is None or n_readers[source.name] != 1 or source.target not in (*_KEEPS_ROWS, *_PRODUCTS):
            return ()
        ops.insert(0, source)
    product, rows = ops[0], ops[-2]
    n_classes = product.outputs[0].shape[-1]
    keeps_classes = all(op.outputs[0].shape[-1:] == (n_classes,) for op in ops[:-1])
    is_module = product.module_path not in ("", LOSS_PATH)
    return tuple(ops) if keeps_classes and is_module and len(rows.outputs[0].shape) == 2 else ()


def _first_name(op: Op) -> str:
    first = op.args[0]
    return first.name if isinstance(first, Ref) else ""
