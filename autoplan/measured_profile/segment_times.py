"""Measured profile: what `autoplan profile` found out, read back and checked against the question at hand.

    measured.json    one JSON object per line; each names model, device, torch, driver and precision of its own

so results of several models, precisions and devices may stand in one file. Lines of other devices and precisions are
left out; a file none of whose lines belongs to this device, precision and model is an error that says which of them is
wrong. Of two lines for one thing the later one counts. A line without `compiled` was measured eager, one without
`memory_format` on contiguous tensors, one without `module` on generated code; "own" is the user's own module, which
programs without tensor and pipeline parallelism run. A line of generated code says by `code` which code that was;
where it does not, as in files of before, it counts for whatever code is generated. See `space.current_code`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from autoplan.errors import InputError
from autoplan.json_values import loads_finite
from autoplan.measured_profile.op_times import OPS, SegmentOps, about, check_ops, segment_ops
from autoplan.options import MEMORY_FORMATS
from autoplan.parallel_plan import Execution

SCHEMA_VERSION = 1
MEASURED, NOISY, OUT_OF_MEMORY = "measured", "noisy", "out of memory"
NOT_COMPILED, NOT_RUN = "not compiled", "not run"
STATUSES = MEASURED, NOISY, OUT_OF_MEMORY, NOT_COMPILED, NOT_RUN
GENERATED, OWN = "generated", "own"
_SEGMENT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "content": str,
    "assignment": str,
    "segment": str,
    "boundary": str,
    "tp": int,
    "micro_batch_size": int,
}
# As in measuring_program.timing: a host that is faster than this share of the device's time is not what that waits for.
HOST_BOUND = 0.9
# The part of the time of the user's own modules, which read better, that generated code must save to be offered.
WORTH_GENERATING = 0.05
_TIME_FIELDS = ("forward_s", "backward_s", "host_forward_s", "host_backward_s")
_GRAPH_FIELDS = ("graph_forward_s", "graph_backward_s")


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """One segment, measured.

    Attributes:
        content, assignment: keys of `segment_key`.
        boundary: the layout between segments; "" without tensor parallelism.
        forward_s, backward_s: on the device; communication left out.
        host_forward_s, host_backward_s: what the host takes to launch it.
        graph_forward_s, graph_backward_s: on the device, replayed as a CUDA graph; None where it was not.
        saved_bytes: distinct tensors that it keeps from forward to backward.
        working_bytes: the most it has allocated besides these, less all gradients of its weights: below zero where few
            of them are there at that moment. None where unknown.
        execution: how it ran; a segment that runs alike under two of them is measured once, under the first.
        is_own: whether it was the user's own module, and not the code generated for it.
        code: key of the generated code; None where it is not known, and for the user's own modules.
    """

    content: str
    assignment: str
    tp: int
    boundary: str
    micro_batch_size: int
    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float
    saved_bytes: int
    working_bytes: int | None
    execution: Execution = Execution()
    is_own: bool = False
    code: str | None = None
    graph_forward_s: float | None = None
    graph_backward_s: float | None = None

    @property
    def subject(self) -> tuple[object, ...]:
        """What was measured, whatever its code was."""
        return self.content, self.assignment, self.tp, self.micro_batch_size, self.execution, self.is_own


@dataclass(frozen=True, slots=True)
class FailedSegment:
    """One segment that did not run so, where it does without compiling or in contiguous memory; as `SegmentTime`."""

    segment: str
    content: str
    assignment: str
    tp: int
    execution: Execution
    code: str | None = None


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """The measurements that belong to one model, device and precision.

    Attributes:
        optimizer_element_s: gradient norm and one AdamW step, per element; None when not measured.
        source: file, device, and versions, for reports.
        failed: what did not run where it does otherwise.
        ops: of eager segments; none in files of before they were measured.
    """

    segments: tuple[SegmentTime, ...]
    optimizer_element_s: float | None
    source: str
    failed: tuple[FailedSegment, ...] = ()
    ops: tuple[SegmentOps, ...] = ()

    @property
    def executions(self) -> frozenset[Execution]:
        """The ways in which something was measured."""
        return frozenset(row.execution for row in self.segments)

    @property
    def is_worth_generating(self) -> bool | None:
        """Whether some block ran faster as generated code than as the user's own module; None if none ran as both."""
        times: dict[tuple[object, ...], dict[bool, float]] = {}
        for row in self.segments:
            key = row.content, row.assignment, row.tp, row.micro_batch_size, row.execution
            times.setdefault(key, {})[row.is_own] = row.forward_s + row.backward_s
        pairs = [found for found in times.values() if len(found) == len((GENERATED, OWN))]
        gains = [found[False] < (1.0 - WORTH_GENERATING) * found[True] for found in pairs]
        return any(gains) if gains else None

    def rows(self, executions: Mapping[str, Execution], *, keeps_modules: bool = False) -> tuple[SegmentTime, ...]:
        """The measurements of segments that run so, by content.

        With `keeps_modules` they are those of the user's own modules where these were measured, which is at degree 1;
        without it, where nothing else was.
        """
        found = [row for row in self.segments if row.execution == executions.get(row.content, Execution())]
        own, generated = ({(row.content, row.tp) for row in found if row.is_own == is_own} for is_own in (True, False))
        chosen = own if keeps_modules else own - generated
        return tuple(row for row in found if row.is_own == ((row.content, row.tp) in chosen))


