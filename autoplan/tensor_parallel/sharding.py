"""Tensor parallelism by integer programming: a layout for every value of every kind of segment.

For one segment and one degree, with
    x[i,k] = 1   op i runs in strategy k                       (`_op_columns`)
    s[p,t] = 1   parameter p is stored in layout t             (`_source_columns`)
    f[v,u,a,b]   value v reaches use u, produced in layout a, read in layout b
    y[v,a,b]     v is converted from a to b; once, however many uses need it

    minimize     sum time(i,k) x[i,k] + sum time(a->b of v) y[v,a,b] + sum optimizer time(p,t) s[p,t]
    such that    sum_k x[i,k] = 1,  sum_t s[p,t] = 1
                 sum_b f[v,u,a,b] = the produced layout of v is a     (`_flow_rows`)
                 sum_a f[v,u,a,b] = use u reads b
                 f[v,u,a,b] <= y[v,a,b]

Time is forward plus backward: every conversion is one autograd function, so y prices both directions. The relaxation
is solved first; it was integral in all 216 programs of the examples at degrees 2, 4 and 8 (2026-11-20), and only
otherwise the integer program is solved. Kinds that read the same parameters are solved as one program, in which each
has the weight of its segments and s[p,t] is the same in all (`_Problem.tie`).

What lies between segments has a fixed layout, the **boundary**: R, or split along dim 1 (for a language model the
sequence, which is sequence parallelism). Both are offered to the search, with everything else following from the
program: column and row splits, attention by heads or by context, experts and vocabulary-parallel loss are not special
cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoplan.graph import GraphFacts, Op, OpGraph, Segment, TensorSpec
from autoplan.layout import NOTHING, Conversion, Layout, R, can_shard, conversion, parse_layout, sharded
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import OpRule, Strategy, operand_names
from autoplan.solver.linear_model import LinearModel, Solution
from autoplan.tensor_parallel.op_strategies import legal_strategies

MICROSECONDS = 1e6  # the unit of the objective: solvers want numbers near 1

OpPrice = Callable[[Op, Strategy], float]
ConversionPrice = Callable[[TensorSpec, Conversion], float]
Solver = Callable[[LinearModel], Solution]
PricedStrategies = tuple[dict[Strategy, float], ...]  # per op of a segment, seconds of each of its strategies
_Place = tuple[int, int]  # kind of a segment, position among its parameters
Item = TypeVar("Item", int, _Place)


@dataclass(frozen=True, slots=True)
class ShardingPrices:
    """What the program minimizes: seconds of a step of one micro-batch, with the optimizer's share."""

    op_s: OpPrice
    conversion_s: ConversionPrice
    parameter_s: Callable[[TensorSpec, Layout], float]


@dataclass(frozen=True, slots=True)
class _Use:
    """One read of a value: by operand number `position` of op `op_index`, or by the boundary (op_index -1)."""

    value: str
    op_index: int
    position: int


def shard_graph(
    graph: OpGraph, *, degree: int, rules: Mapping[str, OpRule], prices: ShardingPrices, solve: Solver
) -> dict[str, tuple[SegmentSharding, ...]]:
    """The best assignment for each boundary layout that is possible, by its text ("R", "S(1)")."""
    found, facts = {}, GraphFacts.of(graph)
    priced = {
        kind: _priced_strategies(graph.ops_of(segment), facts, degree, rules, prices.op_s)
        for kind, segment in graph.first_of_kind().items()
    }
    for boundary in _boundaries(graph, facts, degree):
        best = _shard_kinds(graph, facts, boundary=boundary, degree=degree, priced=priced, prices=prices, solve=solve)
        if best is not None:
            found[str(boundary)] = best
    return found


def _priced_strategies(
    ops: tuple[Op, ...], facts: GraphFacts, degree: int, rules: Mapping[str, OpRule], op_s: OpPrice
) -> PricedStrategies:
    legal = legal_strategies(ops, facts.specs, facts.gradients, degree, rules)
    return tuple({strategy: op_s(op, strategy) for strategy in candidates} for op, candidates in legal.items())


def _boundaries(graph: OpGraph, facts: GraphFacts, degree: int) -> tuple[Layout, ...]:
    """R, and S(1) when every value with gradient that crosses a boundary can be split along dim 1."""
    crossing = {name for s in graph.segments[1:] for name in s.inputs if name in facts.gradients}
    if crossing and all(can_shard(facts.specs[name], sharded(1), degree) for name in crossing):
        return R, sharded(1)
    return (R,)


