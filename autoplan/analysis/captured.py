"""Whether the passes of a plan can be a CUDA graph, as far as the traced model tells.

A graph replays what it saw: the same kernels on the same memory. What cannot be in one: code that waits for the device
to know how to go on, and numbers of the host's that change from step to step. What a trace does not show, the program
notices before it captures anything (see `runtime.cuda_graph`).
"""

from __future__ import annotations

from autoplan.analysis.random_numbers import draws_numbers
from autoplan.graph import OpGraph
from autoplan.tensor_parallel.expert_rows import GROUPED_PRODUCT


def why_uncaptured(graph: OpGraph, *, precision: str, grad_compression: str, is_cpu: bool) -> str:
    """Why no plan of a model can have its passes captured; "" where they can be."""
    if is_cpu:
        return "a CPU"
    if graph.is_module_level:
        return "a forward that branches on data"
    if precision == "fp16":
        return "fp16, whose loss scale changes from step to step"
    if grad_compression != "none":
        return f"gradients compressed by {grad_compression}, which counts steps"
    return ""


def why_shards_uncaptured(graph: OpGraph) -> str:
    """Why none can that splits the model by tensor parallelism."""
    if any(op.target == GROUPED_PRODUCT for op in graph.ops):
        return "experts, of which each rank has as many rows as the device finds"
    if draws_numbers(graph):
        return "shards that draw random numbers of their own"
    return ""
