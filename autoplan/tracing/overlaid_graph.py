"""A trace and a second run of one model, at two batch sizes -> OpGraph: laid over each other, see `trace`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import InputError, TraceError
from autoplan.graph import (
    COMPUTE,
    LOSS_PATH,
    Argument,
    Extent,
    Input,
    Op,
    OpGraph,
    Parameter,
    PerSample,
    Ref,
    Symbol,
    TensorSpec,
)
from autoplan.tensor_parallel.expert_rows import with_ends_first
from autoplan.tracing.batches import BATCH_A, BATCH_B
from autoplan.tracing.constant_masks import constant_masks, fold_masks
from autoplan.tracing.effects import COPY, restore_effects
from autoplan.tracing.known_branches import Answers
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.returned_loss import LOSS
from autoplan.tracing.same_operators import first_difference, live_nodes
from autoplan.tracing.second_names import first_name
from autoplan.tracing.segments import at_first_paths, block_runs, leaving_from_last, split_segments
from autoplan.tracing.source_names import place_of, with_labels

DTYPE = torch.bfloat16
_AS_MODULES = "use --module-level, for data parallelism and ZeRO; or write it as tensor operations"
_COUNT = "use a reduction such as mean(), or count the samples by one, x.new_ones(len(x), dtype=torch.float32).sum()"


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace of a model: the exported program, and what it was made from.

    Attributes:
        is_decomposed: whether `run_decompositions` changed what was exported.
        answers: what forward decided by the values of constants.
    """

    program: torch.export.ExportedProgram
    model: nn.Module
    batch: tuple[Any, Any]
    dissolved: tuple[str, ...]
    is_decomposed: bool
    answers: Answers

    @property
    def run(self) -> TracedRun:
        """The trace as the second of two runs."""
        return TracedRun(self.program.graph, self.model, self.batch)


@dataclass(frozen=True, slots=True)
class TracedRun:
    """The operators of one run of a model, however they were found, and what they were made from."""

    graph: torch.fx.Graph
    model: nn.Module
    batch: tuple[Any, Any]


class NumbersDiffer(TraceError):
    """A number or a size of an operator depends on the batch, or on values, in a way that no graph holds.

    Attributes:
        node: of the trace.
        cause: what it depends on.
    """

    def __init__(self, node: torch.fx.Node, message: str, *, cause: str = "the batch size") -> None:
        super().__init__(message)
        self.node, self.cause = node, cause


def overlay(source: ModelSource, first: Trace, second: TracedRun) -> OpGraph:
    """The graph of a model, from its trace at batch size `BATCH_A` and its run at `BATCH_B`.

    Raises: TraceError when they do not fit together, or the loss is none; NumbersDiffer where a number does not fit.
    """
    where, has_loss_fn = source.where, source.loss_fn is not None
    nodes_a, nodes_b = live_nodes(first.program.graph), live_nodes(second.graph)
    differs_at = first_difference(nodes_a, nodes_b)
    if differs_at is not None:
        raise TraceError(_other_operators(where, nodes_a[differs_at:], nodes_b[differs_at:]))
    value_names = _value_names(first, nodes_a)
    ops = tuple(
        _overlay_op(a, b, value_names) for a, b in zip(nodes_a, nodes_b, strict=True) if a.op == "call_function"
    )
    output_names, written = _outputs(first, value_names)
    ops = restore_effects(ops, written=written)
    own_names = {node.name: name for node, name in value_names.items()}
    masks = constant_masks(nodes_a, nodes_b, traced_dtype=DTYPE)
    ops = fold_masks(ops, {own_names[name]: mask for name, mask in masks.items()})
    loss, *model_outputs = output_names
    output_names = output_names if has_loss_fn else [loss]
    ops = _live_ops(ops, {*output_names, *(op.name for op in ops if op.target == COPY)})
    ops = with_labels(ops, {value_names[node]: node.meta.get("stack_trace") or "" for node in nodes_a})
    ops = at_first_paths(ops, _first_paths(first.model))
    ops = tuple(chain.from_iterable(with_ends_first(ops[start:stop]) for _, start, stop in block_runs(ops)))
    _check_loss(where, loss, ops, has_loss_fn=has_loss_fn)
    model_outputs = [_made_by_model(name, ops) for name in model_outputs] if has_loss_fn else []
    inputs = _graph_inputs(first, second, value_names)
    parameters = graph_parameters(first.model, second.model)
    class_names = {path: type(module).__name__ for path, module in first.model.named_modules()}
    segments = split_segments(
        ops, inputs=inputs, parameters=parameters, kept=tuple(output_names), class_names=class_names
    )
    outputs = tuple(dict.fromkeys(model_outputs))
    segments = leaving_from_last(segments, outputs, ops=ops, parameters=parameters)
    return OpGraph(source.name, inputs, parameters, ops, segments, outputs, loss, first.dissolved)


