"""Predicted against measured: emit the program of each case, run it on real devices, print one table.

    python benchmarks/predictions.py emit FOLDER                 plans each case (needs autoplan)
    python benchmarks/predictions.py run FOLDER RESULTS.jsonl    runs the programs (needs torch and the devices only)
    python benchmarks/predictions.py table RESULTS.jsonl         prints the table
    python benchmarks/predictions.py table RESULTS.jsonl FOLDER  the same with the predictions of plans emitted since

A row holds the plan's own prediction and what the program measured: the median step after warm-up, and the largest
allocated memory of any rank. Bad rows are rows.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

N_STEPS, N_WARM_UP = 12, 4
HARDWARE = "h200_x4"
# name: (example, --set values, global batch, --fix)
PIPELINE = "recompute=none,schedule=1f1b"
CASES = {
    "llama-1b ddp": ("llama.py", ("size=1b",), 16, "dp=4,tp=1,pp=1,zero=0,micro_batch=2,recompute=none"),
    "llama-1b zero1": ("llama.py", ("size=1b",), 16, "dp=4,tp=1,pp=1,zero=1,micro_batch=2,recompute=none"),
    "llama-1b zero2": ("llama.py", ("size=1b",), 16, "dp=4,tp=1,pp=1,zero=2,micro_batch=2,recompute=none"),
    "llama-1b zero3": ("llama.py", ("size=1b",), 16, "dp=4,tp=1,pp=1,zero=3,micro_batch=2,recompute=none"),
    "llama-1b zero3 full": ("llama.py", ("size=1b",), 16, "dp=4,tp=1,pp=1,zero=3,micro_batch=4,recompute=full"),
    "llama-1b tp2 dp2": ("llama.py", ("size=1b",), 16, "dp=2,tp=2,pp=1,zero=1,micro_batch=2,recompute=none"),
    "llama-1b tp4": ("llama.py", ("size=1b",), 16, "dp=1,tp=4,pp=1,zero=0,micro_batch=4,recompute=none"),
    "llama-1b pp2 dp2": ("llama.py", ("size=1b",), 16, f"dp=2,tp=1,pp=2,zero=0,micro_batch=1,{PIPELINE}"),
    "llama-1b pp4": ("llama.py", ("size=1b",), 16, f"dp=1,tp=1,pp=4,zero=0,micro_batch=1,{PIPELINE}"),
    "llama-1b pp2 tp2": ("llama.py", ("size=1b",), 16, f"dp=1,tp=2,pp=2,zero=0,micro_batch=1,{PIPELINE}"),
    "gpt-1.5b zero3": ("gpt.py", ("size=1.5b",), 64, "dp=4,tp=1,pp=1,zero=3,micro_batch=8,recompute=none"),
    "gpt-1.5b tp2 dp2": ("gpt.py", ("size=1.5b",), 64, "dp=2,tp=2,pp=1,zero=1,micro_batch=8,recompute=none"),
    "llama-8b zero3 full": ("llama.py", ("size=8b",), 8, "dp=4,tp=1,pp=1,zero=3,micro_batch=2,recompute=full"),
    "llama-8b tp4": ("llama.py", ("size=8b",), 8, "dp=1,tp=4,pp=1,zero=0,micro_batch=1,recompute=none"),
}  # fmt: skip
EXAMPLES = Path(__file__).parent.parent / "examples"


def emit(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (example, sets, global_batch, fix) in CASES.items():
        options = [f"--set={text}" for text in sets]
        out = folder / name.replace(" ", "_")
        command = [
            sys.executable, "-m", "autoplan", "plan", str(EXAMPLES / example), "--hw", HARDWARE, *options,
            "--global-batch", str(global_batch), "--fix", fix, "--out", str(out), "--force", "--top", "1",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name}: {'ok' if done.returncode == 0 else done.stderr.strip()[-300:]}", flush=True)


def run(folder: Path, results: Path) -> None:
    with results.open("w") as file:
        for name in CASES:
            path = folder / name.replace(" ", "_")
            if not (path / "plan.json").exists():
                continue
            plan = json.loads((path / "plan.json").read_text())
            started_s = time.perf_counter()
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                str(plan["plan"]["dp"] * plan["plan"]["tp"] * plan["plan"]["pp"]),
                "train.py", "--steps", str(N_STEPS), "--out-json", "measured.json",
            ]  # fmt: skip
            try:
                done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=150, check=False)
                code, error = done.returncode, done.stderr[-1500:]
            except subprocess.TimeoutExpired:
                code, error = 124, "timed out"
            row = {"case": name, "exit_code": code, "run_s": time.perf_counter() - started_s}
            row |= {"predicted_step_s": plan["step_s"], "plan": plan["plan"], "breakdown_s": plan["breakdown_s"]}
            row["predicted_memory_bytes"] = plan["peak_bytes_per_stage"]
            row["predicted_allocated_bytes"] = plan.get("allocated_bytes_per_stage")
            row |= json.loads((path / "measured.json").read_text()) if code == 0 else {"error": error}
            print(json.dumps({k: row[k] for k in ("case", "exit_code", "run_s", "predicted_step_s")}), flush=True)
            if code == 0:
                print([round(step["step_s"], 4) for step in row["steps"]], row["steps"][-1]["loss"], flush=True)
            else:
                print(error, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


def table(results: Path, folder: Path | None = None) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row in rows if folder is not None else ():
        plan = json.loads((folder / row["case"].replace(" ", "_") / "plan.json").read_text())
        row["predicted_step_s"] = plan["step_s"]
        row["predicted_allocated_bytes"] = plan["allocated_bytes_per_stage"]
    print(
        f"{'case':24} {'predicted s':>11} {'measured s':>10} {'error':>7}  "
        f"{'pred. GiB':>9} {'meas. GiB':>9} {'error':>7}"
    )
    errors, memory_errors = [], []
    for row in rows:
        if row["exit_code"]:
            print(f"{row['case']:24} {row['predicted_step_s']:11.4f}     failed with exit code {row['exit_code']}")
            continue
        measured_s = statistics.median(step["step_s"] for step in row["steps"][N_WARM_UP:])
        error = row["predicted_step_s"] / measured_s - 1
        predicted, measured = max(row["predicted_allocated_bytes"]), max(row["peak_allocated_bytes_per_rank"])
        memory_error = predicted / measured - 1
        errors.append(abs(error))
        memory_errors.append(abs(memory_error))
        print(
            f"{row['case']:24} {row['predicted_step_s']:11.4f} {measured_s:10.4f} {error:+7.1%}  "
            f"{predicted / 2**30:9.1f} {measured / 2**30:9.1f} {memory_error:+7.1%}"
        )
    print(f"mean absolute error: step {statistics.mean(errors):.1%}, memory {statistics.mean(memory_errors):.1%}")


if __name__ == "__main__":
    action, *paths = sys.argv[1:]
    {"emit": emit, "run": run, "table": table}[action](*map(Path, paths))
