"""Which strategies each op of a segment may run in: those of its rule that its neighbours give a meaning to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.graph import Extent, Op, TensorSpec
from autoplan.rules import OpRule, Strategy, all_strategies, normalize, operand_names, padded_dims
from autoplan.tensor_parallel.expert_rows import ends_of_rows, may_be_divided, rows_put_back


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op of a segment, its operands, and what its rule allows beside its equation (`own`)."""

    op: Op
    rule: OpRule | None
    names: tuple[str, ...]
    operands: tuple[TensorSpec, ...]
    own: tuple[Strategy, ...]


def op_calls(
    ops: tuple[Op, ...], specs: Mapping[str, TensorSpec], degree: int, rules: Mapping[str, OpRule]
) -> tuple[OpCall, ...]:
    """The ops with what every question about their strategies needs."""
    found = []
    for op in ops:
        rule, names = rules.get(op.target), operand_names(op)
        operands = tuple(specs[name] for name in names)
        own: tuple[Strategy, ...] = ()
        if rule is not None and rule.strategies is not None:
            own = tuple(rule.strategies(op, operands, op.outputs[0], degree))
        found.append(OpCall(op, rule, names, operands, own))
    return tuple(found)


def legal_strategies(
    ops: tuple[Op, ...],
    specs: Mapping[str, TensorSpec],
    gradients: frozenset[str],
    degree: int,
    rules: Mapping[str, OpRule],
) -> dict[Op, tuple[Strategy, ...]]:
    """The strategies of each op of a segment, with V only where there is a gradient that could vary.

    Rows are divided by expert only behind the op that says where these end.
    """
    calls = op_calls(ops, specs, degree, rules)
    blocks, extents = block_counts(calls), padded_extents(calls)
    ends, known = ends_of_rows(ops, specs, degree), specs.keys() - {op.name for op in ops}
    found = {}
    for call in calls:
        known |= {call.op.name}
        flags = tuple(name in gradients for name in call.names)
        candidates = all_strategies(
            call.rule,
            call.op,
            operands=call.operands,
            degree=degree,
            blocks=blocks[call.op.name],
            padded_extents=extents,
            expert_rows={n for n, name in ends.items() if name in known and may_be_divided(call.op)},
        )
        normal = (normalize(s, flags, result_has_gradient=call.op.name in gradients) for s in candidates)
        found[call.op] = tuple(dict.fromkeys(normal))
    for rows in rows_put_back(ops, specs, degree):
        for op, strategy in rows.strategies().items():
            found[op] = (*found[op], strategy)
    return found


def block_counts(calls: tuple[OpCall, ...]) -> dict[str, tuple[int, ...]]:
    """In how many blocks each op may split a dim: 1, and what its neighbours ask for.

    An op that cuts a dim in three (a fused QKV) asks for 3; that spreads over element-wise ops, up to the products
    that make or consume the value.
    """
    asked: dict[str, set[int]] = {name: set() for call in calls for name in (call.op.name, *call.names)}
    for call in calls:
        for strategy in call.own:
            asked[call.op.name].add(strategy.result.blocks)
            for name, layout in zip(call.names, strategy.operands, strict=True):
                asked[name].add(layout.blocks)
    elementwise = [c for c in calls if c.rule and c.rule.equation and c.rule.efficiency != "matmul"]
    for call in (*elementwise, *reversed(elementwise)):
        spread = set().union(*(asked[name] for name in (call.op.name, *call.names)))
        for name in (call.op.name, *call.names):
            asked[name] |= spread
    return {c.op.name: tuple(sorted({1}.union(*(asked[name] for name in (c.op.name, *c.names))))) for c in calls}


def padded_extents(calls: tuple[OpCall, ...]) -> frozenset[Extent]:
    """The extents that are worth padding: those at which an op has a function that knows where the padding begins.

    A vocabulary, which the embedding and the loss can split, is; the other ops in between pass the padding on.
    """
    found: set[Extent] = set()
    for call in calls:
        for strategy in call.own:
            if strategy.function:
                found |= padded_dims(strategy, call.operands, call.op.outputs[0])
    return frozenset(found)
