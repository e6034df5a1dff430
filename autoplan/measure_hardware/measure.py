"""One measurement of a host, by all its ranks: every time, then the hardware profile that follows from them.

Every process measures; rank 0 writes, once everything is measured and the loader accepts it, so that a run that
fails leaves nothing behind. NCCL logs to a file of its own over what it talks, in this very run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.errors import AutoplanError, InputError, MeasureError, OutputError, UsageError
from autoplan.files import check_writable
from autoplan.hardware import CPU, HardwareProfile
from autoplan.hardware.file import build_hardware_profile
from autoplan.measure_hardware.device import device_rates
from autoplan.measure_hardware.host_file import profile_text
from autoplan.measure_hardware.link_fit import CollectiveTime
from autoplan.measure_hardware.links import Ranks, collective_launch, link_times, mean_of_rounds, overlap_times
from autoplan.measure_hardware.measured_host import MeasuredHost, measured_json
from autoplan.measure_hardware.nccl_log import LOG_SUBSYSTEMS, SOCKET, Transport, link_kind, read_nccl_log
from autoplan.measure_hardware.pipeline_host_time import pipeline_rates
from autoplan.measure_hardware.zero_host_time import sharded_passes
from autoplan.units import MiB

DEVICES = ("auto", "cuda", "cpu")
PATIENCE = timedelta(seconds=120)
_SMI_FIELDS = ("driver_version", "memory.total", "pcie.link.gen.max")
_OWN_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_GLOO = "gloo over TCP of this host"


def measure_host(
    out: Path,
    *,
    device: str = "auto",
    with_json: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> HardwareProfile | None:
    """Measure with all ranks of this host, and write its hardware profile to `out`; `with_json` adds every time.

    Returns the hardware profile on rank 0, None on the others.

    Raises: MeasureError when anything cannot be measured, OutputError when `out` cannot be written, UsageError when
        it is not named as a hardware file.
    """
    files = (out, out.with_suffix(".json")) if with_json else (out,)
    rank = int(os.environ.get("RANK", "0"))
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: a hardware file ends in .toml\n  fix: choose another name")
    if rank == 0:
        for file in files:
            _check_target(file, force=force)
    with tempfile.TemporaryDirectory() as folder:
        try:
            host = _measure(device, Path(folder, "nccl.log"), progress if rank == 0 else lambda text: None)
        except (RuntimeError, ValueError) as error:  # what torch raises: out of memory, a lost rank, no process group
            reason = str(error).strip().partition("\n")[0]
            raise MeasureError(f"hw measure: rank {rank}: {type(error).__name__}: {reason}") from error
    if rank != 0:
        return None
    return _write(host, files)


def _measure(device_type: str, nccl_log: Path, progress: Callable[[str], None]) -> MeasuredHost:
    """What this rank's process group measured; equal on all ranks but for the transport, which rank 0 knows."""
    if int(os.environ.get("RANK", "0")) == 0:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(nccl_log), NCCL_DEBUG_SUBSYS=LOG_SUBSYSTEMS)
    ranks = _start(device_type)
    progress(f"measuring products, memory and launches of {ranks.n_ranks} x {ranks.device.type}")
    rates = device_rates(ranks.device, ranks.slowest)
    on_cuda = ranks.device.type == "cuda"
    smi = _nvidia_smi() if on_cuda else {}
    today = date.today().isoformat()
    host = MeasuredHost(
        device_name=torch.cuda.get_device_name(ranks.device) if on_cuda else CPU,
        n_devices=ranks.n_ranks,
        memory_bytes=_memory_bytes(ranks, smi),
        memory_source=f"{'nvidia-smi' if smi else 'torch' if on_cuda else 'an equal share of the host'}, {today}",
        versions=_versions(smi, on_cuda=on_cuda, today=today),
        date=today,
        rates=rates,
        environment=tuple(
            sorted(pair for pair in os.environ.items() if pair[0].startswith("NCCL_") and pair[0] not in _OWN_VARIABLES)
        ),
    )
    if ranks.n_ranks == 1:
        return host
    rounds: list[tuple[CollectiveTime, ...]] = []

    def measure_links() -> None:
        progress(f"measuring collectives, round {len(rounds) + 1}")
        rounds.append(link_times(ranks))

    measure_links()
    rates += (collective_launch(ranks), *pipeline_rates(ranks))
    measure_links()
    progress("measuring overlap")
    overlap, overlap_of_shards = overlap_times(ranks)
    measure_links()
    progress("measuring fully_shard")
    passes = sharded_passes(ranks)
    measure_links()
    times, drift = mean_of_rounds(rounds)
    transport = Transport((_GLOO,), None, False)
    kind = SOCKET
    if on_cuda:
        transport = read_nccl_log(nccl_log.read_text(errors="replace") if nccl_log.is_file() else "")
        generation = smi.get("pcie.link.gen.max", "")
        kind = link_kind(
            transport,
            capability_major=torch.cuda.get_device_capability(ranks.device)[0],
            pcie_generation=int(generation) if generation.isdigit() else None,
        )
    dist.destroy_process_group()
    return replace(
        host,
        rates=rates,
        times=times,
        drift=drift,
        overlap=overlap,
        overlap_of_shards=overlap_of_shards,
        sharded_passes=passes,
        transport=str(transport),
        link_kind=kind,
        has_multicast=transport.has_multicast,
    )


