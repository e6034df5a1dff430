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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from autoplan.equations import broadcast_equation
from autoplan.errors import InputError
from autoplan.graph import Argument, Op, OpGraph, PerSample, Ref, Symbol, TensorSpec, extent_at
from autoplan.layout import Layout, P, V, sharded
from autoplan.rules import Specs, Strategy, operand_names, parse_equation
from autoplan.user_errors import first_line

DEGREES = (2, 3)
BATCH_SIZE = 6  # divides by both degrees
TOLERANCE = 1e-9
_LINE_LENGTH = 116
MAX_ELEMENTS = 2**24  # of the operands together; a smaller configuration of the model shows the same rule
MAX_TRIALS = 2000  # letters tried per call


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

    Raises: InputError for an operator that the graph does not call.
    """
    called = dict.fromkeys(op.target for op in graph.ops)
    for target in targets:
        if target not in called:
            raise InputError.of(
                f"--op {target}", found="not called", expected=f"one of {', '.join(called)}", fix="use a name of these"
            )
    return tuple(_discover(graph, target) for target in targets)


def rules_text(found: Sequence[FoundRule]) -> str:
    """A file of rules: what `--rules` reads."""
    entries = [line for rule in found for line in _entry_lines(rule)]
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
            trial = _Trial.of(op, operands)
        except _CannotTryError as error:
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


def _equation(trial: _Trial) -> str | None:
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
    trial: _Trial,
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


# ---------------------------------------------------------------- trying


class _CannotTryError(Exception):
    """The operator cannot be run here as a trial needs it."""


@dataclass(slots=True)
class _Trial:
    """One call of an operator on random numbers; `holds` tries a strategy on it."""

    run: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    operands: list[torch.Tensor]
    results: list[torch.Tensor]
    seeds: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    has_backward: bool
    saves: tuple[int, ...] | None
    n_tried: int = 0

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.results[0].shape)

    @classmethod
    def of(cls, op: Op, operands: Specs) -> _Trial:
        """Run the whole op, forward and backward."""
        if sum(spec.n_elements(BATCH_SIZE) for spec in operands) > MAX_ELEMENTS:
            raise _CannotTryError("its tensors are too large to try; make the model smaller with --set")
        generator = torch.Generator().manual_seed(0)
        values = [_random(spec, generator) for spec in operands]
        run = _runner(op)
        leaves = [_leaf(value) for value in values]
        try:
            with _Saved(leaves) as saved:
                results = run(leaves)
            again = run(values)
        except Exception as error:  # the user's operator: whatever it raises says why it cannot be tried
            raise _CannotTryError(f"it does not run on the CPU in float64 ({first_line(error)[:100]})") from error
        if not all(_close(a.detach(), b) for a, b in zip(results, again, strict=True)):
            raise _CannotTryError("it gives other results each time")
        seeds = [torch.rand(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
        has_backward = _backward(results, seeds)
        gradients = [leaf.grad if has_backward else None for leaf in leaves]
        whole = [result.detach() for result in results]
        return cls(run, values, whole, seeds, gradients, has_backward, saved.places(results) if has_backward else None)

    def holds(self, strategy: Strategy) -> bool:
        """Whether the strategy gives the whole op's results and gradients on 2 and on 3 shards."""
        self.n_tried += 1
        return self.n_tried <= MAX_TRIALS and all(self._holds_on(strategy, degree) for degree in DEGREES)

    def _holds_on(self, strategy: Strategy, degree: int) -> bool:
        """Forward first: an operator may not survive backward on shapes that do not belong together."""
        leaves_of, found = [], []
        try:
            for rank in range(degree):
                pairs = zip(self.operands, strategy.operands, strict=True)
                leaves_of.append([_leaf(_part(value, layout, rank, degree)) for value, layout in pairs])
                found.append(self.run(leaves_of[-1]))
        except Exception:  # the operator refuses these shapes: the split is not possible
            return False
        for whole, *parts in zip(self.results, *found, strict=True):
            if not _are_parts(parts, strategy.result, whole):
                return False
        if not self.has_backward:
            return True
        for rank, results in enumerate(found):
            if not _backward(results, [_seed_part(seed, strategy.result, rank, degree) for seed in self.seeds]):
                return False
        columns = zip(self.gradients, zip(*leaves_of, strict=True), strategy.operands, strict=True)
        return all(
            gradient is None or _is_gradient([leaf.grad for leaf in leaves], layout, gradient)
            for gradient, leaves, layout in columns
        )


