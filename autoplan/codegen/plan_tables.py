"""What the runtime must know: stages, what the first one takes, what crosses cuts, sharded parameters, tied weights."""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.codegen.layout_text import statement
from autoplan.codegen.text import INDENT, names_text, quoted, range_text, shard_text, tuple_text
from autoplan.codegen.writer import Writer
from autoplan.graph import COMPUTE, PerSample, Segment, TensorSpec
from autoplan.layout import R, can_shard, local_spec, parse_layout


def runtime_tables(writer: Writer) -> str:
    """STAGES, INPUTS, BOUNDARIES, OUTPUTS, SHARDS and TIED."""
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
            f"SHARDS: dict[str, Shard] = {_all_shards_text(writer)}",
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


def _all_shards_text(writer: Writer) -> str:
    rows: list[str] = []
    done: set[int | str] = set()
    for segment in writer.graph.segments:
        layouts = writer.layouts_of(segment).produced
        own_prefix = segment.module_path + "."
        if segment.is_block and segment.kind not in done:
            done.add(segment.kind)
            rows += _block_shard_rows(writer, segment)
        for name in segment.parameters:
            is_own = segment.is_block and name.startswith(own_prefix)
            if not is_own and name not in done and layouts[name].kind == "S":
                done.add(name)
                for alias in writer.parameters[name].aliases:
                    rows.append(f"{quoted(alias)}: {shard_text(layouts[name], writer.parameters[name].spec)}")
    return "{\n" + "".join(f"{INDENT}{row},\n" for row in rows) + "}" if rows else "{}"


def _block_shard_rows(writer: Writer, segment: Segment) -> list[str]:
    layouts = writer.layouts_of(segment).produced
    own = [name for name in segment.parameters if name.startswith(segment.module_path + ".")]
    if not any(layouts[name].kind == "S" for name in own):
        return []
    paths = dict.fromkeys(s.module_path for s in writer.graph.segments if s.kind == segment.kind)
    name = writer.class_names[segment.kind]
    rows = []
    for parent, numbers in _ranges(paths):
        key = f'f"{parent}.{{i}}.{{name}}"' if parent else 'f"{i}.{name}"'
        source = f"i in {range_text(numbers.start, numbers.stop)}"
        rows.append(f"**{{{key}: part for {source} for name, part in {name}.SHARDS.items()}}")
    return rows


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
