"""Measured times in place of computed ones: the work of a segment, corrected by what was measured.

    measured      the same content, assignment and micro-batch: the measured seconds and bytes
    scaled        the same content and degree, another micro-batch or assignment: computed x measured / computed there,
                  at the nearest micro-batch, and as if an assignment that is unknown here were the one of its boundary
    calibrated    not measured: computed x the median of measured / computed of the same content at other degrees, or of
                  the user's own class in place of generated code; else, for the host, and for the device where the
                  segment is compiled, of all that runs in the same way; for the host, if nothing does, of all

Computed is the roofline of `segment_work`, which knows eager operators only: what compiling gains is in the ratios.
What other segments took says nothing about the device time of an eager one (benchmarks/op_calibration.py). A kind is
corrected by what was measured of it as it runs (`analysis.executions`). A program of the user's own classes is
corrected by what was measured of these, where they could be measured. In a CUDA graph passes take as much less of the
device as the measured block did when it was replayed as one. Bytes are only scaled, never calibrated: they are
counted, not rated. A measured backward pass includes that of the weights, which is taken to be as large a part of it as
computed. The chunked loss is not measured: what it takes beyond the whole one is scaled as that is. Nor is attention,
which recomputation may keep: it is taken to be as large a part of a measured forward pass as of the computed one, of
eager operators. Compiled it is a larger part of less, so that keeping it spares more than is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from autoplan.cost.chunked_loss import chunked_as
from autoplan.cost.kept_attention import KeptAttention
from autoplan.cost.segment_work import AS_IN_STREAM, WHOLE_PASS, PassRatios, SegmentWork, fraction_of
from autoplan.cost.table import CALIBRATED, MEASURED, SCALED
from autoplan.measured_profile.segment_times import MeasuredProfile, SegmentTime
from autoplan.parallel_plan import Execution

Compute = Callable[[int, str, int, int, bool], SegmentWork]  # (tp, sharding, micro-batch size, kind, own class)


@dataclass(frozen=True, slots=True)
class _Ratio:
    """Measured over computed, of one measurement that can be computed here."""

    row: SegmentTime
    forward: float
    backward: float
    host_forward: float
    host_backward: float
    in_graph: PassRatios | None
    saved: float
    working: float | None


@dataclass(frozen=True, slots=True)
class Correction:
    """Replaces computed work by measured work; `Correction.of` reads what was measured.

    Attributes:
        contents: content key of each kind.
        assignments: (tp, boundary) -> assignment key of each kind; "sharding" is the boundary by its other name.
        executions: how each kind runs.
        keeps_modules: whether the program is made of the user's own classes.
    """

    contents: dict[int, str]
    assignments: dict[tuple[int, str], dict[int, str]]
    ratios: tuple[_Ratio, ...]
    executions: dict[int, Execution]
    keeps_modules: bool

    @classmethod
    def of(
        cls,
        measured: MeasuredProfile,
        *,
        contents: dict[int, str],
        assignments: dict[tuple[int, str], dict[int, str]],
        compute: Compute,
        executions: dict[int, Execution],
        keeps_modules: bool = False,
    ) -> Correction:
        """What these measurements say about these kinds and assignments."""
        places = {
            (content, assignments[split][kind], split[0]): (*split, kind)
            for split in assignments
            for kind, content in contents.items()
        }
        ratios = []
        of_kinds = {contents[kind]: execution for kind, execution in executions.items()}
        for row in measured.rows(of_kinds, keeps_modules=keeps_modules):
            place = places.get((row.content, row.assignment, row.tp))
            if place is None and (row.tp, row.boundary) in assignments:
                place = next(
                    ((row.tp, row.boundary, kind) for kind, key in contents.items() if key == row.content), None
                )
            if place is not None:
                tp, sharding, kind = place
                ratios.append(_ratio(row, compute(tp, sharding, row.micro_batch_size, kind, row.is_own)))
        return cls(contents, assignments, tuple(ratios), executions, keeps_modules)

    def corrected(
        self, work: SegmentWork, *, kind: int, tp: int, sharding: str, micro_batch_size: int
    ) -> tuple[SegmentWork, str]:
        """The work as measured, or as close to that as the measurements come, and which of these it is."""
        found, source = self._corrected(work, kind=kind, tp=tp, sharding=sharding, micro_batch_size=micro_batch_size)
        is_compiled = self.executions[kind].compile
        if is_compiled:  # one op to autograd, which keeps what it made
            attention = None if found.attention is None else replace(found.attention, n_seen_ops=0)
            elsewhere = found.elsewhere.compiled(found.elsewhere.of_kind_bytes)
            found = replace(found, repeated=WHOLE_PASS, attention=attention, elsewhere=elsewhere)
        return replace(found, chunked=chunked_as(found, work, is_compiled=is_compiled)), source

    def _corrected(
        self, work: SegmentWork, *, kind: int, tp: int, sharding: str, micro_batch_size: int
    ) -> tuple[SegmentWork, str]:
        assignment = self.assignments[tp, sharding][kind]
        alike = [r for r in self.ratios if r.row.content == self.contents[kind]]
        same = [r for r in alike if r.row.tp == tp and (self.keeps_modules or not r.row.is_own)]
        same = [r for r in same if r.row.assignment == assignment] or same
        same = [r for r in same if r.row.boundary == sharding] or same
        if same:
            nearest = min(same, key=lambda r: _distance(r.row.micro_batch_size, micro_batch_size))
            is_exact = nearest.row.micro_batch_size == micro_batch_size and nearest.row.assignment == assignment
            return (_as_measured(work, nearest.row), MEASURED) if is_exact else (_scaled(work, nearest), SCALED)
        ways = alike or [r for r in self.ratios if r.row.execution == self.executions[kind]]
        of_device = ways if self.executions[kind].compile else alike
        return _calibrated(work, of_device=of_device, of_host=ways or self.ratios), CALIBRATED


def _distance(found: int, wanted: int) -> tuple[float, int]:
    """How many times larger or smaller; of two equally near the larger micro-batch."""
    return max(found / wanted, wanted / found), -found


def _ratio(row: SegmentTime, computed: SegmentWork) -> _Ratio:
    measured = None if row.working_bytes is None else row.working_bytes + computed.weight_bytes
    working = None if measured is None else fraction_of(measured, computed.working_bytes)
    return _Ratio(
        row=row,
        forward=fraction_of(row.forward_s, computed.forward_s),
        backward=fraction_of(row.backward_s, computed.backward_s),
        host_forward=fraction_of(row.host_forward_s, computed.host_forward_s),
        host_backward=fraction_of(row.host_backward_s, computed.host_backward_s),
        in_graph=_in_graph(row),
        saved=fraction_of(row.saved_bytes, computed.saved_bytes),
        working=working,
    )


def _in_graph(row: SegmentTime) -> PassRatios | None:
    if row.graph_forward_s is None or row.graph_backward_s is None:
        return None
    ratios = fraction_of(row.graph_forward_s, row.forward_s), fraction_of(row.graph_backward_s, row.backward_s)
    return PassRatios(*(min(1.0, ratio) for ratio in ratios))


def _as_measured(work: SegmentWork, row: SegmentTime) -> SegmentWork:
    return replace(
        work,
        forward_s=row.forward_s,
        backward_s=row.backward_s,
        host_forward_s=row.host_forward_s,
        host_backward_s=row.host_backward_s,
        weight_backward_s=work.weight_backward_s * fraction_of(row.backward_s, work.backward_s),
        attention=_attention(
            work,
            forward=fraction_of(row.forward_s, work.forward_s),
            host_forward=fraction_of(row.host_forward_s, work.host_forward_s),
        ),
        in_graph=_in_graph(row) or AS_IN_STREAM,
        saved_bytes=row.saved_bytes,
        working_bytes=work.working_bytes if row.working_bytes is None else row.working_bytes + work.weight_bytes,
    )


def _scaled(work: SegmentWork, ratio: _Ratio) -> SegmentWork:
    """The host's time does not depend on the micro-batch."""
    return replace(
        _timed(work, forward=ratio.forward, backward=ratio.backward),
        attention=_attention(work, forward=ratio.forward, host_forward=ratio.host_forward),
        host_forward_s=work.host_forward_s * ratio.host_forward,
        host_backward_s=work.host_backward_s * ratio.host_backward,
        in_graph=ratio.in_graph or AS_IN_STREAM,
        saved_bytes=round(work.saved_bytes * ratio.saved),
        working_bytes=round(work.working_bytes * (1.0 if ratio.working is None else ratio.working)),
    )


