"""What a kernel and a collective of a block take of the host, in the time of a bare launch beside them.

    python benchmarks/block_hosts.py    with the transformers of the blocks of T5-large, 5.17

Blocks are the eager ones of `results/profile_*.jsonl`, of which each line has the time of a launch on its host then.

    per kernel        host / (kernels x launch), of blocks that are not split: `MODEL_LAUNCH_RATIO`
    per collective    (host / launch - MODEL_LAUNCH_RATIO x kernels) / collectives, of blocks split as programs of
                      `results/predictions_*.jsonl` ran them, with two collectives or more: `AROUND_COLLECTIVE`
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from predictions import as_traced, cases

from autoplan.answers.answer import plan_from_dict
from autoplan.cost.local_segment import local_segment
from autoplan.cost.op_time import MODEL_LAUNCH_RATIO
from autoplan.cost.segment_work import AROUND_COLLECTIVE, segment_work
from autoplan.cost.work_context import work_contexts
from autoplan.errors import AutoplanError
from autoplan.graph import GraphFacts, OpGraph, Segment
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import assignment_key, content_key
from autoplan.parallel_plan import SegmentSharding
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

RESULTS = Path(__file__).parent / "results"
HARDWARE, RULES = load_hardware_profile("dgx_h100_x8"), load_rules()
PASSES = ("forward", "backward")
Key = tuple[str, str, int]  # content, assignment, tensor-parallel degree


class Counts(NamedTuple):
    """Of one pass of a block."""

    n_kernels: float
    n_collectives: float


def main() -> None:
    measured = rows()
    case_of = {(case.model, case.set): case for case in cases() if case.precision == "bf16"}
    per_kernel: dict[tuple[str, str], list[float]] = defaultdict(list)
    per_collective: dict[str, list[float]] = defaultdict(list)
    for (model, size), case in case_of.items():
        graph = trace_model(model_source(case.file, case.overrides))
        splits = [(1, {}), *splits_of(graph, model, size)]
        for degree, layouts in splits:
            for segment in (item for item in graph.first_of_kind().values() if item.is_block):
                for row in measured.get(key_of(graph, segment, layouts.get(segment.kind), degree), ()):
                    counts = counts_of(graph, segment, layouts.get(segment.kind), degree, row["micro_batch_size"])
                    for name, (n_kernels, n_collectives) in zip(PASSES, counts, strict=True):
                        launches = row[f"host_{name}_s"] / row["launch_s"]
                        if degree == 1 and n_kernels:
                            per_kernel[row.get("module", "generated"), name].append(launches / n_kernels)
                        elif degree > 1 and n_collectives >= 2:
                            rest = launches - MODEL_LAUNCH_RATIO * n_kernels
                            per_collective[name].append(rest / n_collectives)
    for (module, name), ratios in sorted(per_kernel.items()):
        print(f"per kernel, {module:9} {name:8} {statistics.median(ratios):6.2f} of {len(ratios)}")
    for name, ratios in per_collective.items():
        print(f"per collective     {name:8} {statistics.median(ratios):6.2f} of {len(ratios)}")


def rows() -> Mapping[Key, list[dict]]:
    """The eager segments that were measured beside a launch."""
    found = defaultdict(list)
    for path in sorted(RESULTS.glob("profile_*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if row.get("what") == "segment" and row.get("launch_s") and "forward_s" in row and not row.get("compiled"):
                found[row["content"], row["assignment"], row["tp"]].append(row)
    return found


def splits_of(graph: OpGraph, model: str, size: str) -> Iterator[tuple[int, dict[int, SegmentSharding]]]:
    """Degree and layouts of the split programs of this model that ran, each once."""
    names = {case.name for case in cases() if (case.model, case.set) == (model, size)}
    seen = []
    for path in sorted(RESULTS.glob("predictions_*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if row.get("case") not in names or row.get("exit_code"):
                continue
            try:
                plan = as_traced(plan_from_dict(row["plan"], where=path.name), graph)
            except (AutoplanError, KeyError):  # of a program of before, or of another trace
                continue
            found = plan.mesh.tp, {item.kind: item for item in plan.shardings}
            if plan.mesh.tp > 1 and found not in seen:
                seen.append(found)
                yield found


def key_of(graph: OpGraph, segment: Segment, layout: SegmentSharding | None, degree: int) -> Key:
    return content_key(graph, GraphFacts.of(graph), segment), assignment_key(graph, segment, layout), degree


def counts_of(
    graph: OpGraph, segment: Segment, layout: SegmentSharding | None, degree: int, micro_batch_size: int
) -> tuple[Counts, Counts]:
    """Of the forward and of the backward pass."""
    context = work_contexts(graph, HARDWARE, "bf16", RULES)(degree)
    layouts = read_sharding(graph, segment, layout, degree=degree, rules=RULES, facts=GraphFacts.of(graph))
    work = segment_work(context, local_segment(context, segment, layouts), micro_batch_size)
    device = HARDWARE.device

    def counts(host_s: float, collectives_s: float) -> Counts:
        of_kernels_s = host_s - AROUND_COLLECTIVE * collectives_s
        return Counts(of_kernels_s / (MODEL_LAUNCH_RATIO * device.launch_s), collectives_s / device.collective_launch_s)

    return (
        counts(work.host_forward_s, work.collectives_forward_s),
        counts(work.host_backward_s, work.collectives_backward_s),
    )


if __name__ == "__main__":
    main()
