"""Python source in the layout that black and ruff leave alone: double quotes, short lines, brackets opened their way.

flat(node)                 an expression on one line, with the fewest parentheses
statement(text, indent)    a statement; where it does not fit, its last bracket opens

x = f(                     x = f(                      x = {
a, b                       a,                          a,
)                              b,                          b,
)                           }
arguments that fit         arguments that do not       a display is always one item per line
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from autoplan.codegen.text import INDENT, LINE_LENGTH, quoted

_BINARY: dict[type[ast.operator], tuple[str, int]] = {
    ast.BitOr: ("|", 5),
    ast.BitXor: ("^", 6),
    ast.BitAnd: ("&", 7),
    ast.LShift: ("<<", 8),
    ast.RShift: (">>", 8),
    ast.Add: ("+", 9),
    ast.Sub: ("-", 9),
    ast.Mult: ("*", 10),
    ast.Div: ("/", 10),
    ast.FloorDiv: ("//", 10),
    ast.Mod: ("%", 10),
    ast.MatMult: ("@", 10),
    ast.Pow: ("**", 12),
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+", ast.Invert: "~"}
_COMPARISON, _SIGN, _ATOM = 4, 11, 14


def flat(node: ast.AST, level: int = 0) -> str:
    """An expression on one line; in parentheses when it binds less tightly than `level`."""
    text, own_level = _flat(node)
    return f"({text})" if own_level < level else text


def _flat(node: ast.AST) -> tuple[str, int]:
    match node:
        case ast.Constant(value=str(value)):
            return quoted(value), _ATOM
        case ast.Constant(value=float(value)):
            return repr(value).replace("e+", "e"), _ATOM
        case ast.Attribute(value=value, attr=attr):
            return f"{flat(value, _ATOM)}.{attr}", _ATOM
        case ast.Call(func=func):
            return f"{flat(func, _ATOM)}({', '.join(map(flat, _arguments(node)))})", _ATOM
        case ast.keyword(arg=name, value=value):
            return (f"{name}={flat(value)}" if name else f"**{flat(value)}"), 0
        case ast.Starred(value=value):
            return f"*{flat(value)}", 0
        case ast.Subscript(value=value, slice=index):
            inside = ", ".join(map(flat, index.elts)) if isinstance(index, ast.Tuple) and index.elts else flat(index)
            return f"{flat(value, _ATOM)}[{inside}]", _ATOM
        case ast.Slice(lower=lower, upper=upper, step=step):
            return _slice(lower, upper, step), 0
        case ast.Tuple(elts=items):
            return f"({', '.join(map(flat, items))}{',' if len(items) == 1 else ''})", _ATOM
        case ast.List(elts=items):
            return f"[{', '.join(map(flat, items))}]", _ATOM
        case ast.Dict():
            return "{" + ", ".join(f"{key}{flat(value)}" for key, value in _entries(node)) + "}", _ATOM
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            is_power = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Pow)
            return _UNARY[type(sign)] + flat(operand, _ATOM if is_power else _SIGN), _SIGN
        case ast.BinOp(left=left, op=operator, right=right):
            return _binary(left, operator, right)
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
            sides = flat(left, _COMPARISON + 1), flat(right, _COMPARISON + 1)
            return f" {_COMPARISONS[type(operator)]} ".join(sides), _COMPARISON
    return ast.unparse(node), (_ATOM if isinstance(node, ast.Name | ast.Constant) else 0)


def _binary(left: ast.expr, operator: ast.operator, right: ast.expr) -> tuple[str, int]:
    symbol, level = _BINARY[type(operator)]
    if isinstance(operator, ast.Pow):
        space = "" if _is_simple(left) and _is_simple(right) else " "
        return f"{flat(left, level + 1)}{space}**{space}{flat(right, _SIGN)}", level
    return f"{flat(left, level)} {symbol} {flat(right, level + 1)}", level


def _is_simple(node: ast.expr) -> bool:
    """Whether `**` stands next to this operand without spaces."""
    if isinstance(node, ast.Attribute):
        return _is_simple(node.value) and not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Name | ast.Constant)


def _slice(lower: ast.expr | None, upper: ast.expr | None, step: ast.expr | None) -> str:
    bounds = [flat(bound) if bound else "" for bound in (lower, upper)] + ([flat(step)] if step else [])
    is_simple = all(isinstance(b, ast.Name | ast.Constant | ast.UnaryOp | None) for b in (lower, upper, step))
    return ":".join(bounds) if is_simple else " : ".join(bounds).strip()


def _arguments(call: ast.Call) -> list[ast.AST]:
    return [*call.args, *call.keywords]


def _entries(node: ast.Dict) -> list[tuple[str, ast.expr]]:
    return [(f"{flat(key)}: " if key else "**", value) for key, value in zip(node.keys, node.values, strict=True)]


def statement(text: str, indent: int = 0) -> list[str]:
    """The lines of one statement (an assignment, a return, a call), `indent` levels deep but not indented."""
    if len(text) + len(INDENT) * indent <= LINE_LENGTH:
        return [text]
    node = ast.parse(text.removeprefix("return ")).body[0]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and node.value is not None:
        prefix = text[: _offset(text.removeprefix("return "), node.value)]
        prefix = "return " if text.startswith("return ") else prefix
        return _broken(prefix, node.value, "", indent)
    return [text]


def _offset(text: str, node: ast.expr) -> int:
    """Where the expression begins in a statement of one line."""
    return len(text.encode()[: node.col_offset].decode())


def bracket(head: str, items: Sequence[str], tail: str, indent: int) -> list[str]:
    """`head` + items + `tail` on as few lines as black takes, for arguments and parameters."""
    one = head + ", ".join(items) + tail
    if len(one) + len(INDENT) * indent <= LINE_LENGTH:
        return [one]
    body = ", ".join(items)
    if len(body) + len(INDENT) * (indent + 1) <= LINE_LENGTH:
        return [head, INDENT + body, tail]
    return [head, *(f"{INDENT}{item}," for item in items), tail]


def _broken(prefix: str, node: ast.AST, suffix: str, indent: int) -> list[str]:
    room = LINE_LENGTH - len(INDENT) * indent
    one = prefix + flat(node) + suffix
    if len(one) <= room:
        return [one]
    match node:
        case ast.keyword(arg=str(name), value=value):
            return _broken(f"{prefix}{name}=", value, suffix, indent)
        case ast.Call(func=func):
            arguments = [("", argument) for argument in _arguments(node)]
            body = ", ".join(map(flat, _arguments(node)))
            if len(body) + len(INDENT) <= room:
                lines = [body]
            else:
                lines = _items(arguments, indent + 1, last="" if len(arguments) == 1 else ",")
            return [f"{prefix}{flat(func, _ATOM)}(", *(INDENT + line for line in lines), f"){suffix}"]
        case ast.Tuple(elts=items) | ast.List(elts=items) if items:
            opening, closing = "()" if isinstance(node, ast.Tuple) else "[]"
            lines = _items([("", item) for item in items], indent + 1, last=",")
            return [prefix + opening, *(INDENT + line for line in lines), closing + suffix]
        case ast.Dict():
            lines = _items(list(_entries(node)), indent + 1, last=",")
            return [prefix + "{", *(INDENT + line for line in lines), "}" + suffix]
        case ast.BinOp() | ast.Compare() if prefix.endswith(("= ", "return ")):
            return [f"{prefix}(", INDENT + flat(node), f"){suffix}"]
    return [one]


def _items(items: Sequence[tuple[str, ast.AST]], indent: int, *, last: str) -> list[str]:
    lines = []
    for number, (prefix, node) in enumerate(items, 1):
        lines += _broken(prefix, node, last if number == len(items) else ",", indent)
    return lines
