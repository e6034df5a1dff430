"""Blocks that are called several times with others in between: their weights are held, reduced and updated once."""

from dataclasses import replace

import pytest
from distributed import turns
from distributed.launch import run_ranks
from distributed.programs import graph_of
from test_runtime_zero import CollectiveOrder

from autoplan.cost.boundaries import tied_elements
from autoplan.cost.price import make_pricer
from autoplan.hardware import load_hardware_profile
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.rules import load_rules
from autoplan.runtime import Config, ParallelModel, build_rank_mesh, global_batch, local_batch
from autoplan.runtime.stages.zero import local_part
from autoplan.search.bounds import least_needed_bytes, step_bound_s
from autoplan.search.paths.peak_moments import shape_of
from autoplan.search.plans import all_plans, obeys_recompute, repeated_segments, runs_of
from autoplan.search.program.formulation import formulate
from autoplan.simulator.simulate import simulate
from autoplan.solver.solve import minimize

STAGES = (0, 1, 2, 3)
N_MICRO_BATCHES = (1, 3)


def price(mesh, precision="fp64", *, graph=None):
    profile, graph = load_hardware_profile("dgx_a100_x8"), graph or graph_of("turns")
    pricer = make_pricer(graph, hardware=profile, precision=precision, shardings={}, rules=load_rules())
    return pricer(mesh)


def costs_of(table):
    return [table.cost_of(index, recomputed=False) for index in range(len(table.kinds))]


