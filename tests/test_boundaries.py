"""What crosses the cuts of a pipeline: any dtype, with or without gradient, skips over stages, stages of any length."""

from dataclasses import replace

import pytest
from distributed.programs import graph_of, make_plan
from test_equivalence import ZERO_BUBBLE_V, assert_equal_to_one_process

from autoplan import cli
from autoplan.cost.boundaries import legal_cuts, why_uncut
from autoplan.cost.collective_time import Group, send_s
from autoplan.cost.price import make_pricer
from autoplan.hardware import CollectiveTimes, load_hardware_profile
from autoplan.parallel_plan import Mesh, Plan, StagePlan
from autoplan.rules import load_rules
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

INTERLEAVED = {"schedule": "interleaved", "n_chunks": 2}


def cut_at(plan: Plan, *starts: int) -> Plan:
    """The plan with stages that start at 0 and at these segments, nothing recomputed."""
    ends = (0, *starts, plan.stages[-1].stop)
    return replace(plan, stages=tuple(StagePlan(a, b) for a, b in zip(ends, ends[1:], strict=False)))


@pytest.mark.parametrize("model", ["crossing", "unet"])
def test_the_models_have_values_that_cross_two_cuts_or_more(model):
    """What the other tests are about: values that a stage only hands on."""
    graph = graph_of(model)
    readers = {name: i for i, segment in enumerate(graph.segments) for name in segment.inputs}
    makers = {name: i for i, segment in enumerate(graph.segments) for name in segment.outputs}
    assert max(readers[name] - makers[name] for name in readers.keys() & makers.keys()) > 4


@pytest.mark.parametrize(
    ("crossing_cuts", "unet_cuts"),
    [((1, 8), (7,)), pytest.param((2, 3, 4, 5, 6, 7), (1, 4, 11, 15), marks=pytest.mark.nightly)],
    ids=["some", "the others"],
)
def test_wherever_a_model_is_cut_two_ranks_equal_one_process(tmp_path, crossing_cuts, unet_cuts):
    """After the stem, each block, before the head: one segment on one rank, eight on the other, and all between."""
    plan = make_plan("crossing", pp=2, micro_batch_size=2, n_micro_batches=3)
    cases = {f"crossing_{cut}": ("crossing", cut_at(plan, cut)) for cut in crossing_cuts}
    unet = make_plan("unet", pp=2, n_micro_batches=2)
    cases |= {f"unet_{cut}": ("unet", cut_at(unet, cut)) for cut in unet_cuts}
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


def test_what_is_only_returned_changes_nothing_and_may_be_made_on_any_stage(tmp_path):
    """Of the head on an early block no weight has a gradient, so that the optimizer leaves it alone."""
    graph = graph_of("returned")
    assert all(legal_cuts(graph))
    cases = {}
    for sharding in ("R", "S(1)"):
        cases[f"tp_{sharding[0]}"] = ("returned", make_plan("returned", tp=2, sharding=sharding, micro_batch_size=2))
    plan = make_plan("returned", pp=2, micro_batch_size=2, n_micro_batches=2)
    cases |= {f"pp_{cut}": ("returned", cut_at(plan, cut)) for cut in range(1, len(graph.segments))}
    zero = make_plan("returned", dp=2, zero_stage=3, zero_shard_degree=2, n_micro_batches=2)
    assert_equal_to_one_process(tmp_path, cases | {"zero": ("returned", zero)}, n_ranks=2)


def test_a_loss_that_the_model_returns_among_other_things_equals_one_process(tmp_path):
    meshes = {"tp": {"tp": 2, "sharding": "R", "micro_batch_size": 2}, "pp": {"pp": 2, "n_micro_batches": 2}}
    cases = {name: ("picked_loss", make_plan("picked_loss", **mesh)) for name, mesh in meshes.items()}
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


@pytest.mark.nightly
def test_what_is_only_returned_changes_nothing_with_both_axes(tmp_path):
    plan = make_plan("returned", pp=2, tp=2, sharding="R", micro_batch_size=2, n_micro_batches=2)
    assert_equal_to_one_process(tmp_path, {"both": ("returned", plan)}, n_ranks=4)


def test_skips_over_stages_of_any_length_equal_one_process_under_every_schedule(tmp_path):
    looped = {"interleaved": (INTERLEAVED, 4), "zero_bubble": (ZERO_BUBBLE_V, 3)}
    cases = {}
    for model, starts in (("crossing", (1, 2, 6)), ("unet", (1, 9, 13))):
        for name, (schedule, n_micro_batches) in looped.items():
            plan = make_plan(model, pp=2, n_micro_batches=n_micro_batches, **schedule)
            cases[f"{model}_{name}"] = (model, cut_at(plan, *starts))
    assert_equal_to_one_process(tmp_path, cases, n_ranks=2)


