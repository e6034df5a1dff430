"""What a tensor-parallel layout costs on a cluster, op by op: for the programs of `tensor_parallel.sharding`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.cost.collective_time import axis_group, route_of
from autoplan.cost.local_segment import local_op
from autoplan.cost.parameters import element_bytes, optimizer_s
from autoplan.cost.segment_work import LOSS_STATISTIC_BYTES, conversion_s, timed
from autoplan.cost.work_context import work_contexts
from autoplan.graph import Op, OpGraph, TensorSpec
from autoplan.hardware import NO_SHARDING, HardwareProfile
from autoplan.layout import EXCHANGE, Conversion, Layout, V, local_spec
from autoplan.rules import OpRule, Strategy, exchanged_specs
from autoplan.tensor_parallel.sharding import ShardingPrices


def sharding_prices(
    graph: OpGraph,
    *,
    hardware: HardwareProfile,
    precision: str,
    rules: Mapping[str, OpRule],
    degree: int,
    batch_size: int,
    communication: float = 1.0,
) -> ShardingPrices:
    """What `shard_graph` minimizes on this cluster, for one micro-batch of `batch_size`.

    `communication`: which part of its price what ranks send each other has; below 1 more is split than pays.
    """
    context = work_contexts(graph, hardware, precision, rules)(degree)

    def op_s(op: Op, strategy: Strategy) -> float:
        found = timed(context, local_op(context, op, strategy), batch_size)
        n_bytes = strategy.all_reduce_elements * batch_size * LOSS_STATISTIC_BYTES
        exchanged_s = sum(converted_s(spec, EXCHANGE) for spec in exchanged_specs(op, strategy, context.facts.specs))
        reduced_s = communication * context.tp_collective_s("all_reduce", n_bytes)
        return found.forward_s + found.backward_s + reduced_s + exchanged_s

    def parameter_s(spec: TensorSpec, layout: Layout) -> float:
        n_elements = local_spec(spec, layout, degree).n_elements(1)
        element = element_bytes(precision)  # of Adam, so that all optimizers find the same layouts
        update_s = optimizer_s(n_elements, device=hardware.device, element=element)
        return update_s + (communication * summed_s(n_elements) if layout == V else 0.0)

    def summed_s(n_elements: int) -> float:
        """What a gradient adds to the one sum of all that ranks have shares of."""
        n_bytes = n_elements * element_bytes(precision).reduced
        return context.tp_collective_s("all_reduce", n_bytes) - context.tp_collective_s("all_reduce", 1)

    def converted_s(spec: TensorSpec, step: Conversion) -> float:
        return communication * conversion_s(context, spec.n_bytes(batch_size, precision), step)

    return ShardingPrices(
        op_s=op_s,
        conversion_s=converted_s,
        parameter_s=parameter_s,
    )


def sharding_figures(hardware: HardwareProfile, *, degree: int) -> str:
    """All that `sharding_prices` reads of a cluster: equal text, equal prices."""
    route = route_of(axis_group(hardware, size=degree, stride=1), hardware)
    device = replace(
        hardware.device,
        name="",
        memory_bytes=0,
        collective_launch_s=0.0,
        pipeline_action_s=0.0,
        pipeline_transfer_s=0.0,
        sharding=NO_SHARDING,
    )
    return f"{device}, {route}"
