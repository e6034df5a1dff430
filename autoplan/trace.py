"""Model file -> OpGraph, by `torch.export` on meta tensors: no weight is ever allocated.

The model is traced in bfloat16 with two batch sizes, and the two graphs are laid over each other:

    batch 2                         batch 3
    view(x, [2, 256, 6, 64])   +    view(x, [3, 256, 6, 64])   =   view(x, [PerSample(1), 256, 6, 64])
    to(cos, bfloat16)          +    to(cos, bfloat16)          =   to(cos, compute)

So the graph is exact for every batch size, and what depends on the batch in another way is found and refused instead
of guessed. Whatever is bfloat16 becomes the compute precision; a forward that branches on its dtype (T5 does) is
planned as it runs in bfloat16. Attention masks that say nothing are left out (`constant_masks`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.constant_masks import constant_masks, fold_masks
from autoplan.dissolved import watch_dissolved
from autoplan.effects import COPY, restore_effects
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
from autoplan.segments import split_segments
from autoplan.source_names import with_labels
from autoplan.user_errors import made_batch, trace_failure, user_frame

BATCH_A, BATCH_B = 2, 3
DTYPE = torch.bfloat16
_DROPPED_TARGETS = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model file (or a library call) gives to trace.

    Attributes:
        where: what an error names: the path of the file, or the class of the module.
        make_batch: batch size -> (inputs, targets).
        loss_fn: None when the model returns its loss.
    """

    name: str
    where: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


def load_model_file(path: Path) -> ModuleType:
    """Import a model file and check that it has the required functions. It runs the user's code.

    Raises: InputError when the file is missing, fails to import, or lacks a function.
    """
    if not path.is_file():
        raise InputError.of(str(path), found="no such file", expected="a Python model file", fix="check the path")
    if path.suffix != ".py":
        raise InputError.of(
            str(path),
            found=f"a file that ends in {path.suffix!r}",
            expected="a Python model file",
            fix="name the .py file; a Hugging Face config is hf:PATH",
        )
    spec = importlib.util.spec_from_file_location(f"autoplan_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path}: importing the model file failed: {user_frame(error, path)}") from error
    for name, signature in (
        ("build_model", "(**overrides) -> nn.Module"),
        ("make_batch", "(batch_size) -> (inputs, targets)"),
    ):
        if not callable(getattr(module, name, None)):
            functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
            raise InputError.of(
                f"{path}: {name}",
                found="functions: " + (", ".join(functions) or "none"),
                expected=f"a function {name}{signature}",
                fix=f"add `def {name}` to the file; examples/mlp.py is the shortest example",
            )
    return module


def model_source(path: Path, overrides: dict[str, Any]) -> ModelSource:
    """The source to trace for a model file with `--set` overrides."""
    module = load_model_file(path)
    return ModelSource(
        name=path.stem,
        where=str(path),
        build_model=lambda: _build(module.build_model, overrides, path),
        make_batch=module.make_batch,
        loss_fn=getattr(module, "loss_fn", None),
    )


def module_source(
    module: nn.Module, example_batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor] | None
) -> ModelSource:
    """The source to trace for a live module; `example_batch` is (inputs, targets), first dim = batch."""

    def make_batch(batch_size: int) -> tuple[Any, Any]:
        return pytree.tree_map(lambda t: torch.zeros(batch_size, *t.shape[1:], dtype=t.dtype), example_batch)

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return ModelSource(
        name=type(module).__name__.lower(),
        where=type(module).__name__,
        build_model=lambda: copy.deepcopy(module, dict(memo)),
        make_batch=make_batch,
        loss_fn=loss_fn,
    )


def trace_model(source: ModelSource) -> OpGraph:
    """The OpGraph of a model, for every batch size and precision.

    Raises: TraceError with the user's file and line when `torch.export` cannot follow the model.
    """
    first, second = _trace(source, BATCH_A), _trace(source, BATCH_B)
    return _overlay(source, first, second)


# ---------------------------------------------------------------- one trace


