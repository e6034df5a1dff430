"""What autograd keeps of a segment from its forward pass to its backward pass, on one tensor-parallel rank.

A tensor is kept once however many ops keep it, and a view counts as the tensor it looks into. Parameters are not
activations. What depends on no input (rotary tables) is kept once for all micro-batches, and left out. What all
segments of a kind read of another (what an encoder returns) is kept once for them: each counts its share. Of what is
kept where it was made as well, its maker counts all. Both: `handed_on`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autoplan.cost.handed_on import handed_on
from autoplan.cost.work_context import WorkContext
from autoplan.graph import Op, OpGraph, Segment, TensorSpec
from autoplan.layout import Layout, R, V, local_spec
from autoplan.rules import OpRule, Strategy, operand_names
from autoplan.tensor_parallel.sharding import SegmentLayouts

AS = " as "  # between a value and the layout that a copy of it has
N_INSIDE = 2  # such as the mean and the deviation of a norm


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that autograd keeps: `spec` of it on a rank, sharded (`is_part`) or whole, in the memory of `root`.

    `piece` is "" where it is all of the root's memory, else a name that views of the same piece of it share.
    `is_weight` says that it is a parameter, gathered for the op. `first` is the place, among the ops of the segment, of
    the first that keeps it: it is free when that is done backward. `n_holders` segments of this kind keep it;
    `is_handed_on` says that the one that made it does too. `copy_of` is the value of which it is a copy in another
    layout, if it is one.
    """

    root: str
    piece: str
    is_part: bool
    spec: TensorSpec
    precision: str
    is_weight: bool = False
    first: int = 0
    n_holders: int = 1
    is_handed_on: bool = False
    copy_of: str = ""

    def n_bytes(self, batch_size: int) -> int:
        """Of one micro-batch."""
        return self.spec.n_bytes(batch_size, self.precision)


def kept_tensors(
    context: WorkContext, segment: Segment, layouts: SegmentLayouts, *, without: Collection[str] = ()
) -> tuple[KeptTensor, ...]:
    """What its ops keep, but for those that are left out."""
    facts, handed = context.facts, handed_on(context)
    common, made_before = handed.common[segment.kind], handed.inputs[segment.kind]
    pieces, memories = _pieces(context.graph, segment, context.rules), _memories(context, segment, layouts)
    found: dict[tuple[str, str, Layout], KeptTensor] = {}
    for place, op in enumerate(context.graph.ops_of(segment)):
        if op.name not in facts.gradients or op.name in without:
            continue
        for name, layout in _kept(op, _keeping_rule(context, op), layouts.strategies[op.name], facts.gradients):
            memory = _memory_of(name, layout, layouts=layouts, memories=memories)
            if memory not in facts.parameters and name not in facts.invariant:
                spec = local_spec(facts.specs[name], layout, context.degree)
                piece = pieces.get(name, "")
                precision, is_weight = context.precision_of(op), name in facts.parameters
                key = memory, piece, R if layout == V else layout
                first = found[key].first if key in found else place
                found[key] = KeptTensor(
                    root=memory,
                    piece=piece,
                    is_part=layout.kind == "S",
                    spec=spec,
                    precision=precision,
                    is_weight=is_weight,
                    first=first,
                    n_holders=common.get(memory, 1),
                    is_handed_on=memory in made_before,
                    copy_of=memory.partition(AS)[0] if AS in memory else "",
                )
    return tuple(found.values())


def others_bytes(n_bytes: int, n_holders: int) -> int:
    """What one of so many segments leaves the others to count of a tensor that all of them hold."""
    return n_bytes * (n_holders - 1) // n_holders


def kept_names(context: WorkContext, op: Op) -> tuple[str, ...]:
    """The values that autograd keeps for this op."""
    names = operand_names(op)
    positions = _kept_positions(names, _keeping_rule(context, op), context.facts.gradients)
    return tuple(op.name if position < 0 else names[position] for position in positions)


