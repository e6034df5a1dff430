"""What becomes of a run that a rank fails, on real devices: `tests/test_checkpoint_failures.py` over NCCL.

    python benchmarks/failures.py emit FOLDER                                plans each program (needs autoplan)
    python benchmarks/failures.py run FOLDER RESULTS.jsonl [--device cpu]    runs them on two devices (needs torch only)
    python benchmarks/failures.py table RESULTS.jsonl

The model is `examples/text_gpt.py` on its own text, in float32. A rank fails once, where it reads its samples (that is
what Python does in every step, of a CUDA graph too) or as it completes the files of a checkpoint, in a step drawn at
random. A rank that hangs must be named, after `LIMIT_S`. Under `torchrun --max-restarts 1` each run must go on from
its newest complete checkpoint and end with the losses of the undisturbed run of the same program. A sample of another
length, or a loss that is not finite, on one rank must end all ranks with exit code 1 and a message.
"""

import argparse
import datetime
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
N_RANKS, N_STEPS, CHECKPOINT_EVERY, GLOBAL_BATCH, LIMIT_S = 2, 16, 4, 8, 10
# name: --fix, samples that a rank reads in a step
PROGRAMS = {
    "ZeRO 3": ("dp=2,tp=1,pp=1,zero=3,micro_batch=4,compile=off,cuda_graph=off", 4),
    "DDP, CUDA graph": ("dp=2,tp=1,pp=1,zero=0,micro_batch=4,compile=off,cuda_graph=on", 4),
    "TP 2": ("dp=1,tp=2,pp=1,zero=0,micro_batch=8,compile=off", 8),
    "PP 2": ("dp=1,tp=1,pp=2,zero=0,micro_batch=2,compile=off", 8),
}
KILLED, KILLED_WRITING, HANGS, DEVICE_HANGS = "killed", "killed while writing", "hangs", "its device hangs"
ODD_SAMPLE, NOT_FINITE = "has an odd sample", "has a loss of nan"
FAILURES = (
    ("ZeRO 3", 1, KILLED),
    ("ZeRO 3", 0, KILLED_WRITING),
    ("ZeRO 3", 1, HANGS),
    ("ZeRO 3", 1, DEVICE_HANGS),
    ("DDP, CUDA graph", 1, KILLED),
    ("DDP, CUDA graph", 0, HANGS),
    ("TP 2", 0, KILLED),
    ("PP 2", 1, KILLED),
    ("ZeRO 3", 1, ODD_SAMPLE),
    ("ZeRO 3", 1, NOT_FINITE),
    ("DDP, CUDA graph", 1, ODD_SAMPLE),
    ("TP 2", 0, ODD_SAMPLE),
    ("PP 2", 1, ODD_SAMPLE),
)
# At the end of the emitted `model.py`; FAILURE is what fails, in which rank, at its how-manieth sample, write or loss.
FAILING = f"""

import os
import pathlib
import signal
import time

from torch.distributed.checkpoint.filesystem import FileSystemWriter

_failure, _rank, _at = os.environ.get("FAILURE", "none,-1,-1").split(",")
_n_times = 0
_item, _finish, _loss = TokenFile.__getitem__, FileSystemWriter.finish, loss_fn
_place = {{"{KILLED_WRITING}": "write", "{NOT_FINITE}": "loss"}}.get(_failure, "sample")


def _fails_now(place):
    global _n_times
    if place != _place or os.environ.get("RANK") != _rank:
        return False
    _n_times += 1
    mark = pathlib.Path(__file__).with_name("has_failed")
    if _n_times != int(_at) or mark.exists():
        return False
    mark.touch()
    if _failure.startswith("{KILLED}"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif _failure == "{HANGS}":
        time.sleep(1000)
    elif _failure == "{DEVICE_HANGS}":
        torch.cuda._sleep(10**13)
    return True


def _item_or_failure(self, index):
    tokens, targets = _item(self, index)
    return (tokens[1:] if _fails_now("sample") else tokens), targets


def _finish_or_failure(self, **arguments):
    _fails_now("write")
    return _finish(self, **arguments)


def loss_fn(logits, targets):
    loss = _loss(logits, targets)
    return loss * float("nan") if _fails_now("loss") else loss


TokenFile.__getitem__ = _item_or_failure
FileSystemWriter.finish = _finish_or_failure
"""


