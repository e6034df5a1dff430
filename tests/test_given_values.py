"""Tensors that forward makes of numbers, and tensors that it fills piece by piece."""

import pytest
import torch
from distributed.launch import run_program
from torch import nn
from torch.nn import functional as F

from autoplan import api
from autoplan.errors import TraceError
from autoplan.options import Options
from autoplan.tracing.model_source import module_source
from autoplan.tracing.trace import trace_model

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(x)
        left, right = h[..., [1, 0, 5]].sum(-1, keepdim=True), h[..., [-2]]
        scaled = self.down(h) * torch.tensor([1.0, 2.0, 4.0, 3.0] * 2, device=x.device, dtype=x.dtype)
        filled = x.new_empty(x.shape[0], 8)
        filled[:, :3] = scaled[:, :3] + left * torch.tensor(3.0)
        filled[:, 3:] = right  # one column into five
        return x + filled


def build_model():
    return nn.Sequential(Block(), Block())


def make_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 8)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs, targets)
"""


class Given(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make, self.table = nn.Linear(4, 4), make, torch.ones(4)

    def forward(self, x):
        return self.linear(x) * self.make(self, x)


def targets_of(make) -> set[str]:
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    return {op.target for op in trace_model(module_source(Given(make), batch, F.mse_loss)).ops}


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (lambda self, x: torch.tensor(3.0, device=x.device), "aten.full.default"),
        (lambda self, x: torch.tensor(3.0), "aten.full.default"),
        (lambda self, x: x[:, [3, 2, 1, 0]], "aten.arange.start_step"),
        (lambda self, x: x.new_tensor([1, 2, 4, 8]), "aten.scalar_tensor.default"),
        (lambda self, x: torch.tensor([[1, 2, 4, 8]]).to(x.device), "aten.scalar_tensor.default"),
    ],
)
def test_numbers_in_forward_are_made_by_operators(make, target):
    assert target in targets_of(make)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda self, x: torch.tensor([float(i) for i in range(64)]).to(x.device).sum(), r"shape \[64\].*at most 32"),
        (lambda self, x: self.table.to(x.device), "table: .*register it in __init__ by self.register_buffer"),
    ],
)
def test_other_tensors_that_are_no_buffers_are_refused_with_what_to_do(make, message):
    with pytest.raises(TraceError, match=rf"(?s)Given: .*{message}.*--module-level"):
        targets_of(make)


_TABLE = torch.linspace(0.0, 1.0, 64)


def _weighed(outputs, targets):
    return (outputs * _TABLE.to(outputs.device)[targets].to(outputs.dtype)[:, None]).sum()


def test_a_table_that_a_loss_reads_is_refused_with_its_line_and_where_else_to_hold_it():
    source = module_source(nn.Linear(4, 4), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), _weighed)
    line = rf"{__file__}:{_weighed.__code__.co_firstlineno + 1}: return \(outputs \* _TABLE"
    with pytest.raises(TraceError, match=rf"(?s)loss_fn uses .* at {line}.*shape \[64\].*let the targets hold"):
        trace_model(source)


@pytest.mark.nightly
@pytest.mark.parametrize("fix", [(("tp", "2"),), (("pp", "2"),)])
def test_a_program_with_numbers_and_filled_tensors_trains_like_one_process(tmp_path, fix):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = Options(global_batch=4, fix=fix)
    problem = api.make_problem(str(path), hw="dgx_a100_x8/2", options=options)
    api.emit(problem, api.solve(problem), tmp_path / "out")
    run_program(tmp_path / "out", 2, "--steps", "2", "--device", "cpu", "--dtype", "float64", "--check")


def fills(*places):
    def make(self, x):
        filled = x.new_zeros(x.shape[0], 4)
        for start, end in places:
            filled[:, start:end] = x[:, start:end]
        return filled

    return make


@pytest.mark.parametrize(
    ("places", "are_joined"),
    [
        (((0, 1), (1, 4)), True),
        (((3, 4), (0, 3)), True),
        (((0, 2),), False),
        (((0, 3), (2, 4)), False),
        (((0, 2), (3, 4)), False),
    ],
)
def test_pieces_that_are_all_of_a_tensor_are_joined(places, are_joined):
    found = targets_of(fills(*places))
    assert ("aten.cat.default" in found, "aten.slice_scatter.default" in found) == (are_joined, not are_joined)


def begins_with_nothing(self, x):
    made = torch.tensor([], device=x.device)
    for column in x.split(1, -1):
        made = torch.cat([made, column], -1)
    return made


def test_a_tensor_that_begins_with_nothing_is_its_pieces():
    batch = torch.zeros(2, 4), torch.zeros(2, 4)
    ops = trace_model(module_source(Given(begins_with_nothing), batch, F.mse_loss)).ops
    joined = [len(op.args[0]) for op in ops if op.target == "aten.cat.default"]
    assert joined == [1, 2, 2, 2]
