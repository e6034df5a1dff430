"""A call to print, and the usual ways to print one: as a function, a method, an infix, or by the local shape.

Sizes are those of one rank: views take the local shape of their result, a split its local piece, and a number of groups
that divides a sharded dim is the number of groups in the local part (`Call.share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

from autoplan.graph import COMPUTE, Argument, Op, PerSample, Ref, Symbol, TensorSpec


@dataclass(frozen=True, slots=True)
class Call:
    """One op to print.

    Attributes:
        operands: the expression of each tensor operand, in order of appearance.
        result: the local spec of its (first) result.
        dtype_like, device_like: expressions of a tensor in the compute precision, and of any tensor on the device.
        batch: the expression of the batch size.
        tp: the expression of the tensor-parallel group, for functions of the runtime.
        is_16_bit: whether the compute precision is one of 16 bits.
        n_unpadded: the true extent of the operands' padded dim; None when nothing is padded.
    """

    op: Op
    operands: tuple[str, ...]
    result: TensorSpec
    dtype_like: str
    device_like: str
    batch: str = "batch"
    tp: str = "self.tp"
    is_16_bit: bool = False
    n_unpadded: int | None = None

    def share(self, count: int, *, dim: int) -> int:
        """How many of `count` equal groups, which make up a dim of the result, are in the local part."""
        local, whole = self.result.shape[dim], self.op.outputs[0].shape[dim]
        assert isinstance(local, int) and isinstance(whole, int), "the batch dim is never sharded"
        return count * local // whole

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


def _text(call: Call, argument: Argument, operands: Iterator[str]) -> str:
    if isinstance(argument, Ref):
        return next(operands)
    if isinstance(argument, tuple):
        items = [_text(call, item, operands) for item in argument]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, PerSample):
        return call.batch if argument.count == 1 else f"{call.batch} * {argument.count}"
    if isinstance(argument, Symbol):
        return _symbol_text(call, argument)
    if isinstance(argument, float) and not isfinite(argument):
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


Printer = Callable[[Call], str]


def function(name: str, *defaults: object) -> Printer:
    """`name(args)`; trailing arguments equal to `defaults` (aligned at the end) are left out."""

    def printer(call: Call) -> str:
        arguments, rest = call.arguments(), list(call.op.args)
        for default in reversed(defaults):
            if len(rest) and rest[-1] == default and not isinstance(rest[-1], Ref):
                rest.pop()
                arguments.pop()
        return f"{name}({', '.join(arguments + call.keywords())})"

    return printer


def method(name: str) -> Printer:
    """`x.name(arguments)`."""

    def printer(call: Call) -> str:
        operand, *arguments = call.arguments()
        return f"{operand}.{name}({', '.join(arguments + call.keywords())})"

    return printer


def spread_method(name: str) -> Printer:
    """A method whose sizes or dims are separate arguments: x.permute(0, 2, 1)."""

    def printer(call: Call) -> str:
        return f"{call.operands[0]}.{name}({', '.join(call.text(item) for item in call.op.args[1])})"

    return printer


def infix(symbol: str) -> Printer:
    """`a + b`, `a + 2 * b`, or `(-1) ** b`, which without the parentheses is -(1 ** b)."""

    def printer(call: Call) -> str:
        left, right, *_ = call.arguments()
        left = f"({left})" if left.startswith("-") else left
        scale = dict(call.op.kwargs).get("alpha", 1)
        return f"{left} {symbol} {right}" if scale == 1 else f"{left} {symbol} {scale!r} * {right}"

    return printer


def local_shape(name: str) -> Printer:
    """A view, by the shape one rank holds: `x.reshape(8, 6)`; `x.reshape(())` for one number."""

    def printer(call: Call) -> str:
        extents = ", ".join(call.text(extent) for extent in call.result.shape)
        return f"{call.operands[0]}.{name}({extents or '()'})"

    return printer


def keyworded(name: str, n_leading: int, **defaults: object) -> Printer:
    """`name(leading arguments, keyword=value)`: the arguments after the leading ones by their names, in order.

    Defaults are left out, and so are trailing leading arguments that are None. Equal sizes are written once.
    """

    def printer(call: Call) -> str:
        leading = call.arguments()[:n_leading]
        while leading and leading[-1] == "None":
            leading.pop()
        values = dict(zip(defaults, call.op.args[n_leading:], strict=False)) | dict(call.op.kwargs)
        texts = [
            f"{key}={call.text(_once(value))}" for key, value in values.items() if _once(value) != defaults.get(key)
        ]
        return f"{name}({', '.join([*leading, *texts])})"

    return printer


def _once(value: Argument) -> Argument:
    """(2, 2) -> 2."""
    is_repeated = isinstance(value, tuple) and len(set(value)) == 1 and isinstance(value[0], int)
    return value[0] if is_repeated else value


def attribute(name: str) -> Printer:
    """`x.name`."""
    return lambda call: f"{call.operands[0]}.{name}"


def by_local_shape(name: str, *, n_operands: int = 0) -> Printer:
    """A new tensor, of the shape one rank holds: `torch.zeros((8, 6), dtype=...)`, `x.new_zeros((8, 6))`."""

    def printer(call: Call) -> str:
        function = f"{call.operands[0]}.{name}" if n_operands else name
        arguments = [call.text(call.result.shape), *call.arguments()[1 + n_operands :]]
        return f"{function}({', '.join(arguments + call.keywords())})"

    return printer


def indexed(dim: int, rank: int, text: str) -> str:
    """What stands between brackets to index one dim: `:, text` or `..., text`."""
    return f"..., {text}" if dim == rank - 1 and dim > 1 else ", ".join([*[":"] * dim, text])