class _WithLoss(nn.Module):
    """model and loss as one module, so that one graph holds both."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Any, targets: Any) -> Any:
        outputs = call_model(self.model, inputs)
        if self.loss_fn is None:
            return outputs, ()
        return self.loss_fn(outputs, targets), outputs


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


@dataclass(frozen=True, slots=True)
class _Trace:
    program: torch.export.ExportedProgram
    model: nn.Module
    batch: tuple[Any, Any]
    dissolved: tuple[str, ...]


def _trace(source: ModelSource, batch_size: int) -> _Trace:
    with torch.device("meta"):
        model = source.build_model()
    if not isinstance(model, nn.Module):
        raise InputError.of(
            f"{source.where}: build_model", found=type(model).__name__, expected="an nn.Module", fix="return the model"
        )
    model = model.to(DTYPE).train()
    batch = meta_batch(source, batch_size)
    with _quiet():
        try:
            with watch_dissolved() as dissolved:
                program = torch.export.export(_WithLoss(model, source.loss_fn), batch, strict=False)
            if _needs_functionalization(program):
                program = program.run_decompositions({})
        except Exception as error:
            raise TraceError(trace_failure(source.where, error)) from error
    return _Trace(program, model, batch, tuple(sorted(dissolved)))


def example_batch(source: ModelSource, batch_size: int) -> tuple[Any, Any]:
    """A batch with its values, as the model file makes it once a model is built."""
    with torch.device("meta"):
        source.build_model()
    inputs, targets = made_batch(source.make_batch, batch_size, where=source.where)
    return inputs, targets


def meta_batch(source: ModelSource, batch_size: int) -> tuple[Any, Any]:
    """A checked batch of the model file, on the meta device."""
    where = f"{source.where}: make_batch({batch_size})"
    batch = made_batch(source.make_batch, batch_size, where=source.where)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise InputError.of(where, found=type(batch).__name__, expected="(inputs, targets)", fix="return a pair")

    def to_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 or value.shape[0] != batch_size:
            raise InputError.of(
                where,
                found=f"a tensor of shape {list(value.shape)}",
                expected=f"first dim = batch size {batch_size}",
                fix="put the batch dim first in every tensor of the batch",
            )
        return torch.empty_like(value, device="meta", dtype=DTYPE if value.is_floating_point() else value.dtype)

    inputs, targets = pytree.tree_map(to_meta, tuple(batch))
    return inputs, targets


def _needs_functionalization(program: torch.export.ExportedProgram) -> bool:
    """Whether the graph holds in-place ops or sub-graphs; removing them costs as much as a trace."""
    for node in program.graph.nodes:
        if node.op == "call_function" and (
            isinstance(node.target, torch._ops.HigherOrderOperator)
            or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        ):
            return True
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export's own warnings, logs and dumps are about its internals; ours name the user's code."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


# ---------------------------------------------------------------- two traces, one graph


def _overlay(source: ModelSource, first: _Trace, second: _Trace) -> OpGraph:
    where, has_loss_fn = source.where, source.loss_fn is not None
    nodes_a = _kept_nodes(first.program)
    nodes_b = _kept_nodes(second.program)
    if [(n.op, str(n.target)) for n in nodes_a] != [(n.op, str(n.target)) for n in nodes_b]:
        raise TraceError(
            f"{where}: the model runs other operators at batch {BATCH_A} than at batch {BATCH_B}\n"
            "  expected: the same operators for every batch size\n"
            "  fix: remove the branch on the batch size from forward"
        )
    value_names = _value_names(first, nodes_a)
    ops = tuple(
        _overlay_op(a, b, value_names) for a, b in zip(nodes_a, nodes_b, strict=True) if a.op == "call_function"
    )
    output_names, written = _outputs(first, value_names)
    ops = restore_effects(ops, written=written)
    ops = fold_masks(ops, constant_masks(nodes_a, nodes_b, traced_dtype=DTYPE))
    loss, *model_outputs = output_names
    output_names = output_names if has_loss_fn else [loss]
    ops = _live_ops(ops, {*output_names, *(op.name for op in ops if op.target == COPY)})
    ops = with_labels(ops, {node.name: node.meta.get("stack_trace") or "" for node in nodes_a})
    _check_loss(where, loss, ops)
    model_outputs = [_made_by_model(name, ops) for name in model_outputs] if has_loss_fn else []
    inputs = _graph_inputs(first, second, value_names)
    parameters = graph_parameters(first.model, second.model)
    class_names = {path: type(module).__name__ for path, module in first.model.named_modules()}
    segments = split_segments(ops, parameters=parameters, kept=tuple(output_names), class_names=class_names)
    outputs = tuple(dict.fromkeys(model_outputs))
    return OpGraph(source.name, inputs, parameters, ops, segments, outputs, loss, first.dissolved)


def _outputs(trace: _Trace, names: dict[torch.fx.Node, str]) -> tuple[list[str], dict[str, str]]:
    """Names of what the model and its loss return, and which value each written buffer takes."""
    signature = trace.program.graph_signature
    output = next(node for node in trace.program.graph.nodes if node.op == "output")
    nodes = [node for node in output.args[0] if isinstance(node, torch.fx.Node)]
    written = signature.buffers_to_mutate
    returned = [names[node] for node in nodes if node.name not in written]
    buffers = {names[node]: written[node.name].removeprefix("model.") for node in nodes if node.name in written}
    return returned, buffers


def _kept_nodes(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return [
        node
        for node in program.graph.nodes
        if node.op in ("placeholder", "call_function") and _target_name(node) not in _DROPPED_TARGETS
    ]


def _target_name(node: torch.fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target)


def _value_names(trace: _Trace, nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Graph names: parameters by their first name in the model, everything else by its node name."""
    signature = trace.program.graph_signature
    canonical = {alias: group[0] for group in _alias_groups(trace.model) for alias in group}
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {}
    for node in nodes:
        lifted_name = lifted.get(node.name)
        names[node] = canonical[lifted_name.removeprefix("model.")] if lifted_name else node.name
        if node.name in signature.inputs_to_lifted_tensor_constants:
            raise TraceError(
                f"{signature.inputs_to_lifted_tensor_constants[node.name]}: forward uses a tensor"
                " that is neither a parameter nor a buffer\n  fix: register it with self.register_buffer(...)"
            )
    return names


