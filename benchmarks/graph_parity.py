"""Emitted programs with a CUDA graph against the same without: every loss, also across evaluations and a resume.

    python benchmarks/graph_parity.py run PROGRAMS RESULTS.jsonl [NAME ...]    on the GPUs; needs torch
    python benchmarks/graph_parity.py table RESULTS.jsonl

PROGRAMS holds folders that `autoplan plan --fix cuda_graph=on --out` wrote, of models with `build_eval_dataset`. Each
runs as planned, without its graph, up to a checkpoint in the middle, on from there, and with `--check`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

N_STEPS, N_BEFORE, N_CHECKED = 14, 7, 6
EVALUATED = ["--eval-every", "5", "--eval-batches", "2"]
RANDOM = ("drop",)  # their steps in the precision of the plan, as dropout is checked by equal draws, not to 1e-9


def run(programs: Path, results: Path, names: list[str]) -> None:
    for folder in sorted(programs.iterdir()):
        if names and folder.name not in names:
            continue
        with tempfile.TemporaryDirectory() as saved:
            common = ["--repeat-batches", "3"] + ([] if folder.name in RANDOM else ["--dtype", "fp64"])
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        words = [line for line in done.stderr.splitlines() if "cuda_graph" in line]
        steps = json.loads(out.read_text())["steps"] if out.exists() else []
    row = {"name": name, "args": arguments, "rc": done.returncode, "words": words}
    return row | {"losses": [step["loss"] for step in steps], "step_s": [step["step_s"] for step in steps][-3:]}


def table(results: Path) -> None:
    rows = {row["name"]: row for row in map(json.loads, results.read_text().splitlines())}
    print(f"{'program':10}{'differs':>9}{'resumed':>9}{'check':>7}{'given up':>10}{'graph s':>10}{'without s':>11}")
    for name in dict.fromkeys(name.split("@")[0] for name in rows if "@" in name):
        of = {kind: rows.get(f"{name}@{kind}", {}) for kind in ("graph", "none", "save", "resume", "check")}
        whole = of["graph"]["losses"]
        resumed = of["resume"].get("losses", [])
        words = chain.from_iterable(row.get("words", []) for row in of.values())
        print(
            f"{name:10}{largest(whole, of['none']['losses']):>9}{largest(whole[-len(resumed) :], resumed):>9}"
            f"{of['check'].get('rc', '-'):>7}{len(list(words)):>10}"
            f"{statistics.median(of['graph']['step_s']):10.4f}{statistics.median(of['none']['step_s']):11.4f}"
        )


def largest(losses: list[float], others: list[float]) -> str:
    """The largest difference; "-" where one did not run."""
    return f"{max(map(abs, (a - b for a, b in zip(losses, others, strict=True)))):.1e}" if others else "-"


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        table(Path(sys.argv[2]))
