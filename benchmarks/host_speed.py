"""How steady a host is: what each of its cores takes for a small launch and for a loop of Python, several times.

    python benchmarks/host_speed.py measure RESULTS.jsonl      needs torch, and a GPU or none
    python benchmarks/host_speed.py table RESULTS.jsonl

A program that waits for its host can be foreseen no better than this. Where cores change between two speeds, whichever
of them runs, something else may have a part of them: on a rented virtual machine, another one on the same cores.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

N_TIMES, N_LAUNCHES, N_TURNS_OF_LOOP = 3, 500, 20_000
FAST = 1.2  # times the least


def measure(results: Path) -> None:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    x = torch.zeros(64, device=device)

    def launch_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(N_LAUNCHES):
            x.add_(1)
        return (time.perf_counter() - start_s) / N_LAUNCHES

    cores = sorted(os.sched_getaffinity(0))
    with results.open("a") as file:
        for turn in range(N_TIMES):
            for core in cores:
                os.sched_setaffinity(0, {core})
                launch_s()  # moves there
                times = {"launch_s": min(launch_s() for _ in range(4)), "python_s": python_s()}
                file.write(json.dumps({"device": name, "torch": torch.__version__, "turn": turn, "core": core} | times))
                file.write("\n")


def python_s() -> float:
    """Seconds of one turn of a loop."""
    start_s, total = time.perf_counter(), 0
    for i in range(N_TURNS_OF_LOOP):
        total += i * i % 7
    return (time.perf_counter() - start_s) / N_TURNS_OF_LOOP


def table(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for name, unit, scale in (("launch_s", "us", 1e6), ("python_s", "ns", 1e9)):
        times = sorted(scale * row[name] for row in rows)
        limit = FAST * times[0]
        by_core: dict[int, list[bool]] = {}
        for row in rows:
            by_core.setdefault(row["core"], []).append(scale * row[name] <= limit)
        n_changing = sum(len(set(found)) > 1 for found in by_core.values())
        slow = [value for value in times if value > limit] or [times[-1]]
        fast = [value for value in times if value <= limit]
        print(f"{name}: {len(times)} times on {len(by_core)} cores, {times[0]:.1f} to {times[-1]:.1f} {unit}")
        print(f"  {len(fast)} near the least, median {statistics.median(fast):.1f} {unit}")
        print(f"  {len(times) - len(fast)} others, median {statistics.median(slow):.1f} {unit}")
        print(f"  {n_changing} cores were both")


if __name__ == "__main__":
    {"measure": measure, "table": table}[sys.argv[1]](Path(sys.argv[2]))
