"""Whether a program fails in float64, in which `verify` computes, although the model is right.

Products and norms take numbers of one dtype. What forward casts to float32 by itself fits weights in float32, not in
float64:

    self.head(x.float())    planned and run in fp32: float32 x float32     in float64: float32 x float64, an error
"""

from __future__ import annotations

from autoplan.graph import COMPUTE, LOSS_PATH, GraphFacts, Op, OpGraph
from autoplan.rules import operand_names

PRODUCTS = frozenset(
    {"_grouped_mm", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d"}
    | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "dot", "einsum", "linear", "matmul"}
    | {"mm", "mv", "padded_linear", "scaled_dot_product_attention", "tensordot"}
)
_NORMS = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm"})  # not rms_norm, which takes two


def fails_in_float64(graph: OpGraph) -> bool:
    """Whether a product or norm before the loss takes float32 numbers together with some of the compute dtype.

    Not where the model enters torch.autocast, which may have cast operands and does nothing to float64.
    """
    if "autocast" in graph.dissolved:
        return False
    specs = GraphFacts.of(graph).specs
    return any(
        {COMPUTE, "float32"} <= {specs[name].dtype for name in operand_names(op)}
        for op in graph.ops
        if op.module_path != LOSS_PATH and _takes_one_dtype(op)
    )


def _takes_one_dtype(op: Op) -> bool:
    """Whether it is a product or norm that refuses operands of two dtypes."""
    namespace, _, rest = op.target.partition(".")
    return namespace in ("aten", "autoplan") and rest.partition(".")[0] in PRODUCTS | _NORMS
