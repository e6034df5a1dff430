"""One rank of each stage by itself: does it hold what was predicted, of plans for more GPUs than there are?

    python benchmarks/ranks_alone.py run PROGRAMS RESULTS.jsonl [SECONDS]    needs torch and one GPU
    python benchmarks/ranks_alone.py table RESULTS.jsonl...

PROGRAMS holds folders that `predictions.py emit` or `autoplan plan --out` wrote. None is begun after SECONDS. The
largest pipeline rank runs, beside others where there is room, with `LIMIT_MEMORY=1` (`program_runs.py`) in what its
plan needs. Printed are the most that was allocated, predicted and measured, what the allocator was given (without that
limit: would have been) and what it took, and how often in a step it ran short of memory. Of a program that stands there
several times the last run counts.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import program_runs
from predictions import retries_per_step

GIB = 2**30
DEVICE_BYTES, CONTEXT_BYTES = 136 * GIB, 1 * GIB  # of one H200, and of a process beside its allocator
OPTIONS = ("--steps", "6", "--repeat-batches", "2")


def run(folder: Path, results: Path, seconds: str = "inf") -> None:
    import torch

    stop_s = time.perf_counter() + float(seconds)
    programs = sorted(path for path in folder.iterdir() if (path / "train.py").exists())
    for first in {path.name.split("_")[1]: path for path in programs}.values():  # of each model
        program_runs.import_once(first.resolve())
    running: list[Alone] = []
    while programs or running:
        programs = programs if time.perf_counter() < stop_s else []
        if programs:
            started = Alone(programs[0], running)
            if started.run is not None:
                del programs[0]
                running.append(started)
                continue
        time.sleep(0.05)
        for done in [each for each in running if each.run.is_done()]:
            running.remove(done)
            row = done.run.row() | done.facts | {"torch": torch.__version__}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)


class Alone:
    """The largest pipeline rank of a program; it runs where there is room beside others, else `run` is None."""

    def __init__(self, program: Path, others: list["Alone"]) -> None:
        best = json.loads((program / "plan.json").read_text())["best"]
        mesh, allocated = best["plan"]["mesh"], best["estimate"]["allocated_bytes"]
        pipeline_rank = max(range(mesh["pp"]), key=lambda index: allocated[index])
        rank, n_ranks = pipeline_rank * mesh["dp"] * mesh["tp"], mesh["dp"] * mesh["tp"] * mesh["pp"]
        given = program_runs.allocator_bytes_per_rank(best)[rank]
        self.facts = {"rank": rank, "n_ranks": n_ranks, "predicted_bytes": allocated[pipeline_rank]}
        self.facts |= {"given_bytes": given, "limited": os.environ.get("LIMIT_MEMORY", "")}
        taken = sum(other.facts["given_bytes"] + CONTEXT_BYTES for other in others)
        self.run = None
        if not others or taken + given + CONTEXT_BYTES < DEVICE_BYTES:
            case = SimpleNamespace(name=program.name, links="none", devices=n_ranks)
            self.run = program_runs.Run(case, program.resolve(), [0], options=OPTIONS, alone=rank)


def line(row: dict) -> str:
    start = f"{row['case'].removeprefix('nvlink_'):40}{row['rank']:>5}{row['n_ranks']:>6}"
    predicted, given = row["predicted_bytes"], row["given_bytes"] * float(row["limited"] or 1)
    if row["exit_code"]:
        why = "does not fit" if "OutOfMemoryError" in row["error"] else "failed"
        return f"{start}{predicted / GIB:11.2f}{why:>15}"
    measured, held = (row[f"peak_{name}_bytes_per_rank"][row["rank"]] for name in ("allocated", "reserved"))
    short = retries_per_step(row)
    cells = f"{predicted / GIB:11.2f}{measured / GIB:10.2f}{predicted / measured - 1:+8.1%}"
    return f"{start}{cells}{given / GIB:9.2f}{held / GIB:8.2f}{held / measured:7.3f}{short:7.1f}"


def table(*results: str) -> None:
    texts = (text for path in results for text in Path(path).read_text().splitlines())
    rows = {row["case"]: row for row in map(json.loads, texts)}.values()
    head = f"{'program':40}{'rank':>5}{'ranks':>6}{'pred. GiB':>11}{'measured':>10}{'error':>8}"
    print(f"{head}{'given':>9}{'held':>8}{'ratio':>7}{'short':>7}")
    errors = []
    for row in rows:
        print(line(row))
        if not row["exit_code"]:
            errors.append(row["predicted_bytes"] / row["peak_allocated_bytes_per_rank"][row["rank"]] - 1)
    mean = statistics.mean(map(abs, errors))
    print(f"{len(errors)} of {len(rows)} ran; peaks off by {mean:.1%}, {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    else:
        table(*sys.argv[2:])
