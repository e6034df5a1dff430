"""Does a program wait for what it must? Its reductions begin and end late, and it is compared with one process.

    python benchmarks/late_reductions.py run PROGRAMS RESULTS.jsonl [freed]    runs the programs (needs torch, GPUs)
    python benchmarks/late_reductions.py table RESULTS.jsonl

PROGRAMS holds folders that `autoplan plan --out` wrote. Each trains in float64 beside one process, `--check`, while the
GPU waits before and after each reduction of gradients. A wait that is missing shows as a difference: with `freed`,
what is added to a gradient and freed at once lies in memory of the passes, too, as it must not (`gradient_memory.py` of
the programs). `RANKS_PER_GPU=4` does with one GPU.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import program_runs

N_CYCLES = 4_000_000  # 2 ms of a GPU at 2 GHz
OPTIONS = ("--check", "--dtype", "fp64", "--steps", "5")
PARTS = ("loss", "gradient", "parameter")


def run(folder: Path, results: Path, *, is_freed: bool) -> None:
    import torch

    programs = sorted(path for path in folder.iterdir() if (path / "train.py").exists())
    program_runs.import_once(programs[0].resolve())
    for program in programs:
        mesh = json.loads((program / "plan.json").read_text())["best"]["plan"]["mesh"]
        n_ranks = mesh["dp"] * mesh["tp"] * mesh["pp"]
        case = SimpleNamespace(name=program.name, links="nvlink", devices=n_ranks)
        devices = [rank // program_runs.RANKS_PER_GPU for rank in range(n_ranks)]
        before = partial(hold_up, is_freed=is_freed)
        started = program_runs.Run(case, program.resolve(), devices, before=before, options=OPTIONS)
        while not started.is_done():
            time.sleep(0.05)
        row = started.row() | {"freed": is_freed, "torch": torch.__version__}
        row |= {"ranks_per_gpu": program_runs.RANKS_PER_GPU}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


def hold_up(*, is_freed: bool) -> None:
    """Let the program hold up its reductions on the stream that they are on."""
    import torch
    from runtime.stages import gradient_memory

    reduces = gradient_memory._Reduction.__call__

    def late(reduction: object, *args: object, **kwargs: object) -> object:
        torch.cuda._sleep(N_CYCLES)
        done = reduces(reduction, *args, **kwargs)
        torch.cuda._sleep(N_CYCLES)
        return done

    gradient_memory._Reduction.__call__ = late
    if is_freed:
        gradient_memory._becomes_gradient = lambda _: bool  # of every parameter, which is true


def line(row: dict) -> str:
    differences = [step["differences"] for step in row.get("steps", [])]
    largest = "".join(f"{max((d[part] for d in differences), default=float('nan')):12.1e}" for part in PARTS)
    return f"{row['case']:28}{'freed' if row['freed'] else '':>7}{row['exit_code']:>6}{largest}"


def table(results: Path) -> None:
    print(f"{'program':28}{'':>7}{'code':>6}{''.join(f'{part:>12}' for part in PARTS)}")
    for row in map(json.loads, results.read_text().splitlines()):
        print(line(row))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]), is_freed=sys.argv[4:] == ["freed"])
    else:
        table(Path(sys.argv[2]))
