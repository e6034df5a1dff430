"""2,000 steps of a small GPT on real text: plans must train as one process does, within the noise of its seeds.

    python benchmarks/text_loss_curves.py emit FOLDER                                plans each case (needs autoplan)
    python benchmarks/text_loss_curves.py run FOLDER RESULTS.jsonl [--device cuda]   trains (needs torch only)
    python benchmarks/text_loss_curves.py table RESULTS.jsonl                        prints the table
    python benchmarks/text_loss_curves.py plot RESULTS.jsonl CURVES.svg DIFFERENCES.svg

The model is `examples/text_gpt.py`, the text `pydoc_data/topics.py`: 0.76 MB of English from Python. Every plan
starts from the weights and takes the global batches of one process with seed 0. Seeds 1 and 2 of one process have
others, and so show how far apart runs are that nothing but chance makes differ. All in float32.
"""

import argparse
import datetime
import json
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loss_curves import ROOT, file_name, hardware_text

N_STEPS, GLOBAL_BATCH = 2000, 8
TEXT = Path(pydoc_data.topics.__file__)
SIZES = {"n_layers": 2, "width": 64, "context": 64, "vocabulary": 256}
REFERENCE = "one process"
# name: (processes, --fix, seeds)
CASES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    REFERENCE: (1, "dp=1,tp=1,pp=1,zero=0,micro_batch=8,recompute=none", (0, 1, 2)),
    "DDP over 2": (2, "dp=2,tp=1,pp=1,zero=0,micro_batch=4,recompute=none", (0,)),
    "ZeRO 3 over 2": (2, "dp=2,tp=1,pp=1,zero=3,micro_batch=2,recompute=none", (0,)),
    "TP 2": (2, "dp=1,tp=2,pp=1,zero=0,micro_batch=8,recompute=none", (0,)),
    "PP 2": (2, "dp=1,tp=1,pp=2,zero=0,micro_batch=2,recompute=none,schedule=1f1b", (0,)),
    "TP 2, recompute": (2, "dp=1,tp=2,pp=1,zero=0,micro_batch=4,recompute=full", (0,)),
    "TP 2 x DP 2, recompute": (4, "dp=2,tp=2,pp=1,zero=0,micro_batch=4,recompute=full", (0,)),
}
OPTIONS = ("--lr-schedule", "cosine", "--warmup-steps", "100", "--clip", "1.0", "--eval-every", "1000")
# Losses of single batches scatter: what is drawn are means over windows of steps, each up to one of these.
WINDOWS = (1, 4, 16, 50, 100, 200, 400, 700, 1000, 1400, 2000)
LAST = 100  # steps, whose mean the table has
CURVES_TITLE = "Training loss of a small GPT on real text, under several plans and in one process"
DIFFERENCES_TITLE = "How far the loss of a step is from that of one process, seed 0"


def emit(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TEXT, folder)
    sizes = [word for key, value in {**SIZES, "text": TEXT.name}.items() for word in ("--set", f"{key}={value}")]
    for name, (n_processes, fix, _) in CASES.items():
        hardware = folder / f"h200_x{n_processes}.toml"
        hardware.write_text(hardware_text(n_processes))
        command = [
            sys.executable, "-m", "autoplan", "plan", str(ROOT / "examples" / "text_gpt.py"), "--hw", hardware.name,
            *sizes, "--global-batch", str(GLOBAL_BATCH), "--precision", "fp32", "--fix", fix,
            "--out", file_name(name), "--force", "--top", "1",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        print(f"{name}: {'ok' if done.returncode == 0 else done.stderr.strip()[-300:]}", flush=True)


def run(folder: Path, results: Path, device: str) -> None:
    """Train every case for which there are devices; those that the file has already are left out."""
    known = {(row["case"], row["seed"]) for row in _rows(results)} if results.exists() else set()
    for name, (n_processes, fix, seeds) in CASES.items():
        for seed in seeds:
            if (name, seed) not in known and n_processes <= n_devices(device):
                row = {"case": name, "seed": seed, "fix": fix, **_environment(device)}
                row |= _trained(folder / file_name(name), n_processes, seed, device)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, seed, row["eval_losses"][-1], f"{row['seconds']:.0f} s", flush=True)


