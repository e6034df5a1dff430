"""Calls of generated segments, eager or compiled.

What is measured compiled is compiled as `runtime.stages.compiled` does it: the forward pass of a block, of whose copies
all run the same compiled code, and the loss function. Compiling itself is over before anything is timed.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .stand_ins import RankOfOne
from .strides import Layout, dtype_of, shape_of
from .timing import Call, Loss
from .values import default_dtype, fill, fill_module, n_elements

Compile = Callable[[Any], Any]  # torch.compile, or nothing where things run as they are


def generated_builder(
    region: dict[str, Any],
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: Compile | None,
    *,
    layout: Layout | None = None,
) -> Callable[[], Call]:
    """Makes copies of a region; all share one loss function, as micro-batches do.

    `layout` is that of its inputs and gradients; without, these are dense.
    """
    loss = _loss(region, batch_size, dtype, device, compiled)
    return lambda: _build_call(region, batch_size, dtype, device, compiled, loss, layout)


def _build_call(
    region: dict[str, Any],
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: Compile | None,
    loss: Loss | None,
    layout: Layout | None,
) -> Call:
    generated = importlib.import_module(region["module"])
    tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
    with default_dtype(dtype), device:
        module = getattr(generated, region["class"])(tp).train()
    frozen = set(region["frozen"])
    fill_module(module, dtype, float32_buffers=region["float32_buffers"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if compiled is not None and region["compiles_forward"]:
        module.forward = compiled(module.forward)
    strides = layout.inputs if layout else [None] * len(region["inputs"])
    pairs = zip(region["inputs"], strides, strict=True)
    inputs = [_input(described, batch_size, dtype, device, own) for described, own in pairs]
    kept_once = [t for t, described in zip(inputs, region["inputs"], strict=True) if described["is_kept_once"]]
    gradients = layout.gradients if layout else None
    return Call(module, inputs, {}, loss=loss, kept_once=kept_once, gradient_strides=gradients)


def _loss(
    region: dict[str, Any], batch_size: int, dtype: torch.dtype, device: torch.device, compiled: Compile | None
) -> Loss | None:
    """The loss of a region's outputs and targets of its own; None where it has none."""
    if not region["has_loss"]:
        return None
    generated: Any = importlib.import_module(region["module"])
    calls: Any = importlib.import_module("runtime.input_pipeline.model_calls")
    tp = RankOfOne(region["tp"]) if region["tp"] > 1 else None
    targets = _structure([(d["path"], _input(d, batch_size, dtype, device)) for d in region["targets"]])
    loss_of = calls.generated_loss(generated.loss_fn, tp)
    loss_of = loss_of if compiled is None else compiled(loss_of)
    return lambda outputs: loss_of(outputs, targets)


def _structure(leaves: list[tuple[list[Any], Any]]) -> Any:
    """The tuple or dict whose leaves have these paths."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list[Any]] = {}
    for (key, *rest), leaf in leaves:
        groups.setdefault(key, []).append((rest, leaf))
    return {key: _structure(group) for key, group in groups.items()}


def _input(
    described: dict[str, Any],
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    shape = shape_of(described, batch_size)
    made = [n_elements(shape, strides)] if strides is not None else shape
    tensor = _values(described, made, dtype_of(described, dtype), device)
    if described["is_weight"] and tensor.is_floating_point():
        fill(tensor)
    if strides is not None:
        tensor = tensor.as_strided(shape, strides)
    return tensor.requires_grad_(described["requires_grad"]) if tensor.is_floating_point() else tensor


def _values(described: dict[str, Any], shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    low, high = described["range"]
    return torch.randint(low, high + 1, shape, dtype=dtype, device=device)
