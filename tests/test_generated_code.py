"""Generated code where the user's own classes would do: when it is offered, and what it does better."""

from dataclasses import replace

import pytest

from autoplan import api
from autoplan.analysis.memory_order import scattered_outputs
from autoplan.errors import InputError, UsageError
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.options import Options
from autoplan.parallel_plan import Execution, Mesh
from autoplan.search.meshes import SearchSpace, list_meshes

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return x + self.linear((x.transpose(1, 2) * mask).transpose(1, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        mask = torch.sigmoid(x).transpose(1, 2).unsqueeze(0).squeeze(0)
        for block in self.blocks:
            x = block(x, mask)
        return x


def build_model():
    return Model()


def make_batch(batch_size):
    return torch.randn(batch_size, 4, 8), torch.randn(batch_size, 4, 8)


def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).mean()
"""


def row(milliseconds, *, own, size=4, compiled=False):
    times = {"forward_s": milliseconds / 3e3, "backward_s": milliseconds / 1.5e3}
    host = {"host_forward_s": 0.0, "host_backward_s": 0.0, "saved_bytes": 0, "working_bytes": None}
    execution = Execution(compile=compiled)
    return SegmentTime("block", "whole", 1, "", size, execution=execution, is_own=own, **times, **host)


@pytest.mark.parametrize(
    ("rows", "is_worth"),
    [
        ([row(2.0, own=True), row(1.5, own=False)], True),
        ([row(2.0, own=True), row(1.97, own=False)], False),
        ([row(2.0, own=True), row(2.5, own=False)], False),
        ([row(2.0, own=True, size=8), row(1.0, own=False)], None),
        ([row(2.0, own=True), row(1.0, own=False, compiled=True)], None),
        ([row(1.0, own=False)], None),
    ],
)
def test_generated_code_is_offered_where_the_same_block_was_measured_faster(rows, is_worth) -> None:
    assert MeasuredProfile(tuple(rows), None, "test").is_worth_generating is is_worth


def test_only_meshes_without_tensor_and_pipeline_parallelism_have_the_choice() -> None:
    space = SearchSpace(4, 4, 8, (0, 1, 1, 2), (True, True, True), ((1, ("",)), (2, ("R",))), generated=(False, True))
    meshes = list(list_meshes(space, Options())[0])
    has_choice = {(mesh.tp, mesh.pp) for mesh in meshes if mesh.generated}
    assert has_choice == {(1, 1)}
    assert {mesh.generated for mesh in meshes if mesh.tp == mesh.pp == 1} == {False, True}
    assert all(mesh.needs_generated_model for mesh in meshes if mesh.tp * mesh.pp > 1 or mesh.generated)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "model.py"
    path.write_text(MODEL)
    return path


def problem(model_file, **fix):
    fixed = tuple(fix.items())
    return api.make_problem(model_file, hw="dgx_a100_x8", options=Options(global_batch=8, precision="fp32", fix=fixed))


def test_what_leaves_a_block_as_a_transposed_view_is_made_dense(model_file) -> None:
    asked = problem(model_file, dp="1", tp="1", pp="1", micro_batch="8", generated="on")
    scattered = scattered_outputs(asked.graph)
    assert len(scattered) == 1
    answer = api.solve(asked)
    files = api.program_files(asked, answer)
    assert files["parallel_model.py"].count(".contiguous()") == 1
    assert "parallel_model" in files["train.py"]


def test_generated_is_refused_beside_what_is_always_generated(model_file) -> None:
    asked = problem(model_file)
    plan = api.solve(asked).best.plan
    wrong = replace(plan, mesh=Mesh(pp=2, micro_batch_size=8, generated=True))
    with pytest.raises(InputError, match=r"mesh\.generated"):
        api.score(asked, wrong)
    with pytest.raises(UsageError, match="generated"):
        problem(model_file, generated="perhaps")
