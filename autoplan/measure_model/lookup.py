"""What a measured profile says of one question: the measurements of its model, and the ops of a plan's segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoplan.errors import InputError
from autoplan.files import read_text_file
from autoplan.graph import GraphFacts, OpGraph
from autoplan.hardware import HardwareProfile
from autoplan.measure_model.op_comparison import compare_ops, computed_ops
from autoplan.measured_profile.op_times import SegmentComparison
from autoplan.measured_profile.segment_key import content_key
from autoplan.measured_profile.segment_times import MeasuredProfile, parse_measured_profile
from autoplan.options import Options
from autoplan.parallel_plan import Plan
from autoplan.rules import load_rules
from autoplan.space.current_code import WHOLE_MODEL, with_current_code


def measurements_of(
    options: Options, graph: OpGraph, hardware: HardwareProfile, *, model: str
) -> MeasuredProfile | None:
    """What the file `options.profile` holds of this model on this device; None when there is no file.

    What was measured of code that is not generated any more is left out.

    Raises: InputError when it belongs to another model, device or precision, or is damaged, or nothing of it counts.
    """
    if options.profile is None:
        return None
    file, facts = Path(options.profile), GraphFacts.of(graph)
    contents = {content_key(graph, facts, segment) for segment in graph.first_of_kind().values()}
    found = parse_measured_profile(
        read_text_file(file),
        where=str(file),
        device=hardware.device.name,
        precision=options.precision,
        contents=contents,
        model=model,
    )
    rules = load_rules(options.rules)
    counting = with_current_code(found, graph, [WHOLE_MODEL], precision=options.precision, rules=rules)
    if found.segments and not counting.segments:
        raise InputError.of(
            f"{file}: code",
            found="measurements of code that is not generated any more",
            expected="those of code of today",
            fix="profile again",
        )
    n_old = len(found.segments) - len(counting.segments)
    told = f"; {n_old} measurements of code that is not generated any more left out" if n_old else ""
    return replace(counting, source=counting.source + told)


def ops_of_plan(
    options: Options, graph: OpGraph, hardware: HardwareProfile, plan: Plan, measured: MeasuredProfile | None
) -> tuple[SegmentComparison, ...]:
    """The ops of the segments of a plan: measured beside computed, or computed where none were measured."""
    rules = load_rules(options.rules)
    if measured is not None and measured.ops:
        return compare_ops(graph, hardware, plan, measured, rules=rules)
    return computed_ops(graph, hardware, plan, rules=rules)
