"""The program: measures what measurement.json lists, one line of JSON per result.

Lines are appended as soon as they are there; what the file, or the cache of earlier runs, already holds for the same
device, torch and driver is not measured again. A user's own block that cannot be measured by itself leaves a line that
says why.
"""

import argparse
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .copies import copies_s, without_copies, without_graph_copies
from .generated import Compile, generated_builder
from .memory import memory_of, n_more_copies
from .ops import kernels_s, op_times
from .optimizer import measure_optimizer
from .own import OwnModel
from .progress import Progress, no_bar_left, show, show_bar
from .replays import graph_times
from .results import CONTIGUOUS, GENERATED, MEMORY_FORMATS, OPS, OWN, ResultCache, Row, key_of, read_results
from .stand_ins import collective_names, replace_collectives
from .strides import StageStrides
from .timing import Call, Clock, Round, round_times

SCHEMA_VERSION = 1
SECONDS = 1.0
MAX_SPREAD = 0.10
Backend = str | Callable[..., Any]  # of torch.compile
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # variables that times on a GPU depend on


@dataclass(frozen=True, slots=True)
class Measuring:
    """What all measurements of a run share."""

    clock: Clock
    dtype: torch.dtype
    own_model: OwnModel
    stage_strides: StageStrides
    compile: Compile


def measure_region(task: dict[str, Any], region: dict[str, Any], run: Measuring) -> dict[str, Any]:
    """Times and bytes of one segment at one micro-batch size, as fields of a result line."""
    torch.compiler.reset()  # what was compiled for other regions counts against torch's limit of variants
    compiled = run.compile if task["compiled"] else None
    batch_size, device, seen = task["micro_batch_size"], run.clock.device, replace_collectives().seen
    if task["module"] == OWN:
        kept = region["float32_buffers"]
        own = run.own_model.builder(region["own"], batch_size, device, compiled, float32_buffers=kept)
        return _measured_calls(_in_format(own, task["memory_format"]), run.clock, seen)
    layout = run.stage_strides.of(region, batch_size)
    generated = generated_builder(region, batch_size, run.dtype, device, compiled, layout=layout)
    build = _in_format(generated, task["memory_format"])
    told = None
    if compiled is not None and region["tp"] > 1:  # compiled code does not tell
        eager = generated_builder(region, batch_size, run.dtype, device, None, layout=layout)
        told = memory_of(eager(), run.clock, seen)["collectives"]
    return _measured_calls(build, run.clock, seen, told=told)


def measure_ops(task: dict[str, Any], region: dict[str, Any], run: Measuring) -> dict[str, Any]:
    """Times of the ops of one eager segment, as a field of a result line; its collectives are left out."""
    names = collective_names()
    batch_size = task["micro_batch_size"]
    layout = run.stage_strides.of(region, batch_size)
    call = generated_builder(region, batch_size, run.dtype, run.clock.device, None, layout=layout)()
    found = op_times(call, run.clock)
    return {"status": "measured", "ops": [row for row in found if row["op"] not in names]}


def _in_format(build: Callable[[], Call], memory_format: str) -> Callable[[], Call]:
    """Makes calls whose images lie in memory as they do in the program; weights stay as they are."""
    if memory_format == CONTIGUOUS:
        return build

    formats: Any = importlib.import_module("runtime.input_pipeline.memory_format")

    def build_converted() -> Call:
        call = build()
        for tensor in call.inputs:
            tensor.data = formats.in_memory_format(tensor.data, memory_format)
        call.gradient_strides = None
        return call

    return build_converted