def _other_operators(where: str, rest_a: list[torch.fx.Node], rest_b: list[torch.fx.Node]) -> str:
    """What to say of two runs whose first differing operators begin these lists."""
    a, b = (_target_name(rest[0]) if rest else "no operator" for rest in (rest_a, rest_b))
    found = f"{a}, then {b}" if a != b else f"{a} both times, of other arguments or with other results"
    stack = next((rest[0].meta.get("stack_trace") for rest in (rest_a, rest_b) if rest), None)
    return (
        f"{where}: the model runs other operators at batch {BATCH_A} than at batch {BATCH_B}{place_of(stack or '')}\n"
        f"  found: {found}\n"
        "  expected: the same operators for every batch size\n"
        "  fix: take the branch or loop over samples out of forward, such as by one operator on all of them;"
        " or use --module-level"
    )


def _outputs(trace: Trace, names: dict[torch.fx.Node, str]) -> tuple[list[str], dict[str, str]]:
    """Names of what the model and its loss return, and which value each written buffer takes."""
    signature = trace.program.graph_signature
    output = next(node for node in trace.program.graph.nodes if node.op == "output")
    nodes = [node for node in output.args[0] if isinstance(node, torch.fx.Node)]
    written = signature.buffers_to_mutate
    effects = {*written, *signature.user_inputs_to_mutate}
    returned = [names[node] for node in nodes if node.name not in effects]
    buffers = {names[node]: written[node.name].removeprefix("model.") for node in nodes if node.name in written}
    return returned, buffers


