"""Tensors that forward makes of numbers: `torch.tensor([1.0, 2.0])`, `x[..., [0, 2]]`, `x.new_tensor(3)`.

An export holds such a tensor as an input, and one on the meta device without its values. Here it becomes operators, so
that a generated forward makes it too:

    one number, or one many times    full((2,), 1.0)
    whole numbers in equal steps     arange(0, 4, 2)
    any other                        stack((scalar_tensor(1.0), scalar_tensor(2.0)))

On the meta device they are made so while the model runs, `ValuesAsOperators`. What is on the CPU may be read by the
model itself (`.item()`), so it is replaced in the finished export, `with_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoplan.errors import TraceError
from autoplan.tracing.places import calling_place

MOST_VALUES = 32  # a longer tensor is data, which belongs in a buffer
_MADE_IN_FORWARD = "lifted_tensor_"
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_Call = Callable[..., Any]


class ValuesAsOperators(TorchFunctionMode):
    """Inside, tensors of given numbers on the meta device are made by operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS and _is_meta(kwargs.get("device")) and _are_numbers(args[0]) and not _asks_gradient(kwargs):
            return _made(args[0], kwargs.get("dtype"), kwargs["device"])
        if func is torch.Tensor.new_tensor and _is_meta(kwargs.get("device", args[0].device)):
            if _are_numbers(args[1]) and not _asks_gradient(kwargs):
                return _made(args[1], kwargs.get("dtype", args[0].dtype), "meta")
        elif func is torch.Tensor.__getitem__ and args[0].device.type == "meta":
            args = (args[0], _indices(args[1]))
        return func(*args, **kwargs)


def with_values(program: torch.export.ExportedProgram, *, where: str, run: Callable[[], Any]) -> None:
    """Replace the tensors that forward made of numbers by operators, in the graph of an export.

    `run` runs the model again, for an error to find the line.

    Raises: TraceError for a tensor that is neither a parameter nor a buffer, and has no values here or too many.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in [node for node in program.graph.nodes if node.name in constants and node.users]:
        name = constants[node.name]
        value, first = program.constants[name], next(iter(node.users))
        is_given = name.rpartition(".")[2].startswith(_MADE_IN_FORWARD)
        if not is_given or value.device.type != "cpu" or value.numel() > MOST_VALUES or value.is_complex():
            place = calling_place(first, run, reads=value)
            modules = (first.meta.get("nn_module_stack") or {}).values()
            is_loss = not any(path.startswith("model") for path, _ in modules)
            raise TraceError(_refusal(f"{where}: {name}", place, value, is_given=is_given, is_loss=is_loss))
        with program.graph.inserting_before(first):
            made = _stacked(value.tolist(), value.dtype, "meta", _node_maker(program.graph, first))
        node.replace_all_uses_with(made)
        program.graph.erase_node(node)


def _refusal(where: str, place: str, value: torch.Tensor, *, is_given: bool, is_loss: bool) -> str:
    if is_loss:
        fix = (
            "let the targets hold what loss_fn reads of it, looked up in make_batch (`table[t]`) and wherever your own"
            " data is read; or make it in loss_fn by operators, such as torch.linspace(..., device=outputs.device)"
        )
    elif is_given:
        fix = (
            f"let forward make at most {MOST_VALUES} numbers, by torch.tensor([...], device=x.device), or register them"
            " in __init__ by self.register_buffer(...)"
        )
    else:
        fix = "register it in __init__ by self.register_buffer(...)"
    reader = "loss_fn" if is_loss else "forward"
    return (
        f"{where}: {reader} uses a tensor that is neither a parameter nor a buffer{place}\n"
        f"  found: one of shape {list(value.shape)}\n  fix: {fix}; --module-level plans the model as it is"
    )


# ---------------------------------------------------------------- numbers -> operators


def _made(numbers: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    return _stacked(numbers, dtype or _dtype_of(_flat(numbers)), device, lambda call, *args, **kw: call(*args, **kw))


def _stacked(numbers: Any, dtype: torch.dtype, device: Any, call: _Call) -> Any:
    """The tensor of numbers, by operators that `call` calls."""
    aten, flat, shape = torch.ops.aten, list(_flat(numbers)), _shape(numbers)
    options = {"dtype": dtype, "device": torch.device(device)}
    if len(set(flat)) <= 1 or len(flat) == 1:
        return call(aten.full.default, shape, flat[0] if flat else 0, **options)
    steps = {b - a for a, b in zip(flat, flat[1:], strict=False)}
    if len(shape) == 1 and len(steps) == 1 and all(type(number) is int for number in flat):
        step = steps.pop()
        return call(aten.arange.start_step, flat[0], flat[-1] + (1 if step > 0 else -1), step, **options)
    stacked = call(aten.stack.default, [call(aten.scalar_tensor.default, number, **options) for number in flat])
    return stacked if len(shape) == 1 else call(aten.view.default, stacked, shape)


def _node_maker(graph: torch.fx.Graph, like: torch.fx.Node) -> _Call:
    """Calls become nodes that stand where `like` stands, each with its result in meta["val"]."""

    def create(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = graph.call_function(target, args, kwargs)
        values = pytree.tree_map_only(torch.fx.Node, lambda operand: operand.meta["val"], (args, kwargs))
        node.meta.update(like.meta)
        node.meta["val"] = target(*values[0], **values[1])
        return node

    return create


def _indices(index: Any) -> Any:
    """What stands in brackets, its lists of whole numbers as tensors."""
    if isinstance(index, tuple):
        return tuple(_indices(item) if isinstance(item, list) else item for item in index)
    is_list = isinstance(index, list) and index and all(type(number) is int for number in _flat(index))
    return _made(index, torch.int64, "meta") if is_list and _are_numbers(index) else index


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _asks_gradient(options: dict[str, Any]) -> bool:
    return bool(options.get("requires_grad"))


def _are_numbers(numbers: Any) -> bool:
    """Whether these are few numbers, in lists of equal lengths."""
    flat = list(_flat(numbers))
    return (
        len(flat) <= MOST_VALUES
        and all(type(number) in (bool, int, float) for number in flat)
        and math.prod(_shape(numbers)) == len(flat)
    )


def _flat(numbers: Any) -> Iterable[Any]:
    if not isinstance(numbers, list | tuple):
        return [numbers]
    return [number for item in numbers for number in _flat(item)]


def _shape(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list | tuple):
        return ()
    return (len(numbers), *(_shape(numbers[0]) if numbers else ()))


def _dtype_of(flat: Iterable[Any]) -> torch.dtype:
    kinds = {type(number) for number in flat}
    if float in kinds or not kinds:
        return torch.get_default_dtype()
    return torch.int64 if int in kinds else torch.bool