def _shard_kinds(
    graph: OpGraph,
    facts: GraphFacts,
    *,
    boundary: Layout,
    degree: int,
    priced: Mapping[int, PricedStrategies],
    prices: ShardingPrices,
    solve: Solver,
) -> tuple[SegmentSharding, ...] | None:
    """Solve every kind; None when the boundary cannot be met. Kinds that read the same parameters are one program."""
    firsts, counts = graph.first_of_kind(), Counter(segment.kind for segment in graph.segments)
    tied = _tied_places(graph)
    wanted = {kind: _wanted_layouts(graph, segment, priced[kind]) for kind, segment in firsts.items()}
    for places in tied:
        layouts = tuple(dict.fromkeys(layout for kind, position in places for layout in wanted[kind][position]))
        for kind, position in places:
            wanted[kind][position] = layouts
    found: dict[int, SegmentSharding] = {}
    for kinds in _programs(tied, tuple(firsts)):
        model, fewest = LinearModel(), min(counts[kind] for kind in kinds)
        problems = {
            kind: _Problem(
                graph, facts, firsts[kind], boundary, wanted[kind], priced[kind], prices, model, counts[kind] / fewest
            )
            for kind in kinds
        }
        for (kind, position), *others in (places for places in tied if places[0][0] in problems):
            for other, place in others:
                problems[kind].tie(position, problems[other], place)
        solution = _solved(model, solve)
        if solution.objective is None:
            return None
        found |= {kind: problem.assignment(solution) for kind, problem in problems.items()}
    return tuple(found[kind] for kind in firsts)


def _solved(model: LinearModel, solve: Solver) -> Solution:
    """The optimum of the relaxation where that is integral, else of the integer program."""
    solution = solve(model)
    if any(min(value, 1 - value) > 1e-6 for value in solution.values):
        return solve(replace(model, is_integer=[True] * len(model.costs)))
    return solution


def _tied_places(graph: OpGraph) -> list[tuple[_Place, ...]]:
    """The places that read the same parameters and so have one layout; only those of which there are several."""
    readers: dict[str, set[_Place]] = {}
    for segment in graph.segments:
        for position, name in enumerate(segment.parameters):
            readers.setdefault(name, set()).add((segment.kind, position))
    return _merged(readers.values())


