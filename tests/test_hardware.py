"""Hardware files: every shipped profile loads with its sources, and every wrong file says what is wrong."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import api, cli
from autoplan.errors import AutoplanError, InputError, UsageError
from autoplan.hardware import hardware_names, load_hardware_profile, validate_file
from autoplan.hardware.file import build_hardware_profile, network_names
from autoplan.hardware.usual import unusual_of, unusual_of_file
from autoplan.options import Options
from autoplan.overlap import Overlap
from autoplan.registry import load_table
from autoplan.report.hardware import hardware_list, hardware_sheet

REQUIRED = {
    "dgx_a100_x8", "dgx_a100_40g_x8", "dgx_h100_x8", "hgx_h200_x8", "h200_x4", "dgx_b200_x8", "a100_pcie_x8", "v100_x8",
    "rtx4090_x8", "l40s_x8", "a10g_x8", "l4_x8", "h100_pcie_x8", "h100_nvl_x2", "a100_40g_pcie_x8", "gb200_nvl72_x4",
}  # fmt: skip

TOY = """
description = "two toy devices"
default_network = "lab"

[device]
name = "toy"
memory = { value = "80 GiB", source = "by hand" }
memory_bandwidth = { value = "1000 GB/s", source = "by hand" }
matmul_efficiency = { value = "50 %", source = "by hand" }
memory_efficiency = { value = "80 %", source = "by hand" }
launch = { value = "5 us", source = "by hand" }
kernel = { value = "2 us", source = "by hand" }

[device.peak]
bf16 = { value = "100 TFLOP/s", source = "by hand" }

[host]
n_devices = 2
exposed_when_overlapped = { value = "25 %", source = "by hand" }

[host_link]
kind = "nvlink3"
rate_per_device_one_direction = { value = "200 GB/s", source = "by hand" }
latency_per_step = { value = "4 us", source = "by hand" }
half_rate_size = { value = "1 MiB", source = "by hand" }
all_reduce_bus_rate = { value = "150 GB/s", source = "by hand" }

