"""Gradients copied to where their reduction reads them: as torch does it, at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autoplan.cost.parameters import LEAST_PART_ELEMENTS
from autoplan.runtime.stages import packing

SHAPES = ((8, 3), (4,), (16, 2, 5))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each call of `torch._foreach_copy_` copied; groups of any size are large."""
    n_copied: list[int] = []
    copy = torch._foreach_copy_

    def counted(into: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        n_copied.append(len(parts))
        copy(into, parts)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    monkeypatch.setattr(packing, "LEAST_PART_ELEMENTS", 0)
    return n_copied


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_packing_of_torch(always: list[int], n_ranks: int, dtype: torch.dtype) -> None:
    gradients = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    assert torch.equal(*_packed(gradients, n_ranks))
    assert always == [len(SHAPES) * n_ranks]


@pytest.mark.parametrize(
    "gradients",
    [[torch.randn(5, 3), torch.randn(4)], [torch.randn(4, 6).t(), torch.randn(4)]],
    ids=["padded", "transposed"],
)
def test_leaves_other_gradients_to_torch(always: list[int], gradients: list[torch.Tensor]) -> None:
    assert torch.equal(*_packed(gradients, n_ranks=2))
    assert not always


@pytest.mark.parametrize(("n_ranks", "n_copied"), [(2, [len(SHAPES) * 2]), (4, [])])
def test_leaves_small_parts_to_torch(
    always: list[int], monkeypatch: pytest.MonkeyPatch, n_ranks: int, n_copied: list[int]
) -> None:
    gradients = [torch.randn(shape) for shape in SHAPES]
    n_elements = sum(gradient.numel() for gradient in gradients)
    monkeypatch.setattr(packing, "LEAST_PART_ELEMENTS", n_elements // (3 * len(SHAPES)))  # of as many on 3 ranks
    assert torch.equal(*_packed(gradients, n_ranks))
    assert always == n_copied


def test_costs_and_programs_mean_the_same_groups() -> None:
    assert packing.LEAST_PART_ELEMENTS == LEAST_PART_ELEMENTS


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_uses_it(always: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.of_torch, "foreach_reduce_scatter_copy_in", packing.pack_by_torch)  # to be undone
    packing.pack_at_once()
    module, whole = nn.Linear(8, 4), nn.Linear(8, 4).bfloat16()
    whole.load_state_dict(module.state_dict())
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    inputs = torch.randn(3, 8)
    for run in (module, whole):
        run(inputs.bfloat16()).sum().backward()
    assert always == [2]
    for divided, parameter in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(divided.grad.to_local(), parameter.grad.float())


def _packed(gradients: list[torch.Tensor], n_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By autoplan and by torch."""
    rows = [-(-gradient.size(0) // n_ranks) * n_ranks for gradient in gradients]
    n_elements = sum(
        row * (gradient.numel() // gradient.size(0)) for row, gradient in zip(rows, gradients, strict=True)
    )
    ours, theirs = (torch.full((n_elements,), torch.nan) for _ in range(2))
    packing.pack(list(gradients), ours, n_ranks)
    packing.pack_by_torch(list(gradients), theirs, n_ranks)
    return ours, theirs