def _programs(tied: Sequence[tuple[_Place, ...]], kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The kinds of each program: those that are tied together, directly or by others."""
    joint = _merged({kind for kind, _ in places} for places in tied)
    return joint + [(kind,) for kind in kinds if not any(kind in own for own in joint)]


def _merged(sets: Iterable[set[Item]]) -> list[tuple[Item, ...]]:
    """The unions of sets that have items in common, directly or by others; only those of several items."""
    found: list[set[Item]] = []
    for own in sets:
        common = [other for other in found if not own.isdisjoint(other)]
        found = [other for other in found if own.isdisjoint(other)] + [own.union(*common)]
    return sorted(tuple(sorted(own)) for own in found if len(own) > 1)


def _wanted_layouts(graph: OpGraph, segment: Segment, priced: PricedStrategies) -> list[tuple[Layout, ...]]:
    """Of each parameter R, and every split in which some strategy would read it, and likewise V of a vector.

    Of what is stored as V the ranks sum their shares of the gradient once per step, not in every pass. A matrix is not,
    although that may be faster: tensor parallelism is to split what is large. Buffers are whole on every rank.
    """
    wanted: dict[str, dict[Layout, None]] = {name: {R: None} for name in segment.parameters}
    parameters = {item.name: item for item in graph.parameters}
    for op, strategies in zip(graph.ops_of(segment), priced, strict=True):
        for position, name in enumerate(operand_names(op)):
            if name in wanted and not parameters[name].is_buffer:
                kinds = "SV" if len(parameters[name].spec.shape) <= 1 else "S"
                operands = (strategy.operands[position] for strategy in strategies)
                wanted[name].update(
                    {layout: None for layout in operands if layout is not None and layout.kind in kinds}
                )
    return [tuple(layouts) for layouts in wanted.values()]


class _Problem:
    """The part of a linear model that is one kind of segment, while it is built. Not a value; never leaves this module.

    `stored` are the layouts that each parameter may have; `n_copies` multiplies all costs.
    """

    def __init__(
        self,
        graph: OpGraph,
        facts: GraphFacts,
        segment: Segment,
        boundary: Layout,
        stored: Sequence[tuple[Layout, ...]],
        priced: PricedStrategies,
        prices: ShardingPrices,
        model: LinearModel,
        n_copies: float,
    ) -> None:
        self.segment, self.prices, self.model, self.n_copies = segment, prices, model, n_copies
        self.ops = graph.ops_of(segment)
        self.specs, self.gradients = facts.specs, facts.gradients
        self.tuples = {op.name for op in self.ops if len(op.outputs) > 1}  # read piece by piece, never converted
        self.produced: dict[str, dict[Layout, list[int]]] = {}
        self.strategies: list[dict[Strategy, int]] = []
        self.conversions: dict[tuple[str, Layout, Layout], int] = {}
        self.flows: dict[tuple[_Use, Layout, Layout], int] = {}
        self._op_columns(priced)
        for name in segment.inputs:
            self._source_columns(name, (self._boundary_layout(name, boundary),))
        for name, layouts in zip(segment.parameters, stored, strict=True):
            self._source_columns(name, layouts)
        for index, op in enumerate(self.ops):
            for position, name in enumerate(operand_names(op)):
                self._flow_rows(_Use(name, index, position), self._read_layouts(index, position))
        for name in segment.outputs:
            self._flow_rows(_Use(name, -1, 0), {self._output_layout(name, boundary, graph): None})

    def _boundary_layout(self, name: str, boundary: Layout) -> Layout:
        return boundary if name in self.gradients else R

    def _output_layout(self, name: str, boundary: Layout, graph: OpGraph) -> Layout | None:
        """What leaves the segment; what only leaves the last one (logits) may have any layout, the loss is whole."""
        if name == graph.loss:
            return R
        if any(name in s.inputs for s in graph.segments if s.start >= self.segment.stop):
            return self._boundary_layout(name, boundary)
        return None if self.segment.stop == len(graph.ops) else R

    def _op_columns(self, priced: PricedStrategies) -> None:
        for op, candidates in zip(self.ops, priced, strict=True):
            options: dict[Strategy, int] = {}
            for strategy, seconds in candidates.items():
                name = f"{op.name}:{strategy.result}"
                options[strategy] = self.model.add_column(name, cost=seconds * self.n_copies * MICROSECONDS)
            self.model.add_row(f"one strategy of {op.name}", [(c, 1.0) for c in options.values()], lower=1, upper=1)
            self.strategies.append(options)
            by_layout: dict[Layout, list[int]] = {}
            for strategy, column in options.items():
                by_layout.setdefault(strategy.result, []).append(column)
            self.produced[op.name] = by_layout

    def _source_columns(self, name: str, layouts: tuple[Layout, ...]) -> None:
        def cost_s(layout: Layout) -> float:
            is_weight = name in self.segment.parameters and name in self.gradients
            return self.prices.parameter_s(self.specs[name], layout) * self.n_copies if is_weight else 0.0

        columns = {
            layout: [self.model.add_column(f"{name}:{layout}", cost=cost_s(layout) * MICROSECONDS)]
            for layout in layouts
        }
        self.model.add_row(f"one layout of {name}", [(c[0], 1.0) for c in columns.values()], lower=1, upper=1)
        self.produced[name] = columns

    def _read_layouts(self, index: int, position: int) -> dict[Layout | None, list[int] | None]:
        columns: dict[Layout | None, list[int] | None] = {}
        for strategy, column in self.strategies[index].items():
            found = columns.setdefault(strategy.operands[position], [])
            assert found is not None
            found.append(column)
        return columns

    def _flow_rows(self, use: _Use, reads: Mapping[Layout | None, list[int] | None]) -> None:
        """A read of None accepts any layout as it is; a column list of None is a constant 1."""
        if None in reads:
            return
        has_gradient = use.value in self.gradients
        arrivals: dict[Layout, list[int]] = {layout: [] for layout in reads if layout is not None}
        for source, columns in self.produced[use.value].items():
            departures = []
            for target in arrivals:
                step = conversion(source, target, has_gradient=has_gradient)
                if step is None or (step != NOTHING and use.value in self.tuples):
                    continue
                flow = self.model.add_column(f"{use.value}:{source}->{target}@{use.op_index}.{use.position}")
                self.flows[use, source, target] = flow
                departures.append(flow)
                arrivals[target].append(flow)
                if step != NOTHING:
                    self._share_conversion(use, source, target, step, flow)
            terms = [(flow, 1.0) for flow in departures] + [(column, -1.0) for column in columns]
            self.model.add_row(f"{use.value} leaves as {source}", terms, lower=0, upper=0)
        for target, flows in arrivals.items():
            readers = reads[target]
            terms = [(flow, 1.0) for flow in flows]
            if readers is None:
                self.model.add_row(f"{use.value} leaves the segment as {target}", terms, lower=1, upper=1)
            else:
                terms += [(column, -1.0) for column in readers]
                self.model.add_row(f"{use.value} arrives as {target}", terms, lower=0, upper=0)

    def _share_conversion(self, use: _Use, source: Layout, target: Layout, step: Conversion, flow: int) -> None:
        key = (use.value, source, target)
        if key not in self.conversions:
            cost = self.prices.conversion_s(self.specs[use.value], step) * self.n_copies * MICROSECONDS
            self.conversions[key] = self.model.add_column(f"convert {use.value} {source}->{target}", cost=cost)
        self.model.add_row(f"conversion of {use.value}", [(self.conversions[key], 1.0), (flow, -1.0)], lower=0)

    def tie(self, position: int, other: _Problem, place: int) -> None:
        """Give a parameter the layout of one of another problem; both may be stored in the same ones."""
        own, others = (
            problem.produced[problem.segment.parameters[index]] for problem, index in ((self, position), (other, place))
        )
        for layout, (column,) in own.items():
            terms = [(column, 1.0), (others[layout][0], -1.0)]
            self.model.add_row(f"{self.segment.parameters[position]} is {layout} in both", terms, lower=0, upper=0)

    def assignment(self, solution: Solution) -> SegmentSharding:
        """What a solution says of this kind."""
        chosen = [next(s for s, c in options.items() if solution.values[c] > 0.5) for options in self.strategies]
        values = {
            name: next(layout for layout, columns in table.items() if any(solution.values[c] > 0.5 for c in columns))
            for name, table in self.produced.items()
        }
        uses = [
            (op.name, str(position), str(layout))
            for op, strategy in zip(self.ops, chosen, strict=True)
            for position, (name, layout) in enumerate(zip(operand_names(op), strategy.operands, strict=True))
            if layout != values[name]
        ]
        for (use, _, target), flow in self.flows.items():
            if use.op_index < 0 and solution.values[flow] > 0.5 and target != values[use.value]:
                uses.append(("", use.value, str(target)))
        table = tuple((name, str(layout)) for name, layout in values.items())
        return SegmentSharding(self.segment.kind, table, tuple(uses))


# ---------------------------------------------------------------- reading an assignment


@dataclass(frozen=True, slots=True)
class SegmentLayouts:
    """An assignment made easy to read.

    Attributes:
        produced: the layout in which each value is produced (or arrives, or is stored).
        strategies: the strategy of each op of the segment, by op name.
        leaves_as: the layout in which an output leaves, where it is not the one it is produced in.
    """

    produced: dict[str, Layout]
    strategies: dict[str, Strategy]
    leaves_as: dict[str, Layout]


def read_sharding(
    graph: OpGraph,
    segment: Segment,
    assignment: SegmentSharding | None,
    *,
    degree: int,
    rules: Mapping[str, OpRule],
    facts: GraphFacts,
) -> SegmentLayouts:
    """The layouts of the first segment of a kind; everything replicated when there is no assignment."""
    ops = graph.ops_of(segment)
    if assignment is None:
        values = dict.fromkeys((*segment.inputs, *segment.parameters, *(op.name for op in ops)), R)
        whole = {op.name: Strategy((R,) * len(operand_names(op)), R) for op in ops}
        return SegmentLayouts(values, whole, {})
    return read_assignment(assignment, legal_strategies(ops, facts.specs, facts.gradients, degree, rules))


def read_assignment(assignment: SegmentSharding, legal: Mapping[Op, tuple[Strategy, ...]]) -> SegmentLayouts:
    """Likewise, from the `legal_strategies` of the segment."""
    values = {name: parse_layout(text) for name, text in assignment.values}
    reads = {(op_name, where): parse_layout(text) for op_name, where, text in assignment.uses}
    strategies = {}
    for op, candidates in legal.items():
        operands = tuple(reads.get((op.name, str(i)), values[name]) for i, name in enumerate(operand_names(op)))
        strategies[op.name] = next(s for s in candidates if s.operands == operands and s.result == values[op.name])
    leaves = {where: layout for (op_name, where), layout in reads.items() if op_name == ""}
    return SegmentLayouts(values, strategies, leaves)


def renamed(layouts: SegmentLayouts, names: Mapping[str, str]) -> SegmentLayouts:
    """The same layouts under other names: those of another segment of the same kind."""
    return SegmentLayouts(
        {names[name]: layout for name, layout in layouts.produced.items()},
        {names[name]: strategy for name, strategy in layouts.strategies.items()},
        {names[name]: layout for name, layout in layouts.leaves_as.items()},
    )


def corresponding_names(graph: OpGraph, first: Segment, other: Segment) -> dict[str, str]:
    """Which value of `other` corresponds to which of `first`; both are of one kind, so positions agree."""
    pairs = zip(graph.ops_of(first), graph.ops_of(other), strict=True)
    names = {a.name: b.name for a, b in pairs}
    names.update(zip(first.inputs, other.inputs, strict=True))
    names.update(zip(first.parameters, other.parameters, strict=True))
    return names