def _alias_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter and buffer; several names when it is tied."""
    groups: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in groups.values())


def _overlay_op(a: torch.fx.Node, b: torch.fx.Node, names: dict[torch.fx.Node, str]) -> Op:
    where = f"{a.name} ({_target_name(a)})"
    return Op(
        name=a.name,
        target=_target_name(a),
        args=tuple(_overlay_argument(x, y, names, where) for x, y in zip(a.args, b.args, strict=True)),
        kwargs=tuple((key, _overlay_argument(a.kwargs[key], b.kwargs[key], names, where)) for key in a.kwargs),
        outputs=_overlay_specs(a.meta["val"], b.meta["val"], where),
        module_path=_module_path(a),
    )


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
                f"{where}: the number {a} depends on the batch size; use a reduction such as mean() instead"
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
        "  fix: keep the batch as the first dim of its tensors"
    )


def _overlay_specs(a: Any, b: Any, where: str) -> tuple[TensorSpec, ...]:
    if isinstance(a, torch.Tensor):
        shape = tuple(_overlay_extent(int(x), int(y), where) for x, y in zip(a.shape, b.shape, strict=True))
        return (TensorSpec(shape, _dtype_name(a.dtype)),)
    return tuple(spec for x, y in zip(a, b, strict=True) for spec in _overlay_specs(x, y, where))


def _module_path(node: torch.fx.Node) -> str:
    """The innermost module of the user's model that ran this op; LOSS_PATH for ops of the loss function."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path == "model" or path.startswith("model.")]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else LOSS_PATH


def _live_ops(ops: tuple[Op, ...], kept: set[str]) -> tuple[Op, ...]:
    """The ops that some kept value depends on."""
    reads = nx.DiGraph((name, op.name) for op in ops for name in op.input_names())
    live = kept.union(*(nx.ancestors(reads, name) for name in kept if name in reads))
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


def _check_loss(where: str, loss: str, ops: tuple[Op, ...]) -> None:
    spec = next((op.outputs[0] for op in ops if op.name == loss), None)
    if spec is None or spec.shape != () or not spec.is_float:
        raise InputError.of(
            f"{where}: loss",
            found="no value" if spec is None else f"a tensor of {len(spec.shape)} dims",
            expected="a floating-point scalar from loss_fn(outputs, targets), or from the model itself",
            fix="add loss_fn to the model file, or let the model return its loss",
        )


def _graph_inputs(first: _Trace, second: _Trace, names: dict[torch.fx.Node, str]) -> tuple[Input, ...]:
    user_inputs = set(first.program.graph_signature.user_inputs)
    nodes = [n for n in first.program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    leaves_a, leaves_b = pytree.tree_flatten_with_path(first.batch)[0], pytree.tree_leaves(second.batch)
    inputs = []
    for node, (path, a), b in zip(nodes, leaves_a, leaves_b, strict=True):
        if isinstance(a, torch.Tensor):
            inputs.append(Input(names[node], _overlay_specs(a, b, node.name)[0], input_path(path)))
    return tuple(inputs)


def input_path(steps: tuple[Any, ...]) -> tuple[str | int, ...]:
    """`Input.path` of a tensor, from the steps that lead to it in (inputs, targets)."""
    role, *rest = (step.idx if hasattr(step, "idx") else step.key for step in steps)
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


# ---------------------------------------------------------------- errors of the user's code


def _build(build_model: Callable[..., nn.Module], overrides: dict[str, Any], path: Path) -> nn.Module:
    try:
        return build_model(**overrides)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) and "got an unexpected" not in str(error):
            raise InputError(f"{path}: build_model failed: {user_frame(error, path)}") from error
        raise InputError.of(
            f"{path}: build_model",
            found=f"--set {' '.join(f'{k}={v}' for k, v in overrides.items())} ({error})",
            expected=f"build_model{inspect.signature(build_model)}",
            fix="use a name that build_model accepts",
        ) from error
    except Exception as error:
        raise InputError(
            f"{path}: build_model({', '.join(f'{k}={v!r}' for k, v in overrides.items())}) failed:"
            f" {user_frame(error, path)}\n"
            f"  expected: build_model{inspect.signature(build_model)} to accept these --set values\n"
            "  fix: give values the model file knows"
        ) from error
