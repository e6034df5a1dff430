"""OpRule: everything autoplan knows about one operator, as data. The tables are in `cost_models/`.

The heart of a rule is one equation over the dims of its tensors, operands before `->`, result after it:

    linear       "a b k+, n k+, ~n -> a b n"
    layer norm   "a b c^, c^, c^ -> a b c^"

Each letter is a dim. A letter of the result may be sharded on every tensor that has it. `+` marks a contracted letter:
sharding it leaves partial sums. `^` marks a letter that must stay whole. `~` marks an operand that is added, so under
partial sums it must itself be partial. From this follow all legal layouts of the op on one axis (`strategies`):

    nothing split    all R -> R                      all V -> V
    letter n split   operands with n: S, others: V  -> S
    letter k split   operands with k: S, `~` ones: P -> P
    linear ops       one operand P, the others V     -> P

and each "letter n split" a second time with padded shards, where the extent of n does not divide (`finite_in`).
Operands that lack the split letter are V, not R: each rank computes only part of their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from autoplan.graph import IMAGE_DIMS, Argument, Extent, Op, Ref, TensorSpec, extent_at
from autoplan.layout import E, Layout, P, R, V, can_shard, padded, sharded
from autoplan.registry import load_table

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal way to run an op on the tensor-parallel axis.

    Attributes:
        operands: a layout per tensor operand, in the order of `operand_names`.
        result: the layout of its result (of every result, for an op with several).
        is_split: whether each rank does only its share of the arithmetic.
        function: a function of `runtime` that runs instead of the op ("" for the op itself).
        all_reduce_elements: elements per sample that this function all-reduces in forward (loss statistics).
        exchanged: operands, by position, and -1 for the result, that this function passes through an all-to-all.
    """

    operands: tuple[Layout, ...]
    result: Layout
    is_split: bool = False
    function: str = ""
    all_reduce_elements: int = 0
    exchanged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One call of an op on what a rank holds of its operands and results; `whole_operands` are those before the split.

    `memory_format` is the order of images in memory, as in `parallel_plan.Execution`; `attention` that of `Device`;
    `gradients` says which operands have one (all factors of a product, if it is empty), `scattered` of which the
    numbers of a row lie apart in memory, `own` which the segment makes itself (none, if these are empty), `is_compiled`
    whether torch.compile has the op. `precision` is what it computes in, `given_precision` what its operands are in.
    """

    op: Op
    whole_operands: Specs
    operands: Specs
    results: Specs
    batch_size: int
    precision: str
    memory_format: str = "contiguous"
    attention: str = "flash"
    gradients: tuple[bool, ...] = ()
    scattered: tuple[bool, ...] = ()
    own: tuple[bool, ...] = ()
    is_compiled: bool = False
    given_precision: str = "fp32"

    @property
    def is_tf32_of_hopper(self) -> bool:
        """Whether it is computed in tf32 by a server's GPU of Hopper or later, which alone have attention of cuDNN."""
        return self.precision == "tf32" and self.attention == "cudnn"

    @property
    def operand_format(self) -> str:
        """The order of the first operand: only images, [sample, channel, height, width], lie in another."""
        return self.memory_format if len(self.operands[0].shape) == IMAGE_DIMS else "contiguous"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What computes a call: matrix units, or else those for float32, and which part of a large product's rate (of the
    peak of float32) is achieved, forward and backward.
    """

    uses_matrix_units: bool
    fraction: float = 1.0
    backward_fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class OpRule:
    """What one operator computes, costs and allows.

    Attributes:
        equation: the equation, or a function of the op and its operand specs that returns it (for any rank); None when
            `strategies` is given.
        flops_per_point: FLOPs of the forward pass per point of the iteration space (all letters of the equation).
        backward_flops_ratio: FLOPs of backward / forward.
        backward_bytes_ratio: memory traffic of backward / forward.
        n_kernels, n_backward_kernels: device kernels launched.
        saves: operands kept for backward, by position; -1 is the result.
        extra_saved_bytes: what is kept besides (dropout mask, statistics).
        flops: replaces `flops_per_point` where the iteration space is not the product of all letters.
        moved_bytes: memory traffic of forward; replaces operands plus results.
        backward_bytes: memory traffic of backward, at the rate of a copy; replaces `backward_bytes_ratio`.
        fixed_s: (call, rate of a copy in bytes/s) -> seconds besides in (forward, backward), of what is limited by
            latency, or by memory where that is slower.
        further_bytes: memory traffic that comes on top, at the rate of a copy, in (forward, backward): copies of
            operands and results, additions at single places.
        n_calls: how often the op stands for its kernels; None for once.
        reads_rows: of its first operand it reads what it returns, and no more.
        is_view: no kernel, no memory: the result shares its operand's storage.
        is_product: an operand is kept only for the gradient of the others.
        linear_in: operands in which the op is linear, so that a partial value may pass through.
        finite_in: operands that may hold any finite number: result and gradients are finite then. Only these may be
            padded, in the equation's letters that are not contracted.
        efficiency: "matmul" (limited by matrix units) or "memory".
        is_matrix_product: the matrix units read its tensors as they are, so that odd rows slow it down.
        arithmetic: what computes a call, where that depends on it; replaces `efficiency`.
        rate_fraction, backward_rate_fraction: achieved rate / that of a large matrix product (or copy).
        fractions: these two of a call, where they depend on it.
        strategies: replaces the equation where an equation is not enough; yields what it allows beside all-R and all-V.
    """

    equation: str | Callable[[Op, Specs], str] | None = None
    flops_per_point: float = 1.0
    backward_flops_ratio: float = 1.0
    backward_bytes_ratio: float = 1.5
    n_kernels: int = 1
    n_backward_kernels: int = 1
    saves: tuple[int, ...] = ()
    extra_saved_bytes: Callable[[LocalCall], int] | None = None
    flops: Callable[[Op, Specs, int], int] | None = None
    moved_bytes: Callable[[LocalCall], int] | None = None
    backward_bytes: Callable[[LocalCall], float] | None = None
    fixed_s: Callable[[LocalCall, float], tuple[float, float]] | None = None
    further_bytes: Callable[[LocalCall], tuple[float, float]] | None = None
    n_calls: Callable[[Op], int] | None = None
    reads_rows: bool = False
    is_view: bool = False
    is_product: bool = False
    linear_in: tuple[int, ...] = ()
    finite_in: tuple[int, ...] = ()
    efficiency: str = "memory"
    is_matrix_product: bool = False
    arithmetic: Callable[[LocalCall], Arithmetic] | None = None
    rate_fraction: float = 1.0
    backward_rate_fraction: float = 1.0
    fractions: Callable[[LocalCall], tuple[float, float]] | None = None
    strategies: Callable[[Op, Specs, TensorSpec, int], Iterator[Strategy]] | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor of an equation: its letters, which are marked, and whether it is an added operand."""

    letters: tuple[str, ...]
    contracted: frozenset[str]
    whole: frozenset[str]
    is_added: bool


