"""What every part of a generated file is written from: graph, plan, layouts, class names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoplan.analysis.chunked_loss import chunked_head
from autoplan.codegen.forward import ForwardContext
from autoplan.codegen.layout_text import bracket
from autoplan.codegen.lines import RESERVED
from autoplan.graph import PADDED_LINEAR, OpGraph, Parameter, Segment, crossing_values
from autoplan.layout import Layout
from autoplan.parallel_plan import Plan, SegmentSharding
from autoplan.rules import OpRule
from autoplan.tensor_parallel.sharding import SegmentLayouts, corresponding_names, read_sharding, renamed

_TAKEN = RESERVED | {"self", "torch", "nn", "F", "tp"}


@dataclass(frozen=True, slots=True)
class Writer:
    """What every part of the file is written from."""

    context: ForwardContext
    plan: Plan
    class_names: Mapping[int, str]
    kinds: Mapping[int, SegmentLayouts]
    parameters: Mapping[str, Parameter]

    @property
    def graph(self) -> OpGraph:
        return self.context.graph

    def crossing(self, start: int) -> tuple[str, ...]:
        """What a stage that begins with segment `start` receives."""
        return crossing_values(self.graph, start, invariant=self.context.facts.invariant)

    def layouts_of(self, segment: Segment) -> SegmentLayouts:
        """The layouts of one segment, under its own names."""
        first = self.graph.first_of_kind()[segment.kind]
        return renamed(self.kinds[segment.kind], corresponding_names(self.graph, first, segment))


def writer_of(graph: OpGraph, plan: Plan, rules: Mapping[str, OpRule]) -> Writer:
    """What the parts of the program of a plan are written from."""
    degree = plan.mesh.tp
    context = ForwardContext.of(
        graph, rules=rules, degree=degree, precision=plan.precision, deferred=_deferred(graph, plan)
    )
    assignments: dict[int, SegmentSharding] = {a.kind: a for a in plan.shardings}
    first = graph.first_of_kind()
    return Writer(
        context=context,
        plan=plan,
        class_names=_class_names(first),
        kinds={
            kind: read_sharding(graph, segment, assignments.get(kind), degree=degree, rules=rules, facts=context.facts)
            for kind, segment in first.items()
        },
        parameters={parameter.name: parameter for parameter in graph.parameters},
    )


def _deferred(graph: OpGraph, plan: Plan) -> tuple[str, str] | None:
    """The product of a chunked loss, and the keywords of `deferred_linear`."""
    head = chunked_head(graph) if plan.loss == "chunked" else None
    if head is None:
        return None
    product = head.ops[0]
    switches = {"is_compiled": plan.mesh.compile, "pads_classes": product.target == PADDED_LINEAR}
    return product.name, ", ".join(
        [
            f"slice_rows={head.slice_rows(is_compiled=plan.mesh.compile)}",
            *(f"{name}=True" for name in switches if switches[name]),
        ]
    )


def _class_names(first_of_kind: Mapping[int, Segment]) -> dict[int, str]:
    """The user's class names; a second kind of the same class gets a number."""
    names: dict[int, str] = {}
    for kind, segment in first_of_kind.items():
        if segment.is_block:
            taken = sum(name.rstrip("0123456789") == segment.class_name for name in names.values())
            names[kind] = segment.class_name + (str(taken + 1) if taken else "")
    return names


def leaving_layouts(segment: Segment, layouts: SegmentLayouts) -> dict[str, Layout]:
    """The layouts in which the results of a segment leave it."""
    return {name: layout for name, layout in layouts.leaves_as.items() if name in segment.outputs}


def foreign_parameters(segment: Segment) -> tuple[str, ...]:
    """Weights that a block reads and that belong to other modules."""
    return tuple(name for name in segment.parameters if not name.startswith(f"{segment.module_path}."))


def different_names(wanted: Sequence[str]) -> list[str]:
    """The names with numbers where two are equal or one means something else."""
    found: list[str] = []
    for name in wanted:
        number, text = 1, name if name.isidentifier() else f"value_{name}"
        while text in found or text in _TAKEN:
            number += 1
            text = f"{name}_{number}"
        found.append(text)
    return found


def forward_head(arguments: Iterable[str], n_results: int) -> list[str]:
    """The first lines of `forward`."""
    items = ["self", *(f"{name}: torch.Tensor" for name in arguments)]
    result = "torch.Tensor" if n_results == 1 else "tuple[torch.Tensor, ...]"
    return bracket("def forward(", items, f") -> {result}:", 1)
