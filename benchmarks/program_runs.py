"""Runs of emitted programs on this host, several at once: each in processes forked from one that has imported torch.

Needs torch only. `TRAIN_OPTIONS` of the environment are given to every `train.py`. With `LIMIT_MEMORY=1` the allocator
of each rank has as much as the plan says that it needs (rows then hold `limit_bytes_per_rank`), and no more; with
`LIMIT_MEMORY=1.05`, 5 % more.

With `RANKS_PER_GPU=4` a GPU takes up to four ranks, each a host of its own to NCCL, which sends over sockets. What they
compute and hold is what it would be on GPUs of their own; how long they take is not.
"""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

N_STEPS = 12
N_BATCHES = 4  # different ones, drawn before
PATIENCE_S = 150
N_LAST_CHARACTERS = 6000  # of what a program said that failed
OPTIONS = ("--steps", str(N_STEPS), "--repeat-batches", str(N_BATCHES))
RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
FIRST_PORT = 29600


class Planned(Protocol):
    """What a run must know of its case."""

    name: str
    links: str
    devices: int


def import_once(folder: Path) -> None:
    """Import what a program imports, and leave its own modules out: the next program has others of the same names."""
    sys.path[0] = str(folder)
    runpy.run_path(str(folder / "train.py"), run_name="imported")
    own = [name for name, module in sys.modules.items() if str(folder) in (getattr(module, "__file__", None) or "")]
    for name in own:
        del sys.modules[name]


def allocator_bytes_per_rank(best: dict) -> list[int]:
    """What torch's allocator needs on each rank by a plan's estimate; ranks of a pipeline stage follow each other."""
    mesh, estimate = best["plan"]["mesh"], best["estimate"]
    parts = [dict(parts) for parts in estimate["memory_parts_bytes"]]
    stages = zip(estimate["needed_bytes"], parts, strict=True)
    needed = [total - of_stage["context_and_communicators"] for total, of_stage in stages]
    return [size for size in needed for _ in range(mesh["dp"] * mesh["tp"])]


def limit_memory(rank: int, limit_bytes: int) -> None:
    """Let torch's allocator take no more than that on the device of this rank; CUDA is started by it."""
    import torch

    if "PYTORCH_ALLOC_CONF" not in os.environ:  # as programs have it
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    total_bytes = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), rank)


class Run:
    """The processes of one program."""

    n_started = 0

    def __init__(
        self,
        case: Planned,
        folder: Path,
        devices: list[int],
        *,
        before: Callable[[], None] | None = None,
        options: Sequence[str] = OPTIONS,
        alone: int | None = None,
    ):
        """`before` is called in each process, ahead of the program, which is given `options`.

        `alone` is the only rank that runs (`train.py --alone`).
        """
        self.options, self.alone = options, alone
        self.case, self.folder, self.devices, self.before = case, folder, devices, before
        self.started_s = time.perf_counter()
        self.codes: dict[int, int | None] = {}
        self.best = json.loads((folder / "plan.json").read_text())["best"]
        share = float(os.environ.get("LIMIT_MEMORY", "0"))
        self.limits_bytes = [int(share * size) for size in allocator_bytes_per_rank(self.best)] if share else []
        port = FIRST_PORT + Run.n_started
        Run.n_started += 1
        (folder / "measured.json").unlink(missing_ok=True)
        self.ranks = range(case.devices) if alone is None else range(alone, alone + 1)
        for rank in self.ranks:
            self.codes[self._fork(rank, port)] = None

    def _fork(self, rank: int, port: int) -> int:
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            os.chdir(self.folder)
            log = os.open(f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            is_shared = RANKS_PER_GPU > 1 or self.alone is not None
            local_rank, n_local = (0, 1) if is_shared else (rank, self.case.devices)
            ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self.case.devices, "MASTER_PORT": port}
            ranks |= {"LOCAL_WORLD_SIZE": n_local, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
            if self.alone is None:
                os.environ |= {key: str(value) for key, value in ranks.items()}
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
            if RANKS_PER_GPU > 1 and self.alone is None:
                own = {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
                os.environ |= own | {"CUDA_VISIBLE_DEVICES": str(self.devices[rank])}
            if self.limits_bytes:
                limit_memory(local_rank, self.limits_bytes[rank])
            sys.path[0] = str(self.folder)
            sys.argv = [
                "train.py",
                *self.options,
                *([] if self.alone is None else ["--alone", str(rank)]),
                "--out-json",
                "measured.json",
                *os.environ.get("TRAIN_OPTIONS", "").split(),
            ]
            if self.before is not None:
                self.before()
            runpy.run_path("train.py", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def is_done(self) -> bool:
        """Whether all have ended; one that fails, or takes too long, ends the others."""
        for process, code in self.codes.items():
            if code is None:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.codes[process] = os.waitstatus_to_exitcode(status)
        left = [process for process, code in self.codes.items() if code is None]
        if any(self.codes.values()) or time.perf_counter() - self.started_s > PATIENCE_S:
            for process in left:
                os.kill(process, signal.SIGKILL)
        return not left

    def row(self) -> dict:
        code = next((code for code in self.codes.values() if code), 0)
        row = {"case": self.case.name, "links": self.case.links, "exit_code": code, "plan": self.best["plan"]}
        row["run_s"] = time.perf_counter() - self.started_s
        generated = self.folder / "parallel_model.py"
        row["takes_16_bits"] = generated.exists() and "@takes_16_bits" in generated.read_text()
        if self.limits_bytes:
            row["limit_bytes_per_rank"] = self.limits_bytes
        if code == 0:
            return row | json.loads((self.folder / "measured.json").read_text())
        logs = [(self.folder / f"rank_{rank}.log").read_text() for rank in self.ranks]
        return row | {"error": max(logs, key=len)[-N_LAST_CHARACTERS:]}