@lru_cache(maxsize=1024)
def parse_equation(equation: str) -> tuple[tuple[Term, ...], Term]:
    """Operand terms and result term of an equation."""
    operands, result = equation.split("->")
    return tuple(_parse_term(text) for text in operands.split(",")), _parse_term(result)


def _parse_term(text: str) -> Term:
    text = text.strip()
    is_added = text.startswith("~")
    marks = text.removeprefix("~").split()
    return Term(
        letters=tuple(mark.rstrip("+^") for mark in marks),
        contracted=frozenset(mark[:-1] for mark in marks if mark.endswith("+")),
        whole=frozenset(mark[:-1] for mark in marks if mark.endswith("^")),
        is_added=is_added,
    )


def operand_names(op: Op) -> tuple[str, ...]:
    """The tensor operands of an op in order of appearance; a tensor used twice appears twice."""
    found: list[str] = []

    def collect(argument: Argument) -> None:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            for item in argument:
                collect(item)

    collect(op.args)
    collect(tuple(value for _, value in op.kwargs))
    return tuple(found)


def exchanged_specs(op: Op, strategy: Strategy, specs: Mapping[str, TensorSpec]) -> Specs:
    """The global tensors that the op passes through an all-to-all in this strategy."""
    whole = (*(specs[name] for name in operand_names(op)), op.outputs[0])
    return tuple(whole[position] for position in strategy.exchanged)


