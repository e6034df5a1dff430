"""Parameters that tensor-parallel ranks hold whole stay equal, though each rank computes their gradients by itself."""

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model

from autoplan.runtime import Config, ParallelModel, build_rank_mesh
from autoplan.runtime.stages.zero import local_part
from autoplan.runtime.update import replicas

EVERY = 3


def largest_differences(config, n_steps):
    """Between the first tensor-parallel rank and this one, after each step: of parameters and of optimizer state."""
    replicas.EVERY = EVERY
    mesh = build_rank_mesh(config, "cpu")
    model = ParallelModel(config, tiny_gpt, mesh=mesh, parallel_model=parallel_model(config.tp, 1), learning_rate=1e-2)
    whole = [p for name, p in model.stages[0].named_parameters() if name not in model.shards]
    for parameter in whole:
        parameter.register_post_accumulate_grad_hook(changed_by(1e-3 * mesh.tp_rank))
    found = []
    for step in range(n_steps):
        torch.manual_seed(step)
        model.step(tiny_gpt.make_batch(config.micro_batch_size * config.n_micro_batches))
        states = [model.optimizer.state[p]["exp_avg_sq"] for p in whole]
        found.append([max(map(difference_from_first(mesh), tensors)) for tensors in (whole, states)])
    return found


def changed_by(amount):
    def change(parameter):
        local_part(parameter.grad).add_(amount)

    return change


def difference_from_first(mesh):
    def difference(tensor):
        own = local_part(tensor.detach())
        first = own.clone()
        torch.distributed.broadcast(first, group=mesh.tp_group, group_src=0)
        return (own - first).abs().max().item()

    return difference


@pytest.mark.parametrize("n_ranks, fields", [(2, {}), (4, {"dp": 2, "zero_stage": 3, "zero_shard_degree": 2})])
def test_replicas_whose_gradients_differ_are_made_equal_every_so_many_steps(n_ranks, fields):
    config = Config(tp=2, micro_batch_size=2, blocks=("blocks.0", "blocks.1"), precision="fp64", **fields)
    for rank, differences in enumerate(run_ranks(largest_differences, n_ranks, config, 2 * EVERY)):
        for step, (of_parameters, of_state) in enumerate(differences):
            is_equal = rank % 2 == 0 or step % EVERY == EVERY - 1
            assert (of_parameters == 0.0) == (of_state == 0.0) == is_equal
