"""Measuring a host: the fit finds what the times were made of, the file is a valid profile, failures leave nothing."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest

from autoplan import cli
from autoplan.cost.collective_time import Group, collective_s, send_s
from autoplan.errors import InputError, MeasureError
from autoplan.hardware import NO_SHARDING, Device, HardwareProfile, LinkTier, load_hardware_profile
from autoplan.hardware.file import build_hardware_profile
from autoplan.measure_hardware.host_file import profile_text
from autoplan.measure_hardware.link_fit import CollectiveTime, fit_links
from autoplan.measure_hardware.links import mean_of_rounds
from autoplan.measure_hardware.measured_host import MeasuredHost, OverlapTimes, Rate, Together, measured_json
from autoplan.measure_hardware.nccl_log import Transport, link_kind, read_nccl_log
from autoplan.overlap import Overlap
from autoplan.units import GB, TFLOP, GiB, KiB, MiB

SIZES = [64 * KiB * 4**i for i in range(8)]  # to 1 GiB
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# --- the fit ---------------------------------------------------------------------------------------------------

LINK = LinkTier(
    "nvlink", 4, latency_s=3e-6, bytes_per_s=400e9, bus_efficiency=0.75, half_rate_bytes=5 * MiB,
    kind_bus_efficiency=(("all_gather", 0.7), ("all_to_all", 0.6), ("send", 0.65)), group_bus_efficiency=((2, 0.5),),
)  # fmt: skip
TOY_DEVICE = Device("toy", (("bf16", 1e14),), 80 * GiB, 1e12, 0.5, 0.5, 1e-6, 1e-6, 1e-6, NO_SHARDING)
TOY = HardwareProfile(
    "toy", "four devices", TOY_DEVICE, 4, 1, (LINK,), Overlap(0.3, 0.3), Overlap(0.3, 0.3),
    None, (),
)  # fmt: skip


def times_of(hardware):
    """What a host would show that behaves exactly as the profile says."""
    groups = [
        CollectiveTime(kind, n, size, collective_s(kind, size, group=Group(n, n), hardware=hardware), 1)
        for kind in KINDS
        for n in (2, 4)
        for size in SIZES
    ]
    sends = [CollectiveTime("send", 2, s, send_s(s, pair=Group(2, 2), hardware=hardware), 1) for s in SIZES]
    return (*groups, *sends)


def test_the_fit_finds_the_figures_that_the_times_were_made_of():
    fit = fit_links(times_of(TOY), n_devices=4)
    assert fit.latency_s == pytest.approx(3e-6, rel=0.01)
    assert fit.half_rate_bytes == pytest.approx(5 * MiB, rel=0.01)
    assert dict(fit.all_reduce_bytes_per_s) == pytest.approx({2: 200e9, 4: 300e9}, rel=1e-3)
    assert dict(fit.kind_bytes_per_s) == pytest.approx(
        {"all_gather": 280e9, "all_to_all": 240e9, "send": 260e9}, rel=1e-3
    )
    assert fit.multicast_bytes_per_s is None
    assert fit.median_error < 0.005 and abs(fit.worst[1] - 1) < 0.02


def test_an_all_reduce_in_the_switch_gives_the_multicast_rate_and_the_ring_that_of_the_all_gather():
    switch = replace(TOY, links=(replace(LINK, multicast_bus_efficiency=1.1),))
    fit = fit_links(times_of(switch), n_devices=4, has_multicast=True)
    assert fit.multicast_bytes_per_s == pytest.approx(440e9, rel=0.05)  # large tensors, where no ring is faster
    ring = dict(fit.all_reduce_bytes_per_s)[4]
    assert ring == dict(fit.kind_bytes_per_s)["all_gather"] == pytest.approx(280e9, rel=0.01)


def test_without_an_all_reduce_of_the_whole_host_there_is_no_fit():
    with pytest.raises(MeasureError, match="no all_reduce over all 4"):
        fit_links([time for time in times_of(TOY) if time.n_devices == 2], n_devices=4)


@pytest.mark.parametrize(
    ("kind", "n", "moved"),
    # of 12 bytes: an all-reduce sends 2 (n-1)/n of them, a gather (n-1)/n, an all-to-all (n-1)/n of a rank's n-th
    [("all_reduce", 4, 18), ("all_gather", 4, 9), ("reduce_scatter", 2, 6), ("all_to_all", 2, 3), ("send", 2, 12)],
)
def test_bus_bandwidth_counts_the_bytes_that_a_ring_sends_over_each_link(kind, n, moved):
    assert CollectiveTime(kind, n, 12, 1.0, 1).moved_bytes == moved


# --- NCCL's log ------------------------------------------------------------------------------------------------

LOG = """
box:1:9 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0.
box:1:9 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type {path}/PIX, sameChannels 1
box:1:9 [0] NCCL INFO Pattern 3, crossNic 0, nChannels 12, bw 20.000000/20.000000, type LOC/PIX, sameChannels 1
box:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {via}
box:1:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via {via}
box:1:9 [0] NCCL INFO 16 coll channels, 16 collnet channels, {nvls} nvls channels, 32 p2p channels, 2 per peer
"""


@pytest.mark.parametrize(
    ("path", "via", "capability", "generation", "kind"),
    [
        ("NVL", "P2P/CUMEM", 9, 5, "nvlink4"),
        ("NVL", "P2P/direct pointer", 7, 3, "nvlink2"),
        ("PHB", "P2P/IPC", 8, 4, "pcie4"),
        ("SYS", "P2P/IPC", 12, 6, "pcie5"),
        ("NVL", "SHM/direct/direct", 9, 5, "host_memory"),
        ("NVL", "[send] via NET/Socket/0".removeprefix("[send] via "), 9, 5, "socket"),
    ],
)
def test_the_kind_of_link_is_that_of_the_transport_nccl_used(path, via, capability, generation, kind):
    transport = read_nccl_log(LOG.format(path=path, via=via, nvls=0))
    assert transport == Transport((via.split()[0],), path, False)
    assert link_kind(transport, capability_major=capability, pcie_generation=generation) == kind


def test_the_slowest_of_two_transports_counts_and_direction_marks_are_read_over():
    text = LOG.format(path="PHB", via="P2P/IPC", nvls=0) + "Channel 02/0 : 1[1] -> 2[2] [send] via SHM/direct/direct\n"
    transport = read_nccl_log(text)
    assert transport.channels == ("P2P/IPC", "SHM/direct/direct")
    assert link_kind(transport, capability_major=8, pcie_generation=4) == "host_memory"


def test_channels_in_the_switch_mean_multicast():
    assert read_nccl_log(LOG.format(path="NVL", via="P2P/CUMEM", nvls=16)).has_multicast


def test_a_log_that_names_no_transport_gives_an_unknown_link():
    assert link_kind(read_nccl_log("NCCL version 2"), capability_major=9, pcie_generation=5) == "unknown"


def test_both_kinds_of_work_are_enqueued_evenly_mixed():
    from autoplan.measure_hardware.links import _in_turns

    assert _in_turns(2, 4) == [False, False, True, False, False, True]
    assert (_in_turns(3, 0), _in_turns(0, 2)) == ([True] * 3, [False] * 2)


# --- the file --------------------------------------------------------------------------------------------------

H200 = MeasuredHost(
    device_name="NVIDIA H200",
    n_devices=4,
    memory_bytes=143771 * MiB,
    memory_source="nvidia-smi, 2026-11-21",
    versions="torch 2.11, driver 580, NCCL 2.28, 2026-11-21",
    date="2026-11-21",
    rates=(
        Rate("product bf16", 4096, 2 * 4096**3, 2 * 4096**3 / (700 * TFLOP), 3000),  # 70.8 % of 989
        Rate("product bf16", 8192, 2 * 8192**3, 2 * 8192**3 / (650 * TFLOP), 400),
        Rate("product fp32", 4096, 2 * 4096**3, 2 * 4096**3 / (50 * TFLOP), 300),
        Rate("elementwise", 2 * GiB, 4 * GiB, 4 * GiB / (4200 * GB), 500),  # 87.5 % of 4800
        Rate("copy", 2 * GiB, 4 * GiB, 4 * GiB / (4000 * GB), 500),
        Rate("host to device", 256 * MiB, 256 * MiB, 256 * MiB / (50 * GB), 100),
        Rate("device to host", 256 * MiB, 256 * MiB, 256 * MiB / (52 * GB), 100),
        Rate("kernel", 64, 512, 1.2e-6, 1000),
        Rate("launch", 64, 512, 5e-6, 1000),
    ),
    transport="P2P/CUMEM (NVL)",
    link_kind="nvlink4",
    environment=(("NCCL_NVLS_ENABLE", "0"),),
    times=times_of(TOY),
    drift=0.031,
    overlap=OverlapTimes(Together(0.2, 0.1, 0.225), Together(0.1, 0.2, 0.21)),  # 25 % and 10 % exposed
    overlap_of_shards=OverlapTimes(Together(0.2, 0.1, 0.23), Together(0.1, 0.2, 0.22)),  # 30 % and 20 %
)


def loaded(host):
    return build_hardware_profile(profile_text(host), name="my_box", where="my_box.toml", n_hosts=1, network=None)


def test_the_file_gives_back_what_was_measured():
    hardware = loaded(H200)
    device, (link,) = hardware.device, hardware.links
    sheet = load_hardware_profile("h200_x4").device
    assert (device.name, device.memory_bytes) == ("NVIDIA H200", 143771 * MiB)
    assert device.peak_flops_per_s == sheet.peak_flops_per_s
    assert device.memory_bytes_per_s == sheet.memory_bytes_per_s
    assert device.matmul_efficiency == pytest.approx(700 / 989, rel=1e-3)
    assert device.memory_efficiency == pytest.approx(4200 / 4800, rel=1e-3)
    assert (device.kernel_s, device.launch_s) == pytest.approx((1.2e-6, 5e-6))
    assert device.host_copy_bytes_per_s == pytest.approx(50e9)
    assert hardware.overlap == Overlap(communication_exposed=pytest.approx(0.25), compute_exposed=pytest.approx(0.1))
    assert hardware.overlap_of_shards == Overlap(pytest.approx(0.3), pytest.approx(0.2))
    assert link.drift == pytest.approx(0.031)
    assert (hardware.n_devices_per_host, link.name, link.bytes_per_s) == (4, "nvlink", 450e9)
    assert link.bus_efficiency == pytest.approx(300 / 450, rel=1e-3)
    assert dict(link.kind_bus_efficiency) == pytest.approx(
        {"all_gather": 280 / 450, "all_to_all": 240 / 450, "send": 260 / 450}, rel=1e-3
    )
    assert link.bus_efficiency_of(2) == pytest.approx(200 / 450, rel=1e-3)
    assert link.multicast_bus_efficiency is None
    assert hardware.price_usd_per_device_hour is None


@pytest.mark.parametrize(("has_times", "within"), [(True, 1e-3), (False, 0.02)])
def test_a_written_profile_predicts_the_times_it_was_made_from(has_times, within):
    hardware = loaded(H200)
    if not has_times:  # by the figures that were fitted to them
        hardware = replace(hardware, links=tuple(replace(link, timed=()) for link in hardware.links))
    for time in H200.times:
        group = Group(time.n_devices, time.n_devices)
        if time.kind != "send":
            predicted_s = collective_s(time.kind, time.size_bytes, group=group, hardware=hardware)
            assert predicted_s == pytest.approx(time.seconds, rel=within)
        elif has_times:
            assert send_s(time.size_bytes, pair=group, hardware=hardware) == pytest.approx(time.seconds, rel=within)


def test_sources_name_versions_transport_and_what_overlapped():
    hardware = loaded(H200)
    sources = dict(hardware.sources)
    for field in ("latency_per_step", "all_reduce_bus_rate", "all_reduce_bus_rate_of_group.2"):
        for part in ("P2P/CUMEM (NVL)", "torch 2.11", "driver 580", "NCCL 2.28", "2026-11-21"):
            assert part in sources[f"host_link.{field}"], field
    assert "8192: 650 TFLOP/s" in sources["device.matmul_efficiency"]
    overlap = sources["host.exposed_when_overlapped"]
    assert overlap.startswith("products of 200 ms and all-reduces of 100 ms took 225 ms together; ")
    assert "NCCL_NVLS_ENABLE=0" in hardware.description


def test_that_nvlink_joins_hosts_is_taken_from_the_data_sheet():
    host = replace(H200, device_name="NVIDIA GB200", link_kind="nvlink5")
    assert loaded(host).n_hosts_joined == 18
    times = tuple(replace(time, seconds=time.seconds * 10) for time in host.times)
    assert loaded(replace(host, link_kind="host_memory", times=times)).n_hosts_joined == 1


def test_a_time_is_the_mean_of_its_rounds_and_drift_how_much_rounds_differ():
    rounds = [
        [CollectiveTime("send", 2, size, size * 1e-9 * pace, 5) for size in sizes]
        for pace, sizes in ((0.9, (1024, 4096)), (1.1, (1024, 4096)), (1.0, (1024,)))  # 4096 got too slow for the last
    ]
    times, drift = mean_of_rounds(rounds)
    assert times == (CollectiveTime("send", 2, 1024, pytest.approx(1024e-9), 15),)
    assert drift == pytest.approx(stdev([math.log(0.9), math.log(1.1), 0.0]))
    assert mean_of_rounds(rounds[:1]) == (tuple(rounds[0]), 0.0)


def test_a_device_without_a_data_sheet_has_its_best_rates_as_peaks():
    device = loaded(replace(H200, device_name="NVIDIA Unheard-of")).device
    peaks = dict(device.peak_flops_per_s)
    assert peaks == pytest.approx({"bf16": 700 * TFLOP, "fp32": 50 * TFLOP}, rel=1e-3)
    assert device.memory_bytes_per_s == pytest.approx(4200e9, rel=1e-3)
    assert (device.matmul_efficiency, device.memory_efficiency) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "slowdown", "name", "rate"),
    [
        ("host_memory", 10, "host_memory", 52e9),  # 300 / 10 GB/s over a link that copies at 52 GB/s
        ("socket", 100, "socket", 3e9),  # nothing but the collectives knows its rate
        ("pcie5", 10, "pcie", 63e9),  # that of the kind
        ("pcie5", 1, "unknown", 300e9),  # no PCIe link: faster than its kind can be
    ],
)
def test_the_rate_of_a_link_is_the_kinds_or_else_measured(kind, slowdown, name, rate):
    times = tuple(replace(time, seconds=time.seconds * slowdown) for time in H200.times)
    (link,) = loaded(replace(H200, link_kind=kind, times=times)).links
    assert (link.name, link.bytes_per_s) == (name, pytest.approx(rate, rel=0.01))
    assert link.bytes_per_s * link.bus_efficiency == pytest.approx(300e9 / slowdown, rel=0.01)


def test_a_link_without_a_data_sheet_must_give_its_rate():
    text = profile_text(replace(H200, link_kind="socket"))
    lines = [line for line in text.splitlines() if not line.startswith("rate_per_device")]
    with pytest.raises(InputError, match="host_link.rate_per_device_one_direction: found 'nothing'"):
        build_hardware_profile("\n".join(lines), name="b", where="b.toml", n_hosts=1, network=None)


def test_overlap_that_costs_nothing_is_written_as_the_least_the_schema_takes_and_says_so():
    free = Together(0.2, 0.25, 0.2504)
    hardware = loaded(replace(H200, overlap=OverlapTimes(free, free), overlap_of_shards=OverlapTimes(free, free)))
    assert hardware.overlap == hardware.overlap_of_shards == Overlap(communication_exposed=0.01, compute_exposed=0.01)
    assert dict(hardware.sources)["host.exposed_when_overlapped"].startswith("measured 0.2%; ")


def test_an_implausible_peak_is_left_out_with_the_reason():
    slow = replace(H200.rates[2], seconds=1e6)
    text = profile_text(replace(H200, device_name="abacus", rates=(H200.rates[0], slow, *H200.rates[3:])))
    assert "# fp32 is left out: 0.0000001374 TFLOP/s is outside what is plausible" in text


def test_the_json_has_every_time_beside_what_the_fit_predicts():
    found = json.loads(measured_json(H200))
    assert len(found["times"]) == len(H200.times) == 72
    for time in found["times"]:
        assert time["predicted_s"] == pytest.approx(time["seconds"], rel=0.02)
    largest = next(t for t in found["times"] if (t["kind"], t["n_devices"], t["size_bytes"]) == ("all_reduce", 4, GiB))
    assert largest["bus_bytes_per_s"] == pytest.approx(300e9, rel=0.01)
    assert found["overlap"]["compute_longer"]["exposed"] == pytest.approx(0.25)
    assert found["overlap"]["communication_longer"]["exposed"] == pytest.approx(0.1)
    assert found["overlap_of_shards"]["communication_longer"]["exposed"] == pytest.approx(0.2)
    assert found["environment"] == {"NCCL_NVLS_ENABLE": "0"}


# --- runs ------------------------------------------------------------------------------------------------------

CHECKOUT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(folder, *arguments, **environment):
    command = [sys.executable, *arguments]
    variables = {**ENVIRONMENT, **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())


# The same run with less of everything, whose figures are worth nothing.
QUICK = """
import sys
from autoplan.measure_hardware import device, links, measure, pipeline_host_time, zero_host_time

