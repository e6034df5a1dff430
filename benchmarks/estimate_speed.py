"""How long one estimate takes, once the graph and the costs are loaded.

    python benchmarks/estimate_speed.py > RESULTS.jsonl      one JSON line per case; milliseconds on stderr

`estimate` prices one mesh and replays it, when others of its layout were priced before, as in a search; `simulate` is
the replay alone. Both are the median of `N_TIMES`, in seconds of the processor. `first` is the estimate of the first
plan, which loads the costs. Stages are equal parts of the segments.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from autoplan.api import trace_model
from autoplan.hardware import load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, StagePlan
from autoplan.simulator.simulate import simulate
from autoplan.space.priced import priced_space

EXAMPLES = Path(__file__).parent.parent / "examples"
HARDWARE = "dgx_a100_x8"
N_TIMES = 21
# model file, --set, hosts, meshes
CASES = (
    ("gpt.py", {"size": "char"}, 1, (Mesh(dp=8, n_micro_batches=8), Mesh(pp=2, dp=4, n_micro_batches=16))),
    (
        "llama.py",
        {"size": "7b"},
        8,
        (
            Mesh(dp=64, zero_stage=3, zero_shard_degree=64, n_micro_batches=8),
            Mesh(pp=4, dp=16, n_micro_batches=32),
            Mesh(pp=16, dp=4, n_micro_batches=32),
            Mesh(pp=8, dp=8, n_micro_batches=64),
        ),
    ),
    (
        "llama.py",
        {"size": "70b"},
        8,
        (
            Mesh(dp=64, zero_stage=3, zero_shard_degree=64, n_micro_batches=8),
            Mesh(pp=16, dp=4, n_micro_batches=32),
            Mesh(pp=16, dp=4, zero_stage=2, zero_shard_degree=4, n_micro_batches=32),
            Mesh(pp=32, dp=2, n_micro_batches=16),
            Mesh(pp=8, dp=8, n_chunks=2, schedule="interleaved", n_micro_batches=32),
        ),
    ),
)


def median_s(call: Callable[[], object]) -> float:
    found = []
    for _ in range(N_TIMES):
        start_s = time.process_time()
        call()
        found.append(time.process_time() - start_s)
    return statistics.median(found)


def equal_stages(n_segments: int, n_stages: int) -> tuple[StagePlan, ...]:
    stops = [round(n_segments * (index + 1) / n_stages) for index in range(n_stages)]
    return tuple(map(StagePlan, [0, *stops[:-1]], stops))


def main() -> None:
    for file, overrides, n_hosts, meshes in CASES:
        graph = trace_model(EXAMPLES / file, overrides=overrides)
        hardware = load_hardware_profile(HARDWARE, n_hosts=n_hosts)
        for mesh in meshes:
            offered = priced_space(graph, hardware, Options(), global_batch=mesh.global_batch_size)
            stages = equal_stages(len(graph.segments), mesh.n_stages)
            start_s = time.process_time()
            table = offered.price(mesh)
            first = simulate(table, stages)
            first_s = time.process_time() - start_s
            row = {
                "model": Path(file).stem,
                "set": overrides,
                "n_segments": len(graph.segments),
                "mesh": {name: getattr(mesh, name) for name in ("pp", "dp", "zero_stage", "schedule", "n_chunks")},
                "n_micro_batches": mesh.n_micro_batches,
                "n_stages_times_micro_batches": mesh.n_stages * mesh.n_micro_batches,
                "first_s": first_s,
                "estimate_s": median_s(lambda: simulate(offered.price(mesh), stages)),  # noqa: B023
                "simulate_s": median_s(lambda: simulate(table, stages)),  # noqa: B023
                "step_s": first.step_s,
            }
            print(json.dumps(row), flush=True)
            milliseconds = {name: f"{1e3 * row[name]:.2f}" for name in ("first_s", "estimate_s", "simulate_s")}
            print(row["model"], overrides, row["n_stages_times_micro_batches"], milliseconds, file=sys.stderr)


if __name__ == "__main__":
    main()
