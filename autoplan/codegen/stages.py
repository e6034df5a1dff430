"""The class of one pipeline stage: blocks in a loop, and what stands between blocks written out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoplan.codegen.containers import added_weights, block_members, weights_tree
from autoplan.codegen.forward import Body, add_ops
from autoplan.codegen.layout_text import statement
from autoplan.codegen.lines import Line, Wish, placeholder
from autoplan.codegen.text import INDENT, access, indented, names_text, range_text
from autoplan.codegen.writer import Writer, different_names, foreign_parameters, forward_head, leaving_layouts
from autoplan.graph import LOSS_PATH, Op, OpGraph, Segment
from autoplan.layout import R
from autoplan.parallel_plan import StagePlan
from autoplan.rules import Strategy, operand_names
from autoplan.tensor_parallel.sharding import SegmentLayouts


def stage_class(writer: Writer, index: int) -> str:
    """The class `Stage<index>`."""
    graph, stage = writer.graph, writer.plan.program_stages[index]
    segments = graph.segments[stage.start : stage.stop]
    paths = {s.module_path for s in segments if s.is_block}
    read = dict.fromkeys(name for s in segments for name in (foreign_parameters(s) if s.is_block else s.parameters))
    invariants = _invariants(writer, stage)
    read.update(dict.fromkeys(name for op in invariants for name in op.input_names() if name in writer.parameters))
    of_blocks = [name for name in read if any(name.startswith(f"{path}.") for path in paths)]
    held = {name: name for name in read if name not in of_blocks}
    own = {name for s in segments if s.is_block for name in s.parameters if name.startswith(f"{s.module_path}.")}
    layouts = _merged_layouts(writer, segments)
    received, sent = _received(writer, stage), _sent(writer, stage)
    names = different_names([writer.context.names.argument([name]) for name in received])
    arguments = dict(zip(received, names, strict=True))
    body = Body(writer.context)
    _add_invariants(invariants, body)
    for run in _runs(segments, graph):
        _add_run(writer, run, body, members=_members(run[0], segments, held))
    known = {name: access(name, paths) for name in read}
    apart = [s.module_path for s in segments if s.is_block and not _lends(s.module_path, read)]
    blocks = statement(f"BLOCKS: tuple[str, ...] = {names_text(apart)}", 1)
    return "\n".join(
        [
            f"class Stage{index}(nn.Module):",
            f'{INDENT}"""From `{segments[0].name}` to `{segments[-1].name}`."""',
            "",
            *indented(blocks, 1),
            "",
            f"{INDENT}def __init__(self, tp: ProcessGroup | None) -> None:",
            f"{INDENT * 2}super().__init__()",
            f"{INDENT * 2}self.{writer.context.group} = tp",
            *indented(weights_tree(held, writer, layouts), 2),
            *indented(block_members(writer, segments, held), 2),
            *indented(added_weights([name for name in of_blocks if name not in own], own | paths, writer, layouts), 2),
            "",
            *indented(forward_head(arguments.values(), len(sent)), 1),
            *indented(body.text(arguments=arguments, known=known, results=sent, indent=2), 2),
        ]
    )


def _lends(path: str, read: Iterable[str]) -> bool:
    """Whether a block has weights that others read: ZeRO must not free those between its own passes."""
    return any(name.startswith(f"{path}.") for name in read)


def _received(writer: Writer, stage: StagePlan) -> tuple[str, ...]:
    if stage.start == 0:
        return tuple(item.name for item in writer.graph.inputs if item.path[0] == "inputs")
    return writer.crossing(stage.start)


def _sent(writer: Writer, stage: StagePlan) -> tuple[str, ...]:
    if stage.stop == len(writer.graph.segments):
        return writer.graph.model_outputs or (writer.graph.loss,)
    return writer.crossing(stage.stop)


def _merged_layouts(writer: Writer, segments: Sequence[Segment]) -> SegmentLayouts:
    """Layouts of all parameters that a stage holds itself."""
    produced = {
        name: layouts.produced[name]
        for segment in segments
        for layouts in [writer.layouts_of(segment)]
        for name in segment.parameters
    }
    return SegmentLayouts(produced, {}, {})


def _invariants(writer: Writer, stage: StagePlan) -> tuple[Op, ...]:
    """What earlier stages computed from nothing, such as rotary tables, and this one computes again."""
    graph = writer.graph
    invariant = writer.context.facts.invariant
    needed = {name for s in graph.segments[stage.start : stage.stop] for name in s.inputs if name in invariant}
    ops: list[Op] = []
    for op in reversed(graph.ops[: graph.segments[stage.start].start]):
        if op.name in needed:
            ops.append(op)
            needed.update(op.input_names())
    return tuple(reversed(ops))


def _add_invariants(ops: tuple[Op, ...], body: Body) -> None:
    names = {name for op in ops for name in (op.name, *op.input_names())}
    whole = {op.name: Strategy((R,) * len(operand_names(op)), R) for op in ops}
    add_ops(body, ops, layouts=SegmentLayouts(dict.fromkeys(names, R), whole, {}), leaving={})


# ---------------------------------------------------------------- runs of blocks


def _runs(segments: Sequence[Segment], graph: OpGraph) -> list[tuple[Segment, ...]]:
    """Segments grouped so that each group of several is a loop over equal blocks, each fed by the one before."""
    n_readers: dict[str, int] = {}
    for name in (name for segment in graph.segments for name in segment.inputs):
        n_readers[name] = n_readers.get(name, 0) + 1
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and _continues(runs[-1][-1], segment, n_readers):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [tuple(run) for run in runs]


def _continues(previous: Segment, segment: Segment, n_readers: dict[str, int]) -> bool:
    """Whether a block is the next element of the container and reads the result of the one before, alone."""
    if not (segment.is_block and previous.is_block and segment.kind == previous.kind):
        return False
    parent, _, number = segment.name.rpartition(".")
    if not number.isdigit() or not parent or previous.name != f"{parent}.{int(number) - 1}":
        return False
    is_fed = segment.inputs[:1] == previous.outputs and segment.inputs[1:] == previous.inputs[1:]
    return is_fed and n_readers[previous.outputs[0]] == 1 and not foreign_parameters(segment)


def _members(first: Segment, segments: Sequence[Segment], held: dict[str, str]) -> set[str]:
    """What the container of a block holds in this stage."""
    parent = first.module_path.rpartition(".")[0]
    blocks = {s.module_path for s in segments if s.is_block and s.module_path.rpartition(".")[0] == parent}
    return blocks | {name for name in held if name.startswith(f"{parent}.")}


def _add_run(writer: Writer, run: tuple[Segment, ...], body: Body, *, members: set[str]) -> None:
    """The ops between blocks, the call of one block, or a loop."""
    first, last = run[0], run[-1]
    if not first.is_block:
        add_outer(writer, first, body)
        return
    reads = tuple(body.key(name) for name in (*first.inputs, *foreign_parameters(first)))
    call = f"({', '.join(placeholder(index) for index in range(len(reads)))})"
    labels = [writer.context.names.argument([name]) for name in last.outputs]
    parent, _, number = first.module_path.rpartition(".")
    loop, callee = "", access(first.module_path)
    if len(run) > 1 and len(members) == len(run):
        loop, callee = f"for block in {access(parent)}.values()", "block"
    elif len(run) > 1:
        loop = f"for number in {range_text(int(number), int(number) + len(run))}"
        callee = f"{access(parent)}[str(number)]"
    body.lines.append(
        Line(
            template=callee + call,
            reads=reads,
            makes=tuple((name, "") for name in last.outputs),
            wishes=tuple(Wish((label,)) for label in labels),
            loop=loop,
        )
    )


def add_outer(writer: Writer, segment: Segment, body: Body) -> None:
    """The ops of a segment between blocks, but for those of the loss."""
    layouts = writer.layouts_of(segment)
    ops = tuple(op for op in writer.graph.ops_of(segment) if op.module_path != LOSS_PATH)
    made = {op.name for op in ops}
    leaving = {name: layout for name, layout in leaving_layouts(segment, layouts).items() if name in made}
    add_ops(body, ops, layouts=layouts, leaving=leaving)