def _measured_calls(build: Callable[[], Call], clock: Clock, seen: list[Any], *, told: Any = None) -> dict[str, Any]:
    """Times and bytes of copies of one call; its collectives, added to `seen`, are left out, or those it was `told`."""
    call = build()
    memory = memory_of(call, clock, seen)
    stand_ins = told or memory["collectives"]
    del memory["collectives"]
    launches_s = [clock.launch_s()]  # hosts change their speed: before and after
    copies = [call]
    for _ in range(n_more_copies(call, memory, clock)):
        copies.append(build())
    run = Round(copies)
    measured = functools.partial(round_times, run, clock, functools.partial(kernels_s, clock=clock))
    times = measured()
    if _widest(times) > MAX_SPREAD:
        times = min(times, measured(), key=_widest)
    is_noisy = _widest(times) > MAX_SPREAD
    launches_s.append(clock.launch_s())
    in_graph = graph_times(run, clock)
    for way, copied in zip(("forward", "backward"), stand_ins, strict=True):
        left_s = without_copies(times[f"{way}_s"], copies_s(copied, clock))
        if left_s is None:
            is_noisy = True
        else:
            times[f"{way}_s"] = left_s
        in_graph[f"graph_{way}_s"] = without_graph_copies(in_graph[f"graph_{way}_s"], copied, clock)
    status = "noisy" if is_noisy else "measured"
    return {"status": status, **times, **in_graph, **memory, "launch_s": statistics.mean(launches_s)}


def _widest(times: dict[str, float]) -> float:
    return max(times["forward_spread"], times["backward_spread"])


# ------------------------------------------------------------------------------------------- results


def environment(device: torch.device) -> dict[str, str]:
    """What a time depends on besides the code."""
    if device.type == "cpu":
        return {"device": "CPU", "torch": torch.__version__, "driver": ""}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "driver": _driver()}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()


