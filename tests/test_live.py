"""parallelize(): the library call runs the source that `plan --out` writes."""

from pathlib import Path

import pytest
import torch
from distributed.launch import run_ranks
from torch import nn

from autoplan.errors import InputError, PlanMismatchError, UsageError
from autoplan.live import live_program, parallelize, trace
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.runtime import Checkpoints
from autoplan.runtime.input_pipeline.same_batch import _digest
from autoplan.tracing.model_source import load_model_file

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


class Difference(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, more, less):
        return super().forward(self.first(more) - less)


def swapped_losses(fixes):
    """On one rank: under each fix the losses of a batch whose dict is in the planned order, and of one that is not."""
    inputs, targets = batch_of(8)
    orders = {"more": inputs, "less": targets}, {"less": targets, "more": inputs}
    found = []
    for fix in fixes:
        torch.manual_seed(0)
        options = {"global_batch": 8, "precision": "fp64", "fix": tuple(fix.items()), "device_type": "cpu"}
        module, loss_fn = Difference().double(), nn.functional.mse_loss
        expected = loss_fn(module(**orders[0]), targets).item()
        model = parallelize(module, (orders[0], targets), hw=HARDWARE, loss_fn=loss_fn, **options)
        losses = [model.evaluate((order, targets))[0].item() for order in orders]
        if model.config.pp == 1:
            losses += [loss_fn(model(**order), targets).item() for order in orders]
        losses.append(model.step((orders[1], targets)).item())
        found += [loss / expected for loss in losses]
    return found


def test_inputs_by_name_reach_the_model_in_any_order_under_any_plan():
    for ratios in run_ranks(swapped_losses, 2, [{"tp": "2"}, {"pp": "2"}]):
        assert ratios == pytest.approx([1.0] * len(ratios), rel=1e-12) and len(ratios) == 5 + 3


def half_frozen_net():
    net = seeded_net()
    net.blocks[:2].requires_grad_(False)
    return net


def half_frozen_losses(folder):
    """On one rank: three losses of a pipeline whose first stage is frozen, the last after a resume; its last rate."""
    batch, losses = batch_of(8), []
    options = {"global_batch": 8, "precision": "fp64", "fix": (("pp", "2"),), "device_type": "cpu"}
    for n_steps in (2, 1):
        model = parallelize(half_frozen_net(), batch_of(2), hw=HARDWARE, loss_fn=nn.functional.mse_loss, **options)
        checkpoints = Checkpoints(model, folder)
        if (newest := checkpoints.newest()) is not None:
            checkpoints.load(newest)
        losses += [model.step(batch).item() for _ in range(n_steps)]
        model.optimizer.param_groups[0]["lr"] = 0.125
        checkpoints.save()
        checkpoints.close()
    checkpoints.load(checkpoints.newest())
    return losses, model.learning_rate


@pytest.mark.nightly
def test_a_frozen_stage_of_a_pipeline_stays_and_the_others_train_and_go_on(tmp_path):
    net, (inputs, targets) = half_frozen_net(), batch_of(8)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-4)
    expected = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 3e-4 if step < 2 else 0.125
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, rate in run_ranks(half_frozen_losses, 2, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-10) and rate == 0.125


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


def refused_batches(way):
    """On one rank: the message for batches that differ from rank to rank, or the loss."""
    fix, differs = way
    options = {"global_batch": 8, "precision": "fp64", "fix": tuple(fix.items()), "device_type": "cpu"}
    model = parallelize(seeded_net(), batch_of(2), hw=HARDWARE, loss_fn=nn.functional.mse_loss, **options)
    share, rank = 8 // model.config.dp, torch.distributed.get_rank()
    batch = [
        part[:share] + (differs == name) * rank for name, part in zip(("inputs", "targets"), batch_of(8), strict=True)
    ]
    try:
        return model.step(tuple(batch)).item()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fix", "differs", "is_refused"),
    [
        ({"tp": "2"}, "inputs", True),
        ({"tp": "2"}, "targets", True),
        ({"tp": "2"}, "", False),
        ({"pp": "2"}, "targets", True),
        ({"pp": "2"}, "inputs", False),  # the first rank's are taken
        ({"dp": "2", "tp": "1", "pp": "1"}, "inputs", False),
    ],
)
def test_ranks_that_share_samples_are_refused_different_ones(fix, differs, is_refused):
    found = run_ranks(refused_batches, 2, (fix, differs))
    for message in found:
        assert ("ranks 0 and 1 were given different batches" in str(message)) is is_refused, message


def test_what_is_no_module_is_refused_by_name():
    with pytest.raises(UsageError, match=r"module: found 'function'(.|\n)*expected: a torch\.nn\.Module"):
        parallelize(batch_of, batch_of(2), hw=HARDWARE)


def test_a_batch_with_masks_of_infinities_is_compared_as_well():
    mask = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    cpu, ones = torch.device("cpu"), torch.ones(3, dtype=torch.bool)
    digests = [_digest((part, ones), cpu) for part in (mask, mask, mask.flip(0))]
    assert torch.equal(digests[0], digests[1]) and not torch.equal(digests[0], digests[2])


def test_a_module_that_was_given_before_is_refused():
    module, options = seeded_net(), {"hw": HARDWARE, "loss_fn": nn.functional.mse_loss, "device_type": "cpu"}
    fix = (("dp", "1"), ("zero", "0"))
    try:
        parallelize(module, batch_of(2), global_batch=2, fix=fix, **options)
        with pytest.raises(UsageError, match=r"module: found 'a module that parallelize was given before'"):
            parallelize(module, batch_of(2), global_batch=2, fix=fix, **options)
    finally:
        torch.distributed.destroy_process_group()