def zero_mesh(stage, n_micro_batches):
    return Mesh(
        dp=2, zero_stage=stage, zero_shard_degree=2 if stage else 1, micro_batch_size=2, n_micro_batches=n_micro_batches
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_stage_holds_the_weights_once_and_a_pipeline_once_for_each_call(precision):
    graph = graph_of("turns")
    n_elements = graph.n_parameters()
    n_of_blocks = sum(p.spec.n_elements(1) for p in graph.parameters if p.name.startswith("blocks."))
    single, piped = (costs_of(price(Mesh(pp=pp, n_micro_batches=4), precision)) for pp in (1, 2))
    # 4 bytes of the master copy and 8 of Adam per element, and 4 of gradients
    assert sum(cost.state_bytes for cost in single) == 12 * n_elements
    assert sum(cost.gradient_bytes for cost in single) == 4 * n_elements
    assert sum(cost.state_bytes for cost in piped) == 12 * (n_elements + (turns.N_TURNS - 1) * n_of_blocks)
    assert sum(tied_elements(graph)) == n_of_blocks  # what the stages of a pipeline sum


def test_frozen_weights_are_held_once_too():
    graph = graph_of("turns")
    parameters = [replace(p, is_trainable=not p.name.startswith("blocks.0.")) for p in graph.parameters]
    frozen, trained = (
        sum(p.spec.n_elements(1) for p in parameters if p.is_trainable is trains) for trains in (False, True)
    )
    table = price(Mesh(n_micro_batches=4), "fp32", graph=replace(graph, parameters=tuple(parameters)))
    assert sum(cost.state_bytes for cost in costs_of(table)) == 12 * trained + 4 * frozen


def test_gradients_of_later_calls_wait_for_those_of_the_first():
    # stem, A, B, A, B, A, B, head in bf16: 2 bytes per element from the last call of a block to its first one
    graph, costs = graph_of("turns"), costs_of(price(Mesh(n_micro_batches=4), "bf16"))
    a, b = (
        2 * sum(p.spec.n_elements(1) for p in graph.parameters if p.name.startswith(f"blocks.{block}."))
        for block in range(2)
    )
    assert [cost.waiting_bytes for cost in costs] == [0, -a, -b, 0, 0, a, b, 0]


def _second_steps():
    """Of each number of micro-batches and ZeRO stage: (gathers, reductions) of a step, and bytes of state."""
    found = []
    for n_micro_batches in N_MICRO_BATCHES:
        for stage in STAGES:
            mesh = zero_mesh(stage, n_micro_batches)
            config = Config(
                precision="fp64",
                dp=2,
                zero_stage=stage,
                zero_shard_degree=mesh.zero_shard_degree,
                micro_batch_size=2,
                n_micro_batches=n_micro_batches,
                blocks=("blocks.0", "blocks.1"),
            )
            model = ParallelModel(config, turns, None, mesh=build_rank_mesh(config, "cpu"))
            for step in range(2):
                batch = global_batch(turns.make_batch, batch_size=config.global_batch_size, seed=0, step=step)
                with CollectiveOrder() as collectives:
                    model.step(local_batch(batch, config=config, dp_rank=model.mesh.dp_rank))
            order = collectives.order
            moments = [s for state in model.optimizer.state.values() for s in state.values() if s.dim() > 0]
            n_held = sum(local_part(tensor).numel() for tensor in (*model.parameters(), *moments))
            n_reductions = order.count("_reduce_scatter_base_") + order.count("allreduce_") - 1  # of loss and norm
            found.append((order.count("_allgather_base_"), n_reductions, 8 * n_held))
    return found


def _priced(stage, n_micro_batches):
    """The same as it is priced; what is outside of blocks, stem and head, is one group."""
    table = price(zero_mesh(stage, n_micro_batches))
    costs = costs_of(table)
    blocks = [cost for segment, cost in zip(graph_of("turns").segments, costs, strict=True) if segment.is_block]
    gathers = 1 + sum(cost.gather_s > 0 for cost in blocks) if stage else 0
    if table.gathers_per_micro_batch:
        gathers = n_micro_batches * (gathers + sum(cost.gather_back_s > 0 for cost in blocks))
    reductions = 1 + sum(cost.reduce_s > 0 for cost in blocks)
    reductions *= n_micro_batches if table.reduces_per_micro_batch else 1
    state_bytes = sum(cost.state_bytes for cost in costs)
    if stage == 3:  # what is outside of blocks counts as gathered all step, which it is not between steps
        outside = (p for p in graph_of("turns").parameters if not p.name.startswith("blocks."))
        state_bytes -= 8 * sum(parameter.spec.n_elements(1) for parameter in outside)
    return gathers, reductions, state_bytes


def test_two_ranks_gather_reduce_and_hold_what_is_priced():
    measured = run_ranks(_second_steps, 2)[0]
    assert measured == [_priced(stage, n) for n in N_MICRO_BATCHES for stage in STAGES]
    # 2 blocks and the rest; 3 calls of each block. A block is gathered once and for backward in its first two calls, or
    # in every pass; gradients of earlier micro-batches are reduced before those of the last one
    assert [row[:2] for row in measured] == [
        *((0, 3), (1 + 2 * 3, 3), (1 + 2 * 3, 3), (1 + 2 * 6, 3)),
        *((0, 1 + 2 * 2), (1 + 2 * 3, 1 + 2 * 2), (1 + 2 * 3, 3 * 3), (3 * (1 + 2 * 6), 3 * 3)),
    ]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n_micro_batches", N_MICRO_BATCHES)
def test_no_bound_exceeds_a_plan_of_a_model_whose_blocks_are_called_again(stage, n_micro_batches):
    table = price(zero_mesh(stage, n_micro_batches), "bf16")
    assert repeated_segments(table) == tuple(range(1, 1 + 2 * turns.N_TURNS))
    assert obeys_recompute(table, (StagePlan(0, 8, tuple(range(1, 7))),), recompute="full")
    estimates = [simulate(table, plan) for plan in all_plans(runs_of(table), table.mesh)]
    assert len(estimates) == 2**8  # of stem and head both choices are alike
    assert step_bound_s(table) <= min(estimate.step_s for estimate in estimates) * (1 + 1e-12)
    sizes = sorted({estimate.needed_bytes[0] for estimate in estimates})
    assert least_needed_bytes(table) <= sizes[0]
    for limit_bytes in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        limited = replace(table, memory_limit_bytes=limit_bytes)
        form = formulate(limited, shape_of(limited.mesh))
        solution = minimize(form.model, time_limit_s=None)
        fastest_s = min(estimate.step_s for estimate in estimates if estimate.needed_bytes[0] <= limit_bytes)
        assert solution.objective is not None
        assert solution.objective * form.unit_s <= fastest_s * (1 + 1e-7)