def _calibrated(work: SegmentWork, *, of_device: Sequence[_Ratio], of_host: Sequence[_Ratio]) -> SegmentWork:
    """By the medians of what was measured; where nothing was, as computed."""
    if of_device:
        forward, backward = median(r.forward for r in of_device), median(r.backward for r in of_device)
        known = [r.in_graph for r in of_device if r.in_graph is not None]
        in_graph = PassRatios(*map(median, zip(*known, strict=True))) if known else AS_IN_STREAM
        work = replace(_timed(work, forward=forward, backward=backward), in_graph=in_graph)
    if not of_host:
        return work
    host_forward = median(r.host_forward for r in of_host)
    return replace(
        work,
        attention=_attention(work, host_forward=host_forward),
        host_forward_s=work.host_forward_s * host_forward,
        host_backward_s=work.host_backward_s * median(r.host_backward for r in of_host),
    )


def _timed(work: SegmentWork, *, forward: float, backward: float) -> SegmentWork:
    return replace(
        work,
        forward_s=work.forward_s * forward,
        backward_s=work.backward_s * backward,
        weight_backward_s=work.weight_backward_s * backward,
        attention=_attention(work, forward=forward),
    )


def _attention(work: SegmentWork, *, forward: float = 1.0, host_forward: float = 1.0) -> KeptAttention | None:
    """As much longer or shorter as the whole forward pass."""
    return None if work.attention is None else work.attention.timed(forward=forward, host_forward=host_forward)
