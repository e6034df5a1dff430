"""parallelize(): the library call runs the source that `plan --out` writes."""

from pathlib import Path

import pytest
import torch
from distributed.launch import run_ranks
from torch import nn

from autoplan.errors import InputError, PlanMismatchError, UsageError
from autoplan.live import live_program, parallelize, trace
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.tracing.trace import load_model_file

EXAMPLES = Path(__file__).parent.parent / "examples"
HARDWARE = "dgx_a100_x8"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def batch_of(n):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(n, 16, generator=generator, dtype=torch.float64),
        torch.randn(n, 16, generator=generator, dtype=torch.float64),
    )


def seeded_net():
    torch.manual_seed(0)
    return Net().double()


def parallel_losses(fixes):
    """On one rank: three losses under each fix, and the plan's degrees; the process keeps its number of threads."""
    torch.set_num_threads(3)
    found = []
    for fix in fixes:
        options = {"global_batch": 8, "precision": "fp64", "fix": tuple(fix.items()), "device_type": "cpu"}
        model = parallelize(seeded_net(), batch_of(2), hw=HARDWARE, loss_fn=nn.functional.mse_loss, **options)
        inputs, targets = batch_of(8)
        share = 8 // model.config.dp
        own = slice(model.mesh.dp_rank * share, (model.mesh.dp_rank + 1) * share)
        losses = [model.step((inputs[own], targets[own])).item() for _ in range(3)]
        found.append((losses, (model.config.dp, model.config.tp, model.config.pp)))
    assert torch.get_num_threads() == 3
    return found


def plain_losses():
    model = seeded_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(3):
        inputs, targets = batch_of(8)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_any_plan_of_two_processes_trains_as_one_process_does():
    fixes = [{"pp": "1", "tp": "1"}, {"tp": "2"}, {"pp": "2"}]
    for found in run_ranks(parallel_losses, 2, fixes):
        assert [degrees for _, degrees in found] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
        for losses, _ in found:
            assert losses == pytest.approx(plain_losses(), rel=1e-10)


def test_a_plan_for_another_number_of_processes_is_refused():
    plan = Plan(Mesh(dp=2), (StagePlan(0, 5),), precision="fp64")
    model = seeded_net()
    try:
        with pytest.raises(PlanMismatchError, match="the plan is for 2 processes, 1 are running"):
            parallelize(model, batch_of(2), hw=HARDWARE, plan=plan, loss_fn=nn.functional.mse_loss, device_type="cpu")
    finally:
        torch.distributed.destroy_process_group()


def test_an_impossible_option_is_refused_before_any_process_group_is_joined():
    with pytest.raises(UsageError, match="precision"):
        parallelize(seeded_net(), batch_of(2), hw=HARDWARE, precision="int8", device_type="cpu")
    assert not torch.distributed.is_initialized()


def test_an_impossible_plan_is_refused():
    plan = Plan(Mesh(micro_batch_size=0), (StagePlan(0, 5),), precision="fp64")
    try:
        with pytest.raises(InputError, match="mesh.micro_batch_size"):
            parallelize(
                seeded_net(), batch_of(2), hw=HARDWARE, plan=plan, loss_fn=nn.functional.mse_loss, device_type="cpu"
            )
    finally:
        torch.distributed.destroy_process_group()


def test_live_program_without_tensor_or_pipeline_parallelism_generates_no_module():
    graph = trace(seeded_net(), batch_of(2), loss_fn=nn.functional.mse_loss)
    config, generated = live_program(graph, Plan(Mesh(), (StagePlan(0, len(graph.segments)),)))
    assert generated is None
    assert config.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_trace_takes_a_file_or_a_module_with_a_batch():
    file = EXAMPLES / "mlp.py"
    module, sizes = load_model_file(file), {"width": 8, "depth": 2}
    of_module = trace(module.build_model(**sizes), module.make_batch(2), loss_fn=module.loss_fn)
    assert of_module.ops == trace(str(file), overrides=sizes).ops
    with pytest.raises(UsageError, match="batch: found None"):
        trace(seeded_net())
