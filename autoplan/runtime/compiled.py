"""torch.compile, block by block.

On a CPU what is compiled runs op by op, as torch's own operators: a plan that compiles can be checked there exactly and
without a C++ compiler. The kernels that torch writes for a CPU are not exact: gradients of a modulated layer norm whose
input is transposed are off by 2 % in torch 2.13, and attention in float64 is wrong in 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

COMPILERS = ("torch._dynamo", "torch._inductor")
VARIANTS_OF_BLOCK = 4  # compiled: in training and evaluation, with and without gradients


def backend_of(device: torch.device) -> str:
    """What torch.compile compiles for."""
    return "inductor" if device.type == "cuda" else "aot_eager"


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
