"""What a user's forward does that its traced graph does not hold: it dissolves while `torch.export` follows the code.

- checkpoint: `torch.utils.checkpoint.checkpoint` calls its function, and the graph holds what that one computes.
- autocast: `torch.autocast` becomes a sub-graph without casts, which is then inlined.
- no_grad: `torch.no_grad` becomes a sub-graph that is inlined; `keep_no_grad` detaches what goes in.
- autograd.Function: the graph holds what its forward computes, and the gradient of that, not its backward.
- in-place write: it becomes a new value; `in_place_writes` looks for those that cross the borders of blocks.
- gradient hook: `Tensor.register_hook` and backward hooks of modules change gradients, and the graph holds none.
- functional_call: modules run with other weights than their own, which `fully_shard` and recomputation put back.
- freezing: `requires_grad` of a parameter may change within forward, and the graph has one for all of it.

All are seen where torch itself passes through, because their names are bound wherever somebody imported them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.hooks
from torch.nn.utils import stateless

from autoplan.graph import REPLACED

FREEZING = "freezing"


@contextlib.contextmanager
def watch_dissolved(model: torch.nn.Module) -> Iterator[set[str]]:
    """A set that learns what the code inside uses: "checkpoint", "autocast", `FREEZING`, `REPLACED`, `OWN_GRADIENTS`.

    autocast counts when it is on, a `torch.autograd.Function` or a hook when torch itself does not define it, and
    `torch.func.functional_call` when it is of a module of `model`.
    """
    found: set[str] = set()
    with (
        _watch_checkpoint(found),
        _watch_autocast(found),
        _watch_functions(found),
        _watch_hooks(found),
        _watch_freezing(found),
        _watch_functional_call(found, set(model.modules())),
    ):
        yield found


def keep_no_grad(program: torch.export.ExportedProgram) -> None:
    """Detach what sub-graphs without gradients read, before they are inlined, where gradients would flow into them."""
    names = program.graph_signature.inputs_to_parameters
    trainable = {name for name, own in names.items() if program.state_dict[own].requires_grad}
    carrying: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        carries = node.name in trainable if node.op == "placeholder" else not carrying.isdisjoint(node.all_input_nodes)
        if not carries:
            continue
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
            carrying.update([] if node.target is torch.ops.aten.detach.default else [node])
            continue
        for read in [own for own in node.all_input_nodes if own in carrying]:
            with program.graph.inserting_before(node):
                detached = program.graph.call_function(torch.ops.aten.detach.default, (read,))
            detached.meta = {**node.meta, "val": read.meta["val"].detach()}
            node.replace_input_with(read, detached)
    program.graph_module.recompile()


@contextlib.contextmanager
def _watch_checkpoint(found: set[str]) -> Iterator[None]:
    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.add("checkpoint")
            return function(*args, **kwargs)

        return noted

    module: Any = torch.utils.checkpoint
    saved = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator = noting(saved[0])
    module.CheckpointFunction = SimpleNamespace(apply=noting(saved[1].apply))
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = saved


@contextlib.contextmanager
def _watch_autocast(found: set[str]) -> Iterator[None]:
    """By what is asked for, since autocast for a device that this machine lacks is off."""
    autocast: Any = torch.amp.autocast_mode.autocast
    init, enter = autocast.__init__, autocast.__enter__

    def noted_init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kw: Any) -> None:
        found.update(["autocast"] if enabled else [])
        init(self, device_type, dtype, enabled, *args, **kw)

    def noted_enter(self: Any) -> Any:
        found.update(["autocast"] if self._enabled else [])
        return enter(self)

    autocast.__init__, autocast.__enter__ = noted_init, noted_enter
    try:
        yield
    finally:
        autocast.__init__, autocast.__enter__ = init, enter


@contextlib.contextmanager
def _watch_functions(found: set[str]) -> Iterator[None]:
    function: Any = torch.autograd.Function
    saved = function.__dict__["apply"]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found.update([] if cls.__module__.startswith("torch.") else ["autograd.Function"])
        return saved.__func__(cls, *args, **kwargs)

    function.apply = classmethod(noted)
    try:
        yield
    finally:
        function.apply = saved


@contextlib.contextmanager
def _watch_hooks(found: set[str]) -> Iterator[None]:
    """Hooks of tensors where they are registered, hooks of modules where these set them up around a call."""
    hooks: Any = torch.utils.hooks.BackwardHook
    saved, saved_init = torch.Tensor.register_hook, hooks.__init__

    def noted(self: torch.Tensor, hook: Any) -> Any:
        found.add("gradient hook")
        return saved(self, hook)  # type: ignore[no-untyped-call]

    def noted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        found.add("gradient hook")
        saved_init(self, *args, **kwargs)

    torch.Tensor.register_hook = noted  # type: ignore[method-assign]
    hooks.__init__ = noted_init
    try:
        yield
    finally:
        torch.Tensor.register_hook, hooks.__init__ = saved, saved_init  # type: ignore[method-assign]


@contextlib.contextmanager
def _watch_functional_call(found: set[str], modules: set[torch.nn.Module]) -> Iterator[None]:
    functions: Any = stateless
    saved = functions._functional_call

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.update([REPLACED] if module in modules else [])
        return saved(module, *args, **kwargs)

    functions._functional_call = noted
    try:
        yield
    finally:
        functions._functional_call = saved


@contextlib.contextmanager
def _watch_freezing(found: set[str]) -> Iterator[None]:
    """Where code that is not torch's own says whether a parameter gets a gradient; a module says so of all of its."""
    tensor: Any = torch.Tensor
    of_tensor, of_module = tensor.requires_grad_, torch.nn.Module.requires_grad_
    own: Any = torch._C.TensorBase.requires_grad

    def note(target: Any) -> None:
        is_users = not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")
        found.update([FREEZING] if is_users and isinstance(target, torch.nn.Module | torch.nn.Parameter) else [])

    def noted(self: Any, requires_grad: bool = True) -> Any:
        note(self)
        return of_tensor(self, requires_grad)

    def noted_module(self: Any, requires_grad: bool = True) -> Any:
        note(self)
        return of_module(self, requires_grad)

    def assigned(self: Any, value: bool) -> None:
        note(self)
        own.__set__(self, value)

    tensor.requires_grad_, tensor.requires_grad = noted, property(own.__get__, assigned)
    torch.nn.Module.requires_grad_ = noted_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del tensor.requires_grad
        tensor.requires_grad_ = of_tensor
        torch.nn.Module.requires_grad_ = of_module  # type: ignore[method-assign]
