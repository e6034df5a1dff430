"""What `fully_shard` takes of the host: from timed passes (`zero_host_time`) to figures of a hardware profile.

Under ZeRO 1 the last backward pass reduces, and passes in between neither gather nor reduce; under ZeRO 3 every pass
gathers (and frees) and every backward pass reduces:

    hooks    half of what a pass forward and backward in between takes more than without `fully_shard`
    reduce   what the last backward pass of ZeRO 1 takes more than one in between
    gather   half of what a pass forward and backward of ZeRO 3 takes more than in between, and without reducing

Two sizes of block tell what comes once per block from what comes with each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.hardware import ShardingHost


@dataclass(frozen=True, slots=True)
class ShardedPasses:
    """Host time of one step, per block.

    Attributes:
        zero_stage: None without `fully_shard`.
        n_parameters: of a block.
        forward_s, backward_s: of each micro-batch.
        optimizer_s: the gradient norm and the optimizer.
    """

    zero_stage: int | None
    n_parameters: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float


def sharding_host(passes: Sequence[ShardedPasses]) -> ShardingHost:
    """See the module docstring; `passes` are without `fully_shard`, under ZeRO 1 and 3, of two sizes of block."""
    found = {(item.zero_stage, item.n_parameters): item for item in passes}
    few, many = sorted({item.n_parameters for item in passes})

    def line(seconds: Callable[[ShardedPasses, ShardedPasses, ShardedPasses], float]) -> tuple[float, float]:
        """(once per block, with each parameter) of what `seconds` makes of (not sharded, ZeRO 1, ZeRO 3)."""
        of_few, of_many = (seconds(found[None, size], found[1, size], found[3, size]) for size in (few, many))
        of_parameter_s = max(0.0, (of_many - of_few) / (many - few))
        return max(0.0, of_few - few * of_parameter_s), of_parameter_s

    hooks = line(lambda bare, one, _: (_between_s(one) - _between_s(bare)) / 2)
    reduce = line(lambda _, one, __: one.backward_s[-1] - one.backward_s[1])
    gather = line(lambda _, one, three: (_between_s(three) - one.forward_s[1] - one.backward_s[-1]) / 2)
    return ShardingHost(*hooks, *gather, *reduce, found[1, many].optimizer_s / many)


def _between_s(passes: ShardedPasses) -> float:
    """Forward and backward of a micro-batch that is neither the first nor the last."""
    return passes.forward_s[1] + passes.backward_s[1]
