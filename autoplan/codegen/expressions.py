"""One op -> one Python expression, as a person would write it: `F.linear(x, weight)`, `a + b`, `x.reshape(...)`.

`EXPRESSIONS` maps an operator to a function of its call; an operator without an entry is called by its ATen name.
Sizes are those of one rank: views take the local shape of their result, a split its local piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplan.graph import COMPUTE, Argument, Op, PerSample, Ref, Symbol, TensorSpec


@dataclass(frozen=True, slots=True)
class Call:
    """One op to print.

    Attributes:
        operands: the expression of each tensor operand, in order of appearance.
        result: the local spec of its (first) result.
        dtype_like, device_like: expressions of a tensor in the compute precision, and of any tensor on the device.
        batch: the expression of the batch size.
    """

    op: Op
    operands: tuple[str, ...]
    result: TensorSpec
    dtype_like: str
    device_like: str
    batch: str = "batch"

    def text(self, argument: Argument) -> str:
        """An argument as Python."""
        return _text(self, argument, iter(self.operands))

    def arguments(self) -> list[str]:
        """All positional arguments as Python."""
        operands = iter(self.operands)
        return [_text(self, argument, operands) for argument in self.op.args]

    def keywords(self) -> list[str]:
        """All keyword arguments as Python; None and torch's allocation details are left out."""
        operands = iter(self.operands[self._n_positional() :])
        skipped = ("pin_memory", "layout", "memory_format")
        return [
            f"{key}={_text(self, value, operands)}"
            for key, value in self.op.kwargs
            if value is not None and key not in skipped
        ]

    def _n_positional(self) -> int:
        return sum(_n_refs(argument) for argument in self.op.args)


def _n_refs(argument: Argument) -> int:
    if isinstance(argument, tuple):
        return sum(_n_refs(item) for item in argument)
    return int(isinstance(argument, Ref))


def _text(call: Call, argument: Argument, operands: object) -> str:
    if isinstance(argument, Ref):
        return next(operands)  # type: ignore[call-overload]
    if isinstance(argument, tuple):
        items = [_text(call, item, operands) for item in argument]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, PerSample):
        return call.batch if argument.count == 1 else f"{call.batch} * {argument.count}"
    if isinstance(argument, Symbol):
        return _symbol_text(call, argument)
    if isinstance(argument, float) and argument in (float("inf"), float("-inf")):
        return f'float("{argument}")'
    return repr(argument)


def _symbol_text(call: Call, symbol: Symbol) -> str:
    if symbol.text == f"dtype:{COMPUTE}":
        return f"{call.dtype_like}.dtype"
    if symbol.text.startswith("dtype:"):
        return "torch." + symbol.text.removeprefix("dtype:")
    if symbol.text == "device":
        return f"{call.device_like}.device"
    return symbol.text


def expression(call: Call) -> str:
    """The Python expression of a call."""
    printer = EXPRESSIONS.get(call.op.target, _aten)
    return printer(call)


Printer = Callable[[Call], str]


def _aten(call: Call) -> str:
    path = call.op.target.replace("aten.", "torch.ops.aten.", 1)
    return f"{path}({', '.join(call.arguments() + call.keywords())})"


def _function(name: str, *defaults: object) -> Printer:
    """`name(args)`; trailing arguments equal to `defaults` (aligned at the end) are left out."""

    def printer(call: Call) -> str:
        arguments, rest = call.arguments(), list(call.op.args)
        for default in reversed(defaults):
            if len(rest) and rest[-1] == default and not isinstance(rest[-1], Ref):
                rest.pop()
                arguments.pop()
        return f"{name}({', '.join(arguments + call.keywords())})"

    return printer


def _method(name: str) -> Printer:
    def printer(call: Call) -> str:
        operand, *arguments = call.arguments()
        return f"{operand}.{name}({', '.join(arguments + call.keywords())})"

    return printer


def _spread_method(name: str) -> Printer:
    """A method whose sizes or dims are separate arguments: x.permute(0, 2, 1)."""

    def printer(call: Call) -> str:
        return f"{call.operands[0]}.{name}({', '.join(call.text(item) for item in call.op.args[1])})"

    return printer


def _infix(symbol: str) -> Printer:
    def printer(call: Call) -> str:
        left, right, *_ = call.arguments()
        scale = dict(call.op.kwargs).get("alpha", 1)
        return f"{left} {symbol} {right}" if scale == 1 else f"{left} {symbol} {scale!r} * {right}"

    return printer


def _local_shape(name: str) -> Printer:
    """A view, by the shape one rank holds."""

    def printer(call: Call) -> str:
        return f"{call.operands[0]}.{name}({', '.join(call.text(extent) for extent in call.result.shape)})"

    return printer


def _split(call: Call) -> str:
    """Pieces of the local size; along a dim that is not split that is the global one."""
    dim = call.op.args[2] if len(call.op.args) > 2 else dict(call.op.kwargs).get("dim", 0)
    size = call.op.args[1]
    is_even = len({spec.shape for spec in call.op.outputs}) == 1
    piece = call.text(call.result.shape[dim]) if is_even else call.text(size)
    return f"{call.operands[0]}.split({piece}, dim={dim})"


def _chunk(call: Call) -> str:
    dim = call.op.args[2] if len(call.op.args) > 2 else dict(call.op.kwargs).get("dim", 0)
    return f"{call.operands[0]}.chunk({call.op.args[1]}, dim={dim})"


def _cast(call: Call) -> str:
    return f"{call.operands[0]}.to({call.text(call.op.args[1])})"


def _to_copy(call: Call) -> str:
    keywords = [text for text in call.keywords() if text.startswith(("dtype=", "device="))]
    return f"{call.operands[0]}.to({', '.join(keywords)})"


