"""What sums over the ops of a segment depend on, besides the segment and the micro-batch.

A context holds nothing of the cluster but its device and the links that the tensor-parallel axis crosses, and equal
ones are one object. So all problems of a process that differ in hosts, networks or batches only share it, and with it
what is computed from it (`cost.rank_segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

from autoplan.analysis.attention_kernel import scattered_masks
from autoplan.analysis.chunked_loss import ChunkedHead, chunked_head
from autoplan.analysis.idle_ops import idle_ops
from autoplan.cost.collective_time import Route, axis_group, route_of, route_s
from autoplan.cost.waits import COLLECTIVE_WAIT_S
from autoplan.graph import LOSS_PATH, GraphFacts, Op, OpGraph
from autoplan.hardware import Device, HardwareProfile
from autoplan.parallel_plan import Execution
from autoplan.rules import OpRule

CONTIGUOUS = Execution().memory_format
N_GRAPHS = 4  # that a process keeps contexts of
N_CONTEXTS = 32  # of each: degrees x devices x precisions x ways to lie in memory


class ContextOf(Protocol):
    """From the tensor-parallel degree, and how values lie in memory, to what the sums depend on."""

    def __call__(self, degree: int, memory_format: str = CONTIGUOUS, *, keeps_modules: bool = False) -> WorkContext: ...


@dataclass(frozen=True, slots=True, eq=False)
class WorkContext:
    """Everything the sums depend on besides the segment and the micro-batch.

    Attributes:
        tp_collective_s: (kind, full bytes) -> seconds on the tensor-parallel axis, with the wait before it.
        idle: the `idle_ops`.
        head: what of the model a chunked loss computes slice by slice, if it can.
        memory_format: of images, as in `Execution`.
        scattered: masks of attention of which the numbers of a row lie apart in memory; generated code has none.
        is_compiled: whether torch.compile has the ops.
    """

    graph: OpGraph
    facts: GraphFacts
    rules: Mapping[str, OpRule]
    device: Device
    precision: str
    degree: int
    tp_collective_s: Callable[[str, float], float]
    idle: frozenset[str] = frozenset()
    head: ChunkedHead | None = None
    memory_format: str = CONTIGUOUS
    scattered: frozenset[str] = frozenset()
    is_compiled: bool = False

    def precision_of(self, op: Op) -> str:
        """The precision an op computes in: float32 in the loss function when the plan has 16 bits."""
        is_widened = op.module_path == LOSS_PATH and self.precision in ("bf16", "fp16")
        return "fp32" if is_widened else self.precision


def work_contexts(graph: OpGraph, hardware: HardwareProfile, precision: str, rules: Mapping[str, OpRule]) -> ContextOf:
    """What the sums depend on, by degree and memory format, in generated code or with the user's own modules."""
    shared = _shared_contexts(graph, tuple(rules.items()))
    scattered = scattered_masks(graph)

    def context(degree: int, memory_format: str = CONTIGUOUS, *, keeps_modules: bool = False) -> WorkContext:
        route = route_of(axis_group(hardware, size=degree, stride=1), hardware)
        return shared(hardware.device, precision, route, memory_format, scattered if keeps_modules else frozenset())

    return cache(context)


@lru_cache(maxsize=N_GRAPHS)
def _shared_contexts(
    graph: OpGraph, rules: tuple[tuple[str, OpRule], ...]
) -> Callable[[Device, str, Route, str, frozenset[str]], WorkContext]:
    """Those of one graph under these rules."""
    facts, idle, head, table = GraphFacts.of(graph), idle_ops(graph), chunked_head(graph), dict(rules)

    @lru_cache(maxsize=N_CONTEXTS)
    def context(
        device: Device, precision: str, route: Route, memory_format: str, scattered: frozenset[str]
    ) -> WorkContext:
        def tp_collective_s(kind: str, n_bytes: float) -> float:
            seconds = route_s(kind, n_bytes, route)
            return seconds + COLLECTIVE_WAIT_S if seconds else 0.0

        tp = route.n_devices
        shared_s = cache(tp_collective_s)
        return WorkContext(graph, facts, table, device, precision, tp, shared_s, idle, head, memory_format, scattered)

    return context
