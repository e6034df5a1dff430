"""The program: measures what measurement.json lists, one line of JSON per result.

Lines are appended as soon as they are there; what the file already holds for the same device, torch and driver is not
measured again. A user's own block that cannot be measured by itself leaves a line that says why.
"""

import argparse
import functools
import gc
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .generated import Compile, generated_builder
from .memory import memory_of, n_more_copies
from .optimizer import measure_optimizer
from .own import OwnModel
from .stand_ins import replace_collectives
from .timing import Call, Clock, Round, copies_s, round_times
from .values import DTYPES

SCHEMA_VERSION = 1
SECONDS = 0.35
BACKEND = "inductor"
MAX_SPREAD = 0.10
OWN, GENERATED = "own", "generated"  # whose module it is
MEMORY_FORMATS = CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"


@dataclass(frozen=True, slots=True)
class Measuring:
    """What all measurements of a run share."""

    clock: Clock
    dtype: torch.dtype
    own_model: OwnModel
    compile: Compile


def measure_region(task: dict[str, Any], region: dict[str, Any], run: Measuring) -> dict[str, Any]:
    """Times and bytes of one segment at one micro-batch size, as fields of a result line."""
    torch.compiler.reset()  # what was compiled for other regions counts against torch's limit of variants
    compiled = run.compile if task["compiled"] else None
    batch_size, device, seen = task["micro_batch_size"], run.clock.device, replace_collectives().seen
    if task["module"] == OWN:
        own = run.own_model.builder(region["own"], batch_size, device, compiled)
        return _measured_calls(_in_format(own, task["memory_format"]), run.clock, seen)
    build = _in_format(generated_builder(region, batch_size, run.dtype, device, compiled), task["memory_format"])
    told = None
    if compiled is not None and region["tp"] > 1:  # compiled code does not tell
        eager = generated_builder(region, batch_size, run.dtype, device, None)
        told = memory_of(eager(), run.clock, seen)["collectives"]
    return _measured_calls(build, run.clock, seen, told=told)


def _in_format(build: Callable[[], Call], memory_format: str) -> Callable[[], Call]:
    """Makes calls whose images lie in memory as they do in the program; weights stay as they are."""
    if memory_format == CONTIGUOUS:
        return build

    formats: Any = importlib.import_module("runtime.memory_format")

    def build_converted() -> Call:
        call = build()
        for tensor in call.inputs:
            tensor.data = formats.in_memory_format(tensor.data, memory_format)
        return call

    return build_converted


def _measured_calls(build: Callable[[], Call], clock: Clock, seen: list[Any], *, told: Any = None) -> dict[str, Any]:
    """Times and bytes of copies of one call; its collectives, added to `seen`, are left out, or those it was `told`."""
    call = build()
    memory = memory_of(call, clock, seen)
    stand_ins = told or memory["collectives"]
    del memory["collectives"]
    copies = [call]
    for _ in range(n_more_copies(call, memory, clock)):
        copies.append(build())
    times = round_times(Round(copies), clock)
    if _widest(times) > MAX_SPREAD:
        times = min(times, round_times(Round(copies), clock), key=_widest)
    for way, copied in zip(("forward", "backward"), stand_ins, strict=True):
        times[f"{way}_s"] = max(0.0, times[f"{way}_s"] - copies_s(copied, clock))
    return {"status": "noisy" if _widest(times) > MAX_SPREAD else "measured", **times, **memory}


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


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a result."""
    names = ("what", "content", "assignment", "tp", "micro_batch_size", "precision", "device", "torch", "driver")
    ways = bool(row.get("compiled")), row.get("memory_format", CONTIGUOUS)
    return (*(row.get(name) for name in names), *ways, row.get("module", GENERATED))


def read_results(path: Path) -> set[tuple[Any, ...]]:
    """The keys of the results that a file holds; a last line that was cut off is removed."""
    if not path.exists():
        return set()
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return {key_of(json.loads(line)) for line in whole.splitlines()}


def tasks(plan: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(fields that identify it, region) of everything to measure: optimizer, eager, compiled."""
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
                for batch_size in region["micro_batch_sizes"]:
                    yield {**common, **described, "module": module, "micro_batch_size": batch_size}, region


def measure(folder: Path, out: Path, device: torch.device, *, seconds: float = SECONDS, backend: str = BACKEND) -> None:
    """Measure everything that `out` does not hold yet; `backend` is that of torch.compile."""
    plan = json.loads((folder / "measurement.json").read_text())
    found = environment(device)
    if plan["device"].lower() != found["device"].lower():
        sys.exit(
            f"measure: found device {found['device']!r}\n  expected: {plan['device']!r}, the device of --hw\n"
            "  fix: run it there, or give --hw a profile of this device, which autoplan hw measure writes"
        )
    if plan["has_own_ops"]:
        importlib.import_module("model")
    run = _measuring(plan, Clock(device, seconds), backend)
    done, everything = read_results(out), list(tasks(plan))
    torch.manual_seed(0)
    with out.open("a") as file:
        for number, (row, region) in enumerate(everything, 1):
            row |= found
            is_known = key_of(row) in done
            if not is_known:
                row |= _measured(row, region, run)
                done.add(key_of(row))
                file.write(json.dumps(row) + "\n")
                file.flush()
            _show(f"[{number}/{len(everything)}] {_described(row)}: {'known' if is_known else _result(row)}")


def _measuring(plan: dict[str, Any], clock: Clock, backend: str) -> Measuring:
    dtype, paths = DTYPES[plan["precision"]], {region["own"]["path"] for region in plan["regions"] if region["own"]}
    overrides = {name: _as_tuple(value) for name, value in plan["overrides"].items()}
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
    return Measuring(clock, dtype, OwnModel(overrides, paths, dtype), compiled)


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples, and overrides no lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _measured(task: dict[str, Any], region: dict[str, Any], run: Measuring) -> dict[str, Any]:
    try:
        if not region:
            return measure_optimizer(run.dtype, run.clock)
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


def _described(row: dict[str, Any]) -> str:
    if row["what"] == "optimizer":
        return "optimizer"
    boundary = f" {row['boundary']}" if row["boundary"] else ""
    way = ", compiled" if row["compiled"] else ""
    way += f", {row['memory_format']}" if row["memory_format"] != CONTIGUOUS else ""
    way += ", own module" if row["module"] == OWN else ""
    return f"{row['segment']}, tp {row['tp']}{boundary}, micro-batch {row['micro_batch_size']}{way}"


def _result(row: dict[str, Any]) -> str:
    if row["status"] not in ("measured", "noisy"):
        return f"{row['status']} {row.get('why', '')}".strip()
    if row["what"] == "optimizer":
        return f"{row['per_element_s'] * 1e12:.2f} ps per element"
    times = f"forward {row['forward_s'] * 1e3:.3f} ms, backward {row['backward_s'] * 1e3:.3f} ms"
    return times + (" (noisy)" if row["status"] == "noisy" else "")


def _show(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(folder: Path, arguments: list[str]) -> None:
    """The command line of measure.py in this folder; see the docstring of the package."""
    parser = argparse.ArgumentParser(description="Measure what measurement.json lists, on one device.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("measured.json"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--backend", default=BACKEND, help="Of torch.compile.")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("measure: found no CUDA device\n  expected: one GPU of the target\n  fix: run on it, or --device cpu")
    measure(folder, given.out, torch.device(given.device), seconds=given.seconds, backend=given.backend)
