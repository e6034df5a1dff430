"""What a device waits for between kernels and steps, with a pencil; and what a tensor takes at least."""

from __future__ import annotations

import pytest
import torch
from distributed.programs import graph_of
from test_price import PROFILE, RULES, TOY

from autoplan.cost.collective_time import Group, axis_group, collective_s
from autoplan.cost.grad_compression import NO_COMPRESSION
from autoplan.cost.parameters import (
    MIXED_FRACTION,
    MIXED_KERNEL_S,
    ParameterContext,
    ParameterCost,
    Placement,
    parameter_cost,
)
from autoplan.cost.price import make_pricer
from autoplan.cost.waits import ADDRESSES_S, AGREEMENT_S, COLLECTIVE_WAIT_S, START_LAUNCHES
from autoplan.cost.work_context import work_contexts
from autoplan.measuring_program.copies import without_graph_copies
from autoplan.measuring_program.replays import graph_times
from autoplan.measuring_program.timing import Clock, Round
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.simulator.simulate import simulate


@pytest.mark.parametrize(("n_devices", "agreement_s"), [(1, 0.0), (2, AGREEMENT_S)])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_step_begins_after_its_host_has(n_devices: int, agreement_s: float, cuda_graph: bool) -> None:
    graph = graph_of("gpt")
    price = make_pricer(graph, hardware=PROFILE, precision="bf16", shardings={}, rules=RULES)
    table = price(Mesh(dp=n_devices, cuda_graph=cuda_graph))
    assert table.start_s == START_LAUNCHES * PROFILE.device.launch_s + agreement_s
    found = simulate(table, (StagePlan(0, len(graph.segments)),)).breakdown
    assert found.launch_s >= table.start_s
    assert found.optimizer_s < table.per_step_s + sum(table.costs[kind][0].optimizer_s for kind in table.kinds)
    assert table.per_step_s >= table.start_s


def test_a_collective_of_tensor_parallelism_waits_and_nothing_does_not() -> None:
    context = work_contexts(graph_of("gpt"), PROFILE, "bf16", RULES)(2)
    group = axis_group(PROFILE, size=2, stride=1)
    alone_s = collective_s("all_gather", 2**20, group=group, hardware=PROFILE)
    assert context.tp_collective_s("all_gather", 2**20) == pytest.approx(alone_s + COLLECTIVE_WAIT_S)
    assert context.tp_collective_s("all_gather", 0) == 0.0


def cost_of(*matrices: tuple[int, int], precision: str = "bf16", **placement: object) -> ParameterCost:
    """On a device that moves 1 GB/s, starts kernels in no time, and has `matrices` in a block."""
    given = {"shard": Group(1, 1), "replicate": Group(1, 1), "zero_stage": 0, "repeats": False} | placement
    context = ParameterContext(TOY, precision, lambda *_: 0.0, 0.0, NO_COMPRESSION)
    return parameter_cost(context, matrices, Placement(**given), is_group=True, is_kept=False)  # type: ignore[arg-type]


def test_groups_copy_their_addresses_with_every_gathering_and_reduction() -> None:
    nothing = (1, 0)  # a tensor without elements
    divided = {"shard": Group(2, 2), "repeats": True}
    third, first = (cost_of(nothing, zero_stage=stage, **divided) for stage in (3, 1))
    assert (third.unpack_s, third.pack_s) == (ADDRESSES_S, ADDRESSES_S)
    assert (first.unpack_s, first.pack_s) == (0.0, 0.0)
    assert first.optimizer_s - third.optimizer_s == pytest.approx(2 * ADDRESSES_S)  # once per step
    assert cost_of().optimizer_s == 0.0  # no tensors, no addresses


def test_adding_a_gradient_takes_a_kernel_at_least() -> None:
    small, large, divided = (1, 8), (1, 10**6), Group(4, 4)
    added = cost_of(small, small, large, repeats=True)
    assert added.accumulate_s == pytest.approx(2 * MIXED_KERNEL_S + (2 + 2 * 4) * 1e6 / (MIXED_FRACTION * 1e9))
    assert cost_of(large, zero_stage=2, shard=divided, repeats=True).accumulate_s == pytest.approx(3 * 1e6 / 1e9)
    assert cost_of(small, repeats=True, precision="fp32").accumulate_s == pytest.approx(3 * 4 * 8 / 1e9)
    assert cost_of(small, repeats=False).accumulate_s == 0.0


def test_a_cpu_replays_nothing() -> None:
    clock = Clock(torch.device("cpu"), 0.0)
    assert graph_times(Round([]), clock) == {"graph_forward_s": None, "graph_backward_s": None}
    assert without_graph_copies(None, [1], clock) is None
    assert without_graph_copies(2.0, [], clock) == 2.0
    assert without_graph_copies(2.0, [((1, 4), (4,), torch.float32)], clock) is None  # copies that cannot be captured
