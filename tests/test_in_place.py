"""What the user's own classes write in place, across the borders of blocks that are sharded or recomputed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from distributed import in_place
from distributed.launch import run_ranks
from distributed.programs import check_programs, graph_of, make_plan, write_programs
from test_runtime_zero import CollectiveOrder
from torch import nn

from autoplan.codegen import config_values
from autoplan.errors import TraceError
from autoplan.graph import WRITES_BATCH
from autoplan.runtime import Config, ParallelModel, build_rank_mesh
from autoplan.runtime.stages.recompute import apply_recompute
from autoplan.tracing.model_source import ModelSource
from autoplan.tracing.module_level import trace_modules
from autoplan.tracing.trace import trace_model

TOLERANCE = 1e-9
BLOCKS = tuple(f"blocks.{index}" for index in range(4))
_SHARDED = {"dp": 2, "zero_shard_degree": 2, "n_micro_batches": 2, "micro_batch_size": 2}
PLANS = {
    "ddp": {"dp": 2, "n_micro_batches": 2, "micro_batch_size": 2},
    "recompute": {"dp": 2, "n_micro_batches": 2, "micro_batch_size": 2, "recompute": "full"},
    "zero2": {**_SHARDED, "zero_stage": 2},
    "zero3": {**_SHARDED, "zero_stage": 3},
    "zero3_recompute": {**_SHARDED, "zero_stage": 3, "recompute": "full"},
}


def _run(folder, rows):
    """On one rank: differences from one process, and the order of collectives in a second step under ZeRO 3."""
    differences = check_programs(folder, rows)
    config = Config(dp=2, zero_stage=3, zero_shard_degree=2, precision="fp64", blocks=BLOCKS, writes_in_place=True)
    model = ParallelModel(config, in_place, mesh=build_rank_mesh(config, "cpu"))
    model.step(in_place.make_batch(1))
    with CollectiveOrder() as collectives:
        model.step(in_place.make_batch(1))
    return differences, collectives.order


def test_writes_across_blocks_give_what_one_process_gives_and_hold_up_no_reduction(tmp_path):
    rows = write_programs(tmp_path, {name: ("in_place", make_plan("in_place", **plan)) for name, plan in PLANS.items()})
    assert not any(is_generated for *_, is_generated in rows)
    for found, order in run_ranks(_run, 2, str(tmp_path), rows, timeout_s=200.0):
        for name, steps in found.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)
        # 4 blocks and the rest are gathered forward; backward a block is gathered ahead of the reduction of the last
        short = "".join({"_allgather_base_": "g", "_reduce_scatter_base_": "r"}.get(name, "") for name in order)
        assert short == "ggggg" + "gg" + "rg" * 2 + "rrr"


SPLIT = {
    "tp": {"tp": 2, "sharding": "R", "n_micro_batches": 2, "micro_batch_size": 2},
    "pp": {"pp": 2, "n_micro_batches": 2, "micro_batch_size": 2},
}


def test_writes_into_the_batch_change_neither_other_micro_batches_nor_what_one_process_gets(tmp_path):
    plans = {name: PLANS[name] for name in ("ddp", "zero3_recompute")} | SPLIT
    cases = {name: ("writes_batch", make_plan("writes_batch", **plan)) for name, plan in plans.items()}
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_programs, 2, str(tmp_path), rows, timeout_s=200.0):
        for name, steps in differences.items():
            assert max(max(step) for step in steps) <= TOLERANCE, (name, steps)


class _Doubles(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


def _doubling(make_batch):
    return ModelSource("toy", "toy.py", lambda: _Doubles(4, 4), make_batch, lambda y, t: (y - t).square().mean())


def _same_twice(batch_size):
    x = torch.randn(batch_size, 4)
    return x, x


def _parts_of_one(batch_size):
    x = torch.randn(batch_size, 8)
    return x[:, :4], x[:, 4:]


def test_a_write_into_the_batch_that_changes_another_tensor_of_it_is_refused():
    with pytest.raises(TraceError, match=r"inputs is written, and shares memory with targets(?s:.*)\.clone\(\)"):
        trace_model(_doubling(_same_twice))


@pytest.mark.parametrize("trace", [trace_model, trace_modules])
def test_a_write_into_the_batch_is_known_of_and_is_no_output(trace):
    graph = trace(_doubling(_parts_of_one))
    assert graph.dissolved == (WRITES_BATCH,)
    assert graph.model_outputs == ("linear",) or graph.is_module_level


class _AddsOne(nn.Module):
    def forward(self, x, y=None):
        x += 1
        return x.square() if y is None else x * y


def test_a_recomputed_block_gets_its_input_as_it_was_before_it_wrote():
    block = nn.Sequential(_AddsOne())
    apply_recompute(block, ["0"])
    for _ in range(2):  # the first call of all finds out what is written
        given = torch.tensor([1.0, 2.0], requires_grad=True)
        x = given * 2
        block(x).sum().backward()
        assert x.tolist() == [3.0, 5.0]
        assert given.grad.tolist() == [12.0, 20.0]  # of (2 x + 1)^2


def test_writes_that_recompute_cannot_follow_are_refused_by_name():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(_AddsOne()))
    apply_recompute(model, ["0", "1.0"])
    x = torch.ones(1, 2)
    outputs = model[0](x)
    x += 1
    with pytest.raises(RuntimeError, match=r"(?s)^0: recomputed, its input is written in place, after .*x = x \+ y"):
        outputs.sum().backward()
    x = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"1.0: recomputed, it writes in place into one of two inputs that share"):
        model[1][0](x[:1], x)


@pytest.mark.parametrize(("model", "writes"), [("in_place", True), ("resnet", False)])  # ReLUs inside of its blocks
def test_programs_are_made_for_writes_only_where_some_cross_the_borders_of_blocks(model, writes):
    values = config_values(graph_of(model), make_plan(model, dp=2))
    assert values.get("writes_in_place", False) == writes
    generated = config_values(graph_of(model), make_plan(model, dp=2, generated=True))
    assert "writes_in_place" not in generated


def test_recompute_finds_out_by_itself_what_is_written_in_training_and_in_evaluation():
    block = nn.Sequential(nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(8, 2)))
    plain, runs = copy.deepcopy(block), []
    apply_recompute(block, ["0"])
    block[0][1].register_forward_pre_hook(lambda *_: runs.append(None))
    for mode in (False, True, False, True):
        x, expected = (torch.ones(1, 8, requires_grad=True) for _ in range(2))
        for model, given in ((plain, expected), (block, x)):
            torch.manual_seed(0)  # of the same mask
            model.train(mode)(given * 2).square().sum().backward()
        assert x.grad.tolist() == expected.grad.tolist()
    assert len(runs) == 4 * 2  # forward, and again in backward
    # dropout writes into the only input in training alone: then it is copied
    assert block[0].forward.written == {False: frozenset(), True: frozenset({0})}


class _AddsToIts(nn.Module):
    def forward(self, x, y=None):
        if y is not None:
            y += x
        return x * x if y is None else x * y


def test_an_input_that_is_written_may_be_left_out_of_another_call():
    block = nn.Sequential(_AddsToIts())
    apply_recompute(block, ["0"])
    for y, gradient in ((torch.ones(1), 2 * 3.0 + 1.0), (None, 2 * 3.0)):
        x = torch.full((1,), 3.0, requires_grad=True)
        block[0](x, y).sum().backward()
        assert x.grad.item() == gradient


class _Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, seen):
        seen.append(self.linear(x))
        return seen[-1]


class _Appending(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Appends() for _ in range(2))

    def forward(self, x):
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
        return sum(seen)


def _message_of_a_list_that_grows():
    config = Config(precision="bf16", blocks=("blocks.0", "blocks.1"))
    file = SimpleNamespace(build_model=_Appending, loss_fn=lambda outputs, targets: outputs.square().mean())
    model = ParallelModel(config, file, mesh=build_rank_mesh(config, "cpu"))
    with pytest.raises(RuntimeError) as error:
        model.step((torch.randn(1, 8), torch.zeros(1)))
    return str(error.value)


def test_a_block_that_puts_something_into_a_list_it_is_given_is_refused():
    (message,) = run_ranks(_message_of_a_list_that_grows, 1)
    assert "_Appends: puts something into a list" in message and "--fix generated=on" in message
