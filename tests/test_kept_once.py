"""What several segments keep is one memory: what all blocks read, as those of a decoder what an encoder returned, and a
result that is kept where it is made and where it is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoplan.api import trace_model
from autoplan.cost.price import make_pricer
from autoplan.cost.table import SegmentCost
from autoplan.graph import GraphFacts, OpGraph
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import WHOLE, content_key
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.options import Options
from autoplan.parallel_plan import Execution, Mesh
from autoplan.rules import load_rules
from autoplan.space.layouts import all_shardings
from autoplan.tracing.model_source import load_model_file

WIDTH, N_BLOCKS, BATCH = 16, 3, 5
ONE = 4 * WIDTH * BATCH  # bytes of a value in float32
MODEL = f"""
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear({WIDTH}, {WIDTH}) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.common = (nn.Linear({WIDTH}, {WIDTH}) for _ in range(2))

    def forward(self, x, common):
        return BODY


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.start = Encoder(), nn.Linear({WIDTH}, {WIDTH})
        self.blocks = nn.ModuleList(Block() for _ in range({N_BLOCKS}))

    def forward(self, source, x):
        common = self.encoder(source)
        x = START
        for block in self.blocks:
            x = block(x, common)
        return x


def build_model():
    return Model()


def make_batch(n):
    source, x = torch.randn(2, n, {WIDTH})
    return (source.clone(), x.clone()), x


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


ADDING = "x + (self.own(x) + self.common(common)).tanh()"  # keeps x, common and what tanh returned
ENDING = "(x + self.own(x) + self.common(common)).relu()"  # keeps x, common and the result
STARTS = {ADDING: "self.start(x)", ENDING: "self.start(x).relu()"}


@pytest.fixture(params=[ADDING, ENDING], ids=["adding", "ending"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("BODY", request.param).replace("START", STARTS[request.param]))
    return path


@pytest.fixture
def graph(file: Path) -> OpGraph:
    return trace_model(file)


@pytest.fixture
def n_own(file: Path) -> int:
    """How many values a block counts alone: what a block before it returns is counted there where that keeps it."""
    return 1 if ENDING in file.read_text() else 2


def _costs(graph: OpGraph, *, is_compiled: bool = False, measured: MeasuredProfile | None = None) -> list[SegmentCost]:
    """Of each segment, without recomputation."""
    return [kept for kept, *_ in _choices(graph, is_compiled=is_compiled, measured=measured)]


def _choices(
    graph: OpGraph, *, is_compiled: bool = False, measured: MeasuredProfile | None = None
) -> list[tuple[SegmentCost, ...]]:
    hardware, rules = load_hardware_profile("h200_x4"), load_rules()
    price = make_pricer(graph, hardware=hardware, precision="fp32", shardings={}, rules=rules, measured=measured)
    costs = price(Mesh(micro_batch_size=BATCH, compile=is_compiled)).costs
    return [costs[segment.kind] for segment in graph.segments]


def _kept_bytes(file: Path) -> int:
    """Of one memory each, but for weights and buffers."""
    module = load_model_file(file)
    model, (inputs, targets) = module.build_model(), module.make_batch(BATCH)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = module.loss_fn(model(*inputs), targets)
    assert loss.requires_grad
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(size for place, size in found.items() if place not in own)


def test_a_model_keeps_what_autograd_keeps(file: Path, graph: OpGraph) -> None:
    kept_bytes = _kept_bytes(file)
    assert kept_bytes <= sum(cost.saved_bytes for cost in _costs(graph)) < kept_bytes + N_BLOCKS


RESIDUAL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.first, self.norm = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)
        self.second = nn.Conv2d(n_out, n_out, 1, bias=False)
        self.beside = nn.Conv2d(n_in, n_out, 1, bias=False) if n_in != n_out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.second(self.relu(self.norm(self.first(x)))) + self.beside(x))


