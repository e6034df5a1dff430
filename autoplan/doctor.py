"""What this machine offers to autoplan: versions, devices, and what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("autoplan", "torch", "numpy", "ortools", "networkx", "jinja2", "click", "platformdirs")
_TORCH_PROBE = "import torch; print(torch.__version__, torch.distributed.is_available(), torch.cuda.device_count())"
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_TIMEOUT_S = 60

Run = Callable[[tuple[str, ...]], str | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis; `fix` is None when nothing is missing."""

    name: str
    found: str
    fix: str | None = None


def run_command(command: tuple[str, ...]) -> str | None:
    """What a command prints; None when it does not exist, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def diagnose(run: Run = run_command) -> tuple[Finding, ...]:
    """Look at this machine; `run` starts a command."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return (
        Finding("python", python),
        *(_package(name) for name in PACKAGES),
        _transformers(),
        _torch_works(run),
        _gpus(run),
        _links(run),
        _torchrun(),
    )


def _package(name: str) -> Finding:
    try:
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"install {name}")


def _transformers() -> Finding:
    """Optional, so that its absence needs no fix."""
    found = _package("transformers")
    return found if not found.fix else Finding("transformers", "not installed; only hf: models need it")


def _torch_works(run: Run) -> Finding:
    answer = run((sys.executable, "-c", _TORCH_PROBE))
    if answer is None:
        return Finding("import torch", "fails", "install torch as pytorch.org describes for this machine")
    _, has_distributed, n_cuda_devices = answer.splitlines()[-1].split()
    if has_distributed != "True":
        return Finding("torch.distributed", "missing", "install a torch build with distributed support")
    return Finding("torch devices", f"{n_cuda_devices} CUDA device(s)" if n_cuda_devices != "0" else "CPU only (gloo)")


def _gpus(run: Run) -> Finding:
    answer = run(_GPU_QUERY)
    if not answer:
        return Finding("GPUs", "none found; planning and CPU checks work without")
    names = answer.splitlines()
    return Finding("GPUs", f"{len(names)} x {names[0]}")


def _links(run: Run) -> Finding:
    """The first row of the driver's link matrix: what device 0 reaches the others through."""
    answer = run(("nvidia-smi", "topo", "-m"))
    row = next((line for line in (answer or "").splitlines() if line.startswith("GPU0")), "")
    return Finding("links of GPU 0", " ".join(row.split()[1:]) or "unknown")


def _torchrun() -> Finding:
    path = shutil.which(str(Path(sys.executable).with_name("torchrun"))) or shutil.which("torchrun")
    return Finding("torchrun", path or "not on PATH", None if path else "use python -m torch.distributed.run")
