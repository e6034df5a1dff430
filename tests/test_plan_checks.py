"""Plans from outside: what does not go with a schedule is refused by its field."""

from dataclasses import replace

import pytest
from distributed.programs import graph_of, make_plan

from autoplan.checks.plan import check_plan
from autoplan.errors import InputError
from autoplan.hardware import load_hardware_profile

ZERO_BUBBLE_V = {"schedule": "zero_bubble_v", "n_chunks": 2, "n_micro_batches": 4}


def check(plan):
    check_plan(plan, graph_of("mlp"), load_hardware_profile("dgx_a100_x8"))


def test_a_plan_with_a_split_backward_pass_is_accepted():
    check(make_plan("mlp", pp=2, dp=2, zero_stage=2, zero_shard_degree=2, **ZERO_BUBBLE_V))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 2, "zero_stage": 3, "zero_shard_degree": 2}, "zero_stage: found 3\n  expected: 0 to 2 with schedule"),
        ({"recompute": "full"}, r"stages\[0\].recomputed: found .*\n  expected: nothing with schedule"),
        ({"n_chunks": 1}, "n_chunks: found 1\n  expected: 2"),
        ({"compile": True}, "mesh.compile: found True\n  expected: false with schedule"),
    ],
)
def test_what_does_not_go_with_a_split_backward_pass_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        check(make_plan("mlp", pp=2, **{**ZERO_BUBBLE_V, **fields}))


def test_a_stage_without_a_segment_is_refused():
    plan = make_plan("mlp", pp=2, n_micro_batches=2)
    empty = replace(plan.stages[1], start=plan.stages[0].stop, stop=plan.stages[0].stop)
    with pytest.raises(InputError, match=r"stages\[1\].stop"):
        check(replace(plan, stages=(plan.stages[0], empty)))