def _target_name(node: torch.fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else first_name(str(node.target))


def _value_names(trace: Trace, nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Graph names: parameters by their first name in the model, everything else by its node name.

    A node that is called like a parameter, as `x.t()` beside `self.t`, gets a number.
    """
    signature = trace.program.graph_signature
    canonical = {alias: group[0] for group in _alias_groups(trace.model) for alias in group}
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    taken = {*canonical, *(node.name for node in nodes)}
    names = {}
    for node in nodes:
        lifted_name = lifted.get(node.name)
        name = canonical[lifted_name.removeprefix("model.")] if lifted_name else node.name
        if not lifted_name and name in canonical:
            name = next(text for n in count(2) if (text := f"{node.name}_{n}") not in taken)
            taken.add(name)
        names[node] = name
    return names


def _alias_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter and buffer; several names when it is tied."""
    groups: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in groups.values())


def _first_paths(model: nn.Module) -> dict[str, str]:
    """Every path of a module to its first; several lead to one that is shared."""
    firsts: dict[int, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    return {path: firsts.setdefault(id(module), path) for path, module in modules}


def _overlay_op(a: torch.fx.Node, b: torch.fx.Node, names: dict[torch.fx.Node, str]) -> Op:
    where = f"{a.name} ({_target_name(a)})"
    if not isinstance(a.meta["val"], torch.Tensor | list | tuple):
        found = (
            f"{where}: a number read from a tensor\n  expected: numbers that follow from shapes\n  fix: {_AS_MODULES}"
        )
        raise NumbersDiffer(a, found, cause="the values of a tensor")
    try:
        return Op(
            name=names[a],
            target=_target_name(a),
            args=tuple(_overlay_argument(x, y, names, where) for x, y in zip(a.args, b.args, strict=True)),
            kwargs=tuple((key, _overlay_argument(a.kwargs[key], b.kwargs[key], names, where)) for key in a.kwargs),
            outputs=_overlay_specs(a.meta["val"], b.meta["val"], where),
            module_path=module_path_of(a),
        )
    except TraceError as error:
        raise NumbersDiffer(a, str(error)) from error


def _overlay_argument(a: Any, b: Any, names: dict[torch.fx.Node, str], where: str) -> Argument:
    if isinstance(a, torch.fx.Node):
        return Ref(names[a])
    if isinstance(a, list | tuple):
        return tuple(_overlay_argument(x, y, names, where) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.dtype):
        return Symbol("dtype:" + _dtype_name(a))
    if isinstance(a, torch.device):
        return Symbol("device")
    if isinstance(a, bool) or a is None or isinstance(a, str):
        return a
    if isinstance(a, int):
        return _overlay_extent(a, b, where)
    if isinstance(a, float):
        if a != b and not (a != a and b != b):
            raise TraceError(
                f"{where}: a number is {a} for batch {BATCH_A} and {b} for batch {BATCH_B}\n"
                "  expected: numbers that depend neither on the batch nor on random numbers without a seed\n"
                f"  fix: {_COUNT}; or use --module-level"
            )
        return a
    return Symbol(str(a))


def _dtype_name(dtype: torch.dtype) -> str:
    return COMPUTE if dtype == DTYPE else str(dtype).removeprefix("torch.")


def _overlay_extent(a: int, b: int, where: str) -> Extent:
    if a == b:
        return a
    if a % BATCH_A == 0 and b % BATCH_B == 0 and a // BATCH_A == b // BATCH_B:
        return PerSample(a // BATCH_A)
    raise TraceError(
        f"{where}: a size is {a} for batch {BATCH_A} and {b} for batch {BATCH_B}\n"
        "  expected: sizes that do not depend on the batch or are a multiple of it\n"
        f"  fix: keep the batch as the first dim of its tensors; for a number, {_COUNT}"
    )


def _overlay_specs(a: Any, b: Any, where: str) -> tuple[TensorSpec, ...]:
    if isinstance(a, torch.Tensor):
        shape = tuple(_overlay_extent(int(x), int(y), where) for x, y in zip(a.shape, b.shape, strict=True))
        return (TensorSpec(shape, _dtype_name(a.dtype)),)
    return tuple(spec for x, y in zip(a, b, strict=True) for spec in _overlay_specs(x, y, where))


def module_path_of(node: torch.fx.Node) -> str:
    """The innermost module of the user's model that ran this op; LOSS_PATH for ops of the loss function."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path == "model" or path.startswith("model.")]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else LOSS_PATH


def _live_ops(ops: tuple[Op, ...], kept: set[str]) -> tuple[Op, ...]:
    """The ops that some kept value depends on; each stands behind what it reads."""
    live = set(kept)
    for op in reversed(ops):
        if op.name in live:
            live.update(op.input_names())
    return tuple(op for op in ops if op.name in live)


def _made_by_model(name: str, ops: tuple[Op, ...]) -> str:
    """The value the model returned, where the trace names an alias of it that the loss function made.

    A loss that broadcasts (`mse_loss`) gets the same tensor back, and the trace keeps the later of the two names.
    """
    table = {op.name: op for op in ops}
    while name in table and table[name].module_path == LOSS_PATH:
        op = table[name]
        source = table[op.args[0].name] if op.target == "getitem" else op
        position = op.args[1] if op.target == "getitem" else 0
        name = source.input_names()[position]
    return name


def _check_loss(where: str, loss: str, ops: tuple[Op, ...], *, has_loss_fn: bool) -> None:
    spec = next((op.outputs[0] for op in ops if op.name == loss), None)
    if spec is None or spec.shape != () or not spec.is_float:
        raise InputError.of(
            f"{where}: loss",
            found="no value" if spec is None else f"a tensor of {len(spec.shape)} dims",
            expected=LOSS,
            fix="let loss_fn return one number, as .mean() does"
            if has_loss_fn
            else "add loss_fn to the model file, or let the model return its loss",
        )


def _graph_inputs(first: Trace, second: TracedRun, names: dict[torch.fx.Node, str]) -> tuple[Input, ...]:
    user_inputs = set(first.program.graph_signature.user_inputs)
    nodes = [n for n in first.program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    leaves_a = [(path, a) for path, a in pytree.tree_flatten_with_path(first.batch)[0] if isinstance(a, torch.Tensor)]
    leaves_b = [b for b in pytree.tree_leaves(second.batch) if isinstance(b, torch.Tensor)]
    return tuple(
        Input(names[node], _overlay_specs(a, b, node.name)[0], input_path(path, first.batch))
        for node, (path, a), b in zip(nodes, leaves_a, leaves_b, strict=True)
    )


def input_path(steps: tuple[Any, ...], batch: Any) -> tuple[str | int, ...]:
    """`Input.path` of a tensor, from the steps that lead to it in `batch`, which is (inputs, targets).

    A field of a named tuple counts by its index, as in any other tuple; that of a dataclass by its name.
    """
    found: list[Any] = []
    for step in steps:
        if isinstance(step, pytree.GetAttrKey):
            names = getattr(batch, "_fields", None)
            found.append(names.index(step.name) if names else step.name)
        else:
            found.append(step.idx if isinstance(step, pytree.SequenceKey) else step.key)
        batch = step.get(batch)
    role, *rest = found
    return ("inputs", "targets")[role], *rest


def graph_parameters(model_a: nn.Module, model_b: nn.Module) -> tuple[Parameter, ...]:
    """Parameters and buffers of the model, each once, with the shapes that two builds of it agree on."""
    parameters_a, parameters_b = dict(model_a.named_parameters()), dict(model_b.named_parameters())
    tensors_a = {**parameters_a, **dict(model_a.named_buffers())}
    tensors_b = {**parameters_b, **dict(model_b.named_buffers())}
    persistent = set(model_a.state_dict(keep_vars=True))
    return tuple(
        Parameter(
            name=group[0],
            spec=_overlay_specs(tensors_a[group[0]], tensors_b[group[0]], group[0])[0],
            aliases=group,
            is_trainable=group[0] in parameters_a and tensors_a[group[0]].requires_grad,
            is_buffer=group[0] not in parameters_a,
            is_persistent=group[0] in persistent,
        )
        for group in _alias_groups(model_a)
    )
