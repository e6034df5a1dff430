"""The product of the head and the loss behind it, over slices of the rows: one slice of the logits exists at a time.

    hidden --deferred_linear--> DeferredProduct --views of its rows, casts--> cross_entropy --> loss

A `DeferredProduct` stands for the logits until it is known what is done with them. Views of whole rows are taken of the
hidden states instead, and cross-entropy computes, slice by slice, the logits, their loss and at once their gradient:

    dx_i = g_i W,    dW += g_i^T x_i,    g_i = d(sum of the losses of slice i) / d(logits_i)

so that nothing is computed twice and nothing of the size of the logits is kept. Backward multiplies dx and dW by the
gradient of the loss. dW is summed up over slices in the dtype of the weight, as autograd does for a weight that is used
several times, but in float32 for float16, which has no room for a sum that is not scaled down.
Anything else computes the logits whole, as if nothing had been deferred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from .compiled import compiled
from .padded_head import padded_linear, replace_linear, with_padding

SliceLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (product, targets) -> sum of the losses of the rows


@dataclass(frozen=True)
class _Product:
    """What is deferred: the logits are linear(x, weight, bias), in `dtype`.

    `pads_classes`: the product is computed as `padded_head` says. `hooks` wait for the gradient of the logits.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    slice_rows: int
    is_compiled: bool
    pads_classes: bool
    dtype: torch.dtype
    hooks: tuple[Callable[[torch.Tensor], Any], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.weight.shape[0])

    @property
    def compiles_for(self) -> torch.device | None:
        return self.x.device if self.is_compiled else None

    def whole(self) -> torch.Tensor:
        linear = padded_linear if self.pads_classes else F.linear
        logits = linear(self.x, self.weight, self.bias).to(self.dtype)
        return _with_hooks(logits, self.hooks)


class DeferredProduct(torch.Tensor):
    """Logits that are not computed yet; has their shape, dtype and device, and no memory."""

    product: _Product

    @staticmethod
    def __new__(cls, product: _Product) -> DeferredProduct:
        has_gradient = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (product.x, product.weight, product.bias)
        )
        found: DeferredProduct = torch.Tensor._make_wrapper_subclass(
            cls, product.shape, dtype=product.dtype, device=product.x.device, requires_grad=has_gradient
        )
        found.product = product
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        handler = _HANDLERS.get(func)
        found = handler(*args, **kwargs) if handler is not None and isinstance(args[0], DeferredProduct) else None
        return func(*whole_logits(args), **whole_logits(kwargs)) if found is None else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func}: found logits that are not computed yet (the plan's loss is chunked)\n"
            "  expected: a loss that torch functions compute\n  fix: plan with --fix loss=whole"
        )


def deferred_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    slice_rows: int,
    is_compiled: bool = False,
    pads_classes: bool = False,
) -> torch.Tensor:
    """`F.linear`, whose result is computed by whoever reads it: by cross-entropy `slice_rows` rows at a time.

    `is_compiled`: torch.compile makes one function of the loss of a slice. `pads_classes`: see `padded_head`.
    """
    return DeferredProduct(_Product(x, weight, bias, slice_rows, is_compiled, pads_classes, x.dtype))


def defer_products(module: nn.Module, *, slice_rows: int, is_compiled: bool, pads_classes: bool = False) -> None:
    """Let the products in `module`, the head of a model, be deferred; only `forward` is replaced, so names stay."""
    deferred = functools.partial(
        deferred_linear, slice_rows=slice_rows, is_compiled=is_compiled, pads_classes=pads_classes
    )
    replace_linear(module, deferred)


def whole_logits(values: Any) -> Any:
    """Tensors in any structure, with those computed that are deferred."""
    return pytree.tree_map(lambda leaf: leaf.product.whole() if isinstance(leaf, DeferredProduct) else leaf, values)


def _with_hooks(tensor: torch.Tensor, hooks: tuple[Callable[[torch.Tensor], Any], ...]) -> torch.Tensor:
    """Run hooks, whatever gradient they get, once that of `tensor` is known."""
    if tensor.requires_grad:
        for hook in hooks:
            tensor.register_hook(functools.partial(_run_hook, hook))  # type: ignore[no-untyped-call]
    return tensor


