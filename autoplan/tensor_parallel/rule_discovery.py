"""The rule of an unknown operator, found by trying: OpGraph -> text of a `RULES` table.

A letter of an equation says one thing: split these dims of the operands alike, and the results of the parts are the
parts of the result (the letter is in the result), or sum to it (the letter is contracted). That is true or false for
each letter by itself, so letters are tried one by one, on random float64 tensors, with 2 and with 3 shards, forward
and gradient; those that hold make the equation:

    one dim of the result, or none        x        for each operand: one dim of equal extent, or none
    rank r runs the op on its shards; operands without the letter are whole (V), or, added, partial (P)

What is printed was true of these shapes and numbers; that is evidence, not proof. An operator that branches on its
values may hold more surprises than random numbers find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from autoplan.equations import broadcast_equation
from autoplan.errors import UsageError
from autoplan.graph import Op, OpGraph
from autoplan.layout import P, V, sharded
from autoplan.rules import Specs, Strategy, operand_names, parse_equation
from autoplan.tensor_parallel.rule_trials import CannotTryError, Trial

_LINE_LENGTH = 116
NONE_WANTED = "# every operator of the model has a rule"


@dataclass(frozen=True, slots=True)
class FoundRule:
    """What was found out about one operator.

    Attributes:
        target: the operator.
        equations: (rank of the first operand, equation) for each rank that the model calls it with; none when nothing
            can be split.
        has_other_ranks: whether it is also called with ranks of which nothing can be split.
        is_elementwise: whether `autoplan.equations.broadcast_equation` gives all of them.
        saves: operands that its forward keeps, -1 for the result; None when it could not be seen.
        note: what limits the finding, or why there is none.
    """

    target: str
    equations: tuple[tuple[int, str], ...] = ()
    has_other_ranks: bool = False
    is_elementwise: bool = False
    linear_in: tuple[int, ...] = ()
    saves: tuple[int, ...] | None = None
    note: str = ""


def discover_rules(graph: OpGraph, targets: Sequence[str]) -> tuple[FoundRule, ...]:
    """What can be split in each of these operators of the graph.

    Raises: UsageError for an operator that the graph does not call.
    """
    called = dict.fromkeys(op.target for op in graph.ops)
    for target in targets:
        if target not in called:
            raise UsageError.of(
                f"--op {target}", found="not called", expected=f"one of {', '.join(called)}", fix="use a name of these"
            )
    return tuple(_discover(graph, target) for target in dict.fromkeys(targets))


def rules_text(found: Sequence[FoundRule]) -> str:
    """A file of rules: what `--rules` reads."""
    entries = [line for rule in found for line in _entry_lines(rule)] or [NONE_WANTED]
    needs_broadcast = any(rule.is_elementwise for rule in found)
    return "\n".join(
        [
            '"""Rules found by trial: each was checked on 2 and 3 shards, forward and gradient, in float64."""',
            "",
            *(["from autoplan.equations import broadcast_equation"] if needs_broadcast else []),
            "from autoplan.rules import OpRule",
            "",
            "RULES = {",
            *(f"    {line}" for line in entries),
            "}",
        ]
    )


def _entry_lines(rule: FoundRule) -> Iterator[str]:
    if rule.note:
        yield f"# {rule.target}: {rule.note}"
    if not rule.equations:
        return
    arguments = [_equation_text(rule)]
    arguments += [f"linear_in={rule.linear_in}"] if rule.linear_in else []
    arguments += [f"saves={rule.saves}"] if rule.saves else []
    line = f'"{rule.target}": OpRule({", ".join(arguments)}),'
    if len(line) <= _LINE_LENGTH:
        yield line
    else:
        yield from (f'"{rule.target}": OpRule(', *(f"    {argument}," for argument in arguments), "),")


def _equation_text(rule: FoundRule) -> str:
    """The equation as Python; by the rank of the first operand where calls of other ranks have other ones, or none."""
    if rule.is_elementwise:
        return "broadcast_equation"
    if not rule.has_other_ranks and len({text for _, text in rule.equations}) == 1:
        return f'"{rule.equations[0][1]}"'
    table = ", ".join(f'{rank}: "{text}"' for rank, text in rule.equations)
    return f"lambda op, operands: {{{table}}}.get(len(operands[0].shape))"


# ---------------------------------------------------------------- one operator


def _discover(graph: OpGraph, target: str) -> FoundRule:
    specs = graph.specs()
    calls = [(op, tuple(specs[name] for name in operand_names(op))) for op in graph.ops if op.target == target]
    by_rank = {len(operands[0].shape): (op, operands) for op, operands in reversed(calls) if operands}
    if not by_rank:
        return FoundRule(target, note="it has no tensor operand; it needs no rule")
    equations, linear_in, saves, is_elementwise = [], None, None, True
    for rank, (op, operands) in sorted(by_rank.items()):
        try:
            trial = Trial.of(op, operands)
        except CannotTryError as error:
            return FoundRule(target, note=f"{error}; it stays replicated")
        equation = _equation(trial)
        if equation is None:
            continue
        equations.append((rank, equation))
        linear = tuple(i for i in range(len(operands)) if trial.holds(_linear(equation, i)))
        linear_in = linear if linear_in is None else tuple(i for i in linear_in if i in linear)
        saves = trial.saves
        is_elementwise &= _is_broadcast(op, operands, equation)
    if not equations:
        return FoundRule(target, note="only replication is possible: no split of any dim gives the same result")
    return FoundRule(
        target,
        tuple(equations),
        has_other_ranks=len(equations) < len(by_rank),
        is_elementwise=is_elementwise,
        linear_in=linear_in or (),
        saves=saves,
        note="" if trial.has_backward else "forward only: it has no derivative that could be checked",
    )


def _is_broadcast(op: Op, operands: Specs, equation: str) -> bool:
    """Whether `broadcast_equation` says the same as the equation."""
    rank = len(op.outputs[0].shape)
    return all(len(s.shape) <= rank for s in operands) and _same(equation, broadcast_equation(op, operands))


def _same(left: str, right: str) -> bool:
    """Whether two equations without contracted letters are equal up to the names of letters."""

    def numbered(equation: str) -> list[list[int]]:
        operands, result = parse_equation(equation)
        numbers: dict[str, int] = {}
        shared = {letter for term in operands for letter in term.letters} & set(result.letters) - result.whole
        return [
            [numbers.setdefault(letter, len(numbers)) if letter in shared else -1 for letter in term.letters]
            for term in (*operands, result)
        ]

    return numbered(left) == numbered(right) and "+" not in left


def _linear(equation: str, index: int) -> Strategy:
    terms, _ = parse_equation(equation)
    layouts = tuple(P if i == index or term.is_added else V for i, term in enumerate(terms))
    return Strategy(layouts, P)


def _equation(trial: Trial) -> str | None:
    """The letters that hold, written as an equation; None when none does."""
    shapes = [tuple(tensor.shape) for tensor in trial.operands]
    names: dict[tuple[int, int], str] = {}  # (operand, dim) -> letter; the result is operand -1
    added: set[int] = set()
    free = iter("abcdefghijklmnopqrstuvwxyz")
    for result_dim in [*range(len(trial.result_shape)), None]:
        letter = _letter(trial, shapes, result_dim, taken=set(names), added=added)
        while letter is not None:
            dims, partial = letter
            name = next(free)
            names.update(dict.fromkeys(dims.items(), name + ("+" if result_dim is None else "")))
            if result_dim is not None:
                names[-1, result_dim] = name
            added |= partial
            letter = _letter(trial, shapes, None, set(names), added) if result_dim is None else None
    if not names:
        return None
    whole: dict[int, str] = {}  # dims that stay whole; equal extents are taken for one dim, which counts once in FLOPs

    def mark(place: int, dim: int, extent: int) -> str:
        if (place, dim) in names:
            return names[place, dim]
        if extent not in whole:
            whole[extent] = f"{next(free)}^"
        return whole[extent]

    terms = [
        ("~" if i in added else "") + " ".join(mark(i, dim, extent) for dim, extent in enumerate(shape))
        for i, shape in enumerate(shapes)
    ]
    result = " ".join(mark(-1, dim, extent) for dim, extent in enumerate(trial.result_shape))
    return f"{', '.join(terms)} -> {result}".rstrip()


def _letter(
    trial: Trial,
    shapes: list[tuple[int, ...]],
    result_dim: int | None,
    taken: set[tuple[int, int]],
    added: set[int],
) -> tuple[dict[int, int], set[int]] | None:
    """The first letter that holds: the dim of each operand that has it, and the operands that are added."""
    for dims in _assignments(shapes, None if result_dim is None else trial.result_shape[result_dim], taken):
        others = [i for i in range(len(shapes)) if i not in dims]
        for partial in _partials(others, added) if result_dim is None else [set[int]()]:
            layouts = tuple(sharded(dims[i]) if i in dims else P if i in partial else V for i in range(len(shapes)))
            if trial.holds(Strategy(layouts, P if result_dim is None else sharded(result_dim))):
                return dims, partial
    return None


def _assignments(
    shapes: list[tuple[int, ...]], extent: int | None, taken: set[tuple[int, int]]
) -> Iterator[dict[int, int]]:
    """A dim or none for each operand; all of one extent; those with more operands first."""
    extents = [extent] if extent is not None else sorted({x for shape in shapes for x in shape if x > 1})
    for wanted in extents:
        options = [
            [*(dim for dim, x in enumerate(shape) if x == wanted and x > 1 and (i, dim) not in taken), None]
            for i, shape in enumerate(shapes)
        ]
        found = [{i: dim for i, dim in enumerate(choice) if dim is not None} for choice in product(*options)]
        yield from sorted((dims for dims in found if dims), key=len, reverse=True)


def _partials(others: list[int], added: set[int]) -> Iterator[set[int]]:
    """Which of the operands without the letter are added: none, or each one, or as an earlier letter found."""
    yield set(added) & set(others)
    yield from ({i} for i in others if {i} != added)