def equation_of(rule: OpRule, op: Op, operands: Specs) -> str | None:
    """The equation for this call of the op."""
    return rule.equation(op, operands) if callable(rule.equation) else rule.equation


def all_strategies(
    rule: OpRule | None,
    op: Op,
    *,
    operands: Specs,
    degree: int,
    blocks: tuple[int, ...] = (1,),
    padded_extents: frozenset[Extent] = frozenset(),
    expert_rows: Collection[Extent] = (),
) -> tuple[Strategy, ...]:
    """Every legal strategy of an op on an axis of `degree` ranks; an op without a rule is replicated.

    `blocks` are the block counts in which dims may be split, `padded_extents` the extents that may be padded
    (`op_strategies.block_counts`, `.padded_extents`), `expert_rows` the numbers of rows that may be in layout E.
    """
    n = len(operands)
    found = [Strategy((R,) * n, R), Strategy((V,) * n, V)]
    if rule is not None:
        found += _equation_strategies(rule, op, operands, blocks)
        found += _expert_row_strategies(rule, op, operands) if expert_rows else []
        if rule.strategies is not None:
            found += rule.strategies(op, operands, op.outputs[0], degree)
    legal = (s for s in dict.fromkeys(found) if _is_legal(s, operands, op.outputs[0], degree))
    return tuple(
        strategy
        for strategy in legal
        if padded_dims(strategy, operands, op.outputs[0]) <= padded_extents
        and _row_counts(strategy, operands, op.outputs[0]) <= {*expert_rows}
    )


def padded_dims(strategy: Strategy, operands: Specs, result: TensorSpec) -> frozenset[Extent]:
    """The extents of the dims that a strategy pads."""
    pairs = zip((*operands, result), (*strategy.operands, strategy.result), strict=True)
    return frozenset(spec.shape[layout.dim] for spec, layout in pairs if layout.is_padded)


def _row_counts(strategy: Strategy, operands: Specs, result: TensorSpec) -> set[Extent]:
    """How many rows there are of what a strategy has in layout E."""
    pairs = zip((*operands, result), (*strategy.operands, strategy.result), strict=True)
    return {spec.shape[0] if spec.shape else 1 for spec, layout in pairs if layout == E}


def _is_legal(strategy: Strategy, operands: Specs, result: TensorSpec, degree: int) -> bool:
    pairs = zip(operands, strategy.operands, strict=True)
    if not all(can_shard(spec, layout, degree) for spec, layout in pairs):
        return False
    return can_shard(result, strategy.result, degree) and len(padded_dims(strategy, operands, result)) <= 1


def _equation_strategies(rule: OpRule, op: Op, operands: Specs, blocks: tuple[int, ...]) -> list[Strategy]:
    equation = equation_of(rule, op, operands)
    if equation is None:
        return []
    terms, result = parse_equation(equation)
    assert len(terms) == len(operands), f"{op.target}: {equation} has {len(terms)} operands, the call {len(operands)}"
    whole = frozenset().union(*(term.whole for term in (*terms, result)))
    letters = dict.fromkeys(letter for term in terms for letter in term.letters if letter not in whole)
    found = [_split(terms, result, letter, partial(sharded, blocks=n)) for letter in letters for n in blocks]
    found += [_split(terms, result, letter, padded) for letter in letters if _may_be_padded(rule, terms, letter)]
    for linear in (index for index in rule.linear_in if index < len(terms)):
        others = [P if term.is_added or index == linear else V for index, term in enumerate(terms)]
        found.append(Strategy(tuple(others), P))
    return [strategy for strategy in found if strategy is not None]


