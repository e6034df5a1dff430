"""Products and norms of numbers in two dtypes: torch traces them, and refuses them in another precision than fp32.

What forward casts to float32 by itself fits weights in float32 only:

    self.head(x.float())    in fp32: float32 x float32    in bf16 or float64: float32 x that, an error
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from autoplan.graph import COMPUTE, LOSS_PATH, GraphFacts, Op, OpGraph
from autoplan.rules import operand_names

PRODUCTS = frozenset(
    {"_grouped_mm", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d"}
    | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "dot", "einsum", "linear", "matmul"}
    | {"mm", "mv", "padded_linear", "scaled_dot_product_attention", "tensordot"}
)
RECURRENT = frozenset(
    {"gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"}
)
NORMS = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm"})  # not rms_norm, which takes two


def operands_of(graph: OpGraph, functions: Set[str]) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """Each op of torch's with these names before the loss, and its operands.

    None where the model enters torch.autocast, which may have cast them; the graph does not tell.
    """
    for op in () if "autocast" in graph.dissolved else graph.ops:
        namespace, _, rest = op.target.partition(".")
        if op.module_path != LOSS_PATH and namespace in ("aten", "autoplan") and rest.partition(".")[0] in functions:
            yield op, operand_names(op)


def fails_in_float64(graph: OpGraph) -> bool:
    """Whether a program fails in float64, in which `verify` computes, although the model is right."""
    specs = GraphFacts.of(graph).specs
    return any(
        {COMPUTE, "float32"} <= {specs[name].dtype for name in operands}
        for _, operands in operands_of(graph, PRODUCTS | NORMS)
    )
