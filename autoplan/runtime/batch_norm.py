"""BatchNorm over data-parallel ranks: whose samples give the mean and variance that a micro-batch is normalized by.

    local          those of this rank's micro-batch. Each rank keeps its own running statistics; rank 0's are the ones
                   to save, as with DistributedDataParallel.
    synchronized   those of all data-parallel ranks' micro-batches together. Running statistics are equal on all ranks.

`synchronize_batch_norm` makes every training `F.batch_norm` of a model synchronized, that of the user's `nn.BatchNorm`
modules and that of generated stages alike. With a group of ranks G, each with n_r values per channel, N = sum n_r, and
y = weight * x_hat + bias, x_hat = (x - mean) / deviation:

    mean = sum_r n_r mean_r / N          variance = sum_r n_r (variance_r + (mean_r - mean)^2) / N
    dx = weight / deviation * (dy - sum_G(dy) / N - x_hat * sum_G(dy * x_hat) / N)

so forward gathers 3 numbers per channel and rank, backward sums 2. Gradients of weight and bias stay those of the rank:
they are averaged with all other gradients. Statistics are computed in float32 or better.

In 16-bit precision running statistics stay in float32 (see `buffers`). `F.batch_norm` takes them only with a weight and
a bias in float32, as under autocast, so these are widened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Groups = Sequence[ProcessGroup]


def data_parallel_groups(mesh: DeviceMesh) -> tuple[ProcessGroup, ...]:
    """One group per axis of more than one rank; doing a sum over each in turn sums over all data-parallel ranks."""
    return tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def synchronize_batch_norm(root: nn.Module, recomputed: Iterable[str], groups: Groups) -> None:
    """Synchronize every `F.batch_norm` of `root` over `groups`, whose ranks must run the same forward passes.

    Only `forward` is replaced: of `root`, and of what a backward pass may run again by itself: the modules `recomputed`
    (those that `root` has), and each `nn.BatchNorm`, since the user's own code may recompute it.
    """
    modules = dict(root.named_modules())
    again = {modules[name] for name in recomputed if name in modules}
    again |= {module for module in modules.values() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    synchronized = functools.partial(synchronized_batch_norm, groups=groups)
    for module in {root, *again}:
        module.forward = functools.partial(_run_with, synchronized, module.forward)


def leave_ranks_to_plan(root: nn.Module) -> None:
    """Let each `nn.SyncBatchNorm` of `root` call `F.batch_norm`, as other BatchNorm does.

    By itself it takes the samples of all ranks on CUDA, whatever the plan says, and refuses tensors on the CPU.
    """
    norms: list[Any] = [m for m in root.modules() if type(m).forward is nn.SyncBatchNorm.forward]
    for module in norms:
        module.forward = functools.partial(nn.modules.batchnorm._BatchNorm.forward, module)


def normalize_in_float32(root: nn.Module) -> None:
    """Let the `nn.BatchNorm` modules of `root` take weights in 16 bits beside statistics in float32."""
    norms: list[nn.Module] = [m for m in root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for module in norms:
        module.forward = functools.partial(_run_with, float32_batch_norm, module.forward)


def _run_with(batch_norm: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Replaced(batch_norm):
        return forward(*args, **kwargs)


class _Replaced(TorchFunctionMode):
    """Inside it `F.batch_norm` means another function of the same arguments."""

    def __init__(self, batch_norm: Callable[..., Any]) -> None:
        super().__init__()
        self._batch_norm = batch_norm

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def float32_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` with its arguments; weight and bias get the dtype of the running statistics."""
    if running_mean is not None:
        weight = None if weight is None else weight.to(running_mean.dtype)
        bias = None if bias is None else bias.to(running_mean.dtype)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def synchronized_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    groups: Groups,
) -> torch.Tensor:
    """`F.batch_norm` with its arguments, over the samples of all ranks of `groups`.

    Raises: ValueError when all ranks together have one value per channel, which has no variance.
    """
    if not training:
        return float32_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    output, mean, variance, count = _Normalize.apply(input, weight, bias, eps, groups)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * count / (count - 1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result: torch.Tensor = output
    return result


class _Normalize(torch.autograd.Function):
    """(x, weight, bias) -> (y, mean, variance, values per channel), the last three over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        groups: Groups,
    ) -> tuple[torch.Tensor, ...]:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = _statistics(values, groups)
        inverse_deviation = torch.rsqrt(variance + eps)
        y = (values - _per_channel(mean, x)) * _per_channel(inverse_deviation, x)
        y = y if weight is None else y * _per_channel(weight, x)
        y = y if bias is None else y + _per_channel(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse_deviation, count)
        ctx.bias_dtype, ctx.groups = None if bias is None else bias.dtype, groups
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse_deviation, count = ctx.saved_tensors
        x_hat = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(inverse_deviation, x)
        gradient = gradient.to(mean.dtype)
        dims = _reduced_dims(x)
        local = torch.stack([gradient.sum(dims), (gradient * x_hat).sum(dims)])
        sum_gradient, sum_product = _sum_over(local.clone(), ctx.groups) / count
        slope = inverse_deviation if weight is None else inverse_deviation * weight
        dx = gradient - _per_channel(sum_gradient, x) - x_hat * _per_channel(sum_product, x)
        dx = (dx * _per_channel(slope, x)).to(x.dtype)
        d_weight = None if weight is None else local[1].to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else local[0].to(ctx.bias_dtype)
        return dx, d_weight, d_bias, None, None


def _statistics(values: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance (biased) and number of values per channel over all ranks."""
    variance, mean = torch.var_mean(values, _reduced_dims(values), correction=0)
    own_count = torch.full_like(mean, values.numel() // values.shape[1])
    means, variances, counts = _gather(torch.stack([mean, variance, own_count]), groups).unbind(dim=1)
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(dim=0) / count
    if values.numel() * len(counts) <= values.shape[1]:
        raise ValueError(f"BatchNorm in training needs more than one value per channel, found {list(values.shape)}")
    return mean, variance, count


def _gather(statistics: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The statistics of every rank, stacked along a new first dim."""
    gathered = statistics.unsqueeze(0)
    for group in groups:
        parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, gathered, group=group)
        gathered = torch.cat(parts)
    return gathered


def _sum_over(tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def _reduced_dims(x: torch.Tensor) -> list[int]:
    """All dims but the channels, which are dim 1."""
    return [0, *range(2, x.dim())]


def _per_channel(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[channels] in the shape that broadcasts against x: [batch, channels, ...]."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))
