"""`loss_fn` of a generated file: the loss on the outputs of the last stage."""

from __future__ import annotations

from autoplan.codegen.forward import Body, add_ops
from autoplan.codegen.layout_text import bracket
from autoplan.codegen.lines import Line, Wish
from autoplan.codegen.text import INDENT, indented, quoted
from autoplan.codegen.writer import Writer
from autoplan.graph import LOSS_PATH, Input
from autoplan.tensor_parallel.narrow_loss import is_narrow_loss


def loss_function(writer: Writer) -> str:
    """`loss_fn` as the runtime calls it: (outputs, targets, tp) -> loss."""
    graph = writer.graph
    last = graph.segments[-1]
    ops = tuple(op for op in graph.ops_of(last) if op.module_path == LOSS_PATH)
    outputs = graph.model_outputs
    kind = "tuple[torch.Tensor, ...]" if len(outputs) > 1 else "torch.Tensor"
    arguments = [f"outputs: {kind}", f"targets: {_targets_type(graph.inputs)}", "tp: ProcessGroup | None"]
    layouts = writer.layouts_of(last)
    is_narrow = is_narrow_loss(graph, ops, layouts.strategies, writer.context.rules)
    if is_narrow:
        writer.context.imports.add(("vocabulary", "takes_16_bits"))
    opening = [
        *(["@takes_16_bits"] if is_narrow else []),
        *bracket("def loss_fn(", arguments, ") -> torch.Tensor:", 0),
        f'{INDENT}"""The loss of one micro-batch, the same on every tensor-parallel rank."""',
    ]
    if not ops:
        piece = f"[{outputs.index(graph.loss)}]" if len(outputs) > 1 else ""
        return "\n".join([*opening, f"{INDENT}return outputs{piece}"])
    body = Body(writer.context, "tp")
    if len(outputs) > 1:
        wishes = tuple(Wish((writer.context.names.argument([name]),)) for name in outputs)
        body.lines.append(Line(template="outputs", makes=tuple((name, "") for name in outputs), wishes=wishes))
    leaving = {graph.loss: layouts.leaves_as[graph.loss]} if graph.loss in layouts.leaves_as else {}
    add_ops(body, ops, layouts=layouts, leaving=leaving)
    known = {item.name: _target_text(item) for item in graph.inputs if item.path[0] == "targets"}
    whole = {outputs[0]: "outputs"} if len(outputs) == 1 else {}
    pieces = {name: f"outputs[{index}]" for index, name in enumerate(outputs)} if len(outputs) > 1 else {}
    lines = body.text(arguments=whole, known=known, results=(graph.loss,), indent=1, sized=pieces)
    return "\n".join([*opening, *indented(lines, 1)])


def _target_text(item: Input) -> str:
    """`targets["clicked"]` for a target of a dict."""
    keys = (quoted(key) if isinstance(key, str) else str(key) for key in item.path[1:])
    return "targets" + "".join(f"[{key}]" for key in keys)


def _targets_type(inputs: tuple[Input, ...]) -> str:
    """The annotation of the targets, from the path to the first of them."""
    path = next((item.path for item in inputs if item.path[0] == "targets"), ("targets",))
    if len(path) == 1:
        return "torch.Tensor"
    return "dict[str, torch.Tensor]" if isinstance(path[1], str) else "tuple[torch.Tensor, ...]"
