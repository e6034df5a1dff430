"""Emitted programs with a CUDA graph against the same without: every loss, also across evaluations and a resume.

    python benchmarks/graph_parity.py run PROGRAMS RESULTS.jsonl [NAME ...]    on the GPUs; needs torch
    python benchmarks/graph_parity.py table RESULTS.jsonl

PROGRAMS holds folders that `autoplan plan --fix cuda_graph=on --out` wrote, of models with `build_eval_dataset`. Each
runs as planned, without its graph, up to a checkpoint in the middle, on from there, and with `--check`. The table says
how many of these runs failed, and how many said something of their graph.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

N_STEPS, N_BEFORE, N_CHECKED = 14, 7, 6
PATIENCE_S = 300
EVALUATED = ["--eval-every", "5", "--eval-batches", "2"]
# Their steps in the precision of the plan: dropout is checked by equal draws, not to 1e-9, and fp64 keeps no attention.
AS_PLANNED = ("drop", "kept")


def run(programs: Path, results: Path, names: list[str]) -> None:
    for folder in sorted(programs.iterdir()):
        if names and folder.name not in names:
            continue
        with tempfile.TemporaryDirectory() as saved:
            common = ["--repeat-batches", "3"] + ([] if folder.name in AS_PLANNED else ["--dtype", "fp64"])
            kept = [*common, "--checkpoint-dir", saved]
            kinds = {
                "graph": [*common, *EVALUATED, "--steps", str(N_STEPS)],
                "none": [*common, *EVALUATED, "--steps", str(N_STEPS), "--no-cuda-graph"],
                "save": [*kept, "--steps", str(N_BEFORE), "--checkpoint-every", "5"],
                "resume": [*kept, "--steps", str(N_STEPS), "--resume", "auto"],
                "check": ["--check", "--steps", str(N_CHECKED)],
            }
            for kind, arguments in kinds.items():
                row = run_one(folder, f"{folder.name}@{kind}", arguments)
                print(json.dumps(row), flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def run_one(folder: Path, name: str, arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        mesh = json.loads((folder / "plan.json").read_text())["plan"]
        n_ranks = mesh["dp"] * mesh["tp"] * mesh["pp"]
        command = ["torchrun", "--standalone", "--nproc-per-node", str(n_ranks), str(folder / "train.py")]
        command += ["--out-json", str(out), *arguments]
        running = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, errors = running.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # torchrun and its ranks
            _, errors = running.communicate()
        words = [line for line in errors.splitlines() if "cuda_graph" in line]
        report = json.loads(out.read_text()) if out.exists() else {"steps": []}
    steps = report["steps"]
    row = {"name": name, "args": arguments, "rc": running.returncode, "words": words}
    row |= {key: report.get(f"peak_{key}_per_rank") for key in ("allocated_bytes", "reserved_bytes")}
    return row | {"losses": [step["loss"] for step in steps], "step_s": [step["step_s"] for step in steps][-3:]}


def table(results: Path) -> None:
    rows = {row["name"]: row for row in map(json.loads, results.read_text().splitlines())}
    print(f"{'program':10}{'differs':>9}{'resumed':>9}{'failed':>8}{'said':>6}{'graph s':>10}{'without s':>11}")
    for name in dict.fromkeys(name.split("@")[0] for name in rows if "@" in name):
        of = {kind: rows.get(f"{name}@{kind}", {}) for kind in ("graph", "none", "save", "resume", "check")}
        losses = {kind: row.get("losses", []) for kind, row in of.items()}
        resumed = losses["resume"] if len(losses["resume"]) == N_STEPS - N_BEFORE else []
        n_failed = sum(row.get("rc", 0) != 0 for row in of.values())
        said = sum(bool(row.get("words")) for row in of.values())
        seconds = [statistics.median(of[kind].get("step_s") or [math.nan]) for kind in ("graph", "none")]
        print(
            f"{name:10}{largest(losses['graph'], losses['none'], n_steps=N_STEPS):>9}"
            f"{largest(losses['graph'], resumed, n_steps=N_STEPS - N_BEFORE):>9}{n_failed:>8}{said:>6}"
            f"{seconds[0]:10.4f}{seconds[1]:11.4f}"
        )


def largest(losses: list[float], others: list[float], *, n_steps: int) -> str:
    """The largest difference of the last losses; "-" where not all of these steps ran, "nan" where one is no number."""
    if min(len(losses), len(others)) < n_steps:
        return "-"
    differences = [abs(a - b) for a, b in zip(losses[-n_steps:], others[-n_steps:], strict=True)]
    return f"{math.nan if any(map(math.isnan, differences)) else max(differences):.1e}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        table(Path(sys.argv[2]))
