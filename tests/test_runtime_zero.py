"""When parameters are gathered and gradients reduced under each ZeRO stage: the table of `stages/zero.py`, counted."""

from types import SimpleNamespace

import pytest
import torch
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.runtime import Config, ParallelModel, build_rank_mesh, global_batch, local_batch
from autoplan.runtime.stages.zero import local_part

BLOCKS = tuple(f"blocks.{layer}" for layer in range(tiny_gpt.N_LAYERS))


N_SENT = 4  # tensors that cross a cut of `tiny_parallel`


class CollectiveOrder(TorchDispatchMode):
    """Notes the collectives that run inside it, in order."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.order.append(function._opname)
        return function(*args, **(kwargs or {}))


def _build(**fields):
    config = Config(precision="fp64", micro_batch_size=2, blocks=BLOCKS, **{"n_micro_batches": 3, **fields})
    generated = parallel_model(config.tp, config.n_stages) if config.pp > 1 else None
    return ParallelModel(config, tiny_gpt, generated, mesh=build_rank_mesh(config, "cpu"))


def _second_step(**fields):
    """What was communicated in the second step, in order."""
    model = _build(**fields)
    for step in range(2):
        batch = global_batch(tiny_gpt.make_batch, batch_size=model.config.global_batch_size, seed=0, step=step)
        with CollectiveOrder() as collectives:
            model.step(local_batch(batch, config=model.config, dp_rank=model.mesh.dp_rank))
    return collectives.order


def _counts(order):
    """(all-gathers, reduce-scatters, all-reduces) among what was communicated."""
    return tuple(order.count(name) for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"))


def _count(**fields):
    return _counts(_second_step(**fields))


def _count_on_two_ranks():
    return [_count(dp=2)] + [_count(dp=2, zero_stage=stage, zero_shard_degree=2) for stage in (1, 2, 3)]


def test_zero_stages_gather_and_reduce_as_often_as_documented():
    # 4 blocks and the rest are 5 groups; 3 micro-batches; the loss and the norm are one all-reduce.
    assert run_ranks(_count_on_two_ranks, 2)[0] == [
        (0, 0, 5 + 1),  # stage 0: each group is all-reduced once
        (5, 5, 1),  # stage 1: gathered and reduced once
        (5, 3 * 5, 1),  # stage 2: reduced in each micro-batch
        (3 * (2 * 4 + 1), 3 * 5, 1),  # stage 3: blocks are gathered in forward and backward, the rest once
    ]


def _orders_on_four_ranks():
    """What was communicated in the second step of replicas under stages 1 and 3, and of pipelines under 1, 2 and 3."""
    replicated = [_second_step(dp=4, zero_stage=stage, zero_shard_degree=2) for stage in (1, 3)]
    pipelines = [_second_step(dp=2, pp=2, zero_stage=stage, zero_shard_degree=2) for stage in (1, 2, 3)]
    return replicated, pipelines


@pytest.fixture(scope="module")
def on_four_ranks():
    return run_ranks(_orders_on_four_ranks, 4)


def test_replicas_are_reduced_once_per_step_and_a_pipeline_changes_no_stage(on_four_ranks):
    replicated, pipelines = on_four_ranks[0]
    assert [_counts(order) for order in (*replicated, *pipelines)] == [
        (5, 5, 5 + 1),  # hybrid stage 1: one all-reduce over replicas per group
        (3 * (2 * 4 + 1), 3 * 5, 5 + 1),  # hybrid stage 3: the same
        # A pipeline stage has 2 blocks and the rest, 3 groups; the tied weight adds one all-reduce.
        (3, 3, 2),
        (3, 3 * 3, 2),
        # 1F1B on the first of two stages runs F0 F1 B0 F2 B1 B2. The rest is gathered for F0, kept for F1, freed by B0,
        # gathered for F2, freed by B1, gathered for B2: 3. Each block: 3 forwards + 3 backwards.
        (3 + 2 * 6, 3 * 3, 2),
    ]


def test_a_pipeline_stage_gathers_what_it_keeps_before_its_first_input_arrives(on_four_ranks):
    # The last two ranks have the second stage: 2 blocks and the rest. Under stage 3 none can be kept until then.
    for _, pipelines in on_four_ranks[2:]:
        assert [order[: order.index("recv_")].count("_allgather_base_") for order in pipelines] == [3, 3, 0]


def _note_waits(patch, order):
    finalize = FSDPParamGroup.finalize_backward

    def noted(group):
        order.append("wait")
        finalize(group)

    patch.setattr(FSDPParamGroup, "finalize_backward", noted)


def _waits_of_a_pipeline():
    """Per schedule, the order of messages and of waiting for reductions in the second step."""
    found = []
    for fields in ({"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "zero_bubble_v", "n_chunks": 2}):
        model = _build(dp=2, pp=2, zero_stage=2, zero_shard_degree=2, **fields)
        for step in range(2):
            batch = global_batch(tiny_gpt.make_batch, batch_size=model.config.global_batch_size, seed=0, step=step)
            with CollectiveOrder() as noted, pytest.MonkeyPatch.context() as patch:
                _note_waits(patch, noted.order)
                model.step(local_batch(batch, config=model.config, dp_rank=model.mesh.dp_rank))
        found.append([name for name in noted.order if name in ("send", "recv_", "wait")])
    return found


def test_a_pipeline_waits_for_reductions_after_the_last_message_of_the_step():
    # else the stage in front would get its last gradient only when all reductions of this one are done
    for orders in run_ranks(_waits_of_a_pipeline, 4):
        for order in orders:
            first = order.index("wait")
            assert {"send", "recv_"} <= set(order[:first])
            assert set(order[first:]) == {"wait"}


def _gathers_of_the_first_rank():
    """The all-gathers of the second step before the first message is sent, and before the second one."""
    schedule = {"schedule": "interleaved", "n_chunks": 2, "n_micro_batches": 4}
    order = _second_step(dp=2, pp=2, zero_stage=1, zero_shard_degree=2, **schedule)
    sends = [place for place, name in enumerate(order) if name == "send"]
    return [order[:place].count("_allgather_base_") for place in sends[: 2 * N_SENT : N_SENT]]


def test_the_first_rank_gathers_for_its_later_stage_before_it_sends_a_second_time():
    # a block and the embedding of the first stage, then the block of the third one
    assert run_ranks(_gathers_of_the_first_rank, 4)[:2] == [[2, 3]] * 2


HEAD_ELEMENTS = tiny_gpt.VOCABULARY * tiny_gpt.WIDTH


class _Reductions(TorchDispatchMode):
    """Notes how many elements each reduction takes, and which are all-gathers."""

    def __init__(self):
        super().__init__()
        self.gathered, self.reduced = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and function._opname == "_reduce_scatter_base_":
            self.reduced.append(args[1].numel())
        if function.namespace == "c10d" and function._opname == "_allgather_base_":
            self.gathered.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def _order_with_a_head_of_its_own():
    """Sizes of the groups in the order in which they are gathered and reduced, under ZeRO 2 and 3."""
    found = []
    for stage in (2, 3):
        config = Config(precision="fp64", blocks=BLOCKS, head_group="head", dp=2, zero_stage=stage, zero_shard_degree=2)
        file = SimpleNamespace(build_model=tiny_gpt.untied, make_batch=tiny_gpt.make_batch, loss_fn=tiny_gpt.loss_fn)
        model = ParallelModel(config, file, mesh=build_rank_mesh(config, "cpu"))
        batch = global_batch(tiny_gpt.make_batch, batch_size=2, seed=0, step=0)
        with _Reductions() as noted:
            model.step(local_batch(batch, config=config, dp_rank=model.mesh.dp_rank))
        found.append((noted.gathered, noted.reduced))
    return found


def test_a_head_of_its_own_is_gathered_after_the_blocks_and_reduced_before_them():
    block = sum(p.numel() for p in tiny_gpt.build_model().blocks[0].parameters())
    rest = HEAD_ELEMENTS + 2 * tiny_gpt.WIDTH  # the embedding is as large as the head; the last norm
    (kept, reduced), (freed, reduced_3) = run_ranks(_order_with_a_head_of_its_own, 2)[0]
    assert kept == [rest, *[block] * 4, HEAD_ELEMENTS]
    assert freed == [rest, *[block] * 4, HEAD_ELEMENTS, *[block] * 4]  # once: not between forward and backward
    assert reduced == reduced_3 == [HEAD_ELEMENTS, *[block] * 4, rest]


def _state_elements():
    """Elements of parameters and optimizer state that this rank holds, per ZeRO stage."""
    found = []
    for fields in ({"dp": 2}, *({"dp": 2, "zero_stage": stage, "zero_shard_degree": 2} for stage in (1, 2, 3))):
        model = _build(**fields)
        batch = global_batch(tiny_gpt.make_batch, batch_size=model.config.global_batch_size, seed=0, step=0)
        model.step(local_batch(batch, config=model.config, dp_rank=model.mesh.dp_rank))
        parameters = sum(local_part(p).numel() for p in model.parameters())
        moments = [s for state in model.optimizer.state.values() for s in state.values() if s.dim() > 0]
        found.append((parameters, sum(local_part(moment).numel() for moment in moments)))
    return found


def test_sharded_stages_keep_half_of_parameters_and_optimizer_state_between_steps_on_two_ranks():
    n_elements = sum(p.numel() for p in tiny_gpt.build_model().parameters())
    whole, half = (n_elements, 2 * n_elements), (n_elements // 2, n_elements)
    assert n_elements % 2 == 0
    assert run_ranks(_state_elements, 2)[0] == [whole, half, half, half]


def _gathers_in_mixed_precision():
    config = Config(precision="bf16", micro_batch_size=2, blocks=BLOCKS)
    model = ParallelModel(config, tiny_gpt, mesh=build_rank_mesh(config, "cpu"))
    seen = set()
    model.stages[0].blocks[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    losses = [model.step(global_batch(tiny_gpt.make_batch, batch_size=2, seed=0, step=0)).item() for _ in range(5)]
    return seen, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}, losses


def test_one_device_in_bf16_computes_in_bf16_and_keeps_parameters_and_gradients_in_float32():
    ((computed, parameters, gradients, losses),) = run_ranks(_gathers_in_mixed_precision, 1)
    assert (computed, parameters, gradients) == ({torch.bfloat16}, {torch.float32}, {torch.float32})
    assert losses[-1] < losses[0]


def _held_before_each_block():
    """How many reductions of the micro-batch before are kept, before each block in turn, under ZeRO 2."""
    model = _build(dp=2, zero_stage=2, zero_shard_degree=2)
    [stage] = model.stages
    held = []

    def note(*_):
        held.append(len(stage._get_fsdp_state()._comm_ctx.reduce_scatter_states))

    for name in BLOCKS:
        stage.get_submodule(name).register_forward_hook(note)
    batch = global_batch(tiny_gpt.make_batch, batch_size=model.config.global_batch_size, seed=0, step=0)
    model.step(local_batch(batch, config=model.config, dp_rank=model.mesh.dp_rank))
    return held


def test_what_was_reduced_is_freed_before_the_last_block_and_not_among_the_logits():
    assert run_ranks(_held_before_each_block, 2)[0] == [0, 0, 0, 0, *2 * [1, 1, 1, 0]]
