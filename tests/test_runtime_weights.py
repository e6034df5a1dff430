"""Weights of generated stages: names, shards, ties, and what is refused."""

import pytest
import torch
from torch import nn

from autoplan.runtime.building.weights import Buffer, Shard, Weights, attach, join_shards, load_weights, take_shard


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.arange(3))


def stage(**weights):
    root = nn.Module()
    for name, module in weights.items():
        attach(root, name.replace("__", "."), module)
    return root


def test_blocked_shard_takes_the_same_part_of_each_block():
    # 12 rows are q0..q3 k0..k3 v0..v3; rank 1 of 2 holds q2 q3 k2 k3 v2 v3
    qkv = torch.arange(12).view(12, 1)
    assert take_shard(qkv, Shard(0, blocks=3), 1, 2).flatten().tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("shard", [Shard(0), Shard(1), Shard(-1), Shard(0, blocks=3), Shard(1, blocks=2)])
def test_join_shards_is_the_inverse_of_take_shard(shard):
    tensor = torch.randn(12, 8, 4)
    parts = [take_shard(tensor, shard, rank, 2) for rank in range(2)]
    assert torch.equal(join_shards(parts, shard), tensor)
    assert all(part.is_contiguous() for part in parts)


@pytest.mark.parametrize(("n_rows", "tp_degree"), [(7, 2), (7, 3), (5, 4)])
def test_padded_shards_are_equally_large_end_in_zeros_and_join_to_the_whole(n_rows, tp_degree):
    tensor, shard = torch.rand(n_rows, 3) + 1.0, Shard(0, padded_from=n_rows)
    parts = [take_shard(tensor, shard, rank, tp_degree) for rank in range(tp_degree)]
    n_local = -(-n_rows // tp_degree)
    assert {tuple(part.shape) for part in parts} == {(n_local, 3)}
    assert (torch.cat(parts)[n_rows:] == 0).all()
    assert torch.equal(join_shards(parts, shard), tensor)


def test_shard_padded_for_another_size_is_refused():
    with pytest.raises(ValueError, match=r"dim 0 of shape \[7, 2\] cannot be divided into 2 equal parts"):
        take_shard(torch.zeros(7, 2), Shard(0, padded_from=9), 0, 2)


def test_shard_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"dim 0 of shape \[6, 2\] cannot be divided into 4 equal parts"):
        take_shard(torch.zeros(6, 2), Shard(0), 0, 4)


def test_attached_weights_have_the_names_of_the_user_model():
    root = stage(transformer__h__3__attn=Weights(weight=(2, 2)), transformer__h__5=Weights(bias=(2,)))
    assert [name for name, _ in root.named_parameters()] == ["transformer.h.3.attn.weight", "transformer.h.5.bias"]


def test_loaded_stage_holds_shards_ties_frozen_weights_and_buffers_of_the_whole_model():
    full = Tied()
    root = stage(
        embedding=Weights(weight=(4, 4)), head=Weights(weight=(4, 4)), frozen=Weights(weight=(4, 4), bias=(4,))
    )
    root.register_buffer("scale", torch.empty(3, dtype=torch.int64))
    load_weights(root, full, {"embedding.weight": Shard(0), "head.weight": Shard(0)}, 1, 2)
    assert root.embedding.weight is root.head.weight
    assert torch.equal(root.embedding.weight, full.embedding.weight[4:])
    assert root.embedding.weight.requires_grad and not root.frozen.weight.requires_grad
    assert root.scale.tolist() == [0, 1, 2]


def test_loaded_weights_share_no_memory_with_the_whole_model():
    full = Tied()
    root = stage(frozen=Weights(weight=(4, 4), bias=(4,)), embedding=Weights(weight=(8, 4)))
    load_weights(root, full, {}, 0, 1)
    with torch.no_grad():
        root.embedding.weight.zero_()
    assert full.embedding.weight.abs().sum() > 0


def test_one_weight_sharded_in_two_ways_is_refused():
    root = stage(embedding=Weights(weight=(4, 4)), head=Weights(weight=(8, 2)))
    with pytest.raises(ValueError, match="head.weight and embedding.weight are one weight but are sharded differently"):
        load_weights(root, Tied(), {"embedding.weight": Shard(0), "head.weight": Shard(1)}, 0, 2)


def test_stage_of_another_model_is_refused_by_name_and_shape():
    with pytest.raises(ValueError, match="other.weight is in the generated stage but not in the user's model"):
        load_weights(stage(other=Weights(weight=(4,))), Tied(), {}, 0, 1)
    with pytest.raises(ValueError, match=r"frozen.bias: .* shape \[4\], the generated stage expects \[5\]"):
        load_weights(stage(frozen=Weights(bias=(5,))), Tied(), {}, 0, 1)


def test_buffer_declares_dtype_and_persistence():
    weights = Weights(weight=(2,), count=Buffer((), "int64", persistent=False))
    assert weights.count.dtype == torch.int64
    assert list(weights.state_dict()) == ["weight"]


def test_modules_with_numbers_below_weights_are_items():
    weights = Weights(original=(2,))
    weights["0"] = Weights(u=Buffer((3,)))
    assert weights["0"].u.shape == (3,)
    assert list(weights.state_dict()) == ["original", "0.u"]