def tasks(plan: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(fields that identify it, region) of everything to measure: optimizer, eager, compiled, ops.

    Ops are measured at the largest micro-batch only, of generated code in contiguous memory.
    """
    common = {"schema_version": SCHEMA_VERSION, "model": plan["model"], "precision": plan["precision"]}
    yield {**common, "what": "optimizer"}, {}
    names = ("segment", "content", "assignment", "tp", "boundary")
    for compiled, memory_format in itertools.product((False, True), MEMORY_FORMATS):
        for region in plan["regions"]:
            if compiled not in region["compiled"] or memory_format not in region["memory_formats"]:
                continue
            way = {"compiled": compiled, "memory_format": memory_format}
            described = {"what": "segment", **{name: region[name] for name in names}, **way}
            for module in (GENERATED,) if region["own"] is None else (GENERATED, OWN):
                code = {"code": region["code"]} if module == GENERATED else {}
                for batch_size in region["micro_batch_sizes"]:
                    yield {**common, **described, "module": module, **code, "micro_batch_size": batch_size}, region
    plain = {"compiled": False, "memory_format": CONTIGUOUS, "module": GENERATED}
    for region in plan["regions"]:
        described = {"what": OPS, **{name: region[name] for name in (*names, "code")}, **plain}
        yield {**common, **described, "micro_batch_size": max(region["micro_batch_sizes"])}, region


def measure(
    folder: Path,
    out: Path,
    device: torch.device,
    *,
    seconds: float = SECONDS,
    backend: Backend | None = None,
    cache: Path | None = None,
) -> None:
    """Measure everything that neither `out` nor `cache` holds yet.

    `backend` is that of torch.compile, where it is not that of programs.
    """
    plan = json.loads((folder / "measurement.json").read_text())
    found = environment(device)
    if plan["device"].lower() != found["device"].lower():
        sys.exit(
            f"measure: found device {found['device']!r}\n  expected: {plan['device']!r}, the device of --hw\n"
            "  fix: run it there, or give --hw a profile of this device, which autoplan hw measure writes"
        )
    if plan["has_own_ops"]:
        importlib.import_module("model")
    backend = backend or importlib.import_module("runtime.stages.compiled").backend_of(device)
    earlier = _result_cache(cache, plan, folder, seconds=seconds, backend=backend)
    run = _measuring(plan, Clock(device, seconds), backend)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what was imported stays: to look through it for garbage would take 0.3 s after each row
    with closing(earlier), out.open("a") as file, no_bar_left():
        for line in _measure_all([(row | found, region) for row, region in tasks(plan)], out, run, earlier):
            if line.row is not None:
                file.write(json.dumps(line.row) + "\n")
                file.flush()
            show(line.told)
    if earlier.trouble:
        show(f"measure: {earlier.trouble}")


class _Line(NamedTuple):
    """A new line of the results, if there is one, and what is told of it."""

    row: Row | None
    told: str


def _measure_all(
    everything: list[tuple[Row, dict[str, Any]]], out: Path, run: Measuring, earlier: ResultCache
) -> Iterator[_Line]:
    """The lines of all tasks, in order: those that `out` holds, those of earlier runs, and new ones."""
    done = read_results(out)
    figures = {key_of(task): earlier.find(task) for task, _ in everything if key_of(task) not in done}
    progress = Progress(len(everything), [task for task, _ in everything if figures.get(key_of(task), task) is None])
    for task, region in everything:
        key = key_of(task)
        if key in done:
            yield _Line(None, progress.known(task, "known"))
            continue
        done.add(key)
        if (known := figures[key]) is not None:
            yield _Line(task | known, progress.known(task, "known from an earlier run"))
            continue
        show_bar(progress.bar(task))
        start_s = time.perf_counter()
        row = task | _measured(task, region, run)
        earlier.keep(row)
        yield _Line(row, progress.measured(row, seconds=time.perf_counter() - start_s))


def _result_cache(
    path: Path | None, plan: dict[str, Any], folder: Path, *, seconds: float, backend: Backend
) -> ResultCache:
    model = folder / "model.py"
    compiling = Path(str(importlib.import_module("runtime.stages.compiled").__file__))
    own_texts = "".join(path.read_text() for path in (*sorted(Path(__file__).parent.glob("*.py")), compiling))
    own_hash = hashlib.sha256(own_texts.encode()).hexdigest()
    of_torch = backend if isinstance(backend, str) else f"{backend.__module__}.{backend.__qualname__}"
    measured_with = {"schema_version": SCHEMA_VERSION, "seconds": seconds, "backend": of_torch, "measuring": own_hash}
    measured_with |= {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    paths = (model, *map(folder.joinpath, plan["beside_model"])) if model.exists() else ()
    text = "".join(path.read_text() for path in paths)
    return ResultCache(path, measured_with=measured_with, model_text=text, has_own_ops=plan["has_own_ops"])


def _measuring(plan: dict[str, Any], clock: Clock, backend: Backend) -> Measuring:
    config: Any = importlib.import_module("runtime.config")
    dtype = config.COMPUTE_DTYPES[plan["precision"]]
    importlib.import_module("runtime.float32_products").set_float32_products(plan["precision"])
    paths = {path for region in plan["regions"] if region["own"] for path, _ in region["own"]["instances"]}
    overrides = {name: _as_tuple(value) for name, value in plan["overrides"].items()}
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
    strides = StageStrides(plan["inputs"], plan["float32_buffers"], dtype)
    return Measuring(clock, dtype, OwnModel(overrides, paths, dtype), strides, compiled)


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples, and overrides no lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _measured(task: dict[str, Any], region: dict[str, Any], run: Measuring) -> dict[str, Any]:
    try:
        if not region:
            return measure_optimizer(run.dtype, run.clock)
        if task["what"] == OPS:
            return measure_ops(task, region, run)
        return measure_region(task, region, run)
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except Exception as error:
        if task.get("module") == OWN:  # the user's code, outside of where it belongs, may raise anything
            return {"status": "not run", "why": f"{type(error).__name__}: {_first_line(error)}"}
        if task.get("memory_format", CONTIGUOUS) != CONTIGUOUS and isinstance(error, RuntimeError):
            return {"status": "not run", "why": _first_line(error)}  # such as a view that needs contiguous memory
        if not task.get("compiled") or not isinstance(error, RuntimeError):
            raise
        return {"status": "not compiled", "why": _first_line(error)}  # torch.compile, whichever part of it fails
    finally:
        gc.collect()
        if run.clock.is_cuda:
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def main(folder: Path, arguments: list[str]) -> None:
    """The command line of measure.py in this folder; see the docstring of the package."""
    parser = argparse.ArgumentParser(description="Measure what measurement.json lists, on one device.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("measured.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--backend", help="Of torch.compile, instead of the one that programs have.")
    parser.add_argument("--cache", type=Path, help="SQLite file of what earlier runs measured, of any model.")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("measure: found no CUDA device\n  expected: one GPU of the target\n  fix: run on it, or --device cpu")
    torch.backends.cudnn.benchmark = True  # as programs with convolutions have it
    process_group = importlib.import_module("runtime.process_group")
    process_group.choose_allocator()  # as programs do when they join it
    options = {"seconds": given.seconds, "backend": given.backend, "cache": given.cache}
    measure(folder, given.out, torch.device(given.device), **options)
