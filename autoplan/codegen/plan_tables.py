"""What the runtime must know: stages, what the first one takes, what crosses cuts, how parameters lie, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoplan.codegen.layout_text import statement
from autoplan.codegen.text import INDENT, LINE_LENGTH, indented, names_text, quoted, range_text, shard_text, tuple_text
from autoplan.codegen.writer import Writer
from autoplan.graph import COMPUTE, PerSample, Segment, TensorSpec
from autoplan.layout import Layout, R, can_shard, local_spec, parse_layout


def runtime_tables(writer: Writer) -> str:
    """STAGES, INPUTS, BOUNDARIES, OUTPUTS, SHARDS, PARTIAL_GRADIENTS and TIED.

    PARTIAL_GRADIENTS are parameters that every tensor-parallel rank holds whole, with its share of the gradient.
    """
    graph, plan = writer.graph, writer.plan
    n_stages = len(plan.program_stages)
    stages = ", ".join(f"Stage{i}" for i in range(n_stages)) + ("," if n_stages == 1 else "")
    tied = [p.aliases for p in graph.parameters if len(p.aliases) > 1 or _n_stages_with(writer, p.name) > 1]
    return "\n".join(
        [
            *statement(f"STAGES = ({stages})"),
            *statement(f"INPUTS: tuple[tuple[str | int, ...], ...] = {_inputs_text(writer)}"),
            *statement(f"BOUNDARIES: tuple[tuple[Boundary, ...], ...] = {_boundaries_text(writer)}"),
            *statement(f"OUTPUTS: tuple[Shard | str, ...] = {_outputs_text(writer)}"),
            f"SHARDS: dict[str, Shard] = {_shards_text(writer)}",
            _partial_text(writer),
            *statement(f"TIED: tuple[tuple[str, ...], ...] = {tuple_text([names_text(group) for group in tied])}"),
        ]
    )


def _inputs_text(writer: Writer) -> str:
    """The keys and indices that lead to each tensor that the first stage takes, within the inputs of a batch."""
    paths = [item.path[1:] for item in writer.graph.inputs if item.path[0] == "inputs"]
    return tuple_text(
        [tuple_text([quoted(step) if isinstance(step, str) else str(step) for step in path]) for path in paths]
    )


def _n_stages_with(writer: Writer, name: str) -> int:
    """In how many stages a weight lives; in several when a layer is called again further on."""
    stages = (writer.graph.segments[stage.start : stage.stop] for stage in writer.plan.program_stages)
    return sum(any(name in segment.parameters for segment in segments) for segments in stages)


def _outputs_text(writer: Writer) -> str:
    """How each model output lies on the tensor-parallel ranks: a Shard, "whole" or "partial"."""
    layouts = writer.layouts_of(writer.graph.segments[-1])
    found = [(layouts.produced.get(name, R), writer.context.facts.specs[name]) for name in writer.graph.model_outputs]
    words = {"R": '"whole"', "V": '"whole"', "P": '"partial"'}
    return tuple_text(
        [shard_text(layout, spec) if layout.kind == "S" else words[layout.kind] for layout, spec in found]
    )


def _boundaries_text(writer: Writer) -> str:
    cuts = [writer.crossing(stage.start) for stage in writer.plan.program_stages[1:]]
    return tuple_text([tuple_text([_boundary_text(writer, name) for name in crossing]) for crossing in cuts])


def _boundary_text(writer: Writer, name: str) -> str:
    facts = writer.context.facts
    spec = facts.specs[name]
    if writer.plan.mesh.sharding and name in facts.gradients:
        layout = parse_layout(writer.plan.mesh.sharding)
        assert can_shard(spec, layout, writer.context.degree)
        spec = local_spec(spec, layout, writer.context.degree)
    dtype = "" if spec.dtype == COMPUTE else f", {quoted(spec.dtype)}"
    return f"Boundary({_shape_text(spec)}{dtype}{'' if name in facts.from_loss else ', requires_grad=False'})"


def _shape_text(spec: TensorSpec) -> str:
    return tuple_text([f"PerSample({x.count})" if isinstance(x, PerSample) else str(x) for x in spec.shape])


def _shards_text(writer: Writer) -> str:
    def row(alias: str, layout: Layout, spec: TensorSpec) -> str:
        return f"{quoted(alias)}: {shard_text(layout, spec)}"

    def block_row(key: str, numbers: str, class_name: str) -> str:
        return _unpacked("**{", f"{key}: part", numbers, f"name, part in {class_name}.SHARDS.items()", "}")

    return _lines_text("{}", _rows(writer, "S", row, block_row))


def _partial_text(writer: Writer) -> str:
    def block_row(key: str, numbers: str, class_name: str) -> str:
        return _unpacked("*(", key, numbers, f"name in {class_name}.PARTIAL_GRADIENTS", ")")

    head = "PARTIAL_GRADIENTS: tuple[str, ...] = "
    rows = _rows(writer, "V", lambda alias, layout, spec: quoted(alias), block_row)
    is_short = len(rows) == 1 and len(f"{head}({rows[0]},)") <= LINE_LENGTH
    return f"{head}({rows[0]},)" if is_short else head + _lines_text("()", rows)


def _unpacked(opening: str, item: str, numbers: str, of_block: str, closing: str) -> str:
    """The row of all blocks of a class, a comprehension; over several lines where one is too short."""
    parts = [item, f"for i in {numbers}", f"for {of_block}"]
    row = f"{opening}{' '.join(parts)}{closing}"
    if len(f"{INDENT}{row},") <= LINE_LENGTH:
        return row
    return "\n".join([opening, *indented(parts, 2), INDENT + closing])


def _lines_text(brackets: str, rows: list[str]) -> str:
    lines = "".join(f"{INDENT}{row},\n" for row in rows)
    return f"{brackets[0]}\n{lines}{brackets[1]}" if rows else brackets


def _rows(
    writer: Writer,
    kind: str,
    row: Callable[[str, Layout, TensorSpec], str],
    block_row: Callable[[str, str, str], str],
) -> list[str]:
    """One row for every name of a parameter in a layout of this kind, and one for all blocks of a class."""
    rows: list[str] = []
    done: set[int | str] = set()
    for segment in writer.graph.segments:
        layouts = writer.layouts_of(segment).produced
        own = [name for name in segment.parameters if segment.is_block and name.startswith(f"{segment.module_path}.")]
        if segment.kind not in done and any(layouts[name].kind == kind for name in own):
            done.add(segment.kind)
            class_name = writer.class_names[segment.kind]
            rows += [block_row(*place, class_name) for place in _places(writer, segment)]
        for name in segment.parameters:
            if name not in own and name not in done and layouts[name].kind == kind:
                done.add(name)
                parameter = writer.parameters[name]
                rows += [row(alias, layouts[name], parameter.spec) for alias in parameter.aliases]
    return rows


def _places(writer: Writer, segment: Segment) -> list[tuple[str, str]]:
    """Where the blocks of a kind stand: the expression of a name in block `i`, and what `i` runs over."""
    paths = dict.fromkeys(s.module_path for s in writer.graph.segments if s.kind == segment.kind)
    return [
        (f'f"{parent}.{{i}}.{{name}}"' if parent else 'f"{i}.{name}"', range_text(numbers.start, numbers.stop))
        for parent, numbers in _ranges(paths)
    ]


def _ranges(paths: Iterable[str]) -> list[tuple[str, range]]:
    """The paths of container elements as (container, consecutive numbers)."""
    found: list[tuple[str, range]] = []
    for path in paths:
        parent, _, number = path.rpartition(".")
        if found and found[-1][0] == parent and found[-1][1].stop == int(number):
            found[-1] = (parent, range(found[-1][1].start, int(number) + 1))
        else:
            found.append((parent, range(int(number), int(number) + 1)))
    return found
