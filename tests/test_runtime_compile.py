"""Compiled blocks in the runtime: every kind of block is compiled, and copies of one kind share what was compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402

from autoplan.runtime.stages import compiled  # noqa: E402
from autoplan.runtime.stages.compiled import compile_blocks, naming_a_way_without  # noqa: E402

FAMILIES = Path(__file__).parent / "families"
CPU = torch.device("cpu")
WIDTHS = range(2, 12)  # more kinds than the 8 variants of one piece of code after which torch compiles no more


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.convolution(x)) + x


@pytest.fixture
def nothing_compiled():
    """Nothing is compiled before the test or after it; torch's limits are put back."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        torch.compiler.reset()
        yield
        torch.compiler.reset()


@pytest.fixture
def compiled_graphs(monkeypatch, nothing_compiled):
    """The example inputs of each graph that torch compiled during the test."""
    found: list[tuple] = []

    def backend(graph, inputs):
        found.append(tuple(inputs))
        return graph.forward

    monkeypatch.setattr(compiled, "backend_of", lambda device: backend)
    return found


def test_every_kind_of_block_is_compiled_once_for_its_own_sizes(compiled_graphs) -> None:
    blocks = nn.ModuleList(Block(width) for width in WIDTHS for _ in range(2))
    compile_blocks(blocks, [str(index) for index in range(len(blocks))], CPU)
    for _ in range(2):
        for block in blocks:
            width = block.convolution.in_channels
            block(torch.ones(3, width, 64 // width)).sum().backward()
    assert len(compiled_graphs) == len(WIDTHS)
    assert all(isinstance(item, torch.Tensor) for inputs in compiled_graphs for item in inputs)  # no size is one


class PositionBiases(nn.Module):
    """Scores of 64 queries and keys, to which biases of 8 rows are added, 512 look-ups of each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)

    def forward(self, scores):
        distances = torch.arange(64)[:, None] - torch.arange(64)
        return scores * self.table(distances.abs() % 8).permute(2, 0, 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch's compiler itself
@pytest.mark.parametrize("least", [512, 513])
def test_gradients_of_many_look_ups_in_a_small_table_are_torchs_own_operator(
    monkeypatch, nothing_compiled, least
) -> None:
    targets: list[object] = []
    tag = torch.compiler.config.cache_key_tag

    def write(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def compile_fx(graph, inputs, decompositions):
        assert str(least) in torch.compiler.config.cache_key_tag
        return aot_autograd(fw_compiler=write, bw_compiler=write, decompositions=decompositions)(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr(compiled, "OWN_LOOK_UP_GRADIENT_PER_ROW", least)
    monkeypatch.setattr(compiled, "backend_of", lambda device: compiled.inductor)
    biases, scores = PositionBiases().double(), torch.randn(3, 2, 64, 64).double()
    expected = torch.autograd.grad(biases(scores).sum(), biases.parameters())
    compile_blocks(biases, [], CPU)
    found = torch.autograd.grad(biases(scores).sum(), biases.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (torch.ops.autoplan.look_up_gradient.default in targets) is (least == 512)
    assert targets and compiled.LOOK_UP_GRADIENT not in targets
    assert torch.compiler.config.cache_key_tag == tag


def test_what_cannot_be_compiled_names_a_way_without(monkeypatch) -> None:
    def backend(graph, inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled, "backend_of", lambda device: backend)
    block = Block(2)
    compile_blocks(block, [], CPU)
    step = naming_a_way_without()(block)
    with pytest.raises(Exception, match="no compiler") as found:
        step(torch.ones(3, 2, 4))
    assert "fix: TORCHDYNAMO_DISABLE=1" in "".join(found.value.__notes__)
    with pytest.raises(RuntimeError) as other:
        naming_a_way_without()(torch.mm)(torch.ones(2, 3), torch.ones(2, 3))
    assert not hasattr(other.value, "__notes__")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
def test_gradients_of_transposed_inputs_are_exact_on_a_cpu() -> None:
    # what torch 2.13 compiles for a CPU is off by 2 % here
    spec = importlib.util.spec_from_file_location("family", FAMILIES / "diffusion_transformer.py")
    family = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(family)
    torch.manual_seed(0)
    block = family.Block(32, 4).double()
    inputs = [torch.randn(2, 32, 16).double().requires_grad_(), torch.randn(2, 32).double().requires_grad_()]
    weights = torch.randn(2, 16, 32).double()

    def gradients():
        return torch.autograd.grad((block(inputs[0].transpose(1, 2) * 1.0, inputs[1]) * weights).sum(), inputs)

    expected = gradients()
    compile_blocks(block, [], CPU)
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