[network.lab]
kind = "infiniband"
ports = "1 per host"
rate_per_port_one_direction = { value = "400 Gbit/s", source = "by hand" }
latency_per_step = { value = "10 us", source = "by hand" }
half_rate_size_per_port = { value = "2 MiB", source = "by hand" }
all_reduce_bus_rate_per_port = { value = "40 GB/s", source = "by hand" }
"""


@pytest.fixture
def write(tmp_path):
    def write_text(text: str, name: str = "my_box.toml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_text


def changed(old: str, new: str) -> str:
    assert TOY.count(old) == 1, old
    return TOY.replace(old, new)


def message_of(text: str) -> str:
    with pytest.raises(InputError) as error:
        build_hardware_profile(text, name="my_box", where="my_box.toml", n_hosts=1, network=None)
    assert error.value.exit_code == 3
    return str(error.value)


def test_an_array_of_tables_in_place_of_a_table_is_named_without_what_is_in_it():
    message = message_of(changed("[device]", "[[device]]"))
    assert message.startswith("my_box.toml: device: found 'an array of tables (1)'\n  expected: a table [device]\n")


@pytest.mark.parametrize(
    ("old", "new", "where", "name"),
    [
        ("n_devices = 2", "n_device = 2", "host.n_device", "n_devices"),
        ('kind = "nvlink3"', 'kinds = "nvlink3"', "host_link.kinds", "kind"),
        ('kind = "infiniband"', 'kinds = "infiniband"', "network.lab.kinds", "kind"),
        ('ports = "1 per host"', 'port = "1 per host"', "network.lab.port", "ports"),
        ('name = "toy"', 'names = "toy"', "device.names", "name"),
        ("default_network =", "default_networks =", "default_networks", "default_network"),
    ],
)
def test_a_required_key_that_is_misspelled_is_named(old, new, where, name):
    message = message_of(changed(old, new))
    assert message.startswith(f"my_box.toml: {where}: found ") and f'fix: did you mean "{name}"?' in message


def test_a_required_key_that_is_missing_is_found_nowhere():
    message = message_of(changed("n_devices = 2\n", ""))
    assert message.startswith(
        "my_box.toml: host.n_devices: found 'nothing'\n  expected: a whole number: devices of one"
    )


# --- shipped profiles ------------------------------------------------------------------------------------------


def test_the_required_profiles_are_shipped():
    assert set(hardware_names()) >= REQUIRED
    assert "shared" not in hardware_names()


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_profile_loads_over_every_network_with_a_source_for_each_figure(name):
    for network in ("", "+ethernet_10g", "+ethernet_100g", "+infiniband_400g"):
        hardware = load_hardware_profile(name + network, n_hosts=3)
        assert hardware.n_devices == 3 * hardware.n_devices_per_host
        assert len(hardware.links) == 2
        assert hardware.overlap.communication_exposed > 0.0
        # 4 device figures + 2 times + at least one peak, 1 host figure, 4 figures of each link
        assert len(hardware.sources) >= 6 + 1 + 1 + 8
        assert all(field and source.strip() for field, source in hardware.sources)


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_link_rate_is_plausible_for_one_direction(name):
    hardware = load_hardware_profile(name, n_hosts=36)
    for link in hardware.links:
        assert 0 < link.bus_efficiency <= 1
        assert all(0 < efficiency <= 1 for _, efficiency in link.kind_bus_efficiency)
    *own, network = hardware.links
    assert all(link.bytes_per_s <= 900e9 for link in own)
    assert network.bytes_per_s <= 50e9


def test_dgx_a100_has_the_figures_of_its_data_sheet():
    hardware = load_hardware_profile("dgx_a100_x8", n_hosts=2)
    assert dict(hardware.device.peak_flops_per_s)["bf16"] == 312e12
    assert hardware.device.memory_bytes == 81920 * 2**20
    assert hardware.device.memory_bytes_per_s == 2.039e12
    host, network = hardware.links
    assert (host.name, host.bytes_per_s, host.n_devices) == ("nvlink", 300e9, 8)
    assert host.bus_efficiency == pytest.approx(229 / 300)
    # one 200 Gbit/s port per device: 25 GB/s, 24 achieved
    assert (network.name, network.bytes_per_s, network.n_devices) == ("infiniband", 25e9, 16)
    assert network.bus_efficiency == pytest.approx(24 / 25)


def test_one_port_per_host_is_shared_by_its_devices():
    # 10 Gbit/s = 1.25 GB/s per host; an eighth of it for each of 8 devices, a quarter for each of 4
    assert load_hardware_profile("dgx_a100_x8+ethernet_10g", n_hosts=2).links[1].bytes_per_s == pytest.approx(
        1.25e9 / 8
    )
    assert load_hardware_profile("h200_x4+ethernet_10g", n_hosts=2).links[1].bytes_per_s == pytest.approx(1.25e9 / 4)


def test_v100_does_not_support_bf16():
    assert "bf16" not in dict(load_hardware_profile("v100_x8").device.peak_flops_per_s)


def test_peaks_of_the_profiles_are_dense():
    # what their data sheets give with sparsity is twice that
    with_sparsity = {"h100_pcie_x8": 1513e12, "h100_nvl_x2": 1671e12, "a10g_x8": 140e12, "l4_x8": 242e12}
    for name, sparse in with_sparsity.items():
        peak = dict(load_hardware_profile(name).device.peak_flops_per_s)["bf16"]
        assert peak == pytest.approx(sparse / 2, rel=1e-3), name


def test_nvlink_of_gb200_joins_18_hosts_of_4_and_infiniband_racks():
    def links(n_hosts, name="gb200_nvl72_x4"):
        return [
            (link.name, link.n_devices, link.bytes_per_s) for link in load_hardware_profile(name, n_hosts=n_hosts).links
        ]

    host, pair, rack = (("nvlink", n, 900e9) for n in (4, 8, 72))
    assert links(1) == [host]
    assert links(2) == [host, pair]
    assert links(18) == [host, rack]
    assert links(36) == [host, rack, ("infiniband", 144, 50e9)]
    assert [n for _, n, _ in links(18, "gb200_nvl72_x4/1")] == [18]
    # 10 Gbit/s of a host for 4 devices, between racks only
    assert links(19, "gb200_nvl72_x4+ethernet_10g")[1:] == [rack, ("ethernet", 76, 1.25e9 / 4)]
    joined = [load_hardware_profile("gb200_nvl72_x4", n_hosts=n).n_devices_joined for n in (1, 2, 18, 36)]
    assert joined == [4, 8, 72, 72]
    assert load_hardware_profile("dgx_b200_x8", n_hosts=4).n_devices_joined == 8


def test_one_host_has_one_link_tier():
    assert [link.name for link in load_hardware_profile("dgx_h100_x8").links] == ["nvlink"]


def test_multicast_is_off_on_four_h200_and_on_in_a_full_host():
    assert load_hardware_profile("h200_x4").links[0].multicast_bus_efficiency is None
    assert load_hardware_profile("hgx_h200_x8").links[0].multicast_bus_efficiency == pytest.approx(475 / 450)


def test_the_measured_overlap_of_four_h200_exposes_31_percent_of_either_side():
    overlap = load_hardware_profile("h200_x4").overlap
    assert overlap == Overlap(communication_exposed=pytest.approx(0.31), compute_exposed=pytest.approx(0.31))


def test_a_generic_figure_is_marked_as_assumed():
    sources = dict(load_hardware_profile("l40s_x8").sources)
    assert sources["device.memory_efficiency"].startswith("assumed: ")
    assert not sources["device.memory"].startswith("assumed: ")


# --- choosing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "names"), [("h100_x8", '"dgx_h100_x8"'), ("v100", '"v100_x8"'), ("H100_pcie", '"h100_pcie_x8"')]
)
def test_a_name_that_others_hold_is_answered_with_these(name, names):
    with pytest.raises(UsageError, match=rf"did you mean {names}\?"):
        load_hardware_profile(name)
    with pytest.raises(UsageError, match=r'did you mean one of "a100_40g_pcie_x8", .*"dgx_a100_x8"\?'):
        load_hardware_profile("a100")


def test_an_unknown_name_is_a_usage_error_with_the_nearest_name_and_the_list():
    with pytest.raises(UsageError) as error:
        load_hardware_profile("dgx_a10_x8")
    assert error.value.exit_code == 2
    assert 'did you mean "dgx_a100_x8"?' in str(error.value)
    assert "rtx4090_x8" in str(error.value)


def test_devices_are_named_before_a_network() -> None:
    with pytest.raises(UsageError, match=re.escape("--hw dgx_h100_x8/2+ethernet_10g")):
        load_hardware_profile("dgx_h100_x8+ethernet_10g/2")


def test_a_network_in_place_of_the_profiles_is_named_and_a_file_with_a_plus_has_none(tmp_path: Path) -> None:
    text = " ".join(hardware_sheet(load_hardware_profile("dgx_h100_x8+ethernet_10g")).split())
    assert "; here ethernet_10g between hosts" in text and "between hosts with --hosts N: ethernet_10g" in text
    (tmp_path / "my+box.toml").write_text(TOY)
    own = " ".join(hardware_sheet(load_hardware_profile(str(tmp_path / "my+box.toml"))).split())
    assert "here" not in own and "with --hosts N: the tiers that N hosts reach" in own


@pytest.mark.parametrize(("hosts", "is_said"), [(1, True), (2, False)])
def test_a_plan_on_one_host_says_that_nothing_goes_over_the_network_that_was_asked_for(hosts, is_said) -> None:
    options = Options(global_batch=8, fix=(("dp", "2"), ("tp", "1"), ("pp", "1")))
    gpt = Path(__file__).parent.parent / "examples" / "gpt.py"
    problem = api.make_problem(gpt, hw="dgx_h100_x8/2+ethernet_10g", hosts=hosts, options=options)
    limits = api.solve(problem).workload.limits
    assert any(text.startswith("Nothing goes over ethernet_10g") for text in limits) is is_said


@pytest.mark.parametrize("name", ["8xdgx_h100_x8", "8*dgx_h100_x8", "dgx_h100_x8*8"])
def test_a_number_of_hosts_in_the_name_is_told_where_it_belongs(name):
    with pytest.raises(UsageError, match="fix: --hw dgx_h100_x8 --hosts 8"):
        load_hardware_profile(name)


def test_an_unknown_network_names_the_known_ones():
    with pytest.raises(UsageError, match='ethernet_10g(.|\n)*did you mean "ethernet_10g"'):
        load_hardware_profile("dgx_a100_x8+ethernet_10")


def test_network_as_suffix_and_as_argument_are_the_same():
    assert load_hardware_profile("v100_x8+ethernet_10g", n_hosts=2) == load_hardware_profile(
        "v100_x8", n_hosts=2, network="ethernet_10g"
    )


def test_two_different_networks_are_a_usage_error():
    with pytest.raises(UsageError):
        load_hardware_profile("v100_x8+ethernet_10g", network="ethernet_100g")


def test_the_name_of_a_profile_loads_it_again():
    for name in ("v100_x8", "v100_x8+ethernet_10g"):
        hardware = load_hardware_profile(name, n_hosts=2)
        assert load_hardware_profile(hardware.name, n_hosts=2) == hardware


def test_zero_hosts_are_a_usage_error():
    with pytest.raises(UsageError):
        load_hardware_profile("v100_x8", n_hosts=0)


# --- files -----------------------------------------------------------------------------------------------------


def test_a_file_gives_exactly_its_figures(write):
    path = write(TOY)
    hardware = load_hardware_profile(path, n_hosts=2)
    assert hardware.name == "my_box"
    assert hardware.device.memory_bytes == 80 * 2**30
    assert (hardware.device.matmul_efficiency, hardware.device.memory_efficiency) == (0.5, 0.8)
    assert (hardware.device.launch_s, hardware.device.kernel_s) == pytest.approx((5e-6, 2e-6))
    assert hardware.overlap == Overlap(communication_exposed=0.25, compute_exposed=0.25)
    assert hardware.price_usd_per_device_hour is None
    host, network = hardware.links
    assert host.bus_efficiency == 0.75  # 150 / 200
    assert (network.bytes_per_s, network.bus_efficiency) == (25e9, 0.8)  # 50 GB/s per port / 2 devices; 40 / 50
    assert network.half_rate_bytes == 2**20  # 2 MiB per port, half a port per device
    assert validate_file(path) == load_hardware_profile(path)
    assert load_hardware_profile(path + "+ethernet_10g", n_hosts=2).links[1].name == "ethernet"


def test_what_compute_adds_to_communication_may_differ_from_what_that_adds_to_compute(write):
    figure = 'compute_exposed_when_overlapped = { value = "10 %", source = "by hand" }'
    hardware = load_hardware_profile(write(changed("n_devices = 2", f"n_devices = 2\n{figure}")))
    assert hardware.overlap == Overlap(communication_exposed=0.25, compute_exposed=0.1)
    assert dict(hardware.values)["host.compute_exposed_when_overlapped"] == "10 %"
    assert hardware.overlap_of_shards == Overlap(0.25, 0.25)  # not said of shards
    of_shards = f"[host.shards]\n{figure}\n\n[host_link]"
    hardware = load_hardware_profile(write(changed("[host_link]", of_shards)))
    assert (hardware.overlap, hardware.overlap_of_shards) == (Overlap(0.25, 0.25), Overlap(0.25, 0.1))
    assert dict(hardware.values)["host.shards.compute_exposed_when_overlapped"] == "10 %"


def test_a_host_with_one_device_needs_no_host_link(write):
    text = changed("n_devices = 2", "n_devices = 1")
    text = text[: text.index("[host_link]")] + text[text.index("[network.lab]") :]
    assert load_hardware_profile(write(text)).links == ()
    assert [link.name for link in load_hardware_profile(write(text), n_hosts=2).links] == ["infiniband"]


MISTAKES = {
    "no unit": ('"80 GiB"', '"80"', ["my_box.toml: device.memory", "'80'", 'no unit; use "GB" or "GiB"']),
    "a bare number": ('{ value = "80 GiB"', "{ value = 80", ["device.memory.value", "80", "add the unit"]),
    "an exponent without unit": ('"1000 GB/s"', '"1e12"', ["device.memory_bandwidth", "no unit"]),
    "bytes for gibibytes": ('"80 GiB"', '"80 B"', ["device.memory", "1 GiB to 2 TiB", 'did you mean "80 GiB"?']),
    "far too much memory": ('"80 GiB"', '"80 TiB"', ["device.memory", 'did you mean "80 GiB"?']),
    "negative": ('"80 GiB"', '"-80 GiB"', ["device.memory", "above 0"]),
    "not a number": ('"80 GiB"', '"nan GiB"', ["device.memory", "not a number"]),
    "infinite": ('"80 GiB"', '"1e999 GiB"', ["device.memory", "finite"]),
    "zero bandwidth": ('"200 GB/s"', '"0 GB/s"', ["host_link.rate_per_device_one_direction", "above 0"]),
    "latency of seconds": ('"4 us"', '"10 s"', ["host_link.latency_per_step", "100 ms", 'did you mean "10 us"?']),
    "bytes for bits": ('"400 Gbit/s"', '"400 GB/s"', ["network.lab.rate_per_port", 'did you mean "400 Gbit/s"?']),
    "ambiguous Gb": ('"400 Gbit/s"', '"400 Gb"', ["network.lab.rate_per_port", '"Gbit/s"']),
    "both directions": ('"200 GB/s"', '"600 GB/s"', ["rate_per_device", "both directions", '"300 GB/s"']),
    "too fast for its kind": ('"200 GB/s"', '"450 GB/s"', ["at most 300 GB/s", "check the kind"]),
    "bus faster than link": ('"150 GB/s"', '"250 GB/s"', ["all_reduce_bus_rate", "200 GB/s"]),
    "bus of all ports": ('"40 GB/s"', '"320 GB/s"', ["all_reduce_bus_rate_per_port", "50 GB/s"]),
    "sparse percent": ('"50 %"', '"150 %"', ["device.matmul_efficiency", "100 %"]),
    "all of it exposed": ('"25 %"', '"100 %"', ["host.exposed_when_overlapped", "1 % to 99 %"]),
    "shards that are nothing": ("n_devices = 2", "n_devices = 2\nshards = 0", ["host.shards", "a table"]),
    "shards that are no table": ("n_devices = 2", "n_devices = 2\nshards = 3", ["host.shards", "a table"]),
    "misspelt field of shards": (
        "[host_link]",
        '[host.shards]\nexposed = { value = "10 %", source = "by hand" }\n\n[host_link]',
        ["host.shards.exposed", "exposed_when_overlapped"],
    ),
    "misspelt field": (
        "memory_bandwidth",
        "memory_bandwith",
        ["device.memory_bandwith", 'did you mean "memory_bandwidth"?'],
    ),
    "unknown section": ("[host_link]", "[hostlink]", ["my_box.toml: hostlink", 'did you mean "host_link"?']),
    "unknown precision": ("bf16 =", "bfloat16 =", ["device.peak.bfloat16", 'did you mean "bf16"?']),
    "one host joined": ('kind = "nvlink3"', 'kind = "nvlink3"\nn_hosts = 1', ["host_link.n_hosts", "2 to 1024"]),
    "text joined": ('kind = "nvlink3"', 'kind = "nvlink3"\nn_hosts = "2"', ["host_link.n_hosts", "a whole number"]),
    "unknown kind": ('"nvlink3"', '"nvlink9"', ["host_link.kind", "pcie4", "did you mean"]),
    "missing source": ('"80 GiB", source = "by hand"', '"80 GiB"', ["device.memory", "source"]),
    "empty source": ('"80 GiB", source = "by hand"', '"80 GiB", source = " "', ["device.memory.source"]),
    "no figure table": (
        '{ value = "80 GiB", source = "by hand" }',
        '"80 GiB"',
        ["device.memory", "value =", "source ="],
    ),
    "ports without scope": ('"1 per host"', '"8"', ["network.lab.ports", '"8 per host" or "1 per device"']),
    "no ports": ('"1 per host"', '"0 per host"', ["network.lab.ports"]),
    "no devices": ("n_devices = 2", "n_devices = 0", ["host.n_devices", "0"]),
    "boolean devices": ("n_devices = 2", "n_devices = true", ["host.n_devices", "a whole number"]),
    "text devices": ("n_devices = 2", 'n_devices = "2"', ["host.n_devices", "a whole number"]),
    "duplicate key": ("n_devices = 2", "n_devices = 2\nn_devices = 4", ["my_box.toml", "line 19", "n_devices = 4"]),
    "unknown default network": ('"lab"', '"lan"', ["network", "'lan'", 'did you mean "lab"?']),
    "network is no table": ("[network.lab]", "[network]\nlab = 3\n[network.x]", ["network.lab"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_file_field_and_fix(mistake):
    old, new, expected = MISTAKES[mistake]
    message = message_of(changed(old, new))
    for part in ["my_box.toml", *expected]:
        assert part in message, message
    assert re.search(r"found .*\n  expected: .+\n  fix: .+", message), message


@pytest.mark.parametrize(
    ("field", "purpose"),
    [
        ("memory =", "memory that the driver offers"),
        ("memory_bandwidth =", "data-sheet memory bandwidth"),
        ("rate_per_port_one_direction =", "data-sheet rate of one network port"),
        ("half_rate_size_per_port =", "bytes a rank moves"),
        ("ports =", "network ports"),
        ('kind = "infiniband"', "sort of network"),
        ("name =", "what the driver calls it"),
        ("description =", "one line"),
        ("n_devices =", "devices of one host"),
        ("bf16 =", "dense peak rate"),
    ],
)
def test_a_missing_figure_is_named_with_what_it_is_for(field, purpose):
    lines = [line for line in TOY.splitlines() if not line.startswith(field)]
    assert len(lines) == len(TOY.splitlines()) - 1
    assert purpose in message_of("\n".join(lines))


@pytest.mark.parametrize(
    "field", ["matmul_efficiency", "memory_efficiency", "launch", "kernel", "exposed_when_overlapped"]
)
def test_a_missing_optional_figure_is_assumed_and_says_so(field):
    text = "\n".join(line for line in TOY.splitlines() if not line.startswith(field))
    hardware = build_hardware_profile(text, name="my_box", where="my_box.toml", n_hosts=1, network=None)
    (source,) = [source for path, source in hardware.sources if path.endswith("." + field)]
    assert source.startswith("assumed: ")


def test_a_link_without_figures_takes_those_of_its_kind_as_assumed():
    start, stop = TOY.index("rate_per_device"), TOY.index("[network.lab]")
    hardware = build_hardware_profile(TOY[:start] + TOY[stop:], name="b", where="b.toml", n_hosts=1, network=None)
    assert hardware.links[0].bytes_per_s == 300e9
    assert hardware.links[0].bus_efficiency == pytest.approx(232 / 300)
    assert dict(hardware.sources)["host_link.latency_per_step"].startswith("assumed: ")


def test_gb_and_gib_give_different_memory():
    def memory(unit):
        text = changed('"80 GiB"', f'"80 {unit}"')
        return build_hardware_profile(text, name="b", where="b.toml", n_hosts=1, network=None).device.memory_bytes

    assert (memory("GB"), memory("GiB")) == (80_000_000_000, 85_899_345_920)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\x89PNG\r\n\x1a\n\xff\xfe", b"a = " + b"[" * 5000, b"x" * (2**20 + 1)]
)
def test_a_file_that_is_no_profile_is_an_input_error(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="bad.toml"):
        validate_file(path)


def test_a_file_that_is_missing_is_an_input_error_with_its_path(tmp_path):
    with pytest.raises(InputError, match="nowhere.toml"):
        load_hardware_profile(str(tmp_path / "nowhere.toml"))
    with pytest.raises(InputError, match="dir.toml"):
        (tmp_path / "dir.toml").mkdir()
        load_hardware_profile(str(tmp_path / "dir.toml"))


@settings(max_examples=150, deadline=None)
@given(start=st.integers(0, len(TOY)), length=st.integers(0, 12), insert=st.text(max_size=4))
def test_a_damaged_file_loads_or_is_refused_and_never_crashes(start, length, insert):
    text = TOY[:start] + insert + TOY[start + length :]
    try:
        build_hardware_profile(text, name="my_box", where="my_box.toml", n_hosts=1, network=None)
    except AutoplanError as error:
        assert "my_box.toml" in str(error)


# --- registry --------------------------------------------------------------------------------------------------


def make_package(folder: Path, name: str, **modules: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    for module, text in modules.items():
        (folder / name / f"{module}.py").write_text(text)


def test_tables_of_all_files_of_a_package_are_joined(tmp_path, monkeypatch):
    make_package(tmp_path, "tables_one", a="T = {'x': 1}", b="T = {'y': 2}", c="U = {'z': 3}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_table("tables_one", "T") == {"x": 1, "y": 2}


def test_the_same_key_in_two_files_is_an_error_that_names_both(tmp_path, monkeypatch):
    make_package(tmp_path, "tables_two", first="T = {'x': 1}", second="T = {'x': 2}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"first\.py .* and .*second\.py"):
        load_table("tables_two", "T")


def test_the_list_of_profiles_names_every_network_that_any_of_them_may_have() -> None:
    text = " ".join(hardware_list([load_hardware_profile("dgx_a100_x8")]).split())
    assert ", ".join(network_names()) in text
    for name in network_names():
        assert load_hardware_profile(f"dgx_a100_x8+{name}", n_hosts=2).networks


# --- figures that are possible and not usual -------------------------------------------------------------------

NOT_TOLD = {"half_rate_size"}  # a thousandth of it; measured links have as little
FIGURE = re.compile(r'^(\w+) = \{ value = "([\d.]+) ([^"%]+)"', re.M)


@pytest.mark.parametrize("name", [*hardware_names(), *(f"dgx_a100_x8+{network}" for network in network_names())])
def test_of_a_shipped_profile_no_figure_is_unusual(name):
    assert unusual_of(load_hardware_profile(name, n_hosts=36)) == ()


@pytest.mark.parametrize("factor", [1000, 0.001])
@pytest.mark.parametrize("figure", tuple(FIGURE.finditer(TOY)), ids=lambda match: match[1])
def test_a_figure_that_is_off_by_1000_is_refused_or_named_with_its_range(write, figure, factor):
    key, number = figure[1], f"{float(figure[2]) * factor:g}"
    path = write(TOY[: figure.start(2)] + number + TOY[figure.end(2) :])
    try:
        validate_file(path)
    except InputError as error:
        assert key in str(error) or "bus_rate" in str(error)  # which is above the rate of its link
        return
    warnings = unusual_of_file(Path(path))
    assert [f"{key} is {number} {figure[3]}, where" in text for text in warnings] == [True] or key in NOT_TOLD


def test_validate_and_plan_name_an_unusual_figure_and_take_it(write, capsys):
    fp32 = '[device.peak]\nfp32 = { value = "20 TFLOP/s", source = "by hand" }'
    path = write(changed('"1000 GB/s"', '"1 GB/s"').replace("[device.peak]", fp32))
    said = "device.memory_bandwidth is 1 GB/s, where 10 GB/s to 100 TB/s is usual: is its unit right?"
    assert cli.run(["hw", "validate", path]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}: valid (my_box)\n" and err == f"warning: {path}: {said}\n"
    assert cli.run(["hw", "validate", path, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [said]
    mlp = Path(__file__).parent.parent / "examples" / "mlp.py"
    options = Options(global_batch=8, fix=(("dp", "2"), ("tp", "1"), ("pp", "1")))
    assert said in api.decide(api.make_problem(mlp, hw=path, options=options)).workload.limits


def test_of_a_processor_nothing_is_unusual(write):
    text = changed('name = "toy"', 'name = "CPU"').replace('"1000 GB/s"', '"5 GB/s"')
    assert unusual_of_file(Path(write(text))) == unusual_of(load_hardware_profile(write(text))) == ()
