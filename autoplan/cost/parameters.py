"""What the parameters of a segment cost one device: memory, the collectives of data parallelism, and the optimizer.

Memory of one parameter element under mixed precision, after `fully_shard` with a float32 master copy:

                      always (per shard degree d)                gathered    gradient before reduction
    bf16 / fp16       4 master + 4 gradient + 8 Adam, all / d    2           2 + 4, or 4 while micro-batches accumulate
    fp32              4 + 4 + 8, all / d                         4           4 + 4, or 4
    fp64              8 + 8 + 16, all / d                        8           8 + 8, or 8

Gathered parameters are copied out of the communication buffer and gradients into it, on the compute stream: per
micro-batch where the stage gathers or reduces that often, else once per step (counted with the optimizer).

ZeRO 0 is a shard degree of 1. The optimizer moves every byte of master, gradient and state once (and writes back
master and state), after the gradient norm has read the gradients: that is its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplan.cost.collectives import Group
from autoplan.hardware import Device

N_ADAM_STATES = 2


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per parameter element; see the table in the module docstring."""

    master: int
    gathered: int
    reduced: int

    @property
    def optimizer(self) -> int:
        """Adam's state."""
        return N_ADAM_STATES * self.master


def element_bytes(precision: str) -> ElementBytes:
    """The row of the table."""
    if precision in ("bf16", "fp16"):
        return ElementBytes(master=4, gathered=2, reduced=4)
    size = 8 if precision == "fp64" else 4
    return ElementBytes(master=size, gathered=size, reduced=size)


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """What costs of parameters depend on besides their number and their place.

    Attributes:
        collective_s: (kind, full bytes, group) -> seconds.
        optimizer_element_s: measured time of the optimizer per element; None computes it.
    """

    device: Device
    precision: str
    collective_s: Callable[[str, float, Group], float]
    optimizer_element_s: float | None


@dataclass(frozen=True, slots=True)
class Placement:
    """How parameters lie on the data-parallel ranks: all that their cost depends on of a mesh.

    Attributes:
        shard: the ranks that have the state of one copy in parts.
        replicate: the ranks that have the same part.
        zero_stage: see `Mesh`.
        accumulates: whether gradients of several micro-batches are added up before they are reduced.
    """

    shard: Group
    replicate: Group
    zero_stage: int
    accumulates: bool


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """The parameters of one segment; see `cost.table.SegmentCost` for the fields they share.

    Attributes:
        unpack_s, pack_s: copies out of and into communication buffers, where they are made in every micro-batch.
    """

    unpack_s: float
    pack_s: float
    gather_s: float
    reduce_s: float
    optimizer_s: float
    state_bytes: int
    gathered_bytes: int
    gradient_bytes: int


def parameter_cost(
    context: ParameterContext, n_elements: int, placement: Placement, *, is_block: bool
) -> ParameterCost:
    """The cost of `n_elements` on a tensor-parallel rank."""
    element, degree = element_bytes(context.precision), placement.shard.n_devices
    n_shard_elements = -(-n_elements // degree)
    is_wrapped = degree * placement.replicate.n_devices > 1 or context.precision in ("bf16", "fp16")
    gathered_bytes = element.gathered * n_elements if is_wrapped else 0
    # `fully_shard` keeps what is outside of blocks gathered for a whole pass, and reduces it last.
    is_held = placement.zero_stage == 3 and not is_block
    bandwidth = context.device.memory_bytes_per_s * context.device.memory_efficiency
    unpack_s = 2 * gathered_bytes / bandwidth if degree > 1 else 0.0
    pack_s = (element.gathered + element.reduced) * n_elements / bandwidth if is_wrapped else 0.0
    gathers_often, reduces_often = placement.zero_stage == 3, placement.zero_stage >= 2
    scatter_s, replicas_s = _reduce_s(context, element.reduced * n_elements, placement)
    once_s = (0.0 if gathers_often else unpack_s) + (replicas_s if reduces_often else pack_s)
    held_bytes = (gathered_bytes + element.gathered * n_elements) if is_held else 0
    gradient_bytes = _gradient_bytes(element, accumulates=placement.accumulates, is_held=is_held) * n_elements
    return ParameterCost(
        unpack_s=unpack_s if gathers_often else 0.0,
        pack_s=pack_s if reduces_often else 0.0,
        gather_s=context.collective_s("all_gather", element.gathered * n_elements, placement.shard),
        reduce_s=scatter_s if reduces_often else scatter_s + replicas_s,
        optimizer_s=_optimizer_s(context, n_shard_elements) + once_s,
        state_bytes=(2 * element.master + element.optimizer) * n_shard_elements + held_bytes,
        gathered_bytes=0 if is_held else gathered_bytes,
        gradient_bytes=gradient_bytes if is_wrapped else 0,
    )


def optimizer_s(n_elements: int, *, device: Device, precision: str) -> float:
    """Read the gradient for the norm; read master, gradient and state; write master and state."""
    element = element_bytes(precision)
    n_bytes = n_elements * (4 * element.master + 2 * element.optimizer)
    return n_bytes / (device.memory_bytes_per_s * device.memory_efficiency)


def _optimizer_s(context: ParameterContext, n_elements: int) -> float:
    if context.optimizer_element_s is not None:
        return n_elements * context.optimizer_element_s
    return optimizer_s(n_elements, device=context.device, precision=context.precision)


def _gradient_bytes(element: ElementBytes, *, accumulates: bool, is_held: bool) -> int:
    """Per element: accumulated in the dtype of the reduction, else as computed and beside it the reduction's input."""
    if accumulates:
        return element.reduced
    return element.reduced + (0 if is_held else element.gathered)


def _reduce_s(context: ParameterContext, n_bytes: int, placement: Placement) -> tuple[float, float]:
    """Reduce-scatter inside the shard group, and all-reduce of the shards between replicas (once per step)."""
    scatter_s = context.collective_s("reduce_scatter", n_bytes, placement.shard)
    share_bytes = n_bytes / placement.shard.n_devices
    return scatter_s, context.collective_s("all_reduce", share_bytes, placement.replicate)
