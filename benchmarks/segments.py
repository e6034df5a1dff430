"""Computed against measured: the roofline of each segment beside what `autoplan profile` measured of it.

    python benchmarks/segments.py RESULTS.jsonl [HARDWARE]

RESULTS is what `autoplan profile` wrote, for the models in MODELS. Only unsplit segments are compared: how a segment is
split belongs to the version that chose it.
"""

import json
import statistics
import sys
from pathlib import Path

from autoplan.cost.local_segment import local_segment
from autoplan.cost.segment_work import segment_work
from autoplan.cost.work_context import work_contexts
from autoplan.graph import GraphFacts
from autoplan.hardware import load_hardware_profile
from autoplan.measured_profile.segment_key import content_key
from autoplan.rules import load_rules
from autoplan.tensor_parallel.sharding import read_sharding
from autoplan.tracing.model_source import model_source
from autoplan.tracing.trace import trace_model

EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = {"llama 1b": ("llama.py", "1b"), "llama 8b": ("llama.py", "8b"), "gpt 1.5b": ("gpt.py", "1.5b")}


def main(results: Path, hw: str) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    unsplit = {(r["content"], r["micro_batch_size"]): r for r in rows if r["what"] == "segment" and r["tp"] == 1}
    hardware, rules = load_hardware_profile(hw), load_rules()
    print(f"{'segment':22} {'batch':>5} {'forward ms':>17} {'error':>7} {'backward ms':>17} {'error':>7} {'saved':>7}")
    errors: dict[str, list[float]] = {"forward": [], "backward": [], "saved": []}
    for name, (file, size) in MODELS.items():
        graph = trace_model(model_source(EXAMPLES / file, {"size": size}))
        facts, context = GraphFacts.of(graph), work_contexts(graph, hardware, "bf16", rules)(1)
        for segment in graph.first_of_kind().values():
            key = content_key(graph, facts, segment)
            layouts = read_sharding(graph, segment, None, degree=1, rules=rules, facts=facts)
            for batch_size in (b for content, b in unsplit if content == key):
                row = unsplit[key, batch_size]
                if "forward_s" not in row:
                    continue
                work = segment_work(context, local_segment(context, segment, layouts), batch_size)
                forward, backward = work.forward_s / row["forward_s"] - 1, work.backward_s / row["backward_s"] - 1
                saved = work.saved_bytes / row["saved_bytes"] - 1
                for kind, error in zip(errors, (forward, backward, saved), strict=True):
                    errors[kind].append(abs(error))
                cells = (work.forward_s, row["forward_s"], forward, work.backward_s, row["backward_s"], backward, saved)
                print(f"{f'{name} {segment.name}':22} {batch_size:5} {line(*cells)}")
    print("mean absolute error: " + ", ".join(f"{kind} {statistics.mean(e):.1%}" for kind, e in errors.items()))


def line(
    forward_s: float, measured_forward_s: float, forward: float,
    backward_s: float, measured_backward_s: float, backward: float,
    saved: float,
) -> str:  # fmt: skip
    return (
        f"{forward_s * 1e3:8.3f} {measured_forward_s * 1e3:8.3f} {forward:+7.1%} "
        f"{backward_s * 1e3:8.3f} {measured_backward_s * 1e3:8.3f} {backward:+7.1%} {saved:+7.1%}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "h200_x4")
