"""Compiled blocks in the runtime: every kind of block is compiled, and copies of one kind share what was compiled."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from autoplan.runtime.compiled import compile_blocks, naming_a_way_without  # noqa: E402

WIDTHS = range(2, 12)  # more kinds than the 8 variants of one piece of code after which torch compiles no more


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.convolution(x)) + x


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The example inputs of each graph that torch compiled during the test; torch's limits are put back after it."""
    import torch._dynamo

    found: list[tuple] = []

    def backend(graph, inputs):
        found.append(tuple(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        torch.compiler.reset()
        yield found
        torch.compiler.reset()


def test_every_kind_of_block_is_compiled_once_for_its_own_sizes(compiled_graphs) -> None:
    blocks = nn.ModuleList(Block(width) for width in WIDTHS for _ in range(2))
    compile_blocks(blocks, [str(index) for index in range(len(blocks))])
    for _ in range(2):
        for block in blocks:
            width = block.convolution.in_channels
            block(torch.ones(3, width, 64 // width)).sum().backward()
    assert len(compiled_graphs) == len(WIDTHS)
    assert all(isinstance(item, torch.Tensor) for inputs in compiled_graphs for item in inputs)  # no size is one


def test_what_cannot_be_compiled_names_a_way_without(monkeypatch) -> None:
    def backend(graph, inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    block = Block(2)
    compile_blocks(block, [])
    step = naming_a_way_without()(block)
    with pytest.raises(Exception, match="no compiler") as found:
        step(torch.ones(3, 2, 4))
    assert "fix: TORCHDYNAMO_DISABLE=1" in "".join(found.value.__notes__)
    with pytest.raises(RuntimeError) as other:
        naming_a_way_without()(torch.mm)(torch.ones(2, 3), torch.ones(2, 3))
    assert not hasattr(other.value, "__notes__")
