"""Checkpoints: a run goes on under another plan, and on another number of ranks, as if it had never stopped."""

import pytest
from distributed.families import family_plan  # noqa: F401  adds the families to the models
from distributed.programs import make_plan, write_programs
from distributed.resumed import largest_difference

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
_FSDP2 = {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}
PLANS = {
    "tp2_fsdp2": {"tp": 2, "sharding": "R", **_FSDP2, "micro_batch_size": 4},
    "fsdp4": {"dp": 4, "zero_stage": 3, "zero_shard_degree": 4, "micro_batch_size": 2},
    "pp2_dp2": {"pp": 2, "dp": 2, "micro_batch_size": 2, "n_micro_batches": 2},
    "one": {"micro_batch_size": 8},
    "tp2": {"tp": 2, "sharding": "R", "micro_batch_size": 8},
    "pp2_zero1": {"pp": 2, "micro_batch_size": 2, "n_micro_batches": 4},
    "tp4": {"tp": 4, "sharding": "R", "micro_batch_size": 8},
    "hybrid": {"dp": 4, "zero_stage": 2, "zero_shard_degree": 2, "micro_batch_size": 2},
}


def differences(root, models, chain):
    """Train each model along a chain of plans, two steps under each."""
    parts = [
        write_programs(root, {f"{model}__{plan}": (model, make_plan(model, **PLANS[plan])) for model in models})
        for plan in chain
    ]
    return largest_difference(root, parts, n_steps_each=2)


@pytest.mark.slow
def test_a_run_under_four_plans_in_turn_trains_as_one_process(tmp_path):
    # tied head and a vocabulary that 2 does not divide; fused QKV, in blocks
    found = differences(tmp_path, ["gpt_odd"], ["tp2_fsdp2", "fsdp4", "pp2_dp2", "one"])
    assert max(found.values()) <= TOLERANCE, found


MATRIX = ["gpt", "gpt_odd", "llama", "mixture", "shared_layers", "two_tower"]


@pytest.mark.nightly
@pytest.mark.parametrize("model", MATRIX)
def test_every_plan_goes_on_from_every_other(tmp_path, model):
    # every ordered pair of the four plans of the first chain, and the others once
    chain = [
        "tp2_fsdp2", "fsdp4", "pp2_dp2", "one", "tp2_fsdp2", "pp2_dp2", "fsdp4", "tp2_fsdp2", "one", "pp2_dp2",
        "tp2_fsdp2", "fsdp4", "one", "fsdp4", "tp2", "pp2_zero1", "tp4", "hybrid", "one",
    ]  # fmt: skip
    found = differences(tmp_path, [model], chain)
    assert max(found.values()) <= TOLERANCE, found
