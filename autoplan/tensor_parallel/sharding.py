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
otherwise the integer program is solved.

What lies between segments has a fixed layout, the **boundary**: R, or split along dim 1 (for a language model the
sequence, which is sequence parallelism). Both are offered to the search, with everything else following from the
program: column and row splits, attention by heads or by context, experts and vocabulary-parallel loss are not special
cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from autoplan.graph import GraphFacts, Op, OpGraph, Segment, TensorSpec
from autoplan.layout import NOTHING, Conversion, Layout, R, can_shard, conversion, padded, parse_layout, sharded
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import OpRule, Strategy, operand_names
from autoplan.solver.linear_model import LinearModel, Solution
from autoplan.tensor_parallel.op_strategies import legal_strategies

MICROSECONDS = 1e6  # the unit of the objective: solvers want numbers near 1

OpPrice = Callable[[Op, Strategy], float]
ConversionPrice = Callable[[TensorSpec, Conversion], float]
Solver = Callable[[LinearModel], Solution]
PricedStrategies = tuple[dict[Strategy, float], ...]  # per op of a segment, seconds of each of its strategies


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
    """Solve every kind; a parameter that several kinds read gets one layout for all of them, the cheapest in sum."""
    shared = _shared_parameters(graph)
    counts: dict[int, int] = {}
    for segment in graph.segments:
        counts[segment.kind] = counts.get(segment.kind, 0) + 1
    solved: dict[tuple[int, tuple[tuple[str, Layout], ...]], tuple[float, SegmentSharding] | None] = {}
    best: tuple[float, tuple[SegmentSharding, ...]] | None = None
    for layouts in product(*(_storage_layouts(graph, name, degree) for name in shared)):
        storage = dict(zip(shared, layouts, strict=True))
        results = []
        for kind, segment in graph.first_of_kind().items():
            key = (kind, tuple((name, storage[name]) for name in shared if name in segment.parameters))
            if key not in solved:
                problem = _Problem(graph, facts, segment, boundary, dict(key[1]), priced[kind], prices)
                solved[key] = problem.solve(solve)
            results.append((counts[kind], solved[key]))
        if any(result is None for _, result in results):
            continue
        total_s = sum(count * result[0] for count, result in results if result)
        if best is None or total_s < best[0]:
            best = total_s, tuple(result[1] for _, result in results if result)
    return best[1] if best else None


def _shared_parameters(graph: OpGraph) -> tuple[str, ...]:
    """Parameters read by segments of several kinds: tied weights."""
    readers: dict[str, set[int]] = {}
    for segment in graph.segments:
        for name in segment.parameters:
            readers.setdefault(name, set()).add(segment.kind)
    return tuple(name for name, kinds in readers.items() if len(kinds) > 1)


def _storage_layouts(graph: OpGraph, name: str, degree: int) -> tuple[Layout, ...]:
    parameter = next(p for p in graph.parameters if p.name == name)
    dims = () if parameter.is_buffer else tuple(range(len(parameter.spec.shape)))
    splits = [split(dim) for dim in dims for split in (sharded, padded)]
    return (R, *(layout for layout in splits if can_shard(parameter.spec, layout, degree)))


class _Problem:
    """The linear model of one segment while it is built. Not a value; never leaves this module."""

    def __init__(
        self,
        graph: OpGraph,
        facts: GraphFacts,
        segment: Segment,
        boundary: Layout,
        storage: dict[str, Layout],
        priced: PricedStrategies,
        prices: ShardingPrices,
    ) -> None:
        self.segment, self.prices = segment, prices
        self.ops = graph.ops_of(segment)
        self.specs, self.gradients = facts.specs, facts.gradients
        self.tuples = {op.name for op in self.ops if len(op.outputs) > 1}  # read piece by piece, never converted
        self.buffers = {parameter.name for parameter in graph.parameters if parameter.is_buffer}
        self.model = LinearModel()
        self.produced: dict[str, dict[Layout, list[int]]] = {}
        self.strategies: list[dict[Strategy, int]] = []
        self.conversions: dict[tuple[str, Layout, Layout], int] = {}
        self.flows: dict[tuple[_Use, Layout, Layout], int] = {}
        self._op_columns(priced)
        for name in segment.inputs:
            self._source_columns(name, (self._boundary_layout(name, boundary),))
        for name in segment.parameters:
            self._source_columns(name, (storage[name],) if name in storage else self._wanted_layouts(name))
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
                options[strategy] = self.model.add_column(name, cost=seconds * MICROSECONDS)
            self.model.add_row(f"one strategy of {op.name}", [(c, 1.0) for c in options.values()], lower=1, upper=1)
            self.strategies.append(options)
            by_layout: dict[Layout, list[int]] = {}
            for strategy, column in options.items():
                by_layout.setdefault(strategy.result, []).append(column)
            self.produced[op.name] = by_layout

    def _source_columns(self, name: str, layouts: tuple[Layout, ...]) -> None:
        def cost_s(layout: Layout) -> float:
            is_weight = name in self.segment.parameters and name in self.gradients
            return self.prices.parameter_s(self.specs[name], layout) * MICROSECONDS if is_weight else 0.0

        columns = {layout: [self.model.add_column(f"{name}:{layout}", cost=cost_s(layout))] for layout in layouts}
        self.model.add_row(f"one layout of {name}", [(c[0], 1.0) for c in columns.values()], lower=1, upper=1)
        self.produced[name] = columns

    def _wanted_layouts(self, name: str) -> tuple[Layout, ...]:
        """R and every split in which some strategy would read the parameter; buffers are whole on every rank."""
        wanted = {R: None}
        if name in self.buffers:
            return (R,)
        for op, options in zip(self.ops, self.strategies, strict=True):
            for position, operand in enumerate(operand_names(op)):
                if operand == name:
                    wanted.update({s.operands[position]: None for s in options if s.operands[position].kind == "S"})
        return tuple(wanted)

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
            cost = self.prices.conversion_s(self.specs[use.value], step) * MICROSECONDS
            self.conversions[key] = self.model.add_column(f"convert {use.value} {source}->{target}", cost=cost)
        self.model.add_row(f"conversion of {use.value}", [(self.conversions[key], 1.0), (flow, -1.0)], lower=0)

    def solve(self, solve: Solver) -> tuple[float, SegmentSharding] | None:
        """Objective and assignment; None when the boundary cannot be met."""
        solution = solve(self.model)
        if solution.values and any(min(value, 1 - value) > 1e-6 for value in solution.values):
            self.model = replace(self.model, is_integer=[True] * len(self.model.costs))
            solution = solve(self.model)
        if solution.objective is None:
            return None
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
        return solution.objective / MICROSECONDS, SegmentSharding(self.segment.kind, table, tuple(uses))


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
