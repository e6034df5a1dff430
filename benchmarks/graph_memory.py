"""What a captured CUDA graph holds, by the stream whose memory it is, and what torch's allocator had before.

    python benchmarks/graph_memory.py run FOLDER RESULTS.jsonl [apart]   runs the programs in FOLDER
    python benchmarks/graph_memory.py table RESULTS.jsonl...

`predictions.py emit` writes the programs. `apart`: with gradients in memory of the stream that reduces them, as
`fully_shard` has it by itself. Printed is the rank that comes closest to its limit. Needs torch and GPUs.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import program_runs

GiB = 2**30
NOTE = "graph_memory_{}.json"  # in the folder of a program, of each rank


def run(folder: Path, results: Path, *, is_apart: bool) -> None:
    programs = sorted(path for path in folder.iterdir() if (path / "train.py").exists())
    program_runs.import_once(programs[0])
    for program in programs:
        limits = program_runs.allocator_bytes_per_rank(json.loads((program / "plan.json").read_text())["best"])
        notes = [program / NOTE.format(rank) for rank in range(len(limits))]
        for note in notes:
            note.unlink(missing_ok=True)
        case = SimpleNamespace(name=program.name, links="nvlink", devices=len(limits))
        devices = list(range(len(limits)))
        started = program_runs.Run(case, program.resolve(), devices, before=note_apart if is_apart else note_memory)
        while not started.is_done():
            time.sleep(0.05)
        graphs = [json.loads(note.read_text()) for note in notes if note.exists()]
        row = started.row() | {"graphs": graphs, "apart": is_apart, "limits": limits}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


def note_apart() -> None:
    import runtime.parallel  # of the program

    runtime.parallel.keep_gradients_on = lambda *_, **__: None
    note_memory()


def note_memory() -> None:
    """Let the program write what its graph holds, once it is captured."""
    import torch
    from runtime.stages.cuda_graph import StepGraph

    capture = StepGraph._capture

    def captured(graph: StepGraph, batch) -> None:
        before = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        capture(graph, batch)
        found = {"before": before, "pools": pools(torch.cuda.memory_snapshot())}
        found["captured_allocated"] = torch.cuda.max_memory_allocated()
        found["captured_reserved"] = torch.cuda.max_memory_reserved()
        Path(NOTE.format(os.environ["RANK"])).write_text(json.dumps(found))

    StepGraph._capture = captured


def pools(segments: list[dict]) -> dict[str, list[int]]:
    """Bytes that are held, and of these allocated, of the graph ("private") and of all else, by stream."""
    sums: dict[str, list[int]] = {}
    streams: dict[int, int] = {}
    for segment in segments:
        whose = "default" if tuple(segment["segment_pool_id"]) == (0, 0) else "private"
        pool = sums.setdefault(f"{whose} {streams.setdefault(segment['stream'], len(streams))}", [0, 0])
        pool[0] += segment["total_size"]
        pool[1] += segment["allocated_size"]
    return sums


def table(*results: str) -> None:
    columns = f"{'planned':>8s} {'allocated':>9s} {'held':>8s} {'ratio':>6s}"
    print(f"{'GiB':42s} {'gradients':9s} {columns}  of the graph, by stream")
    for row in (json.loads(text) for file in results for text in Path(file).read_text().splitlines()):
        print(line(row))


def line(row: dict) -> str:
    """One program: what its plan says that the allocator needs, and what it took to capture."""
    where = "apart" if row["apart"] else "together"
    graphs = row["graphs"] if "graphs" in row else [row["graph"]] if row["graph"] else []  # of one rank: before 11-29
    if len(graphs) < len(row["limits"]):
        return f"{row['case']:42s} {where:9s} {max(row['limits']) / GiB:8.2f} {row.get('error', '')[-300:]}"
    limit, graph = max(zip(row["limits"], graphs, strict=True), key=lambda pair: pair[1]["captured_reserved"] / pair[0])
    start = f"{row['case']:42s} {where:9s} {limit / GiB:8.2f}"
    allocated, held = graph["captured_allocated"], graph["captured_reserved"]
    of_graph = [f"{total / GiB:.2f}" for name, (total, _) in graph["pools"].items() if name.startswith("private")]
    return f"{start} {allocated / GiB:9.2f} {held / GiB:8.2f} {held / allocated:6.3f}  {' + '.join(of_graph)}"


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(*sys.argv[2:])
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]), is_apart="apart" in sys.argv[4:])
