"""Computed against measured: compiled blocks and losses, priced from the data sheet, beside what was measured of them.

    python benchmarks/compiled_blocks.py RESULTS.jsonl HARDWARE [RESULTS.jsonl HARDWARE ...]

RESULTS is what `autoplan profile` wrote of the models of cases.csv on one device of HARDWARE. Only unsplit segments
that took 0.2 ms forward and more are compared; `eager` is the computed time of the same op by op. A segment that was
measured as the user's own class and as generated code is two rows, and so are images in two orders (`last`:
channels_last).
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import predictions

from autoplan.analysis.executions import compiled_kinds
from autoplan.api import trace_model
from autoplan.cost.compiled_work import as_compiled, compiled_passes, compiled_segment
from autoplan.cost.fusions import fused_segment
from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import SegmentWork, segment_work
from autoplan.cost.work_context import CONTIGUOUS, work_contexts
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import content_key
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding

SHORTEST_S = 2e-4
QUANTITIES = {"forward": "forward_s", "backward": "backward_s", "saved": "saved_bytes"}


@dataclass(frozen=True)
class Compared:
    """One measured row beside the computed work, compiled and eager."""

    device: str
    model: str
    segment: str
    is_block: bool
    row: dict
    computed: SegmentWork
    eager: SegmentWork

    def errors(self) -> dict[str, float]:
        return {name: getattr(self.computed, key) / self.row[key] - 1 for name, key in QUANTITIES.items()}


def is_compared(row: dict) -> bool:
    is_unsplit = row["what"] == "segment" and row["tp"] == 1
    return bool(is_unsplit and row.get("compiled") and row.get("forward_s", 0.0) >= SHORTEST_S and row["saved_bytes"])


def compared(results: Path, hw: str, *, only: str = "") -> Iterator[Compared]:
    """Those of all models, or of one of cases.csv."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    hardware, rules = load_hardware_profile(hw), load_rules()
    models = {
        (str(case.file), json.dumps(case.overrides, sort_keys=True)): case
        for case in predictions.cases()
        if only in ("", case.model)
    }
    for case in models.values():
        graph = trace_model(case.file, overrides=case.overrides)
        facts, contexts = GraphFacts.of(graph), work_contexts(graph, hardware, "bf16", rules)
        for kind, segment in graph.first_of_kind().items():
            key = content_key(graph, facts, segment)
            found = [row for row in rows if row.get("content") == key and is_compared(row)]
            if kind not in compiled_kinds(graph) or not found:
                continue
            layouts = read_sharding(graph, segment, None, degree=1, rules=rules, facts=facts)
            for row in found:
                memory_format = row.get("memory_format", CONTIGUOUS)
                context = contexts(1, memory_format, keeps_modules=row.get("module") == "own")
                local = local_segment(context, segment, layouts)
                eager = segment_work(context, local, row["micro_batch_size"])
                compiled = compiled_segment(context, local, fused_segment(context, segment, local))
                computed = as_compiled(eager, compiled_passes(context, compiled, row["micro_batch_size"]))
                yield Compared(row["device"], case.model, segment.name, segment.is_block, row, computed, eager)


def line(item: Compared) -> str:
    """Milliseconds and MiB: eager, compiled, measured compiled, and the error."""
    row, cells = item.row, []
    for name, key in QUANTITIES.items():
        unit = 2.0**20 if name == "saved" else 1e-3
        values = (getattr(item.eager, key), getattr(item.computed, key), row[key])
        digits = 0 if name == "saved" else 3
        cells += [*(f"{value / unit:8.{digits}f}" for value in values), f"{item.errors()[name]:+6.0%}"]
    name = f"{item.model} {item.segment.split('.')[0]}{'' if row.get('module') != 'own' else ' own'}"
    name += " last" if row.get("memory_format") == "channels_last" else ""
    return f"{item.device.split()[1][:6]:6} {name[:28]:28} {row['micro_batch_size']:4}" + "".join(cells)


def main(*given: str) -> None:
    titles = "".join(f"  {name} (eager, compiled, run)".ljust(30) for name in QUANTITIES)
    print(f"{'device':6} {'segment':27} {'batch':>5}{titles}".rstrip())
    errors: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    seen: list[dict] = []  # a file may hold rows of an earlier one
    for results, hw in zip(given[::2], given[1::2], strict=True):
        for item in compared(Path(results), hw):
            if item.row in seen:
                continue
            seen.append(item.row)
            print(line(item), flush=True)
            kind = "blocks" if item.is_block else "loss"
            for model in (item.model, "all"):
                errors[model, kind].append(item.errors())
    print("mean absolute error, mean error")
    for (model, kind), found in sorted(errors.items()):
        cells = ", ".join(
            f"{name} {statistics.mean(abs(e[name]) for e in found):.1%} {statistics.mean(e[name] for e in found):+.1%}"
            for name in QUANTITIES
        )
        print(f"{model}, {kind} ({len(found)}): {cells}")


if __name__ == "__main__":
    main(*sys.argv[1:])
