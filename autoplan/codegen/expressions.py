"""One op -> one Python expression, as a person would write it: `F.linear(x, weight)`, `a + b`, `x.reshape(...)`.

`EXPRESSIONS` maps an operator to a function of its call; an operator without an entry is called by its ATen name.
`FUNCTIONS` does the same for the functions of the runtime that run instead of an op.
"""

from __future__ import annotations

from autoplan.codegen import printers
from autoplan.codegen.call import (
    Call,
    Printer,
    attribute,
    by_local_shape,
    function,
    infix,
    keyworded,
    local_shape,
    method,
    spread_method,
)
from autoplan.graph import PADDED_LINEAR


def expression(call: Call) -> str:
    """The Python expression of a call."""
    printer = EXPRESSIONS.get(call.op.target, _by_name)
    return printer(call)


def _by_name(call: Call) -> str:
    name = call.op.target if call.op.target.startswith("aten.") else call.op.target.removesuffix(".default")
    return f"torch.ops.{name}({', '.join(call.arguments() + call.keywords())})"


# Operators of the same name and arguments in `torch`, in `torch.nn.functional`, and as methods.
_TORCH = (
    "abs acos acosh addmv asin asinh atan atanh bmm bitwise_not ceil clamp clamp_max clamp_min cos cosh digamma dot erf"
    " erfc erfinv exp exp2 expm1 eye floor frac isfinite isinf isnan lgamma linspace log log10 log1p log2 logical_and"
    " logical_not logical_or logical_xor logit matmul maximum minimum mm mv nan_to_num outer positive reciprocal round"
    " rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh tril triu trunc addcdiv addcmul addmm atan2 baddbmm"
    " bilinear full_like hypot logaddexp logaddexp2 ones_like scalar_tensor zeros_like arange"
)
_FUNCTIONAL = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d celu cosine_similarity gelu glu hardshrink hardsigmoid"
    " hardswish hardtanh leaky_relu mish one_hot pixel_shuffle pixel_unshuffle prelu relu relu6 selu silu softplus"
    " softshrink threshold"
)
_METHODS = (
    "copy_ all amax amin any argmax argmin argsort clone contiguous cummax cummin cumprod cumsum detach diagonal"
    " expand_as flip gather index_add index_copy index_select logcumsumexp logsumexp max mean min prod roll scatter"
    " scatter_add sort sum swapaxes swapdims t take_along_dim topk type_as unsqueeze"
)
_OVERLOADED_METHODS = (
    "all.dim all.dims any.dim any.dims argsort.stable flatten.using_ints masked_fill.Scalar masked_fill.Tensor max.dim"
    " mean.dim median.dim min.dim moveaxis.int movedim.int movedim.intlist norm.Scalar norm.ScalarOpt_dim prod.dim_int"
    " scatter.src scatter.value scatter_reduce.two select.int sort.stable squeeze.dim std.correction std.dim"
    " sum.dim_IntList tensor_split.sections transpose.int unbind.int var.correction var.dim"
)
_OVERLOADED_TORCH = (
    "arange.start arange.start_step bucketize.Tensor clamp.Tensor clamp_max.Tensor clamp_min.Tensor copysign.Tensor"
    " div.Scalar_mode div.Tensor_mode eye.m fmod.Scalar fmod.Tensor lerp.Scalar lerp.Tensor max.other min.other"
    " remainder.Scalar remainder.Tensor var_mean.correction var_mean.dim where.Scalar where.ScalarOther"
    " where.ScalarSelf where.self xlogy.Tensor"
)
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "pow": "**", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
    "__and__": "&", "__or__": "|", "__xor__": "^",
}  # fmt: skip
_CONVOLVED = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
_POOLED = {"stride": (), "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None}
_MAX_POOLED = {"stride": (), "padding": 0, "dilation": 1, "ceil_mode": False}


def _named(names: str) -> list[tuple[str, str]]:
    """(operator, name) of a list of operators with their overloads."""
    return [(f"aten.{item}", item.split(".")[0]) for item in names.split()]


EXPRESSIONS: dict[str, Printer] = {
    **{f"aten.{name}.default": function(f"torch.{name}") for name in _TORCH.split()},
    **{f"aten.{name}.default": function(f"F.{name}") for name in _FUNCTIONAL.split()},
    **{f"aten.{name}.default": method(name) for name in _METHODS.split()},
    **{operator: method(name) for operator, name in _named(_OVERLOADED_METHODS)},
    **{operator: function(f"torch.{name}") for operator, name in _named(_OVERLOADED_TORCH)},
    **{
        f"aten.{name}.{overload}": infix(symbol)
        for name, symbol in _INFIX.items()
        for overload in ("Tensor", "Scalar", "Tensor_Scalar", "Tensor_Tensor", "default")
    },
    **{f"aten.conv{n}d.default": printers.convolution(f"F.conv{n}d", *_CONVOLVED) for n in (1, 2, 3)},
    **{f"aten.conv{n}d.padding": printers.convolution(f"F.conv{n}d", *_CONVOLVED) for n in (1, 2, 3)},
    "aten.conv_transpose1d.default": printers.convolution("F.conv_transpose1d", *_TRANSPOSED),
    "aten.conv_transpose2d.input": printers.convolution("F.conv_transpose2d", *_TRANSPOSED),
    "aten.conv_transpose3d.input": printers.convolution("F.conv_transpose3d", *_TRANSPOSED),
    "aten.convolution.default": printers.any_convolution,
    **{f"aten.max_pool{n}d.default": keyworded(f"F.max_pool{n}d", 2, **_MAX_POOLED) for n in (1, 2, 3)},
    **{
        f"aten.max_pool{n}d_with_indices.default": keyworded(f"F.max_pool{n}d_with_indices", 2, **_MAX_POOLED)
        for n in (2, 3)
    },
    **{f"aten.avg_pool{n}d.default": keyworded(f"F.avg_pool{n}d", 2, **_POOLED) for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": function(f"F.adaptive_max_pool{n}d_with_indices") for n in (1, 2, 3)},
    "aten._adaptive_avg_pool2d.default": function("F.adaptive_avg_pool2d"),
    "aten._adaptive_avg_pool3d.default": function("F.adaptive_avg_pool3d"),
    **{f"aten.upsample_nearest{n}d.vec": printers.resize("nearest") for n in (1, 2, 3)},
    "aten.upsample_linear1d.vec": printers.resize("linear", aligns=True),
    "aten.upsample_bilinear2d.vec": printers.resize("bilinear", aligns=True),
    "aten.upsample_bicubic2d.vec": printers.resize("bicubic", aligns=True),
    "aten.upsample_trilinear3d.vec": printers.resize("trilinear", aligns=True),
    "aten._upsample_bilinear2d_aa.vec": printers.resize("bilinear", aligns=True, antialias=True),
    "aten._upsample_bicubic2d_aa.vec": printers.resize("bicubic", aligns=True, antialias=True),
    "aten.im2col.default": function("F.unfold"),
    "aten.col2im.default": function("F.fold"),
    **{f"aten.{name}.input": printers.recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "aten.rsub.Scalar": printers.reversed_difference,
    "aten.neg.default": lambda call: f"-{call.operands[0]}",
    "aten.linear.default": function("F.linear", None),
    PADDED_LINEAR: function("padded_linear", None),
    "aten.bilinear.default": function("F.bilinear", None),
    "aten.einsum.default": printers.einsum,
    "aten.tensordot.default": printers.tensordot,
    "aten.elu.default": keyworded("F.elu", 1, alpha=1, scale=1, input_scale=1),
    "aten.log_sigmoid.default": function("F.logsigmoid"),
    "aten.layer_norm.default": printers.norm("layer_norm"),
    "aten.rms_norm.default": printers.norm("rms_norm"),
    "aten.group_norm.default": printers.group_norm,
    "aten.batch_norm.default": printers.batch_norm,
    "aten.instance_norm.default": printers.instance_norm,
    "aten.softmax.int": function("torch.softmax", None),
    "aten.log_softmax.int": function("torch.log_softmax", None),
    "aten.embedding.default": printers.embedding,
    "aten.scaled_dot_product_attention.default": printers.attention,
    "aten.cross_entropy_loss.default": printers.loss(
        "F.cross_entropy", "weight", "reduction", "ignore_index", "label_smoothing"
    ),
    "aten.nll_loss.default": printers.loss("F.nll_loss", "weight", "reduction", "ignore_index"),
    "aten.nll_loss_nd.default": printers.loss("F.nll_loss", "weight", "reduction", "ignore_index"),
    "aten.mse_loss.default": printers.loss("F.mse_loss", "reduction"),
    "aten.l1_loss.default": printers.loss("F.l1_loss", "reduction"),
    "aten.smooth_l1_loss.default": printers.loss("F.smooth_l1_loss", "reduction", "beta"),
    "aten.huber_loss.default": printers.loss("F.huber_loss", "reduction", "delta"),
    "aten.kl_div.default": printers.loss("F.kl_div", "reduction"),
    "aten.binary_cross_entropy.default": printers.loss("F.binary_cross_entropy", "weight", "reduction"),
    "aten.binary_cross_entropy_with_logits.default": printers.loss(
        "F.binary_cross_entropy_with_logits", "weight", "pos_weight", "reduction"
    ),
    "aten.dropout.default": printers.dropout,
    "aten.view.default": local_shape("reshape"),
    "aten.reshape.default": local_shape("reshape"),
    "aten._unsafe_view.default": local_shape("reshape"),
    "aten.unflatten.int": local_shape("reshape"),
    "aten.ravel.default": local_shape("reshape"),
    "aten.squeeze.default": local_shape("reshape"),
    "aten.squeeze.dims": local_shape("reshape"),
    "aten.expand.default": local_shape("expand"),
    "aten.broadcast_to.default": local_shape("expand"),
    "aten.broadcast_tensors.default": lambda call: f"torch.broadcast_tensors({', '.join(call.operands)})",
    "aten.permute.default": spread_method("permute"),
    "aten.numpy_T.default": attribute("T"),
    "aten.mT.default": attribute("mT"),
    "aten.slice.Tensor": printers.slice_,
    "aten.narrow.default": printers.narrow,
    "aten.unfold.default": method("unfold"),
    "aten.index.Tensor": printers.index,
    "aten.index_put.default": printers.index_put,
    "aten.repeat.default": spread_method("repeat"),
    "aten.tile.default": spread_method("tile"),
    "aten.repeat_interleave.self_int": printers.repeat_interleave,
    "aten.pad.default": printers.pad,
    "aten.constant_pad_nd.default": printers.pad,
    "aten.split.Tensor": printers.split,
    "aten.split_with_sizes.default": printers.split,
    "aten.chunk.default": printers.chunk,
    "aten.cat.default": function("torch.cat"),
    "aten.stack.default": function("torch.stack"),
    "aten.slice_scatter.default": printers.scattered("torch.slice_scatter"),
    "aten.select_scatter.default": printers.scattered("torch.select_scatter"),
    "aten.diff.default": function("torch.diff"),
    "aten.linalg_vector_norm.default": function("torch.linalg.vector_norm"),
    "aten.to.dtype": printers.cast,
    "aten.histc.default": printers.histogram,
    "aten._grouped_mm.default": printers.grouped_product,
    "aten.to.device": printers.to_device,
    "aten.to.dtype_layout": printers.to_copy,
    "aten._to_copy.default": printers.to_copy,
    "aten.zeros.default": by_local_shape("torch.zeros"),
    "aten.ones.default": by_local_shape("torch.ones"),
    "aten.full.default": by_local_shape("torch.full"),
    "aten.new_zeros.default": by_local_shape("new_zeros", n_operands=1),
    "aten.new_ones.default": by_local_shape("new_ones", n_operands=1),
    "aten.new_full.default": by_local_shape("new_full", n_operands=1),
    "getitem": lambda call: f"{call.operands[0]}[{call.op.args[1]}]",
}

FUNCTIONS: dict[str, Printer] = {
    "vocab_parallel_embedding": printers.split_embedding,
    "vocab_parallel_cross_entropy": printers.split_cross_entropy,
    "grouped_attention_of_rank": printers.grouped_attention,
    "causal_attention_of_rows": printers.causal_rows,
    "own_experts_mm": printers.own_experts,
}

# The module of the runtime that holds a function of `FUNCTIONS`, where it is not `collectives`.
FUNCTION_MODULES = {
    "vocab_parallel_embedding": "vocabulary",
    "vocab_parallel_cross_entropy": "vocabulary",
    "own_experts_mm": "experts",
    "own_rows": "experts",
    "grouped_attention_of_rank": "attention",
    "causal_attention_of_rows": "attention",
}