def _run_hook(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> None:
    """`fully_shard` wants to know when the backward pass begins, and returns the gradient as it is."""
    hook(gradient)


# ---------------------------------------------------------------- what is done with logits
# Each returns None where the logits must be whole.


def _cast(deferred: DeferredProduct, dtype: torch.dtype) -> DeferredProduct:
    return DeferredProduct(replace(deferred.product, dtype=dtype))


def _to(deferred: DeferredProduct, *args: Any, **kwargs: Any) -> DeferredProduct | None:
    """A cast, if it is nothing but one."""
    dtype = kwargs.get("dtype", args[0] if args else None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or len(args) + len(kwargs) != 1:
        return None
    return _cast(deferred, dtype)


def _same(deferred: DeferredProduct) -> DeferredProduct:
    return deferred


def _reshaped(change: Callable[..., torch.Tensor]) -> Callable[..., DeferredProduct | None]:
    """A view in another shape is a view of rows if its last dim is that of the classes."""

    def handler(deferred: DeferredProduct, *args: Any, **kwargs: Any) -> DeferredProduct | None:
        product = deferred.product
        shape = change(torch.empty(product.shape, device="meta"), *args, **kwargs).shape
        if not shape or shape[-1] != product.shape[-1]:
            return None
        return DeferredProduct(replace(product, x=product.x.reshape(*shape[:-1], product.x.shape[-1])))

    return handler


def _items(deferred: DeferredProduct, index: Any) -> DeferredProduct | None:
    """Slices and numbers along other dims than the last one."""
    indices = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, int | slice) for item in indices):
        return None
    n_dims = len(deferred.product.shape)
    n_named = sum(item is not Ellipsis for item in indices)
    reaches_last = n_named == n_dims or (Ellipsis in indices and indices[-1] is not Ellipsis)
    if reaches_last and indices[-1] != slice(None):
        return None
    return DeferredProduct(replace(deferred.product, x=deferred.product.x[index]))


def _hooked(deferred: DeferredProduct, hook: Callable[[torch.Tensor], Any]) -> DeferredProduct:
    """The logits themselves remember the hook: they are what the caller holds."""
    deferred.product = replace(deferred.product, hooks=(*deferred.product.hooks, hook))
    return deferred


def _cross_entropy(
    deferred: DeferredProduct,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """`F.cross_entropy` of rows with one class each."""
    is_plain = weight is None and size_average is None and reduce is None
    if not is_plain or len(deferred.product.shape) != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    product = deferred.product
    loss_of = _slice_loss(product.compiles_for, product.dtype, ignore_index, label_smoothing)
    return _chunked(product, target, loss_of, ignore_index=ignore_index, reduction=reduction)


def _split_cross_entropy(
    deferred: DeferredProduct,
    targets: torch.Tensor,
    tp: ProcessGroup | None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    n_classes: int | None = None,
) -> torch.Tensor | None:
    """`vocab_parallel_cross_entropy`."""
    product = replace(deferred.product, x=deferred.product.x.reshape(-1, deferred.product.x.shape[-1]))
    loss_of = _split_slice_loss(product.compiles_for, product.dtype, tp, ignore_index, label_smoothing, n_classes)
    return _chunked(product, targets.reshape(-1), loss_of, ignore_index=ignore_index, reduction=reduction)


_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "is_leaf", "_base", "grad_fn",
    )
) | {
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "get_device", "element_size")
}  # fmt: skip

_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.float: lambda deferred: _cast(deferred, torch.float32),
    torch.Tensor.double: lambda deferred: _cast(deferred, torch.float64),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _same,
    torch.Tensor.view: _reshaped(torch.Tensor.view),
    torch.Tensor.reshape: _reshaped(torch.Tensor.reshape),
    torch.reshape: _reshaped(torch.reshape),
    torch.Tensor.flatten: _reshaped(torch.Tensor.flatten),
    torch.flatten: _reshaped(torch.flatten),
    torch.Tensor.__getitem__: _items,
    torch.Tensor.register_hook: _hooked,
    F.cross_entropy: _cross_entropy,
    vocab_parallel_cross_entropy: _split_cross_entropy,
}


