"""The head as a group of its own: which module it is, what it costs, and that programs with it train as one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from distributed.chunked import check_chunked_programs
from distributed.launch import run_ranks
from distributed.programs import N_STEPS, check_programs, graph_of, make_plan, write_programs

from autoplan.analysis import head_group as analysis
from autoplan.analysis.chunked_loss import ChunkedHead
from autoplan.analysis.head_group import head_group
from autoplan.checks.plan import check_plan
from autoplan.codegen import config_values
from autoplan.cost.waits import ADDRESSES_S
from autoplan.errors import InputError
from autoplan.hardware import load_hardware_profile
from autoplan.simulator.simulate import simulate
from autoplan.space.priced import price_plan

TOLERANCE = 1e-9
PLANS = {
    "ddp": {"dp": 2, "micro_batch_size": 2, "n_micro_batches": 2},
    "zero1": {"dp": 2, "zero_stage": 1, "zero_shard_degree": 2, "n_micro_batches": 2},
    "zero2": {"dp": 2, "zero_stage": 2, "zero_shard_degree": 2, "n_micro_batches": 2},
    "zero3": {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2, "n_micro_batches": 2, "recompute": "full"},
}


@pytest.fixture
def any_size(monkeypatch):
    """Heads of toys are small, but larger than norms."""
    monkeypatch.setattr(analysis, "SMALLEST_HEAD_ELEMENTS", 100)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("llama", "head"),
        ("gpt", ""),  # tied to the embedding
        ("bert", ""),  # tied too, and what is its own behind the blocks is less
        ("llama_padded", "head"),
        ("data_dependent", ""),  # whole modules, of which ranks may call different ones
    ],
)
def test_the_head_is_the_module_behind_the_blocks_whose_parameters_are_its_own(model, path, any_size):
    assert head_group(graph_of(model)) == path


def test_a_small_head_stays_with_the_rest():
    assert head_group(graph_of("llama")) == ""


@pytest.mark.parametrize("stages", [("ddp", "zero3"), pytest.param(("zero1", "zero2"), marks=pytest.mark.nightly)])
def test_programs_with_a_head_of_its_own_equal_one_process(stages, tmp_path, any_size):
    cases = {name: ("llama", make_plan("llama", wraps_head=True, **PLANS[name])) for name in stages}
    assert {config_values(graph_of("llama"), plan)["head_group"] for _, plan in cases.values()} == {"head"}
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_programs, 2, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert set(differences) == set(cases)
        assert max(number for steps in differences.values() for step in steps for number in step) <= TOLERANCE


@pytest.mark.nightly
def test_a_chunked_loss_with_a_head_of_its_own_equals_one_process(tmp_path, any_size, monkeypatch):
    monkeypatch.setattr(ChunkedHead, "slice_rows", lambda head, *, is_compiled: 5)
    plans = {name: make_plan("llama", wraps_head=True, **PLANS[name]) for name in ("zero1", "zero3")}
    cases = {name: ("llama", replace(plan, loss="chunked")) for name, plan in plans.items()}
    rows = write_programs(tmp_path, cases)
    for differences in run_ranks(check_chunked_programs, 2, str(tmp_path), rows, N_STEPS, timeout_s=400.0):
        assert max(number for steps in differences.values() for step in steps for number in step) <= TOLERANCE


@pytest.mark.parametrize(("stage", "n_copies"), [("zero1", 0), ("zero2", 1), ("zero3", 2)])
def test_a_head_of_its_own_takes_its_addresses_longer_and_its_gradients_less_memory(stage, n_copies, any_size):
    graph, hardware = graph_of("llama"), load_hardware_profile("dgx_a100_x8/2")
    apart, together = (
        simulate(price_plan(graph, hardware, plan), plan.stages)
        for plan in (
            replace(make_plan("llama", wraps_head=wraps, **PLANS[stage]), precision="bf16") for wraps in (True, False)
        )
    )
    longer_s = n_copies * PLANS[stage]["n_micro_batches"] * ADDRESSES_S
    assert apart.breakdown.compute_s == pytest.approx(together.breakdown.compute_s + longer_s)
    assert apart.breakdown.exposed_dp_s == pytest.approx(together.breakdown.exposed_dp_s)
    assert max(apart.allocated_bytes) < max(together.allocated_bytes)


def test_a_plan_whose_head_cannot_be_a_group_is_refused(any_size):
    hardware = load_hardware_profile("dgx_a100_x8/2")
    for model, mesh in (("gpt", PLANS["zero2"]), ("llama", {"tp": 2, "sharding": "R"})):
        plan = make_plan(model, **mesh)
        with pytest.raises(InputError, match="wraps_head"):
            check_plan(replace(plan, mesh=replace(plan.mesh, wraps_head=True)), graph_of(model), hardware)