def _expert_row_strategies(rule: OpRule, op: Op, operands: Specs) -> list[Strategy]:
    """Each letter that is dim 0 of every tensor that has it, split by expert: as S(0), in parts that are not equal."""
    equation = equation_of(rule, op, operands)
    if equation is None:
        return []
    terms, result = parse_equation(equation)
    whole = frozenset().union(*(term.whole for term in (*terms, result)))
    firsts = dict.fromkeys(term.letters[0] for term in terms if term.letters and term.letters[0] not in whole)
    is_first = [letter for letter in firsts if all(letter not in term.letters[1:] for term in (*terms, result))]
    found = (_split(terms, result, letter, lambda dim: E) for letter in is_first)
    return [strategy for strategy in found if strategy is not None]


def _may_be_padded(rule: OpRule, terms: tuple[Term, ...], letter: str) -> bool:
    """Whether every operand with the letter may hold anything finite beyond its end, and none sums over it."""
    having = [index for index, term in enumerate(terms) if letter in term.letters]
    return set(having) <= set(rule.finite_in) and not any(letter in term.contracted for term in terms)


def _split(terms: tuple[Term, ...], result: Term, letter: str, part_of: Callable[[int], Layout]) -> Strategy | None:
    """The strategy that splits one letter; `part_of` gives the layout of a tensor by the dim that has the letter."""
    is_contracted = any(letter in term.contracted for term in terms)
    if letter not in result.letters and not is_contracted:
        return None
    layouts = []
    for term in terms:
        if letter in term.letters:
            layouts.append(part_of(term.letters.index(letter)))
        else:
            layouts.append(P if is_contracted and term.is_added else V)
    return Strategy(tuple(layouts), P if is_contracted else part_of(result.letters.index(letter)), is_split=True)


def load_rules(files: Sequence[str] = ()) -> dict[str, OpRule]:
    """The rule of every operator, from the tables of `cost_models/` and of these files (`Options.rules`).

    Raises: InputError when two tables have the same operator, or an entry is no rule.
    """
    rules: dict[str, OpRule] = load_table("autoplan.cost_models", "RULES", files, of=OpRule)
    return rules


def normalize(strategy: Strategy, has_gradient: tuple[bool, ...], *, result_has_gradient: bool) -> Strategy:
    """The strategy with V replaced by R wherever there is no gradient that could vary."""
    operands = tuple(
        R if layout == V and not gradient else layout
        for layout, gradient in zip(strategy.operands, has_gradient, strict=True)
    )
    result = R if strategy.result == V and not result_has_gradient else strategy.result
    return replace(strategy, operands=operands, result=result)


def forward_flops(
    rule: OpRule | None, op: Op, *, operands: Specs, batch_size: int, whole_operands: Specs | None = None
) -> int:
    """FLOPs of one forward call: `flops_per_point` times the points of the iteration space.

    `whole_operands` are the operands before they were split, where they were: the equation of the call is theirs.
    """
    if rule is None or rule.is_view:
        return 0
    if rule.flops is not None:
        return rule.flops(op, operands, batch_size)
    equation = equation_of(rule, op, operands if whole_operands is None else whole_operands)
    if equation is None:
        return int(rule.flops_per_point * op.outputs[0].n_elements(batch_size))
    terms, _ = parse_equation(equation)
    extents: dict[str, int] = {}
    for term, spec in zip(terms, operands, strict=True):
        for letter, extent in zip(term.letters, spec.shape, strict=True):
            extents[letter] = max(extents.get(letter, 1), extent_at(extent, batch_size))
    points = 1
    for extent in extents.values():
        points *= extent
    return int(rule.flops_per_point * points)