# ---------------------------------------------------------------- the loss, slice by slice


@functools.cache
def _slice_loss(
    compiles_for: torch.device | None, dtype: torch.dtype, ignore_index: int, label_smoothing: float
) -> SliceLoss:
    """The sum of the losses of rows, computed in float32 at least; compiled where a device is given.

    The logits are what the product is in `dtype`: a cast that is compiled too takes no pass over them of its own.
    """

    def loss_of(product: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = product.to(dtype)
        precise = logits if dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            precise, targets, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )

    return compiled(loss_of, compiles_for) if compiles_for is not None else loss_of


@functools.cache
def _split_slice_loss(
    compiles_for: torch.device | None,
    dtype: torch.dtype,
    tp: ProcessGroup | None,
    ignore_index: int,
    label_smoothing: float,
    n_classes: int | None,
) -> SliceLoss:
    """Likewise, of logits that are split over the ranks of `tp`."""

    def loss_of(product: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(
            product.to(dtype),
            targets,
            tp,
            reduction="sum",
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            n_classes=n_classes,
        )

    return compiled(loss_of, compiles_for) if compiles_for is not None else loss_of


def _chunked(
    product: _Product, targets: torch.Tensor, loss_of: SliceLoss, *, ignore_index: int, reduction: str
) -> torch.Tensor | None:
    if reduction not in ("mean", "sum"):
        return None
    total: torch.Tensor = _SlicedLoss.apply(  # type: ignore[no-untyped-call]
        product.x,
        product.weight,
        product.bias,
        targets,
        loss_of,
        product.slice_rows,
        product.pads_classes,
    )
    loss = total / (targets != ignore_index).sum() if reduction == "mean" else total
    return _with_hooks(loss, product.hooks).to(product.dtype)


class _SlicedLoss(torch.autograd.Function):
    """The sum of the losses of all rows; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        loss_of: SliceLoss,
        slice_rows: int,
        pads_classes: bool,
    ) -> torch.Tensor:
        has_gradient, n_classes = any(ctx.needs_input_grad), len(weight)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias))
        if pads_classes:
            weight, bias = with_padding(weight), None if bias is None else with_padding(bias)
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = _zeros_for_sum(weight) if ctx.needs_input_grad[1] else None
        of_bias = _zeros_for_sum(bias) if bias is not None and ctx.needs_input_grad[2] else None
        losses = []
        for start in range(0, len(x), slice_rows):
            rows = slice(start, start + slice_rows)
            logits = F.linear(x[rows], weight, bias)[:, :n_classes]
            loss, gradient = _loss_and_gradient(loss_of, logits, targets[rows], has_gradient=has_gradient)
            losses.append(loss)
            if has_gradient and pads_classes:
                gradient = with_padding(gradient, dim=1)
            if of_x is not None:
                torch.mm(gradient, weight, out=of_x[rows])
            if of_weight is not None:
                _add_product(of_weight, gradient.t(), x[rows])
            if of_bias is not None:
                of_bias += gradient.sum(0)
            del logits, gradient  # before those of the next slice are made
        ctx.save_for_backward(of_x, *(None if total is None else total[:n_classes] for total in (of_weight, of_bias)))
        return torch.stack(losses).sum() if losses else x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(_scaled(saved, gradient, dtype) for saved, dtype in pairs), None, None, None, None)


def _loss_and_gradient(
    loss_of: SliceLoss, logits: torch.Tensor, targets: torch.Tensor, *, has_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of a slice, and the gradient of its logits (empty without `has_gradient`)."""
    if not has_gradient:
        return loss_of(logits, targets), logits.new_empty(0)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = loss_of(leaf, targets)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _zeros_for_sum(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=torch.float32 if tensor.dtype == torch.float16 else tensor.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _scaled(saved: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The product, rounded once: a factor of no dims would be rounded to 16 bits first."""
    if saved is None or dtype is None:
        return None
    return torch.mul(saved, factor.reshape(1), out=torch.empty_like(saved, dtype=dtype))