def parse_measured_profile(
    text: str, *, where: str, device: str, precision: str, contents: Collection[str], model: str
) -> MeasuredProfile:
    """The measurements in `text` for this device, precision and model, whose segments have these content keys.

    Raises: InputError naming file, field, what was found and what was expected.
    """
    rows = [_parse_line(line, f"{where}:{number}") for number, line in enumerate(text.splitlines(), 1)]
    _require(f"{where}: rows", bool(rows), "no line", "the results of `autoplan profile`", "profile again")
    matching = _matching(rows, where, "device", device, "measure on a device of --hw, or plan for the one measured")
    matching = _matching(
        matching, where, "precision", precision, f"profile with --precision {precision}, or plan in that one"
    )
    segments = {row_key(row): row for row in matching if row["what"] == "segment" and row["content"] in contents}
    if not segments:
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in matching))
        fix = "profile this model, with the same --set values"
        _require(f"{where}: model", False, models, f"{model}, with some segment in common", fix)
    optimizer = [
        row["per_element_s"] for row in matching if row["what"] == "optimizer" and row["status"] != OUT_OF_MEMORY
    ]
    versions = dict.fromkeys(f"torch {row['torch']}, driver {row['driver'] or 'unknown'}" for row in segments.values())
    n_noisy = sum(row["status"] == NOISY for row in segments.values())
    noise = f"; {n_noisy} of {len(segments)} measurements noisy: times spread by more than 10 %" if n_noisy else ""
    replayed = [row.get("graph_forward_s") is not None for row in segments.values() if "forward_s" in row]
    if any(replayed) and not all(replayed):
        noise += f"; {replayed.count(False)} of {len(replayed)} not measured as CUDA graphs"
    return MeasuredProfile(
        segments=_with_typical_host(
            tuple(_segment_time(row) for row in segments.values() if row["status"] in (MEASURED, NOISY))
        ),
        optimizer_element_s=optimizer[-1] if optimizer else None,
        source=f"{where}: {device}, {'; '.join(versions)}{noise}",
        failed=tuple(_failures(segments)),
        ops=tuple(
            segment_ops(row)
            for row in {row_key(row): row for row in matching if row["what"] == OPS}.values()
            if row["status"] == MEASURED and row["content"] in contents
        ),
    )