device.SUSTAINED_S, device.N_LAUNCHES = 0.05, 200
links.GROWTH, links.LARGEST_BYTES, links.SLOWEST_CALL_S, links.OVERLAP_S = 16, {"cpu": 2**20}, 0.02, 0.02
zero_host_time.N_BLOCKS, zero_host_time.N_STEPS, zero_host_time.N_WARM_UP = 2, 3, 1
pipeline_host_time.MANY, pipeline_host_time.N_STEPS, pipeline_host_time.N_WARM_UP = 12, 3, 1
"""
COMMAND = "from autoplan import cli\n\nsys.exit(cli.run(['hw', 'measure', *sys.argv[1:]]))\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "sustained_s"),
    [
        pytest.param(("run.py",), 0.05, id="quick"),
        pytest.param(("-m", "autoplan", "hw", "measure"), 0.5, marks=pytest.mark.nightly, id="in earnest"),
    ],
)
def test_two_processes_write_a_valid_profile_and_every_time(tmp_path, program, sustained_s):
    (tmp_path / "run.py").write_text(QUICK + COMMAND)
    command = [*TORCHRUN, *program, "--device=cpu", "--json", "--out=my_box.toml"]
    done = run(tmp_path, *command)
    if "the measured profile cannot be right" in done.stderr:  # on a host that was busy for a moment
        done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert leftovers(tmp_path) == ["my_box.json", "my_box.toml", "run.py"]
    assert cli.run(["hw", "validate", str(tmp_path / "my_box.toml")]) == 0
    hardware = load_hardware_profile(str(tmp_path / "my_box.toml"))
    assert (hardware.n_devices, hardware.links[0].name) == (2, "socket")
    sources = dict(hardware.sources)
    assert sources["device.kernel"].startswith("assumed: ")
    assert "gloo" in sources["host_link.all_reduce_bus_rate"]
    assert done.stdout.count("my_box") == 1  # the sheet, once, from rank 0
    found = json.loads((tmp_path / "my_box.json").read_text())
    assert {time["kind"] for time in found["times"]} == {*KINDS, "broadcast", "send", "sendrecv"}
    products = [rate for rate in found["rates"] if rate["what"].startswith("product")]
    assert products and all(rate["seconds"] * rate["n_calls"] >= sustained_s for rate in products)


@pytest.mark.slow
def test_one_device_is_measured_without_torchrun_and_without_click(tmp_path):
    blocker = "import sys; sys.modules.update(dict.fromkeys(('click', 'jinja2', 'ortools', 'platformdirs')))\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    (tmp_path / "my_box.toml").write_text("of a former run")
    path = f"{tmp_path}:{CHECKOUT}"
    options = ("--device", "cpu", "--out", "my_box.toml")
    (tmp_path / "run.py").write_text(QUICK + FITTING + TWICE)
    done = run(tmp_path, "run.py", *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "exit code 9, and there is: of a former run\n" in done.stdout
    hardware = load_hardware_profile(str(tmp_path / "my_box.toml"))
    assert (hardware.n_devices, hardware.links) == (1, ())


# What several devices need besides.
FITTING = """
from autoplan.measure_hardware.link_fit import CollectiveTime, fit_links