def _embedding(call: Call) -> str:
    table, ids, *_ = call.operands
    padding = call.op.args[2] if len(call.op.args) > 2 else -1
    return f"F.embedding({ids}, {table}{f', padding_idx={padding}' if padding != -1 else ''})"


def _attention(call: Call) -> str:
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    values = dict(zip(names, call.op.args[3:], strict=False)) | dict(call.op.kwargs)
    texts = [*call.operands[:3]]
    if isinstance(values.pop("attn_mask", None), Ref):
        texts.append(f"attn_mask={call.operands[3]}")
    defaults = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    texts += [f"{key}={value!r}" for key, value in values.items() if value != defaults[key]]
    return f"F.scaled_dot_product_attention({', '.join(texts)})"


def _norm(name: str) -> Printer:
    def printer(call: Call) -> str:
        arguments = call.arguments()[:5]
        return f"F.{name}({', '.join(arguments)})"

    return printer


_REDUCTIONS = ("none", "mean", "sum")


def _loss(name: str, *keywords: str) -> Printer:
    """Losses take their reduction as a number in ATen and as a word in `F`."""

    def printer(call: Call) -> str:
        values = dict(zip(keywords, call.op.args[2:], strict=False)) | dict(call.op.kwargs)
        if isinstance(values.get("reduction"), int):
            values["reduction"] = _REDUCTIONS[values["reduction"]]
        defaults = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "weight": None}
        operands = iter(call.operands[2:])
        texts = [*call.operands[:2]]
        for key, value in values.items():
            if value != defaults.get(key):
                texts.append(f"{key}={next(operands) if isinstance(value, Ref) else repr(value)}")
        return f"{name}({', '.join(texts)})"

    return printer


def _dropout(call: Call) -> str:
    return f"F.dropout({call.operands[0]}, {call.op.args[1]!r}, self.training)"


_TORCH_FUNCTIONS = [
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "abs",
    "square",
    "tanh",
    "sigmoid",
    "outer",
    "where",
    "tril",
    "triu",
    "clamp",
    "reciprocal",
    "bmm",
    "mm",
    "matmul",
]

EXPRESSIONS: dict[str, Printer] = {
    **{f"aten.{name}.default": _function(f"torch.{name}") for name in _TORCH_FUNCTIONS},
    "aten.where.self": _function("torch.where"),
    "aten.pow.Tensor_Scalar": _infix("**"),
    "aten.pow.Scalar": _infix("**"),
    "aten.add.Tensor": _infix("+"),
    "aten.sub.Tensor": _infix("-"),
    "aten.mul.Tensor": _infix("*"),
    "aten.div.Tensor": _infix("/"),
    "aten.eq.Tensor": _infix("=="),
    "aten.eq.Scalar": _infix("=="),
    "aten.ne.Scalar": _infix("!="),
    "aten.lt.Tensor": _infix("<"),
    "aten.le.Tensor": _infix("<="),
    "aten.gt.Tensor": _infix(">"),
    "aten.ge.Tensor": _infix(">="),
    "aten.lt.Scalar": _infix("<"),
    "aten.gt.Scalar": _infix(">"),
    "aten.neg.default": lambda call: f"-{call.operands[0]}",
    "aten.linear.default": _function("F.linear", None),
    "aten.addmm.default": _function("torch.addmm"),
    "aten.gelu.default": _function("F.gelu"),
    "aten.silu.default": _function("F.silu"),
    "aten.relu.default": _function("F.relu"),
    "aten.softplus.default": _function("F.softplus"),
    "aten.layer_norm.default": _norm("layer_norm"),
    "aten.rms_norm.default": _norm("rms_norm"),
    "aten.softmax.int": _function("torch.softmax", None),
    "aten.log_softmax.int": _function("torch.log_softmax", None),
    "aten.embedding.default": _embedding,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.cross_entropy_loss.default": _loss(
        "F.cross_entropy", "weight", "reduction", "ignore_index", "label_smoothing"
    ),
    "aten.mse_loss.default": _loss("F.mse_loss", "reduction"),
    "aten.l1_loss.default": _loss("F.l1_loss", "reduction"),
    "aten.dropout.default": _dropout,
    "aten.view.default": _local_shape("reshape"),
    "aten.reshape.default": _local_shape("reshape"),
    "aten._unsafe_view.default": _local_shape("reshape"),
    "aten.unflatten.int": _local_shape("reshape"),
    "aten.flatten.using_ints": _method("flatten"),
    "aten.expand.default": _local_shape("expand"),
    "aten.unsqueeze.default": _method("unsqueeze"),
    "aten.squeeze.dim": _method("squeeze"),
    "aten.transpose.int": _method("transpose"),
    "aten.permute.default": _spread_method("permute"),
    "aten.t.default": _method("t"),
    "aten.contiguous.default": _method("contiguous"),
    "aten.clone.default": _method("clone"),
    "aten.detach.default": _method("detach"),
    "aten.select.int": _method("select"),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _chunk,
    "aten.cat.default": _function("torch.cat"),
    "aten.to.dtype": _cast,
    "aten._to_copy.default": _to_copy,
    "aten.sum.default": _method("sum"),
    "aten.sum.dim_IntList": _method("sum"),
    "aten.mean.default": _method("mean"),
    "aten.mean.dim": _method("mean"),
    "aten.arange.default": _function("torch.arange"),
    "aten.arange.start": _function("torch.arange"),
    "aten.arange.start_step": _function("torch.arange"),
    "aten.zeros.default": _function("torch.zeros"),
    "aten.ones.default": _function("torch.ones"),
    "aten.full.default": _function("torch.full"),
    "aten.scalar_tensor.default": _function("torch.scalar_tensor"),
    "getitem": lambda call: f"{call.operands[0]}[{call.op.args[1]}]",
}