class _Saved:
    """Which tensors a forward pass keeps."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self.leaves, self.kept = leaves, set[int]()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __enter__(self) -> _Saved:
        self.hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self.hooks.__exit__(*details)

    def places(self, results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Positions of the operands that were kept, and -1 for the first result."""
        found = [i for i, x in enumerate(self.leaves) if x.untyped_storage().data_ptr() in self.kept]
        return (*found, -1) if results[0].untyped_storage().data_ptr() in self.kept else tuple(found)


def _runner(op: Op) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    function: Any = torch.ops
    for name in op.target.split("."):
        function = getattr(function, name)

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left = iter(tensors)
        arguments = [_value(argument, left) for argument in op.args]
        keywords = {key: _value(argument, left) for key, argument in op.kwargs}
        results = function(*arguments, **keywords)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    return run


def _value(argument: Argument, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(tensors)
    if isinstance(argument, tuple):
        return [_value(item, tensors) for item in argument]
    if isinstance(argument, PerSample):
        return extent_at(argument, BATCH_SIZE)
    if isinstance(argument, Symbol):
        return _symbol(argument.text)
    return argument


def _symbol(text: str) -> Any:
    if text == "device":
        return torch.device("cpu")
    name = text.removeprefix("dtype:").removeprefix("torch.")
    return torch.float64 if name in ("compute", "float32", "bfloat16", "float16") else getattr(torch, name)


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Numbers in (0.1, 1.1), 0 or 1, or true and false."""
    shape = spec.at(BATCH_SIZE)
    if spec.is_float:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return torch.randint(2, shape, generator=generator).to(getattr(torch, spec.dtype))


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _backward(results: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> bool:
    """Whether there is a backward pass, and it ran."""
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    if not pairs:
        return False
    try:
        torch.autograd.backward([r for r, _ in pairs], [s for _, s in pairs])
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _part(value: torch.Tensor, layout: Layout, rank: int, degree: int) -> torch.Tensor:
    if layout.kind == "S":
        return value.tensor_split(degree, dim=layout.dim)[rank]
    if layout.kind == "P":
        return value * (rank + 1) / (degree * (degree + 1) / 2) if value.is_floating_point() else value * (rank == 0)
    return value


def _seed_part(seed: torch.Tensor, layout: Layout, rank: int, degree: int) -> torch.Tensor:
    return seed if layout == P else _part(seed, layout, rank, degree)


def _joined(parts: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    return torch.cat(list(parts), dim=layout.dim) if layout.kind == "S" else torch.stack(list(parts)).sum(0)


def _are_parts(parts: Sequence[torch.Tensor], layout: Layout, whole: torch.Tensor) -> bool:
    """Whether the parts make up the whole, each of the shape that its place has."""
    degree = len(parts)
    if any(part.shape != _seed_part(whole, layout, rank, degree).shape for rank, part in enumerate(parts)):
        return False
    return _close(_joined([part.detach() for part in parts], layout), whole)


def _is_gradient(parts: Sequence[torch.Tensor | None], layout: Layout, whole: torch.Tensor) -> bool:
    if any(part is None for part in parts):
        return False
    found = [part for part in parts if part is not None]
    return all(_close(part, whole) for part in found) if layout == P else _close(_joined(found, layout), whole)


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return torch.allclose(left.double(), right.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