fit_links([CollectiveTime(kind, 2, 2**20, 1e-3, 1) for kind in ("all_reduce", "all_gather")], n_devices=2)
"""

# As `python -m autoplan.measure_hardware` runs, without and with --force.
TWICE = """
import runpy
from pathlib import Path

try:
    runpy.run_module("autoplan.measure_hardware", run_name="__main__")
except SystemExit as end:
    print(f"exit code {end.code}, and there is: {Path('my_box.toml').read_text()}")
sys.argv.append("--force")
runpy.run_module("autoplan.measure_hardware", run_name="__main__")
"""

FAILING = """
whole = measure.link_times

def failing(ranks):
    if ranks.rank == 1:
        raise RuntimeError("CUDA out of memory")
    return whole(ranks)

measure.link_times = failing
sys.exit(measure.main())
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_that_fails_ends_the_run_and_leaves_no_file(tmp_path):
    (tmp_path / "run.py").write_text(QUICK + FAILING)
    done = run(tmp_path, *TORCHRUN, "run.py", "--device=cpu", "--json", "--out=my_box.toml")
    assert done.returncode != 0
    assert "autoplan: hw measure: rank 1: RuntimeError: CUDA out of memory" in done.stderr
    assert "exitcode  : 7" in done.stderr
    assert leftovers(tmp_path) == ["run.py"]


