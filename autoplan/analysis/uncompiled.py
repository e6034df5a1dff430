"""Whether torch may compile the blocks of a model that writes its buffers, as far as the traced model tells.

    read       w = old + 1; buffer.copy_(w); y = h * w     dy/dh = w

What a compiled backward pass needs and is cheap, it computes again from the operands of the forward pass, of which it
keeps a buffer itself, not what this held: after the write `old + 1` is `w + 1`. Gradients are wrong in torch 2.13, on
GPUs and CPUs, and nothing says so (pytorch/pytorch#197039). Batch norm in training reads no running statistics.
"""

from __future__ import annotations

from autoplan.equations import argument
from autoplan.graph import WRITES, GraphFacts, Op, OpGraph, Ref, Segment, changing_buffers

_BATCH_NORM = "aten.batch_norm.default"
_RUNNING = slice(3, 5)  # mean and variance, among the arguments of a batch norm


def why_uncompiled(graph: OpGraph) -> str:
    """Why the blocks of this model, or all of one without any, must not be compiled; "" where they may be."""
    written, has_blocks = changing_buffers(graph), any(segment.is_block for segment in graph.segments)
    for segment in graph.segments if written else ():
        if segment.is_block or not has_blocks:
            why = _why_of(graph, segment, written)
            if why:
                return why
    return ""


def _why_of(graph: OpGraph, segment: Segment, written: frozenset[str]) -> str:
    for name in segment.parameters:
        if name in written and _reaches_gradients(graph, segment, name):
            return (
                f"{name}, a buffer that forward computes with and changes in place, after which the backward pass"
                " of compiled code reads it anew"
            )
    numbers = {parameter.name for parameter in graph.parameters if parameter.spec.is_float and not parameter.spec.shape}
    for name in segment.parameters:
        if name in written & numbers:
            return (
                f"{name}, a buffer of one number that forward changes in place, which torch.compile leaves out on a CPU"
                " in float64, in which verify computes"
            )
    return ""


def _reaches_gradients(graph: OpGraph, segment: Segment, buffer: str) -> bool:
    """Whether what the segment computes from the buffer's contents gets a gradient, or is an operand of what does."""
    from_loss, found = GraphFacts.of(graph).from_loss, {buffer}
    for op in graph.ops_of(segment):
        if not found.isdisjoint(_read_by(op)):
            if op.name in from_loss:
                return True
            found.add(op.name)
    return False


def _read_by(op: Op) -> tuple[str, ...]:
    """The operands that decide on the result of an op: not what a batch norm in training only updates."""
    if op.target == _BATCH_NORM and argument(op, 5, "training", True):
        statistics = {item.name for item in op.args[_RUNNING] if isinstance(item, Ref)}
        return tuple(name for name in op.input_names() if name not in statistics)
    return () if op.target in WRITES else op.input_names()
