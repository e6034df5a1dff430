"""Plans from the data sheet with eager and with compiled blocks, each run: is what compiling gains computed right?

    python benchmarks/computed_compile.py emit FOLDER HARDWARE/DEVICES    the picks both ways (needs autoplan)
    python benchmarks/computed_compile.py run FOLDER RESULTS.jsonl        needs torch and the devices
    python benchmarks/computed_compile.py table RESULTS.jsonl

When these were first run, on H100, no block of theirs had been measured there, nor compiled anywhere. A row is the
median of the steps after warm-up, and the largest allocated memory of any rank, beside what the plan in the folder
says.
"""

import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CASES = {  # file, size, global batch on 2 devices
    "llama3b": ("llama.py", "3b", 16),
    "gpt15b": ("gpt.py", "1.5b", 32),
    "gpt124m": ("gpt.py", "124m", 128),
}
WAYS = "off", "on"
N_STEPS, N_WARM_UP, N_BATCHES = 16, 5, 4
PATIENCE_S = 75


def emit(folder: Path, hw: str) -> None:
    from autoplan import api
    from autoplan.options import Options

    for name, (file, size, global_batch) in CASES.items():
        for way in WAYS:
            options = Options(global_batch=global_batch, fix=(("compile", way),))
            asked = api.make_problem(str(EXAMPLES / file), hw=hw, overrides={"size": size}, options=options)
            answer = api.solve(asked)
            assert answer.best is not None, name
            api.emit(asked, answer, folder / f"{name}_{way}", force=True)
            print(f"{name}_{way}: {answer.best.estimate.step_s:.4f} s", flush=True)


def run(folder: Path, results: Path) -> None:
    for name in CASES:
        for way in WAYS:
            row = run_program(folder / f"{name}_{way}")
            with results.open("a") as file:
                file.write(json.dumps({"model": name, "compile": way} | row) + "\n")


def run_program(folder: Path) -> dict:
    plan = json.loads((folder / "plan.json").read_text())
    n_ranks = plan["plan"]["dp"] * plan["plan"]["tp"] * plan["plan"]["pp"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    options = ["--steps", str(N_STEPS), "--repeat-batches", str(N_BATCHES), "--out-json", "steps.json"]
    done = subprocess.run([*command, "train.py", *options], cwd=folder, timeout=PATIENCE_S, check=False)
    row = {
        "plan": plan["plan"],
        "predicted_s": plan["step_s"],
        "interval_s": plan["step_s_interval"],
        "predicted_allocated_bytes": max(plan["allocated_bytes_per_stage"]),
        "exit_code": done.returncode,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    if done.returncode:
        return row
    seen = json.loads((folder / "steps.json").read_text())
    return row | {
        "device": seen["device"],
        "torch": seen["torch_version"],
        "step_s": [step["step_s"] for step in seen["steps"][N_WARM_UP:]],
        "peak_allocated_bytes_per_rank": seen["peak_allocated_bytes_per_rank"],
    }


def table(results: Path) -> None:
    print(f"{'model':9} {'blocks':9}{'pred. s':>9}{'meas. s':>9}{'error':>8}{'pred. GiB':>11}{'GiB':>7}{'error':>8}")
    for row in map(json.loads, results.read_text().splitlines()):
        name = f"{row['model']:9} {'compiled' if row['compile'] == 'on' else 'eager':9}"
        if row["exit_code"]:
            print(f"{name}{row['predicted_s']:9.4f}  exit code {row['exit_code']}")
            continue
        step_s, found_s = row["predicted_s"], statistics.median(row["step_s"])
        size, found = row["predicted_allocated_bytes"] / 2**30, max(row["peak_allocated_bytes_per_rank"]) / 2**30
        steps = f"{step_s:9.4f}{found_s:9.4f}{step_s / found_s - 1:+8.1%}"
        print(f"{name}{steps}{size:11.1f}{found:7.1f}{size / found - 1:+8.1%}")


if __name__ == "__main__":
    action, *given = sys.argv[1:]
    if action == "emit":
        emit(Path(given[0]), given[1])
    else:
        {"run": run, "table": table}[action](*map(Path, given))
