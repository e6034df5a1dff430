"""Which ops of a segment torch.compile makes one kernel of, and what is kept then: LocalSegment -> FusedSegment.

Element-wise ops, norms, sums, copies and losses that read each other are one kernel, a fusion. Products, attention,
convolutions, indexing and sorting stay kernels of their own. Where two fusions would have to wait for each other
through one of these they are not one: an op fuses with those of its own level, the most other kernels that lie one
after another before it.

What backward needs of a fusion is computed again inside its kernel, as far as it follows from what is kept anyway. Of
any other tensor the smaller is kept: itself, or what it is computed from. Of a result of the segment whose derivative
is one of two values, as that of relu, it is kept which, in a byte per element. What tensor parallelism makes of a value
for another kernel is kept in place of it, as it is not made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoplan.cost.kept_tensors import kept_names
from autoplan.cost.local_segment import LocalSegment, storage_roots
from autoplan.cost.work_context import WorkContext
from autoplan.cost_models import batch_norm, factory, loss, normalization, pointwise, reduction, shape
from autoplan.graph import LOSS_PATH, Segment, TensorSpec
from autoplan.rules import operand_names

_FUSED_TABLES = (batch_norm, factory, loss, normalization, pointwise, reduction, shape)
FUSED_TARGETS = frozenset(target for table in _FUSED_TABLES for target, rule in table.RULES.items() if not rule.is_view)
ADD, DROPOUT = "aten.add.Tensor", "aten.dropout.default"
# Ops of whose results, where they leave the segment, torch keeps where the derivative is which of two values.
_MASKED = "relu leaky_relu relu6 hardtanh hardsigmoid threshold clamp clamp_min clamp_max softshrink hardshrink"
MASKED = frozenset(f"aten.{name}.default" for name in _MASKED.split())
_ANY_BATCH = 2  # at which tensors are compared


@dataclass(frozen=True, slots=True)
class Fusion:
    """One kernel forward and one or two backward.

    Attributes:
        ops: indices of its ops in the segment.
        reads: tensors that it reads; of these backward writes the gradients `writes_gradients` of.
        writes: tensors that others read or that are kept; backward reads these gradients of them, each as often as
            there are kernels that write a part of it: `reads_gradients`.
        reads_again: kept tensors that backward reads.
        has_weights: whether it reads parameters that have gradients.
    """

    ops: tuple[int, ...]
    reads: tuple[TensorSpec, ...]
    writes: tuple[TensorSpec, ...]
    reads_gradients: tuple[TensorSpec, ...]
    reads_again: tuple[TensorSpec, ...]
    writes_gradients: tuple[TensorSpec, ...]
    has_weights: bool


@dataclass(frozen=True, slots=True)
class FusedSegment:
    """A segment as it is compiled.

    Attributes:
        single: indices of the ops that are kernels of their own.
        kept: (tensor kept for backward, how many segments of this kind hold it) of each, masks too.
        additions: (passes over it, tensor) of gradients of what no fusion writes, which several kernels write a part
            of: one more read where a fusion does, else two reads and a write.
    """

    fusions: tuple[Fusion, ...]
    single: tuple[int, ...]
    kept: tuple[tuple[TensorSpec, int], ...]
    additions: tuple[tuple[int, TensorSpec], ...]


def fused_segment(context: WorkContext, segment: Segment, local: LocalSegment) -> FusedSegment:
    """The segment compiled as a whole, or its loss function alone where it is no block of a model that has some."""
    flow = _Dataflow(context, segment, local)
    kept, masked = flow.kept()
    n_holders = {tensor.root: tensor.n_holders for tensor in local.kept}
    copies = [tensor for tensor in local.kept if tensor.copy_of and not tensor.is_weight]
    replaced = {flow.root(tensor.copy_of) for tensor in copies} - set(n_holders)
    return FusedSegment(
        fusions=flow.fusions(kept, masked),
        single=flow.single,
        kept=(
            *((flow.spec(name), n_holders.get(name, 1)) for name in kept if name not in replaced),
            *((tensor.spec, tensor.n_holders) for tensor in copies),
            *((flow.mask(name), 1) for name in masked),
        ),
        additions=tuple(flow.additions()),
    )


class _Dataflow:
    """Who reads what, by the name of the value whose memory it is (`root`)."""

    def __init__(self, context: WorkContext, segment: Segment, local: LocalSegment) -> None:
        is_whole = segment.is_block or not any(other.is_block for other in context.graph.segments)
        self._facts = context.facts
        self._ops = [item.op for item in local.ops]
        self._kept_names = [kept_names(context, op) for op in self._ops]
        self._keeps_more = [item.rule is not None and item.rule.extra_saved_bytes is not None for item in local.ops]
        self._roots, self._idle = storage_roots(context, segment), context.idle
        self._specs: dict[str, TensorSpec] = {}
        self._made_by: dict[str, int] = {}
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        self._fused: set[int] = set()
        for index, item in enumerate(local.ops):
            names = operand_names(item.op)
            for name, spec in zip(names, item.operands, strict=True):
                self._specs.setdefault(name, spec)
            self._specs[item.op.name] = item.results[0]
            if self.root(item.op.name) != item.op.name:
                continue
            self._made_by[item.op.name] = index
            for name in names:
                self._readers[self.root(name)].append(index)
            if item.op.target in FUSED_TARGETS and (is_whole or item.op.module_path == LOSS_PATH):
                self._fused.add(index)
        self._leaves = {self.root(name) for name in segment.outputs}
        self.single = tuple(index for index in self._made_by.values() if index not in self._fused)
        self._group_of = self._find_groups()

    def root(self, name: str) -> str:
        return self._roots.get(name, name)

    def spec(self, root: str) -> TensorSpec:
        return self._specs[root]

    def mask(self, root: str) -> TensorSpec:
        return replace(self._specs[root], dtype="bool")

    def _read_by(self, index: int) -> list[str]:
        return list(dict.fromkeys(self.root(name) for name in operand_names(self._ops[index])))

    def _find_groups(self) -> dict[int, int]:
        """For each fused op the first op of its fusion."""
        level: dict[int, int] = {}
        first: dict[int, int] = {}
        for index in self._made_by.values():
            makers = [self._made_by[name] for name in self._read_by(index) if name in self._made_by]
            is_fused = index in self._fused
            level[index] = max((level[m] + (not (is_fused and m in self._fused)) for m in makers), default=0)
            if is_fused:
                groups = {first[m] for m in makers if m in self._fused and level[m] == level[index]}
                first[index] = min(groups | {index})
                if len(groups) > 1:
                    first.update({op: first[index] for op, group in first.items() if group in groups})
        return first

    # ----------------------------------------------------------------------------------------- what is kept

    def kept(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What other kernels keep, and then what fusions need that does not follow from it; and what has a mask."""
        needs = {index: self._needed(index) for index in self._made_by.values()}
        maskable = {index for name, index in self._made_by.items() if name in self._leaves and self._is_maskable(index)}
        found = {name: None for index in self.single for name in needs[index]}
        found |= {
            name: None
            for index in self._fused - maskable
            for name in needs[index]
            if self._made_by.get(name) not in self._fused
        }
        masked: list[str] = []
        sources: dict[str, dict[str, None]] = {}  # what must be kept besides, so that a kernel can compute it again
        for name, index in self._made_by.items():
            if index not in self._fused:
                continue
            missing = [item for item in needs[index] if item not in found]
            if index in maskable and needs[index] and name not in found:
                masked.append(name)
                missing = []
            for operand in missing:
                if operand != name:
                    found.update(sources.get(operand, {operand: None}))
            operands: dict[str, None] = {}
            for operand in self._read_by(index):
                if not (operand in found or self._is_there(operand)):
                    operands.update(sources.get(operand, {operand: None}))
            sources[name] = operands if self._n_elements(operands) < self._n_elements([name]) else {name: None}
            if name in missing:
                found.update(sources[name])
        return tuple(found), tuple(masked)

    def _is_maskable(self, index: int) -> bool:
        return index in self._fused and self._ops[index].target in MASKED

    def _needed(self, index: int) -> list[str]:
        """Roots of what autograd keeps of an op; a fused loss or norm computes the rest again from its operand."""
        op = self._ops[index]
        if op.name not in self._facts.gradients or op.name in self._idle:
            return []
        names = list(self._kept_names[index])
        if index in self._fused and self._keeps_more[index] and op.target != DROPOUT:
            names.append(operand_names(op)[0])
        roots = dict.fromkeys(self.root(name) for name in names)
        return [name for name in roots if not self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        """Whether a value is kept for all micro-batches anyway."""
        return name in self._facts.parameters or name in self._facts.invariant

    def _n_elements(self, names: Iterable[str]) -> int:
        return sum(self._specs[name].n_elements(_ANY_BATCH) for name in names)

    def _kept_sources(self, kept: Iterable[str]) -> dict[str, set[str]]:
        """For every value that a fusion makes the kept tensors that a kernel reads to compute it again."""
        found: dict[str, set[str]] = {name: {name} for name in kept}
        for name, index in self._made_by.items():
            if index in self._fused and name not in found:
                sources = (found.get(operand, {operand}) for operand in self._read_by(index))
                found[name] = set().union(*sources) - self._facts.parameters
        return found

    # -------------------------------------------------------------------------------------------- fusions

    def fusions(self, kept: tuple[str, ...], masked: tuple[str, ...]) -> tuple[Fusion, ...]:
        members, sources = defaultdict(list), self._kept_sources(kept)
        for index in sorted(self._fused):
            members[self._group_of[index]].append(index)
        return tuple(self._fusion(tuple(found), kept, masked, sources) for found in members.values())

    def _fusion(
        self, ops: tuple[int, ...], kept: tuple[str, ...], masked: tuple[str, ...], sources: Mapping[str, set[str]]
    ) -> Fusion:
        own, members = [self._ops[index].name for index in ops], set(ops)
        reads = list(dict.fromkeys(name for i in ops for name in self._read_by(i) if name not in own))
        writes = [name for name in own if name in self._leaves or name in kept or set(self._readers[name]) - members]
        gradients = self._facts.gradients
        parts = {name: self._n_gradient_parts(name, members) for name in writes if name in gradients}
        written, passed_on = self._written_gradients(reads, members, parts)
        masks = [name for name in own if name in masked]
        needed = {name for i in ops if self._ops[i].name not in masks for name in self._needed(i)}
        again = {source for name in needed for source in sources.get(name, {name})}
        return Fusion(
            ops=ops,
            reads=tuple(self._specs[name] for name in reads),
            writes=(*(self._specs[name] for name in writes), *map(self.mask, masks)),
            reads_gradients=tuple(
                self._specs[name] for name, count in parts.items() if name not in passed_on for _ in range(count)
            ),
            reads_again=(*(self._specs[name] for name in sorted(again)), *map(self.mask, masks)),
            writes_gradients=tuple(self._specs[name] for name in written),
            has_weights=any(name in self._facts.parameters and name in gradients for name in reads),
        )

    def _n_gradient_parts(self, name: str, members: set[int]) -> int:
        """How many kernels outside of a fusion write a part of the gradient of what it writes."""
        readers = [i for i in self._readers[name] if i not in members and self._ops[i].name in self._facts.gradients]
        return len(readers) + (name in self._leaves)

    def _written_gradients(
        self, reads: list[str], members: set[int], parts: Mapping[str, int]
    ) -> tuple[list[str], set[str]]:
        """Gradients that a fusion writes, and those that it hands on: of a sum to what is added, the same tensor."""
        written: list[str] = []
        sums: set[str] = set()
        for name in reads:
            if name in self._facts.gradients and name not in self._facts.parameters:
                total = self._sum_of(name, members)
                if total == name:
                    written.append(name)
                else:
                    sums.add(total)
        passed_on = {name for name in sums if parts.get(name) == 1 and not members & set(self._readers[name])}
        return [*written, *sorted(sums - passed_on)], passed_on

    def _sum_of(self, name: str, members: set[int]) -> str:
        """The last of the additions of a fusion that a tensor goes into and nothing else, or the tensor itself."""
        while True:
            readers = [self._ops[index] for index in self._readers[name] if index in members]
            if len(readers) != 1 or readers[0].target != ADD:
                return name
            if self._n_elements([readers[0].name]) != self._n_elements([name]):
                return name
            name = readers[0].name

    def additions(self) -> Iterable[tuple[int, TensorSpec]]:
        for name, readers in self._readers.items():
            is_made_here = self._made_by.get(name) in self._fused
            if name not in self._facts.gradients or name in self._facts.parameters or is_made_here:
                continue
            having = [index for index in readers if self._ops[index].name in self._facts.gradients]
            fused = {self._group_of[index] for index in having if index in self._fused}
            n_parts = len(fused) + sum(index not in self._fused for index in having)
            if n_parts > 1:
                yield (n_parts - 1) * (1 if fused else 3), self._specs[name]
