"""The processes of the comparison: one per device, forked from one that has imported torch and drawn the batches.

Those of hand-written programs run one configuration after the other. The first failure ends all of them, so that none
waits for another inside a collective, and the next configuration gets new ones.
"""

import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
from hand_tuned_programs import Program, is_out_of_memory, map_tensors
from hand_tuned_space import Case, Configuration, Space
from torch import nn

# Clocks settle under load: after the first step, which compiles, at least so many steps and seconds are not counted,
# and then at least so many are.
N_SETTLING, SETTLING_S = 2, 5.0
N_TIMED, TIMED_S = 3, 3.0
TOO_SLOW = 1.5  # times the fastest, after warm-up
MAX_STEPS = 200  # of an emitted program, which counts its steps in advance, by the estimate of a GPU
N_BATCHES = 4  # different ones
PATIENCE_S = 240.0  # for one program
TO_START_S = 90.0
TO_TELL_S = 1.0  # that ranks have to tell of the same failure
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Job:
    """What all programs of one run have in common; `stop_s` is on the clock of `time.monotonic`."""

    case: Case
    n_ranks: int
    device: str
    precision: str
    results: Path
    stop_s: float

    def space(self, fixed: tuple[tuple[str, object], ...]) -> Space:
        has_tensor_parallel = bool(self.case.tensor_parallel)
        return Space(self.n_ranks, self.case.global_batch, has_tensor_parallel, self.is_convolutional, fixed)

    @property
    def is_convolutional(self) -> bool:
        """Whether the model is made of convolutions, rather than has one."""
        with torch.device("meta"):
            modules = list(self.model_file.build_model(**self.case.overrides).modules())
        return sum(isinstance(m, nn.Conv2d) for m in modules) > sum(isinstance(m, nn.Linear) for m in modules)

    @functools.cached_property
    def model_file(self):
        spec = importlib.util.spec_from_file_location("benchmarked_model", self.case.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def make_batches(job: Job) -> list:
    """The global batches of the first steps, drawn as emitted programs draw them."""
    found = []
    with torch.device("meta"):
        job.model_file.build_model(**job.case.overrides)  # batches may depend on the size of the model
    for step in range(N_BATCHES):
        torch.manual_seed(step)
        found.append(job.model_file.make_batch(job.case.global_batch))
    return found


class Ranks:
    """Processes forked from this one, one per device, that run one configuration after the other until one fails."""

    def __init__(self, job: Job, batches: list) -> None:
        self.job, port = job, free_port()
        self.connections: list[Connection] = []
        self.processes: list = []
        for rank in range(job.n_ranks):
            own, theirs = FORK.Pipe()
            log = job.results.with_suffix(f".rank_{rank}.log")
            place = {"rank": rank, "n_ranks": job.n_ranks, "port": port, "log": log}
            process = FORK.Process(target=as_rank, args=(serve, theirs, job, batches), kwargs=place)
            process.start()
            theirs.close()  # before the next fork: an end that another rank holds too never reads as closed
            self.connections.append(own)
            self.processes.append(process)
        started = self._answers(time.monotonic() + TO_START_S)
        if [answer["status"] for answer in started.values()] != ["ready"] * job.n_ranks:
            self.end()
            raise SystemExit(f"the ranks did not start: {started}\n  see {job.results.with_suffix('.rank_*.log')}")

    def ask(self, configuration: Configuration, best_s: float | None) -> dict:
        """What rank 0 measured, with the memory of the fullest; or the first failure."""
        for connection in self.connections:
            try:
                connection.send((configuration, best_s))
            except OSError:
                return {"status": "error", "error": f"rank {self.connections.index(connection)} has ended"}
        stop_s = min(time.monotonic() + PATIENCE_S, self.job.stop_s)
        answers = self._answers(stop_s)
        failures = [answer for answer in answers.values() if answer["status"] not in ("ok", "slow")]
        if failures:
            return min(failures, key=lambda answer: answer["status"] != "oom")
        if len(answers) < len(self.connections):
            status = "out of time" if stop_s == self.job.stop_s else "too long"
            silent = sorted(set(range(len(self.connections))) - set(answers))
            return {"status": status, "error": f"ranks {silent} were not done after {PATIENCE_S:g} s or at the end"}
        peaks = [answer["peak_allocated_bytes"] for answer in answers.values()]
        return answers[0] | {"peak_allocated_bytes": None if None in peaks else max(peaks)}

    def _answers(self, stop_s: float) -> dict[int, dict]:
        """By rank: one of each, or those until the first failure or the end of the time."""
        answers: dict[int, dict] = {}
        while len(answers) < len(self.connections) and time.monotonic() < stop_s:
            open_ones = [c for rank, c in enumerate(self.connections) if rank not in answers]
            for connection in wait(open_ones, timeout=stop_s - time.monotonic()):
                rank = self.connections.index(connection)
                answers[rank] = self._received(connection, rank)
            if any(answer["status"] not in ("ready", "ok", "slow") for answer in answers.values()):
                break
        return answers

    def _received(self, connection: Connection, rank: int) -> dict:
        try:
            return connection.recv()
        except EOFError:
            self.processes[rank].join(TO_TELL_S)
            return {"status": "error", "error": f"rank {rank} ended with code {self.processes[rank].exitcode}"}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def as_rank(target, *arguments, rank: int, n_ranks: int, port: int, log: Path) -> None:
    """`target(*arguments)` in a process with torchrun's variables, its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
    variables |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in variables.items()}
    code = 1
    try:
        target(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no clean-up: it may wait for another rank


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# --------------------------------------------------------------------------------------------- on one rank


def serve(connection: Connection, job: Job, batches: list) -> None:
    """Measure what is asked for; a failure is told and ends the process, as nobody knows what it left unfinished."""
    device = torch.device(job.device, int(os.environ["RANK"])) if job.device == "cuda" else torch.device("cpu")
    if job.device == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    connection.send({"status": "ready"})
    pinned: dict[int, list] = {}
    while True:
        configuration, best_s = connection.recv()
        try:
            program = Program(job.case, job.model_file, configuration, device=device, precision=job.precision)
            if program.tp_degree not in pinned:
                pinned[program.tp_degree] = own_batches(program, batches)
            connection.send(measure(program, pinned[program.tp_degree], best_s))
            del program
        except Exception as error:
            traceback.print_exc()
            status = "oom" if is_out_of_memory(error) else "error"
            connection.send({"status": status, "error": f"{type(error).__name__}: {error}"[-800:]})
            raise SystemExit(1) from error
        gc.collect()
        torch._dynamo.reset()
        if job.device == "cuda":
            torch.cuda.empty_cache()


def own_batches(program, batches: list) -> list:
    """This rank's samples, in memory from which a device copies by itself."""
    own = [map_tensors(torch.Tensor.contiguous, program.own_samples(batch)) for batch in batches]
    return own if program.device.type == "cpu" else [map_tensors(torch.Tensor.pin_memory, batch) for batch in own]


def measure(program, batches: list, best_s: float | None) -> dict:
    """Time steps of the slowest rank; all ranks stop in the same one."""
    on_cuda = program.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    steps_s: list[float] = []
    losses: list[float] = []
    status = "ok"
    gc.collect()
    gc.disable()
    while not is_enough(steps_s):
        step_s, loss = timed_step(program, batches[len(steps_s) % len(batches)])
        steps_s.append(step_s)
        losses.append(loss)
        is_first_counted = n_warm_up(steps_s) == len(steps_s) - 1
        if best_s is not None and is_first_counted and step_s > TOO_SLOW * best_s:
            status = "slow"
            break
    gc.enable()
    timed = steps_s[n_warm_up(steps_s) :] if status == "ok" else steps_s[-1:]
    peak = torch.cuda.max_memory_allocated() if on_cuda else None
    answer = {"status": status, "steps_s": timed, "warm_up_s": steps_s[: len(steps_s) - len(timed)]}
    return answer | {"losses": losses, "peak_allocated_bytes": peak}


def timed_step(program, batch) -> tuple[float, float]:
    """Seconds of the slowest rank, and the mean loss."""

    def wait_for_device() -> None:
        if program.device.type == "cuda":
            torch.cuda.synchronize()

    wait_for_device()
    start_s = time.perf_counter()
    loss = program.step(batch)
    wait_for_device()
    own_s = time.perf_counter() - start_s
    own = torch.tensor([own_s, float(loss)], dtype=torch.float64, device=program.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    table = torch.stack(every)
    return table[:, 0].max().item(), table[:, 1].mean().item()


def n_warm_up(steps_s: list[float]) -> int:
    """How many of the first steps are not counted; all of these where clocks have not settled."""
    later_s = enumerate(accumulate(steps_s[1:-1]), start=2)
    return next((n for n, so_far_s in later_s if n > N_SETTLING and so_far_s >= SETTLING_S), len(steps_s))


def is_enough(steps_s: list[float]) -> bool:
    timed = steps_s[n_warm_up(steps_s) :]
    return len(timed) >= N_TIMED and sum(timed) >= TIMED_S


def n_steps_of(folder: Path) -> int:
    """How many steps of an emitted program are enough, by what is predicted; no fewer if it is a quarter faster."""
    step_s = prediction_of(folder)["predicted_step_s"] / 1.25
    n_steps = 1 + max(N_SETTLING, math.ceil(SETTLING_S / step_s)) + max(N_TIMED, math.ceil(TIMED_S / step_s))
    return min(n_steps, MAX_STEPS)


# ------------------------------------------------------------------------------------------ emitted programs


def folders_of(programs: Path) -> list[Path]:
    """The folder itself, or those in it; the first is the plan that was chosen."""
    if (programs / "train.py").exists():
        return [programs.absolute()]
    found = sorted(path.parent for path in programs.glob("*/train.py"))
    if not found:
        raise SystemExit(
            f"{programs}: found no train.py in it or one below\n  fix: write it with `emit {programs.parent}`"
        )
    return [folder.absolute() for folder in found]


def check_folder(job: Job, folder: Path) -> None:
    """Refuse a program that trains something else, or on more devices; a plan may leave some idle."""
    mesh, n_ranks = plan_of(folder)["mesh"], n_ranks_of(folder)
    global_batch = mesh["dp"] * mesh["micro_batch_size"] * mesh["n_micro_batches"]
    if n_ranks > job.n_ranks or global_batch != job.case.global_batch:
        raise SystemExit(
            f"{folder}/plan.json: found {n_ranks} ranks and a global batch of {global_batch}, "
            f"expected at most {job.n_ranks} and {job.case.global_batch}\n  fix: --ranks {n_ranks}, or emit it again"
        )


def plan_of(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text())["best"]["plan"]


def n_ranks_of(folder: Path) -> int:
    mesh = plan_of(folder)["mesh"]
    return mesh["dp"] * mesh["tp"] * mesh["pp"]


def prediction_of(folder: Path) -> dict:
    estimate = json.loads((folder / "plan.json").read_text())["best"]["estimate"]
    names = ("allocated_bytes", "needed_bytes")
    largest = {f"predicted_{name}": max(estimate[name]) for name in names}
    return {"predicted_step_s": estimate["step_s"]} | largest


def run_folder(job: Job, folder: Path) -> dict:
    """What one emitted program measured, in processes forked from this one."""
    for old in [folder / "measured.json", *folder.glob("rank_*.log")]:
        old.unlink(missing_ok=True)
    n_ranks, port, processes = n_ranks_of(folder), free_port(), []
    for rank in range(n_ranks):
        place = {"rank": rank, "n_ranks": n_ranks, "port": port, "log": folder / f"rank_{rank}.log"}
        processes.append(FORK.Process(target=as_rank, args=(train, folder, job), kwargs=place))
        processes[-1].start()
    stop_s = min(time.monotonic() + PATIENCE_S, job.stop_s)
    while any(process.is_alive() for process in processes):
        if time.monotonic() > stop_s or any(process.exitcode for process in processes):
            time.sleep(TO_TELL_S)
            for process in processes:
                process.kill()
        wait([process.sentinel for process in processes if process.is_alive()], timeout=0.5)
    codes = [process.exitcode for process in processes]
    if not any(codes):
        return measured_of(folder)
    return failure_of(folder, codes, is_out_of_time=time.monotonic() > job.stop_s)


def train(folder: Path, job: Job) -> None:
    os.chdir(folder)
    sys.path[0] = str(folder)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[job.precision]
    options = {"steps": n_steps_of(folder), "repeat-batches": N_BATCHES, "out-json": "measured.json"}
    options |= {"device": job.device, "dtype": dtype}
    sys.argv = ["train.py", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    runpy.run_path("train.py", run_name="__main__")


def measured_of(folder: Path) -> dict:
    found = json.loads((folder / "measured.json").read_text())
    steps_s = [step["step_s"] for step in found["steps"]]
    n_first = min(n_warm_up(steps_s), len(steps_s) - N_TIMED)
    peaks, reserved = found["peak_allocated_bytes_per_rank"], found["peak_reserved_bytes_per_rank"]
    return {
        "status": "ok",
        "steps_s": steps_s[n_first:],
        "warm_up_s": steps_s[:n_first],
        "losses": [step["loss"] for step in found["steps"]],
        "peak_allocated_bytes": None if None in peaks else max(peaks),
        "peak_reserved_bytes": None if None in reserved else max(reserved),
    }


def failure_of(folder: Path, codes: list[int], *, is_out_of_time: bool) -> dict:
    logs = [folder / f"rank_{rank}.log" for rank in range(len(codes))]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    is_oom = any(is_out_of_memory(RuntimeError(text)) for text in texts)
    status = "out of time" if is_out_of_time else "oom" if is_oom else "error"
    return {"status": status, "error": f"codes {codes}: {max(texts, key=len)[-800:]}"}
