"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

COMPILERS = ("torch._dynamo", "torch._inductor")
VARIANTS_OF_BLOCK = 4  # compiled: in training and evaluation, with and without gradients


def compile_blocks(root: nn.Module, blocks: Iterable[str]) -> None:
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
        module.forward = torch.compile(module.forward, dynamic=False)


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
