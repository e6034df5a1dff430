"""Statements of `__init__` that create weights and the plain modules that hold them, under the user's names."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from autoplan.codegen.layout_text import statement
from autoplan.codegen.text import access, assigned, is_name, quoted, range_text
from autoplan.codegen.writer import Writer
from autoplan.graph import COMPUTE, Segment
from autoplan.layout import R, local_spec
from autoplan.tensor_parallel.sharding import SegmentLayouts


def weights_tree(names: Mapping[str, str], writer: Writer, layouts: SegmentLayouts) -> list[str]:
    """Statements that create containers and weights; `names` maps a path below `self` to the graph's name.

    A module whose children have numbers for names, or others that Python does not take, is a ModuleDict, which keeps
    them. A module that has both weights and children is created with its weights, before its children.
    """
    owners: dict[str, dict[str, str]] = {}
    holders = {path.rpartition(".")[0] for path in names}
    for path, name in names.items():
        owner, _, leaf = path.rpartition(".")
        for level in levels(owner):
            if level in holders:
                owners.setdefault(level, {})
        owners.setdefault(owner, {})[leaf] = name
    lines: list[str] = []
    created: set[str] = set()
    for owner, leaves in _parents_first(owners).items():
        shapes = {leaf: _weight_text(writer, layouts, name) for leaf, name in leaves.items()}
        if not owner:
            lines += [_own_tensor_text(writer, layouts, leaf, name) for leaf, name in leaves.items()]
            continue
        lines += containers(owner, created)
        lines += statement(assigned(owner, f"Weights({_keywords_text(shapes)})"), 2)
        created.add(owner)
    return lines


def _keywords_text(values: Mapping[str, str]) -> str:
    """`weight=(8, 4), **{"0": (8,)}`: as keywords what Python takes as names."""
    named = [f"{name}={value}" for name, value in values.items() if is_name(name)]
    others = ", ".join(f"{quoted(name)}: {value}" for name, value in values.items() if not is_name(name))
    return ", ".join([*named, f"**{{{others}}}"] if others else named)


def _parents_first(owners: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The same entries, a module with weights of its own before the modules inside it."""
    found = {}
    for owner in owners:
        parts = owner.split(".")
        for index in range(len(parts)):
            level = ".".join(parts[: index + 1])
            if level in owners:
                found[level] = owners[level]
    return found


def containers(path: str, created: set[str], classes: Container[str] = ()) -> list[str]:
    """Plain modules for the levels above `path` that do not exist yet; `classes` are the paths of generated classes."""
    lines = []
    for level in levels(path):
        if level not in created:
            created.add(level)
            has_keys = not is_name(path.removeprefix(f"{level}.").split(".")[0])
            lines.append(assigned(level, "nn.ModuleDict()" if has_keys else "nn.Module()", classes))
    return lines


def levels(path: str) -> list[str]:
    """The modules above a path, outermost first: `a`, `a.b` above `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[:index]) for index in range(1, len(parts))]


def block_members(writer: Writer, segments: Sequence[Segment], held: Iterable[str]) -> list[str]:
    """Statements that create the blocks of a stage beside the weights it holds, equal neighbours in one statement."""
    created = {level for name in held for level in levels(name)}
    groups: dict[str, dict[str, Segment]] = {}
    for segment in segments:
        if segment.is_block:
            groups.setdefault(segment.module_path.rpartition(".")[0], {}).setdefault(segment.module_path, segment)
    lines: list[str] = []
    for parent, members in groups.items():
        entries = {path.rpartition(".")[2]: writer.class_names[s.kind] for path, s in members.items()}
        if not parent or parent in created:
            owner = access(parent) if parent else "self"
            lines += [f"{owner}.add_module({quoted(number)}, {name}(tp))" for number, name in entries.items()]
            continue
        lines += containers(parent, created)
        created.add(parent)
        lines += statement(assigned(parent, f"nn.ModuleDict({_entries_text(entries)})"), 2)
    return lines


def added_weights(
    names: Iterable[str], existing: Collection[str], writer: Writer, layouts: SegmentLayouts
) -> list[str]:
    """Statements that add weights to blocks that do not read them; `existing` are paths of modules and weights."""
    created = {level for path in existing for level in (*levels(path), path)}
    lines: list[str] = []
    for name in names:
        owner, _, leaf = name.rpartition(".")
        lines += containers(name, created, existing)
        lines += statement(f"{access(owner, existing)}.{_registered(writer, layouts, leaf, name)}", 2)
    return lines


def _registered(writer: Writer, layouts: SegmentLayouts, leaf: str, name: str) -> str:
    """The call that gives a module a parameter or buffer."""
    shape = _local_shape(writer, layouts, name)
    if not writer.parameters[name].is_buffer:
        return f"register_parameter({quoted(leaf)}, nn.Parameter(torch.empty({shape})))"
    tensor = f"torch.empty({shape}, dtype=torch.{_dtype(writer, name)})"
    return f"register_buffer({quoted(leaf)}, {tensor}{_persistent(writer, name)})"


def _entries_text(entries: Mapping[str, str]) -> str:
    """Numbers and the classes of the blocks of these numbers, as a dict."""
    names, numbers = set(entries.values()), [int(number) for number in entries]
    if len(numbers) > 1 and len(names) == 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{str(i): {names.pop()}(tp) for i in {range_text(numbers[0], numbers[-1] + 1)}}}"
    return "{" + ", ".join(f"{quoted(number)}: {name}(tp)" for number, name in entries.items()) + "}"


def _weight_text(writer: Writer, layouts: SegmentLayouts, name: str) -> str:
    """What `Weights` takes for a parameter, its local shape, or for a buffer."""
    shape = _local_shape(writer, layouts, name)
    if not writer.parameters[name].is_buffer:
        return shape
    return f"Buffer({shape}, {quoted(_dtype(writer, name))}{_persistent(writer, name)})"


def _own_tensor_text(writer: Writer, layouts: SegmentLayouts, leaf: str, name: str) -> str:
    """The statement that gives a class a parameter or buffer of its own."""
    if writer.parameters[name].is_buffer or not is_name(leaf):
        return f"self.{_registered(writer, layouts, leaf, name)}"
    return f"self.{leaf} = nn.Parameter(torch.empty({_local_shape(writer, layouts, name)}))"


def _local_shape(writer: Writer, layouts: SegmentLayouts, name: str) -> str:
    layout = layouts.produced.get(name, R)
    return repr(local_spec(writer.parameters[name].spec, layout, writer.context.degree).at(1))


def _dtype(writer: Writer, name: str) -> str:
    dtype = writer.parameters[name].spec.dtype
    return "float32" if dtype == COMPUTE else dtype


def _persistent(writer: Writer, name: str) -> str:
    return "" if writer.parameters[name].is_persistent else ", persistent=False"
