"""torch.compile, block by block.

On a CPU what is compiled runs op by op, as torch's own operators: a plan that compiles can be checked there exactly and
without a C++ compiler. The kernels that torch writes for a CPU are not exact: gradients of a modulated layer norm whose
input is transposed are off by 2 % in torch 2.13, and attention in float64 is wrong in 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

COMPILERS = ("torch._dynamo", "torch._inductor")
VARIANTS_OF_BLOCK = 4  # compiled: in training and evaluation, with and without gradients

# Look-ups per row of a table from which their gradient is torch's own operator, which sorts them. What the compiler
# writes adds those of a row one after the other, 0.37 us each on H100 and H200, where their dims are permuted: for the
# position biases of T5-large, 8,192 to a row, 2.6 to 3.7 ms a micro-batch in place of 0.3.
OWN_LOOK_UP_GRADIENT_PER_ROW = 1000
LOOK_UP_GRADIENT = torch.ops.aten.embedding_dense_backward.default


def backend_of(device: torch.device) -> str | Callable[..., Any]:
    """What torch.compile compiles with."""
    return inductor if device.type == "cuda" else "aot_eager"


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile as torch does, but for gradients of many look-ups in a small table (OWN_LOOK_UP_GRADIENT_PER_ROW)."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    config: Any = torch.compiler.config
    rewritings = select_decomp_table()

    def rewritten(gradient: Tensor, indices: Tensor, n_rows: int, padding_row: int, scale_by_frequency: bool) -> Tensor:
        is_crowded = indices.numel() >= OWN_LOOK_UP_GRADIENT_PER_ROW * n_rows
        rewriting = look_up_gradient if is_crowded else rewritings[LOOK_UP_GRADIENT]
        return rewriting(gradient, indices, n_rows, padding_row, scale_by_frequency)

    # torch's caches do not know by what an operator was replaced
    tag = f"{config.cache_key_tag} {inductor.__qualname__} {OWN_LOOK_UP_GRADIENT_PER_ROW}"
    with config.patch(cache_key_tag=tag):
        found: Any = compile_fx(graph, inputs, decompositions={**rewritings, LOOK_UP_GRADIENT: rewritten})
    return found


@torch.library.custom_op("autoplan::look_up_gradient", mutates_args=())
def look_up_gradient(
    gradient: Tensor, indices: Tensor, n_rows: int, padding_row: int, scale_by_frequency: bool
) -> Tensor:
    """The operator of torch under a name for which the compiler has no code; torch knows operators by registering."""
    return LOOK_UP_GRADIENT(gradient, indices, n_rows, padding_row, scale_by_frequency)


@look_up_gradient.register_fake
def _(gradient: Tensor, indices: Tensor, n_rows: int, padding_row: int, scale_by_frequency: bool) -> Tensor:
    return gradient.new_empty(n_rows, gradient.shape[-1])


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled anew for each size of its inputs."""
    return torch.compile(function, dynamic=False, backend=backend_of(device))


def compile_blocks(root: nn.Module, blocks: Iterable[str], device: torch.device) -> None:
    """Compile each block, or all of `root` when it has none; only `forward` is replaced, so names stay.

    Blocks of one class share its compiled variants, one per kind of block: none is made for sizes that change, as
    another kind of block would seem to ask for, and torch must allow for as many as there may be.
    """
    from torch._dynamo import config

    modules = [root.get_submodule(name) for name in blocks] or [root]
    most = VARIANTS_OF_BLOCK * len(modules)
    config.recompile_limit = max(config.recompile_limit, most)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, most)
    for module in modules:
        module.forward = compiled(module.forward, device)


@contextmanager
def naming_a_way_without() -> Iterator[None]:
    """Add to an error of torch.compile how to train without it."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(COMPILERS):
            error.add_note(
                "torch.compile: this plan compiles blocks\n"
                "  fix: TORCHDYNAMO_DISABLE=1 in the environment runs them as they are, slower and in more memory than"
                " planned; or plan with --fix compile=off"
            )
        raise
