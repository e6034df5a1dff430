"""What the user's optimizer keeps, and what it does with parts of parameters, which ranks have where they are divided.

AdamW or SGD treats each element by itself. LARS, Adafactor and Muon take norms or products of a matrix, and those of a
shard are others. What `build_optimizer` returns is tried on a matrix and a bias: whole; each half by itself, which is
what tensor parallelism gives it; and as torch's distributed tensors of two ranks, which is what ZeRO does. Of these the
norm is that of the whole, so that LARS is right, but some operations do not exist, and Adafactor fails.
One that fails on whole ones may work on the model's own parameters, so that is told and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.graph import DIFFERS_SHARDED, FAILS_SHARDED, N_ADAM_STATES, WHOLE_OPTIMIZER, OpGraph
from autoplan.user_errors import USERS_ERRORS, users_place, what_failed

WIDTH, N_STEPS, N_RANKS = 8, 2, 2
# Of the largest update: Muon multiplies in bf16, and shards of 9 to 65 rows came out up to 3.5 % otherwise than the
# whole (two processes, torch 2.13); an update of other norms is off by a third.
ROUNDING = 0.1


def with_optimizer(graph: OpGraph, build_optimizer: Callable[[Any], Any]) -> OpGraph:
    """The graph, with what was found of the user's optimizer, or how it failed."""
    try:
        is_random = draws_random_numbers(build_optimizer)
        is_whole = not is_random and computes_with_whole_tensors(build_optimizer)
        n_states = n_states_of(build_optimizer)
    except USERS_ERRORS as error:
        return replace(graph, optimizer_failure=what_failed(error) + users_place(error))
    words = (WHOLE_OPTIMIZER if is_whole else "", "" if is_random else trouble_with_shards(build_optimizer))
    return replace(graph, n_optimizer_states=n_states, dissolved=(*graph.dissolved, *filter(None, words)))


def draws_random_numbers(build_optimizer: Callable[[Any], Any]) -> bool:
    """Whether two trainings that begin alike differ, as those of stochastic rounding do: nothing else is known then.

    Raises: what the user's optimizer does.
    """
    values, *gradients = _numbers()
    one, other = (_trained(build_optimizer, values, gradients) for _ in range(2))
    return not all(map(torch.equal, one, other))


def computes_with_whole_tensors(build_optimizer: Callable[[Any], Any]) -> bool:
    """Whether halves of tensors are updated otherwise than the whole.

    Raises: what the user's optimizer does.
    """
    values, *gradients = _numbers()
    whole = _trained(build_optimizer, values, gradients)
    return any(
        not torch.allclose(trained, expected)
        for dim in (0, 1)
        for half in (0, 1)
        for trained, expected in zip(
            _trained(build_optimizer, _half(values, dim, half), [_half(step, dim, half) for step in gradients]),
            _half(whole, dim, half),
            strict=True,
        )
    )


def trouble_with_shards(build_optimizer: Callable[[Any], Any]) -> str:
    """`FAILS_SHARDED`, `DIFFERS_SHARDED` or "": how distributed tensors are updated, of which ranks hold rows.

    They may differ from whole ones by `ROUNDING`. Where torch cannot simulate ranks, as in a process that already has
    a process group, SGD fails too, and nothing is known.
    """
    try:
        return "" if _updates_shards_as_whole(build_optimizer) else DIFFERS_SHARDED
    except USERS_ERRORS:
        pass
    try:
        return FAILS_SHARDED if _updates_shards_as_whole(torch.optim.SGD) else ""
    except USERS_ERRORS:
        return ""


def _updates_shards_as_whole(build_optimizer: Callable[[Any], Any]) -> bool:
    """Raises: what the user's optimizer does, or torch, and AssertionError where ranks come to different numbers."""
    from torch.distributed.tensor import Shard, distribute_tensor  # half a second, for models with an optimizer only

    values, *gradients = _numbers()
    whole = _trained(build_optimizer, values, gradients)
    with _simulated_ranks() as mesh:
        by_rows = [[distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in own] for own in (values, *gradients)]
        gathered = [sharded.full_tensor() for sharded in _trained(build_optimizer, by_rows[0], by_rows[1:])]
        return all(
            torch.allclose(found, expected, rtol=0.0, atol=ROUNDING * float((expected - value).abs().max()))
            for found, expected, value in zip(gathered, whole, values, strict=True)
        )


@contextmanager
def _simulated_ranks() -> Iterator[DeviceMesh]:
    """A mesh of ranks whose tensors are all in this process, which has a process group as long as this lasts."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    try:
        with LocalTensorMode(N_RANKS):
            yield init_device_mesh("cpu", (N_RANKS,))
    finally:
        dist.destroy_process_group()


def n_states_of(build_optimizer: Callable[[Any], Any]) -> int:
    """How many tensors of its size a matrix has as state: 2 of Adam, 1 of momentum; vectors and numbers do not count.

    Optimizers of torch tell by their `state`. Others, which may keep more elsewhere, count as Adam at least.

    Raises: what the user's optimizer does.
    """
    values, *gradients = _numbers()
    (matrix, _), optimizer = _stepped(build_optimizer, values, gradients)
    state = getattr(optimizer, "state", None)
    of_matrix = [kept for key, kept in state.items() if key is matrix] if isinstance(state, Mapping) else []
    kept = [item for one in of_matrix if isinstance(one, Mapping) for item in one.values()]
    n_found = sum(isinstance(item, Tensor) and item.numel() >= matrix.numel() for item in kept)
    is_of_torch = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    return n_found if is_of_torch else max(n_found, N_ADAM_STATES)


def _numbers() -> list[tuple[Tensor, ...]]:
    """A matrix and a bias, and their gradients in each step."""
    generator = torch.Generator().manual_seed(0)
    shapes = (WIDTH, WIDTH), (WIDTH,)
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for _ in range(1 + N_STEPS)
    ]


def _half(tensors: Sequence[Tensor], dim: int, half: int) -> tuple[Tensor, ...]:
    """What one of two ranks has of a matrix split along `dim` and its bias, which goes with the rows."""
    matrix, bias = tensors
    return matrix.chunk(2, dim)[half].contiguous(), bias.chunk(2)[half] if dim == 0 else bias


def _trained(
    build_optimizer: Callable[[Any], Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Any]:
    return [parameter.detach() for parameter in _stepped(build_optimizer, values, gradients)[0]]


def _stepped(
    build_optimizer: Callable[[Any], Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[list[nn.Parameter], Any]:
    """The parameters after a step per gradient, and the optimizer."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = build_optimizer(list(parameters))
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return parameters, optimizer