def n_devices(device: str) -> float:
    import torch

    return torch.cuda.device_count() if device == "cuda" else float("inf")


def _environment(device: str) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores, gloo"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"device": found, "date": today, "torch": torch.__version__, "text_bytes": TEXT.stat().st_size, **SIZES}


def _trained(path: Path, n_processes: int, seed: int, device: str) -> dict[str, Any]:
    """The losses of one run.

    Raises: RuntimeError with what it wrote when it failed.
    """
    log = path / f"seed_{seed}.jsonl"
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes),
        f"{path.name}/train.py", "--steps", str(N_STEPS), "--seed", str(seed), "--device", device,
        "--log-jsonl", f"{path.name}/{log.name}", *OPTIONS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{path.name}: {done.stderr[-2000:]}")
    lines = _rows(log)
    return {
        "losses": [round(line["loss"], 8) for line in lines if "loss" in line],
        "eval_losses": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "seconds": round(sum(line["step_s"] for line in lines if "step_s" in line), 1),
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------ what was found


def table(results: Path) -> None:
    runs = {(row["case"], row["seed"]): row for row in _rows(results)}
    first = runs[REFERENCE, 0]["losses"]
    print(f"{'plan':24} seed  first loss  last {LAST}  evaluation  mean |difference| in steps 1-100, last {LAST}")
    for (name, seed), row in runs.items():
        losses = row["losses"]
        differences = [abs(a - b) for a, b in zip(losses, first, strict=True)]
        means = f"{_mean(differences[:100]):31.1e}  {_mean(differences[-LAST:]):8.1e}"
        print(
            f"{name:24} {seed:4}  {losses[0]:10.4f}  {_mean(losses[-LAST:]):8.4f}  {row['eval_losses'][-1]:10.4f}"
            f"  {means if (name, seed) != (REFERENCE, 0) else ''}".rstrip()
        )


def plot(results: Path, curves: Path, differences: Path) -> None:
    """Both axes logarithmic: the losses themselves, and how far they are from those of one process with seed 0."""
    from autoplan.html_report.charts import Curve, curves_chart

    runs = {(row["case"], row["seed"]): row["losses"] for row in _rows(results)}
    first = runs[REFERENCE, 0]

    def curve(key: tuple[str, int], losses: list[float], form: str) -> Curve:
        name = f"{key[0]}, seed {key[1]}" if key[0] == REFERENCE else key[0]
        means = [(stop, _mean(losses[start:stop])) for start, stop in zip((0, *WINDOWS), WINDOWS, strict=False)]
        return Curve(
            name, tuple((stop, mean, f"{name}, step {stop}: {mean:{form}}") for stop, mean in means if mean > 0)
        )

    apart = {key: [abs(a - b) for a, b in zip(losses, first, strict=True)] for key, losses in runs.items()}
    del apart[REFERENCE, 0]
    axis = {"x_name": "step", "x_text": "{:g}".format}
    loss_chart = curves_chart(
        [curve(key, losses, ".4f") for key, losses in runs.items()],
        name="loss", title_text=CURVES_TITLE, y_name="training loss", y_text="{:g}".format, **axis,
    )  # fmt: skip
    difference_chart = curves_chart(
        [curve(key, values, ".1e") for key, values in apart.items()],
        name="difference", title_text=DIFFERENCES_TITLE, y_name="mean |difference|", y_text="{:.0e}".format, **axis,
    )  # fmt: skip
    curves.write_text(loss_chart.stand_alone)
    differences.write_text(difference_chart.stand_alone)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("action", choices=("emit", "run", "table", "plot"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    if given.action == "run":
        run(*given.paths, given.device)
    else:
        {"emit": emit, "table": table, "plot": plot}[given.action](*given.paths)