def _start(device_type: str) -> Ranks:
    """The place of this process among those that torchrun started on this host; alone without torchrun."""
    n_ranks, local_rank = (int(os.environ.get(name, value)) for name, value in (("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and torch.cuda.device_count() <= local_rank:
        raise MeasureError(
            f"hw measure: found {torch.cuda.device_count()} CUDA devices\n  expected: one for each process, "
            f"{n_ranks} in all\n  fix: start fewer processes, or measure with --device cpu"
        )
    if n_ranks != int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks)):
        raise MeasureError("hw measure: found several hosts\n  expected: the processes of one\n  fix: use --standalone")
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if n_ranks == 1:
        return Ranks(0, 1, device, ())
    backend, device_id = ("nccl", device) if device_type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, timeout=PATIENCE, device_id=device_id)
    sizes = [size for size in range(2, n_ranks) if n_ranks % size == 0]
    groups = [(size, dist.new_subgroups(size)[0]) for size in sizes]  # type: ignore[no-untyped-call]
    return Ranks(dist.get_rank(), n_ranks, device, (*groups, (n_ranks, dist.group.WORLD)))


# --- what the machine says of itself ---------------------------------------------------------------------------


def _nvidia_smi() -> Mapping[str, str]:
    """Driver, memory in MiB and PCIe generation of the first device; empty where nvidia-smi does not answer."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().partition("\n")[0].split(", ")
    return dict(zip(_SMI_FIELDS, values, strict=True)) if len(values) == len(_SMI_FIELDS) else {}


def _memory_bytes(ranks: Ranks, smi: Mapping[str, str]) -> int:
    if ranks.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks.n_ranks
    in_mib = smi.get("memory.total", "")
    return int(in_mib) * MiB if in_mib.isdigit() else torch.cuda.get_device_properties(ranks.device).total_memory


def _versions(smi: Mapping[str, str], *, on_cuda: bool, today: str) -> str:
    found = [f"torch {torch.__version__}"]
    if on_cuda:
        found.append(f"driver {smi.get('driver_version', 'unknown')}")
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found.append("NCCL " + ".".join(str(part) for part in nccl))
    return ", ".join([*found, today])


# --- files -----------------------------------------------------------------------------------------------------


def _check_target(file: Path, *, force: bool) -> None:
    """Refuse a file that could not be written, before time is spent on measuring."""
    check_writable(file.absolute().parent, target=file, option="--out")
    if os.path.lexists(file) and not (force and file.is_file()):
        way = ", or add --force" if file.is_file() else ""
        raise OutputError(f"{file}: already exists, nothing was changed\n  fix: choose another --out{way}")


def _write(host: MeasuredHost, files: Sequence[Path]) -> HardwareProfile:
    """Write all files or none, after the loader has accepted the profile."""
    text = profile_text(host)
    try:
        hardware = build_hardware_profile(text, name=files[0].stem, where=str(files[0]), n_hosts=1, network=None)
    except InputError as error:
        raise MeasureError(f"hw measure: the measured profile cannot be right, and is not written: {error}") from error
    scratch = [file.with_name(f".{file.name}.part") for file in files]
    try:
        for path, content in zip(scratch, (text, measured_json(host)), strict=False):
            path.write_text(content, encoding="utf-8")
        for path, file in zip(scratch, files, strict=True):
            path.replace(file)
    except OSError as error:
        raise OutputError(
            f"{files[0]}: {error.strerror}; nothing was changed\n"
            "  expected: a place that can be written to\n  fix: choose another --out, or make room there"
        ) from error
    finally:
        for path in scratch:
            path.unlink(missing_ok=True)
    return hardware


def main() -> int:
    """The command line of this module alone, where the packages that `autoplan` needs are missing."""
    parser = argparse.ArgumentParser(prog="python -m autoplan.measure_hardware", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--json", dest="with_json", action="store_true", help="write every time beside it, as .json")
    parser.add_argument("--force", action="store_true", help="replace the files")
    options = parser.parse_args()
    try:
        measure_host(**vars(options), progress=lambda text: _tell(f"{text} ..."))
    except AutoplanError as error:
        _tell(f"autoplan: {error}")
        return error.exit_code
    return 0


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