def test_a_group_that_cannot_form_ends_with_7_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ) | dict.fromkeys(("RANK", "LOCAL_RANK"), "0"))
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.pop("MASTER_ADDR", None)
    assert cli.run(["hw", "measure", "--device=cpu", f"--out={tmp_path / 'my_box.toml'}"]) == 7
    error = capsys.readouterr().err
    assert "rank 0: ValueError" in error and "MASTER_ADDR" in error
    assert leftovers(tmp_path) == []


def test_several_hosts_are_refused_with_7(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.run(["hw", "measure", "--device", "cpu", "--out", str(tmp_path / "my_box.toml")]) == 7
    assert "several hosts" in capsys.readouterr().err


def test_a_missing_gpu_ends_with_7(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.run(["hw", "measure", "--device", "cuda", "--out", str(tmp_path / "my_box.toml")]) == 7
    assert "found 0 CUDA devices" in capsys.readouterr().err
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("out", "code"), [("nowhere/my_box.toml", 9), ("my_box.json", 2)])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, out, code, monkeypatch):
    monkeypatch.setattr("autoplan.measure_hardware.measure._measure", None)  # to call it would be an internal error
    assert cli.run(["hw", "measure", "--out", str(tmp_path / out)]) == code


def test_a_profile_that_the_loader_refuses_is_not_written(tmp_path, monkeypatch, capsys):
    impossible = replace(H200, memory_bytes=3)
    monkeypatch.setattr("autoplan.measure_hardware.measure._measure", lambda *_: impossible)
    assert cli.run(["hw", "measure", "--json", "--out", str(tmp_path / "my_box.toml")]) == 7
    assert "device.memory" in capsys.readouterr().err
    assert leftovers(tmp_path) == []


def test_links_that_drift_beyond_belief_are_written_without_it():
    text = profile_text(replace(H200, drift=1.2))
    assert "# drift is left out: 120 % is outside what is plausible" in text
    assert loaded(replace(H200, drift=1.2)).links[0].drift == 0.0
