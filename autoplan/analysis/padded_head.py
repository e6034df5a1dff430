"""A head whose classes are padded, so that products with it run at their full rate: OpGraph -> OpGraph.

    logits = linear(x, weight [50257, hidden])    rows of 100,514 bytes: no multiple of 16, as fast kernels need them
          -> padded_linear(x, weight)             linear(x, weight and 47 rows of zeros)[..., :50257]

H200, bf16, forward and backward with a compiled loss: 32,768 rows of GPT-2 XL (1600 x 50257) 130 ms and 30 ms, 65,536
of BERT-large (1024 x 30522) 53 ms and 28 ms (benchmarks/results/padded_head_h200_2026-11-22.jsonl). No number changes:
what is added is never read. Only a head is replaced that a chunked loss could be computed of, as it is known then that
the loss reads its logits row by row, however far apart these lie; and only where its module computes no other product,
as programs of the user's own classes pad all products of a module. Programs pad at run time, so weights, checkpoints
and tensor-parallel shards are those of the model. A graph knows no precision, so float32 is padded too.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.analysis.chunked_loss import LINEAR, chunked_head
from autoplan.graph import PADDED_LINEAR, Op, OpGraph, PerSample
from autoplan.rules import operand_names

ALIGNED_CLASSES = 8  # rows of 16-bit numbers at multiples of 16 bytes
# Below, launching the kernels that pad takes longer than they gain: 4,096 rows of 512 x 2001, in the rows above.
SMALLEST_WEIGHT_ELEMENTS = 2**22


def with_padded_head(graph: OpGraph, *, smallest_weight_elements: int = SMALLEST_WEIGHT_ELEMENTS) -> OpGraph:
    """The graph, whose head is padded where its rows are odd and its weight is not smaller than that."""
    head = chunked_head(graph)
    if head is None or head.ops[0].target != LINEAR:
        return graph
    product = head.ops[0]
    weight = graph.specs()[operand_names(product)[1]]
    n_classes = weight.shape[0]
    if isinstance(n_classes, PerSample) or n_classes % ALIGNED_CLASSES == 0:  # samples of a batch are no classes
        return graph
    if weight.n_elements(1) < smallest_weight_elements or not _is_only_product(graph, product):
        return graph
    ops = (replace(op, target=PADDED_LINEAR) if op.name == product.name else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _is_only_product(graph: OpGraph, product: Op) -> bool:
    """Whether the module of `product`, with all modules in it, calls `linear` just once."""
    path = product.module_path
    products = (op for op in graph.ops if op.target == LINEAR)
    return sum(op.module_path == path or op.module_path.startswith(f"{path}.") for op in products) == 1
