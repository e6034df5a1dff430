"""What recomputation spares, and keeps, that keeps fused attention: its result, and a log-sum-exp for each query row.

    recompute_s    that of the whole block - the forward time of attention
    saved_bytes    the inputs of the block + results + 4 bytes for each row

Its inputs are computed again. Sizes are those of a rank: of its heads, or of its rows of the query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoplan.analysis.attention_kernel import log_sum_exp_bytes
from autoplan.analysis.kept_attention import is_fused_attention
from autoplan.cost.local_segment import LocalOp, LocalSegment
from autoplan.cost.op_time import OpTime, host_s
from autoplan.cost.work_context import WorkContext

# Host time of each op of a block that keeps attention, in each of both passes: Python looks at it. 20 us forward, 19 us
# again (33 ops of a GPT block, torch 2.13, one CPU core); taken for all hosts.
SEEN_OP_HOST_S = 2e-5


@dataclass(frozen=True, slots=True)
class KeptAttention:
    """The fused attention of a segment.

    Attributes:
        forward_s, host_forward_s: of the device and of the host, in the pass that runs again.
        n_bytes: what is kept.
        n_seen_ops: ops that Python looks at, in each of both passes.
    """

    forward_s: float
    host_forward_s: float
    n_bytes: int
    n_seen_ops: int

    @property
    def seen_s(self) -> float:
        """What looking at ops takes the host, in both passes."""
        return 2 * self.n_seen_ops * SEEN_OP_HOST_S

    def timed(self, *, forward: float, host_forward: float) -> KeptAttention:
        """With times that are so many times longer."""
        return replace(self, forward_s=self.forward_s * forward, host_forward_s=self.host_forward_s * host_forward)


def fused_ops(context: WorkContext, ops: Iterable[LocalOp]) -> tuple[int, ...]:
    """The indices of those that are fused attention."""
    return tuple(
        index
        for index, local in enumerate(ops)
        if is_fused_attention(
            local.op,
            context.facts,
            precision=context.precision,
            attention=context.device.attention,
            scattered=context.scattered,
        )
    )


def kept_attention(
    context: WorkContext, segment: LocalSegment, times: Mapping[int, OpTime], batch_size: int, *, launches: float = 1.0
) -> KeptAttention | None:
    """That of a segment; None where it has none.

    `times` are those of all ops that are kernels of their own; `launches` of the host are for each that they say.
    """
    found = fused_ops(context, segment.ops)
    if not found:
        return None
    again = [times[index] for index in found if index < segment.n_repeated_ops]
    return KeptAttention(
        forward_s=sum(time.forward_s for time in again),
        host_forward_s=host_s(context.device, launches * sum(time.n_launches for time in again)),
        n_bytes=sum(_kept_bytes(segment.ops[index], batch_size) for index in found),
        n_seen_ops=len(times),
    )


def _kept_bytes(local: LocalOp, batch_size: int) -> int:
    (result,) = local.results
    return result.n_bytes(batch_size, local.precision) + log_sum_exp_bytes(local.operands[0], batch_size)
