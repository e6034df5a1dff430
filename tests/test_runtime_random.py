"""Dropout on tensor-parallel ranks: different on shards, alike on whole values, the same again when recomputed."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed import tiny_gpt
from distributed.launch import run_ranks
from distributed.tiny_parallel import parallel_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from autoplan.runtime import Config, ParallelModel, build_rank_mesh
from autoplan.runtime.dropout import without_dropout
from autoplan.runtime.tensor_parallel.attention import (
    causal_attention_of_rows,
    grouped_attention_of_rank,
    rank_attention,
)
from autoplan.runtime.tensor_parallel.random import rank_dropout

N, P_DROP, SEED = 40_000, 0.25, 7


def _of_all_ranks(tensor):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def _dropped_values_and_generator(tp):
    """Two shards, then a whole value: their masks, and the state of the generator after them."""
    torch.manual_seed(SEED)
    ones = torch.ones(N)
    first, second = (rank_dropout(ones, P_DROP, True, tp) for _ in range(2))
    whole = F.dropout(ones, P_DROP, True)
    return first, second, whole, torch.get_rng_state()


def _check_masks(tp):
    first, second, whole, state = _dropped_values_and_generator(tp)
    for a, b in (_of_all_ranks(first), _of_all_ranks(second), (first, second), (first, whole)):
        # two independent masks agree in 0.75^2 + 0.25^2 = 0.625 of the elements; 4 deviations of 0.0024
        assert abs(((a == 0) == (b == 0)).float().mean() - 0.625) < 0.01
    for a, b in (_of_all_ranks(whole), _of_all_ranks(state)):
        assert torch.equal(a, b)
    # kept: 0.75 of them; 4 deviations of 0.0022; what is kept is scaled by 1 / 0.75
    assert abs((first != 0).float().mean() - (1 - P_DROP)) < 0.009
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - P_DROP))}
    again = _dropped_values_and_generator(tp)
    assert all(torch.equal(a, b) for a, b in zip(again, (first, second, whole, state), strict=True))


def _check_without_training(tp):
    x = torch.ones(5)
    state = torch.get_rng_state()
    assert torch.equal(rank_dropout(x, P_DROP, False, tp), x) and torch.equal(rank_dropout(x, 0.0, True, tp), x)
    q = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        rank_attention(q, q, q, tp=tp, is_causal=True), F.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    assert torch.equal(torch.get_rng_state(), state)


def _check_attention(tp):
    """With values of one, a row of attention is the sum of its kept weights: about 1, and not alike on two ranks."""
    q = torch.randn(2, 4, 64, 8, generator=torch.Generator().manual_seed(SEED))
    key, value = q[:, :1], torch.ones(2, 1, 64, 8)
    for attention in (
        lambda: rank_attention(q, q, torch.ones_like(q), tp=tp, dropout_p=P_DROP),
        lambda: grouped_attention_of_rank(q, key, value, tp, dropout_p=P_DROP),
        lambda: causal_attention_of_rows(q[:, :, :32], q, torch.ones_like(q), tp, dropout_p=P_DROP),
    ):
        torch.manual_seed(SEED)
        found = attention()
        a, b = _of_all_ranks(found)
        assert (a != b).float().mean() > 0.99
        assert abs(found.mean() - 1.0) < 0.05
        assert torch.equal(*_of_all_ranks(torch.get_rng_state()))


def _check_recompute(tp):
    """The second forward pass drops what the first one dropped: the gradient is that without recomputation."""

    def function(x):
        h = rank_dropout(x.sin(), P_DROP, True, tp)
        h = F.dropout(h, P_DROP, True).view(2, 2, 8, 8)
        return rank_attention(h, h.cos(), h, tp=tp, dropout_p=P_DROP).sin()

    found = []
    for run in (function, lambda x: checkpoint(function, x, use_reentrant=False)):
        torch.manual_seed(SEED)
        x = torch.linspace(-1, 1, 256, dtype=torch.float64).requires_grad_()
        y = run(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        found.append((y.detach(), gradient, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    a, b = _of_all_ranks(found[0][1])
    assert not torch.equal(a, b)


def _check_compiled(tp):
    """A compiled caller draws the same masks."""

    def function(x):
        return 2 * rank_dropout(x + 1, P_DROP, True, tp)

    torch.manual_seed(SEED)
    expected = function(torch.ones(N))
    torch.manual_seed(SEED)
    assert torch.equal(torch.compile(function, backend="aot_eager")(torch.ones(N)), expected)


def _two_ranks():
    tp = dist.group.WORLD
    for check in (_check_masks, _check_without_training, _check_attention, _check_recompute, _check_compiled):
        check(tp)
    return True


def test_shards_drop_different_elements_whole_values_the_same_and_recomputation_the_same_again():
    assert run_ranks(_two_ranks, 2) == [True, True]


def test_without_tensor_parallel_ranks_dropout_is_that_of_torch():
    found = []
    for function in (lambda x: rank_dropout(x, P_DROP, True, None), lambda x: F.dropout(x, P_DROP, True)):
        torch.manual_seed(SEED)
        found.append(function(torch.ones(N)))
    assert torch.equal(*found)


def _seed_of_trained_program():
    config = Config(precision="fp64", micro_batch_size=2, tp=2, dp=2)
    mesh = build_rank_mesh(config, "cpu")
    ParallelModel(config, tiny_gpt, parallel_model(2, 1), mesh=mesh)
    return mesh.dp_rank, mesh.tp_rank, torch.initial_seed()


def test_training_seeds_differ_between_data_parallel_ranks_and_agree_on_tensor_parallel_ranks():
    seeds = {(dp_rank, tp_rank): seed for dp_rank, tp_rank, seed in run_ranks(_seed_of_trained_program, 4)}
    assert seeds[0, 0] == seeds[0, 1] != seeds[1, 0] == seeds[1, 1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")])
def test_recurrent_layers_drop_nothing_where_dropout_is_left_out_of_padded_and_of_packed_samples(kind):
    layers, x = kind(3, 4, num_layers=2, dropout=0.5, batch_first=True), torch.randn(2, 5, 3)
    packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    with without_dropout():
        training = layers(x)[0], layers(packed)[0].data
    layers.eval()
    assert torch.equal(training[0], layers(x)[0]) and torch.equal(training[1], layers(packed)[0].data)
