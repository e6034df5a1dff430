"""What would calibrate segments that were not measured best? Each kind of segment in turn, from the others.

    python benchmarks/op_calibration.py RESULTS.jsonl [HARDWARE]

RESULTS is what `autoplan profile` wrote for the models of cases.csv. The time of a segment is computed by the roofline
and corrected by what was measured of the other kinds of segments:

    none        as computed
    segments    x the median of measured / computed over the other kinds
    ops         each op x the ratio of its kind, all ratios 0 or more, fitted to the times of the other kinds at once

A kind of op is the file of cost_models that has its rule. Only eager, unsplit segments of generated code are compared,
at their largest micro-batch; the error of a way is the mean of |log(predicted / measured)|, forward and backward apart.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import predictions

from autoplan import cost_models
from autoplan.api import trace_model
from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import segment_work, timed
from autoplan.cost.work_context import work_contexts
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import content_key
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding

WAYS = "none", "segments", "ops"
OTHER = "other"
N_SWEEPS = 2000  # of coordinate descent


@dataclass(frozen=True)
class Sample:
    """One kind of segment in one direction: measured, and computed by kind of op."""

    model: str
    segment: str
    direction: str
    measured_s: float
    parts_s: dict[str, float]

    @property
    def computed_s(self) -> float:
        return sum(self.parts_s.values())


def kinds_of_ops() -> dict[str, str]:
    """The file of cost_models that has the rule of an op."""
    found = {}
    for path in sorted(Path(cost_models.__path__[0]).glob("*.py")):
        if path.stem != "__init__":
            module = __import__(f"autoplan.cost_models.{path.stem}", fromlist=["RULES"])
            found |= dict.fromkeys(getattr(module, "RULES", {}), path.stem)
    return found


def samples(results: Path, hw: str) -> list[Sample]:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    plain = [
        row
        for row in rows
        if row["what"] == "segment" and row["tp"] == 1 and row["status"] == "measured" and not row.get("compiled")
        and row.get("module", "generated") == "generated" and row.get("memory_format", "contiguous") == "contiguous"
    ]  # fmt: skip
    largest = {row["content"]: row for row in sorted(plain, key=lambda row: row["micro_batch_size"])}
    hardware, rules, kinds = load_hardware_profile(hw), load_rules(), kinds_of_ops()
    found: dict[tuple[str, str], Sample] = {}
    for case in {(c.model, c.set): c for c in predictions.cases()}.values():
        graph = trace_model(case.file, overrides=case.overrides)
        facts, context = GraphFacts.of(graph), work_contexts(graph, hardware, "bf16", rules)(1)
        for segment in graph.first_of_kind().values():
            row = largest.get(content_key(graph, facts, segment))
            if row is None:
                continue
            layouts = read_sharding(graph, segment, None, degree=1, rules=rules, facts=facts)
            local, size = local_segment(context, segment, layouts), row["micro_batch_size"]
            work = segment_work(context, local, size)
            for direction in ("forward", "backward"):
                parts: defaultdict[str, float] = defaultdict(float)
                for op in local.ops:
                    parts[kinds.get(op.op.target, OTHER)] += getattr(timed(context, op, size), f"{direction}_s")
                parts[OTHER] += getattr(work, f"{direction}_s") - sum(parts.values())
                kept = {kind: part for kind, part in parts.items() if part > 0}
                if kept and row[f"{direction}_s"] > 0:
                    found[row["content"], direction] = Sample(
                        f"{case.model} {case.set}".strip(), segment.name, direction, row[f"{direction}_s"], kept
                    )
    return list(found.values())


def fitted(others: list[Sample]) -> dict[str, float]:
    """The ratio of each kind of op with the least squares of relative errors, pulled a little towards 1."""
    kinds = sorted({kind for sample in others for kind in sample.parts_s})
    table = [{kind: part / sample.measured_s for kind, part in sample.parts_s.items()} for sample in others]
    ratios, pull = dict.fromkeys(kinds, 1.0), 0.05
    for _ in range(N_SWEEPS):
        before = dict(ratios)
        for kind in kinds:
            held = [
                (row[kind], 1 - sum(ratios[k] * x for k, x in row.items() if k != kind)) for row in table if kind in row
            ]
            best = (sum(x * left for x, left in held) + pull) / (sum(x * x for x, _ in held) + pull)
            ratios[kind] = max(0.0, best)
        if max(abs(ratios[kind] - before[kind]) for kind in kinds) < 1e-9:
            break
    return ratios


def predicted_s(way: str, sample: Sample, others: list[Sample]) -> float:
    if way == "none":
        return sample.computed_s
    if way == "segments":
        return sample.computed_s * statistics.median(other.measured_s / other.computed_s for other in others)
    ratios = fitted(others)
    return sum(part * ratios.get(kind, 1.0) for kind, part in sample.parts_s.items())


def main(results: Path, hw: str = "h200_x4") -> None:
    found = samples(results, hw)
    for title, is_other in (
        ("from other segments of the same model", lambda sample, other: other.model == sample.model),
        ("from segments of all models", lambda sample, other: True),
    ):
        print(title)
        table(found, is_other)
    for direction in ("forward", "backward"):
        ratios = fitted([sample for sample in found if sample.direction == direction])
        print(f"{direction}: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items()))


def table(found: list[Sample], is_other: Callable[[Sample, Sample], bool]) -> None:
    """Every sample that there are others for, predicted from these."""
    print(f"{'':46}{'measured ms':>12}" + "".join(f"{way:>10}" for way in WAYS))
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for sample in found:
        alike = [other for other in found if other.direction == sample.direction and is_other(sample, other)]
        others = [other for other in alike if other is not sample]
        if not others:
            continue
        cells = ""
        for way in WAYS:
            ratio = max(predicted_s(way, sample, others), 1e-12) / sample.measured_s
            errors[way].append(abs(math.log(ratio)))
            cells += f"{ratio - 1:+10.0%}"
        name = f"{sample.model} {sample.segment}"
        print(f"{name:36}{sample.direction:>10}{sample.measured_s * 1e3:12.3f}{cells}")
    for way, own in errors.items():
        mean, median = statistics.mean(own), statistics.median(own)
        print(f"{way}: {len(own)} times, mean |log error| {mean:.3f}, median {median:.3f}, worst {max(own):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