@pytest.mark.nightly
def test_skips_over_four_ranks_equal_one_process(tmp_path):
    cases = {}
    for model, starts, all_starts in (
        ("crossing", (1, 2, 7), (1, 2, 3, 4, 5, 7, 8)),
        ("unet", (3, 9, 14), (1, 2, 5, 6, 9, 12, 14)),
    ):
        for schedule in ("1f1b", "gpipe"):
            plan = make_plan(model, pp=4, n_micro_batches=4, schedule=schedule)
            cases[f"{model}_{schedule}"] = (model, cut_at(plan, *starts))
        for name, schedule in (("interleaved", INTERLEAVED), ("zero_bubble", ZERO_BUBBLE_V)):
            plan = make_plan(model, pp=4, n_micro_batches=4, **schedule)
            cases[f"{model}_{name}"] = (model, cut_at(plan, *all_starts))
        zero = {"zero_stage": 2, "zero_shard_degree": 2, "n_micro_batches": 4}
        for name, schedule in (("interleaved", INTERLEAVED), ("zero_bubble", ZERO_BUBBLE_V)):
            plan = make_plan(model, pp=2, dp=2, **zero, **schedule)
            cases[f"{model}_{name}_zero2"] = (model, cut_at(plan, *starts))
    assert_equal_to_one_process(tmp_path, cases, n_ranks=4)


def test_a_cut_is_priced_with_all_that_crosses_it():
    # U-Net, micro-batch 1, fp32, before segment 7 (up.0 is done): its output 32 x 4 x 4 = 512, the skips 8 x 16 x 16 =
    # 2048, 16 x 8 x 8 = 1024 and 32 x 4 x 4 = 512 elements; before segment 1 only the first skip, also the next input
    hardware = load_hardware_profile("dgx_a100_x8")
    price = make_pricer(graph_of("unet"), hardware=hardware, precision="fp32", shardings={}, rules=load_rules())
    cut_s = price(Mesh(pp=2, n_micro_batches=2)).cut_s
    for cut, n_elements in ((7, 512 + 2048 + 1024 + 512), (1, 2048)):
        assert cut_s[cut - 1] == send_s(4 * n_elements, pair=Group(2, 2), hardware=hardware)


def test_a_sendrecv_takes_what_was_measured_and_no_less_than_a_send_alone():
    hardware = load_hardware_profile("dgx_a100_x8")
    assert hardware.host_link is not None
    times = {"send": ((1024, 1e-3), (10240, 4e-3)), "sendrecv": ((1024, 0.5e-3), (10240, 8e-3))}
    timed = tuple(CollectiveTimes(kind, 2, of_kind) for kind, of_kind in times.items())
    links = replace(hardware.links[0], timed=timed), *hardware.links[1:]
    for known, has_sendrecv in (((), False), (links, True)):
        own = replace(hardware, links=known) if known else hardware
        price = make_pricer(graph_of("unet"), hardware=own, precision="fp32", shardings={}, rules=load_rules())
        table = price(Mesh(pp=2, n_micro_batches=2))
        assert bool(table.sendrecv_s) == has_sendrecv
    # before segment 7 16 KiB cross, before segment 1 8 KiB
    assert table.cut_s[0] == pytest.approx(1e-3 + 3e-3 * 7 / 9)
    assert table.sendrecv_s[0] == pytest.approx(0.5e-3 + 7.5e-3 * 7 / 9)
    assert table.sendrecv_s[6] == pytest.approx(0.5e-3 + 7.5e-3 * 15 / 9)


EARLY_OUTPUT = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)
    def forward(self, x):
        return x + F.gelu(self.up(x))

class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(16, 1)
    def forward(self, x):
        return self.down(x).square().mean()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(4)), Score()])
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                seen = x
        return {returned}

def build_model(): return Model()
def make_batch(n): return torch.randn(n, 16), None
def loss_fn(y, targets): return {loss}
"""


@pytest.mark.parametrize(("returned", "loss", "n_stages"), [("x, seen", "y[0]", 2), ("x", "y", 5)])
def test_an_output_that_is_made_early_is_named_where_it_forbids_cuts(tmp_path, capsys, returned, loss, n_stages):
    file = tmp_path / "early.py"
    file.write_text(EARLY_OUTPUT.replace("{returned}", returned).replace("{loss}", loss))
    graph = trace_model(model_source(file, {}))
    assert 1 + sum(legal_cuts(graph)) == n_stages  # before the block that makes `seen`, or before every block
    why = why_uncut(graph)
    assert bool(why) is (returned != "x")
    arguments = ["plan", str(file), "--hw", "dgx_a100_x8", "--global-batch", "8"]
    assert cli.run(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("of blocks.1 is an output of the model" in said) is bool(why)
    assert cli.run([*arguments, "--fix", "pp=4,dp=1,tp=1"]) == (5 if why else 0)
    assert ("no more pieces: " in capsys.readouterr().out) is bool(why)
