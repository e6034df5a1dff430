"""The class of one kind of block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.codegen.containers import weights_tree
from autoplan.codegen.forward import Body, add_ops
from autoplan.codegen.layout_text import statement
from autoplan.codegen.text import INDENT, access, indented, names_text, quoted, shard_text
from autoplan.codegen.writer import Writer, different_names, foreign_parameters, forward_head, leaving_layouts
from autoplan.graph import Segment
from autoplan.layout import V


def block_class(writer: Writer, segment: Segment) -> str:
    """The class of one kind of block, written from its first instance."""
    layouts = writer.layouts_of(segment)
    foreign = foreign_parameters(segment)
    instances = [s for s in writer.graph.segments if s.kind == segment.kind]
    relative = {
        name: name.removeprefix(f"{segment.module_path}.") for name in segment.parameters if name not in foreign
    }
    arguments = _arguments(writer, segment, instances)
    body = Body(writer.context)
    add_ops(body, writer.graph.ops_of(segment), layouts=layouts, leaving=leaving_layouts(segment, layouts))
    known = {name: access(path) for name, path in relative.items()}
    shards = {
        path: shard_text(layouts.produced[name], writer.parameters[name].spec)
        for name, path in relative.items()
        if layouts.produced[name].kind == "S"
    }
    partial = [path for name, path in relative.items() if layouts.produced[name] == V]
    return "\n".join(
        [
            f"class {writer.class_names[segment.kind]}(nn.Module):",
            f'{INDENT}"""{_described([s.module_path for s in instances])}."""',
            "",
            *([f"{INDENT}SHARDS = {_shards_text(shards)}", ""] if shards else []),
            *([*_partial_lines(partial), ""] if partial else []),
            f"{INDENT}def __init__(self, tp: ProcessGroup | None) -> None:",
            f"{INDENT * 2}super().__init__()",
            f"{INDENT * 2}self.{writer.context.group} = tp",
            *indented(weights_tree({path: name for name, path in relative.items()}, writer, layouts), 2),
            "",
            *indented(forward_head(arguments.values(), len(segment.outputs)), 1),
            *indented(body.text(arguments=arguments, known=known, results=segment.outputs, indent=2), 2),
        ]
    )


def _arguments(writer: Writer, segment: Segment, instances: list[Segment]) -> dict[str, str]:
    """The parameters of forward: what the block reads, then weights that belong to other modules."""
    wanted = [
        writer.context.names.argument(instance.inputs[position] for instance in instances)
        for position in range(len(segment.inputs))
    ]
    foreign = foreign_parameters(segment)
    names = different_names([*wanted, *(name.replace(".", "_") for name in foreign)])
    return dict(zip((*segment.inputs, *foreign), names, strict=True))


def _described(instances: list[str]) -> str:
    if len(instances) == 1:
        return f"`{instances[0]}`"
    return f"`{instances[0]}` to `{instances[-1]}`, {len(instances)} in all"


def _partial_lines(names: Sequence[str]) -> list[str]:
    comment = f"{INDENT}# of whose gradients every rank has a share; they are summed once per step"
    return [comment, *indented(statement(f"PARTIAL_GRADIENTS = {names_text(names)}", 1), 1)]


def _shards_text(shards: Mapping[str, str]) -> str:
    rows = "".join(f"{INDENT * 2}{quoted(name)}: {shard},\n" for name, shard in shards.items())
    return "{\n" + rows + INDENT + "}"
