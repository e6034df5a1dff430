"""A model at a second batch size, without a second `torch.export`: it runs once on meta tensors, and is compared.

    the exported graph, batch 2      mul(%view, 8)      linear(%mul, %weight) : [2, 8]
    the recorded run, batch 3        mul(%view, 8)      linear(%mul, %weight) : [3, 8]

The run executes the user's own forward and loss again, so its sizes are what the model does at this batch size. It
counts only where it is the exported graph, operator by operator (`same_operators`). In any other case there is no
answer here, and the caller exports a second time.

In inference mode a dispatch mode sees the operators that `torch.export` records. Where `run_decompositions` changed the
export, it took operators apart that alias their operands, and replaced those that write in place; so does the record.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from autoplan.tracing.overlaid_graph import Trace
from autoplan.tracing.same_operators import are_same, live_nodes
from autoplan.user_errors import USERS_ERRORS


def record_run(module: nn.Module, batch: tuple[Any, ...], *, like: Trace) -> torch.fx.Graph | None:
    """The graph of a run of `module` on a batch of meta tensors; None where it fails, or is not like the trace.

    Each node has its result in meta["val"], as in an exported program; results that nothing reads are left out.
    """
    try:
        graph = _recorded(module, batch, like)
    except USERS_ERRORS:  # whatever the user's code raises: the export that follows says it with file and line
        return None
    return graph if are_same(live_nodes(like.program.graph), live_nodes(graph)) else None


# ---------------------------------------------------------------- recording


def _recorded(module: nn.Module, batch: tuple[Any, ...], like: Trace) -> torch.fx.Graph:
    graph, nodes = torch.fx.Graph(), WeakTensorKeyDictionary()
    for placeholder, value in _placeholders(module, batch, like.program):
        node = graph.create_node("placeholder", placeholder.target, name=placeholder.name)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            nodes[value] = node
    recorder = _Recorder(graph, nodes, decomposes=like.is_decomposed)
    with torch.inference_mode(), like_an_export(), recorder:
        outputs = module(*batch)
    graph.output(tuple(nodes[leaf] for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)))
    return graph


def _placeholders(
    module: nn.Module, batch: tuple[Any, ...], program: torch.export.ExportedProgram
) -> Iterator[tuple[torch.fx.Node, Any]]:
    """The inputs of the exported graph, and what the module and the batch have in their places."""
    signature = program.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    tensors: dict[str, torch.Tensor] = {**dict(parameters), **dict(buffers)}
    leaves = iter(pytree.tree_leaves(batch))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            yield node, tensors[lifted[node.name]] if node.name in lifted else next(leaves)


@contextlib.contextmanager
def like_an_export() -> Iterator[None]:
    """Inside, what a model may ask about is as it is while it is exported."""
    flags: Any = torch.compiler
    saved = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = True
    try:
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = saved


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every operator into a graph; it holds no result, since torch copies what somebody else holds."""

    def __init__(self, graph: torch.fx.Graph, nodes: WeakTensorKeyDictionary, *, decomposes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._nodes = nodes
        self._decomposes = decomposes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._decomposes and _is_taken_apart(func, args):
            with self:
                return func.decompose(*args, **kwargs)
        target = _functional(func) if self._decomposes else func
        call = self._graph.create_node("call_function", target, *pytree.tree_map(self._node, (args, kwargs)))
        if not call.all_input_nodes and kwargs.get("device") != torch.device("meta"):
            raise ValueError("a new tensor that is not on the meta device")
        result = func(*args, **kwargs)
        self._track(result, call)
        return result

    def _node(self, value: Any) -> Any:
        return self._nodes[value] if isinstance(value, torch.Tensor) else value

    def _track(self, result: Any, node: torch.fx.Node) -> None:
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, _like, result)
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
        else:
            for index, item in enumerate(result):
                self._track(item, self._graph.create_node("call_function", operator.getitem, (node, index)))


def _is_taken_apart(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `run_decompositions({})` replaces an operator by those that it consists of; dropout is whole again."""
    from torch._export.utils import _is_cia_op, _is_preservable_cia_op

    if func is torch.ops.aten.dropout.default and args[1] > 0.0:
        return False
    return _is_cia_op(func) and not _is_preservable_cia_op(func)


def _functional(func: Any) -> Any:
    """The operator that gives as a new value what `func` writes into its first operand, or `func` if it writes nothing.

    The written operand then stands for the new value. A view of it does not, so such graphs differ from the export.
    """
    name = func.overloadpacket.__name__
    if not func._schema.is_mutable or not name.endswith("_"):
        return func
    return getattr(getattr(torch.ops.aten, name.removesuffix("_")), func._overloadname)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
