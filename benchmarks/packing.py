"""How long it takes to copy the gradients of a block to where their reduction reads them, on one GPU.

    python benchmarks/packing.py ROWS.jsonl        writes rows; needs torch and autoplan/runtime
    python benchmarks/packing.py table ROWS.jsonl

A row is one block on so many ranks: seconds of torch's kernel and of a copy at once, one call after the other, and as
replays of a CUDA graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

BLOCKS = {
    "llama_8b": [(4096, 4096), (1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336), (4096,), (4096,)],
    "llama_1b": [(2048, 2048), (512, 2048)] * 2 + [(8192, 2048)] * 2 + [(2048, 8192), (2048,), (2048,)],
    "bert_large": [(1024, 1024), (1024,)] * 4 + [(1024,)] * 4 + [(4096, 1024), (4096,), (1024, 4096), (1024,)],
    "head of llama_1b": [(128256, 2048)],
}
N_CALLS, N_ROUNDS = 30, 3


def measure(path: Path) -> None:
    """Every block from bfloat16 and float32 to float32, for 1, 2 and 4 ranks."""
    import torch

    from autoplan.runtime.stages import packing

    ways = {"torch": packing.pack_by_torch, "at_once": packing.copy_at_once}
    with path.open("w") as file:
        for name, shapes in BLOCKS.items():
            for dtype in (torch.bfloat16, torch.float32):
                for n_ranks in (1, 2, 4):
                    gradients = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
                    n_elements = sum(gradient.numel() for gradient in gradients)
                    row = {"block": name, "dtype": str(dtype), "n_ranks": n_ranks, "n_elements": n_elements}
                    row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                    packed = torch.empty(n_elements, device="cuda")
                    for way, pack in ways.items():
                        call = partial(pack, gradients, packed, n_ranks)
                        row[f"{way}_s"] = seconds(call)
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            call()
                        row[f"{way}_graph_s"] = seconds(graph.replay)
                    file.write(json.dumps(row) + "\n")
                    file.flush()


def seconds(call: Callable[[], None]) -> float:
    """One call among many, in the fastest round."""
    import torch

    times_s = []
    for _ in range(N_ROUNDS + 1):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(N_CALLS):
            call()
        end.record()
        end.synchronize()
        times_s.append(start.elapsed_time(end) * 1e-3 / N_CALLS)
    return min(times_s[1:])


def table(path: Path) -> None:
    print(f"{'block':17} {'from':9} ranks   torch   at once   torch, graph   at once, graph   (TB/s read and written)")
    for row in map(json.loads, path.read_text().splitlines()):
        n_bytes = row["n_elements"] * (6 if row["dtype"] == "torch.bfloat16" else 8)
        rates = [n_bytes / row[f"{way}_s"] / 1e12 for way in ("torch", "at_once", "torch_graph", "at_once_graph")]
        cells = "{:7.2f} {:9.2f} {:14.2f} {:16.2f}".format(*rates)
        print(f"{row['block']:17} {row['dtype'].removeprefix('torch.'):9} {row['n_ranks']:5} {cells}")


if __name__ == "__main__":
    *action, rows = sys.argv[1:]
    table(Path(rows)) if action else measure(Path(rows))