def _failures(segments: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[FailedSegment]:
    """What torch.compile failed on, and what did not run in another memory format than that in which it did."""
    for row in segments.values():
        execution = _execution(row)
        plain = segments.get(row_key({**row, "compiled": False, "memory_format": Execution().memory_format}))
        runs = plain is not None and plain["status"] in (MEASURED, NOISY)
        is_other = execution.memory_format != Execution().memory_format
        if row["status"] == NOT_COMPILED or (row["status"] == NOT_RUN and is_other and runs):
            yield FailedSegment(
                row["segment"], row["content"], row["assignment"], row["tp"], execution, row.get("code")
            )


def _with_typical_host(segments: tuple[SegmentTime, ...]) -> tuple[SegmentTime, ...]:
    """The host takes as long for every micro-batch size: the median of its times counts.

    A row whose device seemed to wait, for a host that by this is faster, saw the device's own time under load.
    """
    groups: dict[tuple[object, ...], list[SegmentTime]] = {}
    for row in segments:
        groups.setdefault((row.content, row.assignment, row.tp, row.execution, row.is_own, row.code), []).append(row)
    return tuple(
        replace(
            row,
            forward_s=_device_s(row.forward_s, row.host_forward_s, typical_s=host_forward_s),
            backward_s=_device_s(row.backward_s, row.host_backward_s, typical_s=host_backward_s),
            host_forward_s=host_forward_s,
            host_backward_s=host_backward_s,
        )
        for group in groups.values()
        for host_forward_s in [median(row.host_forward_s for row in group)]
        for host_backward_s in [median(row.host_backward_s for row in group)]
        for row in group
    )


def _device_s(device_s: float, host_s: float, *, typical_s: float) -> float:
    return host_s if device_s < host_s and typical_s < HOST_BOUND * host_s else device_s


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a line is about."""
    names = ("content", "assignment", "tp", "micro_batch_size")
    return (*(row[name] for name in names), _execution(row), row.get("module", GENERATED), row.get("code"))


def _execution(row: Mapping[str, Any]) -> Execution:
    """Files of before a way existed hold the plain one."""
    plain = Execution()
    return Execution(row.get("compiled", plain.compile), row.get("memory_format", plain.memory_format))


def _matching(rows: list[dict[str, Any]], where: str, field: str, wanted: str, fix: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row[field].lower() == wanted.lower()]
    others = ", ".join(dict.fromkeys(row[field] for row in rows))
    _require(f"{where}: {field}", bool(found), others, wanted, fix)
    return found


def _parse_line(line: str, where: str) -> dict[str, Any]:
    again = "run autoplan profile again with the same --out: it repairs the end of the file and goes on"
    try:
        row = loads_finite(line)
    except (ValueError, RecursionError) as error:
        raise InputError.of(where, found=str(error), expected="one JSON object per line", fix=again) from error
    _require(where, isinstance(row, dict), type(row).__name__, "a JSON object", again)
    version = row.get("schema_version")
    _require(f"{where}: schema_version", version == SCHEMA_VERSION, version, str(SCHEMA_VERSION), "profile again")
    for name in ("what", "model", "precision", "device", "torch", "driver", "status"):
        _require(f"{where}: {name}", isinstance(row.get(name), str), row.get(name), "a text", "profile again")
    _check_numbers(row, where)
    return dict(row)


def _check_numbers(row: Mapping[str, Any], where: str) -> None:
    has_times = row["status"] in (MEASURED, NOISY)
    is_known = row["what"] in ("segment", "optimizer", OPS) and row["status"] in STATUSES
    expected = "a segment, its ops or the optimizer, measured"
    _require(where, is_known, f"{row['what']}, {row['status']}", expected, "profile again")
    if row["what"] == "optimizer":
        names: tuple[str, ...] = ("per_element_s",)
    else:
        names = () if row["what"] == OPS else (*_TIME_FIELDS, "saved_bytes")
        compiled = _execution(row).compile
        _require(f"{where}: compiled", isinstance(compiled, bool), compiled, "true or false", "profile again")
        memory_format = _execution(row).memory_format
        expected = " or ".join(MEMORY_FORMATS)
        _require(f"{where}: memory_format", memory_format in MEMORY_FORMATS, memory_format, expected, "profile again")
        module = row.get("module", GENERATED)
        _require(f"{where}: module", module in (GENERATED, OWN), module, f"{GENERATED} or {OWN}", "profile again")
        code = row.get("code")
        _require(f"{where}: code", code is None or isinstance(code, str), code, "a text", "profile again")
        for name, kind in _SEGMENT_FIELDS.items():
            fits = isinstance(row.get(name), kind) and (kind is str or row[name] > 0)
            _require(f"{where}: {name}", fits, row.get(name), "a text" if kind is str else "a count", "profile again")
        working = row.get("working_bytes")
        for name in _GRAPH_FIELDS:
            replayed = row.get(name)
            fits = replayed is None or _is_amount(replayed)
            _require(f"{where}: {name}", fits, replayed, "0 or more, or null", "profile again")
        is_fit = working is None or type(working) in (int, float)
        _require(f"{where}: working_bytes", is_fit, working, "a number of bytes, or null", "profile again")
    if row["what"] == OPS and has_times:
        check_ops(row, where)
    for name in names if has_times else ():
        _require(f"{where}: {name}", _is_amount(row.get(name)), row.get(name), "0 or more", "profile again")


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _require(where: str, holds: bool, found: object, expected: str, fix: str) -> None:
    if not holds:
        raise InputError.of(where, found=found, expected=expected, fix=fix)


def _segment_time(row: Mapping[str, Any]) -> SegmentTime:
    working = row["working_bytes"]
    return SegmentTime(
        **about(row),
        forward_s=float(row["forward_s"]),
        backward_s=float(row["backward_s"]),
        host_forward_s=float(row["host_forward_s"]),
        host_backward_s=float(row["host_backward_s"]),
        saved_bytes=int(row["saved_bytes"]),
        working_bytes=None if working is None else int(working),
        execution=_execution(row),
        is_own=row.get("module", GENERATED) == OWN,
        graph_forward_s=row.get("graph_forward_s"),
        graph_backward_s=row.get("graph_backward_s"),
    )