def n_kept_tensors(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> int:
    """How often autograd keeps a tensor, where an op that keeps something beside its operands and result keeps two."""
    total = 0
    for op in context.graph.ops_of(segment):
        if op.name in context.facts.gradients:
            rule = _keeping_rule(context, op)
            total += len(_kept(op, rule, layouts.strategies[op.name], context.facts.gradients))
            total += 0 if rule.extra_saved_bytes is None else N_INSIDE
    return total


def n_repeated_ops(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> int:
    """The ops that run a second time under recomputation, counted from the first.

    torch stops (`early_stop` of `torch.utils.checkpoint`) as soon as all that autograd keeps is there again: before the
    last op that keeps something, where that keeps its operands only, as the product at the end of a block does.
    """
    ops = context.graph.ops_of(segment)
    for index in reversed(range(len(ops))):
        op = ops[index]
        if op.name not in context.facts.gradients or op.name in context.idle:
            continue
        rule = _keeping_rule(context, op)
        if rule.extra_saved_bytes is not None or any(position < 0 for position in rule.saves):
            return index + 1
        if _kept(op, rule, layouts.strategies[op.name], context.facts.gradients):
            return index
    return 0


def _memories(context: WorkContext, segment: Segment, layouts: SegmentLayouts) -> dict[str, str]:
    """For every value of a segment whose memory it looks into: as `storage_roots`, but what is converted is a copy."""
    memories: dict[str, str] = {}
    for op in context.graph.ops_of(segment):
        names, rule = operand_names(op), context.rules.get(op.target)
        is_alias = (rule is not None and rule.is_view) or op.name in context.idle
        memories[op.name] = op.name
        if is_alias and names:
            layout = layouts.strategies[op.name].operands[0]
            memories[op.name] = _memory_of(names[0], layout, layouts=layouts, memories=memories)
    return memories


def _memory_of(name: str, layout: Layout, *, layouts: SegmentLayouts, memories: Mapping[str, str]) -> str:
    """The memory that an op reads when it reads a value in this layout: a copy, if that is not how it is produced.

    A parameter that is gathered for the op is an activation.
    """
    produced = layouts.produced.get(name, layout)
    is_same = layout == produced or {layout, produced} == {R, V}
    return memories.get(name, name) if is_same else f"{name}{AS}{R if layout == V else layout}"


def _pieces(graph: OpGraph, segment: Segment, rules: Mapping[str, OpRule]) -> dict[str, str]:
    """For every view of a piece of some memory (an item of a split, a slice): the first value that is this piece."""
    specs = graph.specs()
    pieces: dict[str, str] = {}
    for op in graph.ops_of(segment):
        rule, names = rules.get(op.target), operand_names(op)
        if rule is None or not rule.is_view or not names:
            continue
        is_smaller = specs[op.name].n_elements(1) < specs[names[0]].n_elements(1)
        if op.target == "getitem" or is_smaller:
            pieces[op.name] = op.name
        elif names[0] in pieces:
            pieces[op.name] = pieces[names[0]]
    return pieces


def _keeping_rule(context: WorkContext, op: Op) -> OpRule:
    """Its rule; without one it is not known what the op keeps: everything it touches."""
    return context.rules.get(op.target) or OpRule(saves=(*range(len(operand_names(op))), -1))


def _kept(op: Op, rule: OpRule, strategy: Strategy, gradients: frozenset[str]) -> list[tuple[str, Layout]]:
    """The tensors autograd keeps for this call."""
    names = operand_names(op)
    return [
        (op.name, strategy.result) if position < 0 else (names[position], strategy.operands[position])
        for position in _kept_positions(names, rule, gradients)
    ]


def _kept_positions(names: tuple[str, ...], rule: OpRule, gradients: frozenset[str]) -> Iterator[int]:
    """Of operands, and -1 of the result. A product keeps a factor only for the gradient of the other one."""
    for position in rule.saves:
        others = (name for i, name in enumerate(names) if i != position)
        if position < 0 or (position < len(names) and (not rule.is_product or any(n in gradients for n in others))):
            yield position
