"""Where reduced gradients lie: on the stream of the passes while they stay, so that a graph takes no more memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autoplan.runtime import Config
from autoplan.runtime.stages import gradient_memory

COMPUTES: Any = "the stream of the passes"
REDUCES: Any = "that of reductions"


class _Group:
    """One of `fully_shard` with two parameters, and the module that has it."""

    def __init__(self) -> None:
        self.parameters = [SimpleNamespace(sharded_param=torch.nn.Parameter(torch.zeros(3))) for _ in range(2)]
        self.reduction: Any = SimpleNamespace(allocate=lambda size, *, dtype, device: torch.empty(*size, dtype=dtype))
        group = SimpleNamespace(fsdp_params=self.parameters, _reduce_scatter_comm=self.reduction)
        self._state = SimpleNamespace(_fsdp_param_groups=[group])

    def _get_fsdp_state(self) -> Any:
        return self._state

    def set_custom_reduce_scatter(self, reduction: Any) -> None:
        self.reduction = reduction


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where results were allocated: a stream, or None for the one that was current."""
    used: list[Any] = []
    current = [COMPUTES]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        if current[0] is not COMPUTES:
            used.append(stream)
        yield

    def alternating(_: Any) -> Any:
        """As `fully_shard` calls: what is reduced, then the result."""
        n_calls.append(1)
        current[0] = COMPUTES if len(n_calls) % 2 else REDUCES
        return current[0]

    n_calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", alternating)
    return used


def _config(**changed: Any) -> Config:
    return Config(**{"dp": 4, "zero_stage": 3, "zero_shard_degree": 4} | changed)


def _reduce(group: _Group, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate as a reduction does; the result."""
    made = [group.reduction.allocate((6,), dtype=dtype, device=torch.device("cpu")) for _ in range(2)]
    result: torch.Tensor = made[-1]
    return result


def test_a_gradient_that_stays_lies_where_the_passes_have_their_memory(streams: list[Any]) -> None:
    group: Any = _Group()
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=_config())
    assert _reduce(group).shape == (6,)
    assert streams == [COMPUTES]


def test_what_is_added_to_a_gradient_stays_on_the_stream_that_adds(streams: list[Any]) -> None:
    group: Any = _Group()
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=_config(n_micro_batches=2))
    group.parameters[1].sharded_param.grad = torch.ones(3)
    _reduce(group)
    assert streams == [None]


def test_so_does_what_is_cast_to_the_dtype_of_a_parameter(streams: list[Any]) -> None:
    group: Any = _Group()
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=_config())
    _reduce(group, torch.bfloat16)
    assert streams == [None]


def test_and_what_was_not_begun_on_the_stream_of_the_passes(
    streams: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = _Group()
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=_config())
    _reduce(group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: REDUCES)
    _reduce(group)
    assert streams == [COMPUTES, None, None]


def test_the_reduction_is_the_one_that_was_there(streams: list[Any]) -> None:
    group: Any = _Group()
    calls: list[Any] = []
    reduction: Any = type("Reduction", (), {"__call__": lambda self, *args, **kwargs: calls.append((args, kwargs))})()
    group._state._fsdp_param_groups[0]._reduce_scatter_comm = reduction
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=_config(zero_stage=0, zero_shard_degree=1))
    group.reduction(1, op=2)
    assert calls == [((1,), {"op": 2})]


@pytest.mark.parametrize(("n_micro_batches", "is_left"), [(1, False), (2, True)])
def test_replicas_of_shards_that_add_up_micro_batches_are_left_alone(n_micro_batches: int, is_left: bool) -> None:
    group: Any = _Group()
    before = group.reduction
    config = _config(zero_stage=2, zero_shard_degree=2, n_micro_batches=n_micro_batches)
    gradient_memory.keep_gradients_on(COMPUTES, [group], config=config)
    assert (group.reduction is before) == is_left


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_uses_it(streams: list[Any]) -> None:
    module, whole = nn.Linear(8, 4), nn.Linear(8, 4).bfloat16()
    whole.load_state_dict(module.state_dict())
    mesh = dist.init_device_mesh("cpu", (1,))
    divided = fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    gradient_memory.keep_gradients_on(COMPUTES, [divided], config=_config(dp=1, zero_stage=0, zero_shard_degree=1))
    inputs = torch.randn(3, 8)
    for run in (module, module, whole, whole):
        run(inputs.bfloat16()).sum().backward()
    assert streams == [COMPUTES, None]
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_another_stream_is_used_while_a_graph_is_captured() -> None:
    """What `_Reduction` relies on: inside of a capture too, a side stream may write into memory of the first one."""
    compute, side = torch.cuda.Stream(), torch.cuda.Stream()
    graph, source = torch.cuda.CUDAGraph(), torch.arange(8.0, device="cuda")
    with torch.cuda.graph(graph, stream=compute):
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            with torch.cuda.stream(compute):
                result = torch.empty_like(source)
            result.copy_(source * 2)
        compute.wait_stream(side)
    source.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, source * 2)
