"""Whether the passes of a plan can be a CUDA graph, as far as the traced model tells.

A graph replays what it saw: the same kernels on the same memory. What cannot be in one: code that waits for the device
to know how to go on, and numbers of the host's that change from step to step. What a trace does not show, the program
notices before it captures anything (see `runtime.stages.cuda_graph`).
"""

from __future__ import annotations

from autoplan.analysis.random_numbers import draws_numbers
from autoplan.graph import OpGraph
from autoplan.schedules import splits_backward
from autoplan.tensor_parallel.expert_rows import GROUPED_PRODUCT


def why_uncaptured(
    graph: OpGraph,
    *,
    precision: str,
    grad_compression: str,
    is_cpu: bool,
    tp: int = 1,
    runs_own_modules: bool = False,
    recomputes: bool = False,
    schedule: str = "",
    has_shares: bool = False,
) -> str:
    """Why the passes of such plans of a model cannot be captured; "" where they can be.

    What is not given does not matter: left out, the answer holds for plans without it. `runs_own_modules`: the user's
    classes run, not generated code. `recomputes`: some block is recomputed. `has_shares`: ranks of a mixed cluster have
    numbers of micro-batches of their own.
    """
    if is_cpu:
        return "a CPU"
    if graph.is_module_level:
        return "a forward that branches on data"
    if precision == "fp16":
        return "fp16, whose loss scale changes from step to step"
    if grad_compression != "none":
        return f"gradients compressed by {grad_compression}, which counts steps"
    if runs_own_modules and graph.waits_at:
        return f"a forward of the model's own that waits for the device: {graph.waits_at}"
    if schedule and splits_backward(schedule):
        return f"schedule {schedule}, whose split backward pass nobody has captured"
    if has_shares:
        return "shares of the batch that differ between groups, which nobody has captured"
    if tp > 1 and any(op.target == GROUPED_PRODUCT for op in graph.ops):
        return "experts, of which each rank has as many rows as the device finds"
    if tp > 1 and draws_numbers(graph):
        return "shards that draw random numbers of their own"
    if recomputes and not may_recompute_captured(graph):
        return "recomputed blocks that draw random numbers"
    return ""


def may_recompute_captured(graph: OpGraph) -> bool:
    """Whether blocks may be recomputed inside a graph: what they draw, they cannot draw again there."""
    return not draws_numbers(graph)