def emit(folder: Path) -> None:
    for name, (fix, _) in PROGRAMS.items():
        out = folder / file_name(name)
        command = [
            sys.executable, "-m", "autoplan", "plan", str(ROOT / "examples" / "text_gpt.py"), "--hw",
            f"h200_x4/{N_RANKS}", "--set", f"text={ROOT / 'examples' / 'data' / 'stories.txt'}",
            "--global-batch", str(GLOBAL_BATCH), "--precision", "fp32", "--fix", fix, "--out", str(out), "--force",
            "--top", "1",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(ROOT / "examples" / "data", out / "data", dirs_exist_ok=True)
        with (out / "model.py").open("a") as file:
            file.write(FAILING)


def file_name(program: str) -> str:
    return re.sub(r"\W+", "_", program).lower()


def run(folder: Path, results: Path, device: str, seed: int, only: list[str]) -> None:
    """All failures, or those of some programs, after the undisturbed run of each; a line of RESULTS.jsonl each."""
    draw = random.Random(seed)
    undisturbed: dict[str, dict[int, float]] = {}
    for program, rank, failure in FAILURES:
        if only and program not in only:
            continue
        path = folder / file_name(program)
        if program not in undisturbed:
            undisturbed[program] = losses(launched(path, device, n_restarts=0)[0].stdout)
        if failure == DEVICE_HANGS and device == "cpu":
            continue
        step = draw.randrange(CHECKPOINT_EVERY + 1, N_STEPS)
        if failure == KILLED_WRITING:
            at = draw.randint(1, 2)
        elif failure == NOT_FINITE:
            at = step + 1
        else:
            at = step * PROGRAMS[program][1] + 1
        n_restarts = 0 if failure in (ODD_SAMPLE, NOT_FINITE) else 1
        done, seconds = launched(path, device, n_restarts=n_restarts, failure=f"{failure},{rank},{at}")
        found, expected = losses(done.stdout), undisturbed[program]
        said = done.stderr.replace(f"{path.absolute()}/", "")
        row = {
            "program": program, "rank": rank, "failure": failure, "at": at, "seed": seed, "seconds": round(seconds, 1),
            "code": done.returncode, "has_failed": (path / "has_failed").exists(),
            "resumed_from": re.findall(r"resumed from \S*?(step-\d+)", said),
            "n_steps": len(found), "max_difference": max((abs(found[i] - expected[i]) for i in found), default=None),
            "report": re.findall(r"a collective did not end.*|  rank \d: .*", said),
            "said": said_by_ranks(said) if n_restarts == 0 else [],
            "device": device_name(device), "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if done.returncode != 0 and n_restarts:
            print(done.stderr[-3000:], file=sys.stderr)


def said_by_ranks(text: str) -> list[str]:
    """Without what torchrun says, and after it, and without warnings of torch."""
    lines = re.split(r"^Traceback|={20}", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return [line for line in lines if line and not re.match(r"[WEI]\d{4} |\*{10}", line) and "Warning: " not in line]


def is_message(line: str) -> bool:
    """Neither what follows one, nor what the program says of a save."""
    return not line.startswith(("  ", "an error ends the run once the save"))


def launched(path: Path, device: str, *, n_restarts: int, failure: str = "none,-1,-1"):
    """The ended process and its seconds."""
    (path / "has_failed").unlink(missing_ok=True)
    shutil.rmtree(path / "saved", ignore_errors=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(N_RANKS),
        "--max-restarts", str(n_restarts), "train.py", "--device", device, "--steps", str(N_STEPS),
        "--checkpoint-dir", "saved", "--checkpoint-every", str(CHECKPOINT_EVERY), "--timeout", str(LIMIT_S),
    ]  # fmt: skip
    environment = os.environ | {"FAILURE": failure, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    return done, time.monotonic() - started


def losses(text: str) -> dict[int, float]:
    """Of each step, as last printed; a step may be taken again."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)", text, re.MULTILINE)}


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def table(results: Path) -> None:
    print(f"{'program':16} {'rank':>4}  {'failure':20} {'code':>4} {'seconds':>7}  what became of it")
    for row in map(json.loads, results.read_text().splitlines()):
        after = ", ".join(row["resumed_from"]) or "the start"
        what = f"after {after}: {row['n_steps']} steps, losses differ by {row['max_difference']:.1e}"
        if row.get("said"):
            what = f"ended after {row['n_steps']} steps: {next(line for line in row['said'] if is_message(line))}"
        report = "; ".join(row["report"][:1])
        print(
            f"{row['program']:16} {row['rank']:4}  {row['failure']:20} {row['code']:4} {row['seconds']:7.0f}"
            f"  {what}  {report}".rstrip()
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("action", choices=("emit", "run", "table"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="PROGRAM")
    given = parser.parse_args()
    if given.action == "run":
        run(*given.paths, given.device, given.seed, given.only)
    else:
        {"emit": emit, "table": table}[given.action](*given.paths)