def build_model():
    start = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    sizes = ((8, 16), (16, 16), (16, 16), (16, 16))
    return nn.Sequential(*start, *(Block(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_batch(n):
    return (torch.randn(n, 3, 16, 16),), torch.randn(n, 16)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


def test_so_does_a_residual_network_with_max_pooling(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(RESIDUAL)
    costs = _costs(trace_model(path))
    assert sum(cost.saved_bytes for cost in costs) == pytest.approx(_kept_bytes(path), rel=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_blocks_count_a_share_of_what_all_of_them_read(graph: OpGraph, n_own: int, is_compiled: bool) -> None:
    blocks = [segment for segment in graph.segments if segment.class_name == "Block"]
    assert len(blocks) == N_BLOCKS
    assert len({segment.kind for segment in blocks}) == 1
    costs = dict(zip(graph.segments, _costs(graph, is_compiled=is_compiled), strict=True))
    own_bytes = ONE + ONE // 4 if is_compiled and n_own == 1 else n_own * ONE  # x and a mask of the result
    assert {costs[segment].saved_bytes for segment in blocks} == {own_bytes + -(-ONE // N_BLOCKS)}


def test_so_they_do_where_they_are_recomputed(graph: OpGraph) -> None:
    """Each counts one of its input and its result."""
    choices = dict(zip(graph.segments, _choices(graph), strict=True))
    kept, again = choices[next(segment for segment in graph.segments if segment.class_name == "Block")]
    assert again.saved_bytes == ONE + -(-ONE // N_BLOCKS)
    assert again.saved_bytes + again.working_bytes == kept.saved_bytes + kept.working_bytes


@pytest.mark.parametrize("micro_batch_size", [BATCH, 2 * BATCH], ids=["measured", "scaled"])
def test_a_block_that_was_measured_alone_kept_all_of_it(graph: OpGraph, n_own: int, micro_batch_size: int) -> None:
    block = next(segment for segment in graph.segments if segment.class_name == "Block")
    content, n_bytes = content_key(graph, GraphFacts.of(graph), block), 3 * ONE * micro_batch_size // BATCH
    row = SegmentTime(
        content, WHOLE, 1, "", micro_batch_size, 3e-3, 9e-3, 5e-3, 4e-3, n_bytes, None, execution=Execution()
    )
    costs = _costs(graph, measured=MeasuredProfile((row,), None, "toy"))
    assert costs[graph.segments.index(block)].saved_bytes == n_own * ONE + -(-ONE // N_BLOCKS)


GATHERED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4096, 4096)

    def forward(self, x):
        return self.up(x).relu()


def build_model():
    return nn.Sequential(*(Block() for _ in range(4)))


def make_batch(n):
    return torch.randn(n, 256, 4096), torch.randn(n, 256, 4096)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


def test_a_shard_that_is_kept_where_it_is_made_does_not_stand_for_what_is_gathered_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(GATHERED)
    graph, hardware, rules = trace_model(path), load_hardware_profile("h200_x4"), load_rules()
    options = Options(precision="fp32", fix=(("tp", "2"),))
    shardings = all_shardings(graph, hardware, options, rules, batch_size=BATCH)
    price = make_pricer(graph, hardware=hardware, precision="fp32", shardings=shardings, rules=rules)
    costs = price(Mesh(tp=2, sharding="R", micro_batch_size=BATCH)).costs
    whole_bytes = 4 * BATCH * 256 * 4096
    behind = [costs[segment.kind] for segment in graph.segments if segment.class_name == "Block"][1:]
    assert {kept.saved_bytes for kept, *_ in behind} == {
        whole_bytes + whole_bytes // 2
    }  # the input, half of the result
    assert {again.saved_bytes for _, again in behind} == {whole_bytes}


CROSSED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(16, 16)

    def forward(self, x, y):
        return self.own(x).tanh() + y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, source, other):
        x, y = self.one(source), self.other(other)
        return self.blocks[0](x, y) + self.blocks[1](y, x)


def build_model():
    return Model()


def make_batch(n):
    source, other = torch.randn(2, n, 16)
    return (source.clone(), other.clone()), other


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


def test_blocks_that_read_the_same_in_other_places_each_keep_their_own(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(CROSSED)
    graph = trace_model(path)
    costs = [cost for segment, cost in zip(graph.segments, _costs(graph), strict=True) if segment.class_name == "Block"]
    assert [cost.saved_bytes for cost in costs] == [2 * ONE, 2 * ONE]


def test_a_frozen_encoder_is_counted_by_each_block(tmp_path: Path) -> None:
    """It has no gradient, so that recomputation does not know it for an input."""
    path = tmp_path / "model.py"
    frozen = "self.start = Encoder(), nn.Linear(16, 16)\n        self.encoder.requires_grad_(False)"
    text = MODEL.replace("BODY", ADDING).replace("START", STARTS[ADDING])
    path.write_text(text.replace(f"self.start = Encoder(), nn.Linear({WIDTH}, {WIDTH})", frozen))
    graph = trace_model(path)
    choices = dict(zip(graph.segments, _choices(graph), strict=True))
    kept, again = choices[next(segment for segment in graph.segments if segment.class_name == "Block")]
    assert kept.saved_bytes == 3 * ONE
    assert again.saved_bytes + again.working_bytes == kept.saved_bytes + kept.working_bytes
