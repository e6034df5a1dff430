"""Networks with several tiers and fragments of hosts, as hardware files give them."""

import re
from dataclasses import replace

import pytest

from autoplan import plan
from autoplan.api import trace_model
from autoplan.errors import InputError, UsageError
from autoplan.hardware import hardware_names, load_hardware_profile, validate_file
from autoplan.hardware.file import build_hardware_profile
from autoplan.options import Options
from autoplan.search.meshes import list_meshes
from autoplan.space.priced import priced_space

HOST = """
description = "two toy devices"
default_network = "lab"

[device]
name = "toy"
memory = { value = "80 GiB", source = "by hand" }
memory_bandwidth = { value = "1000 GB/s", source = "by hand" }

[device.peak]
bf16 = { value = "100 TFLOP/s", source = "by hand" }

[host]
n_devices = 2

[host_link]
kind = "nvlink3"

[network.lab]
kind = "infiniband"
ports = "1 per device"
n_hosts = 4
rate_per_port_one_direction = { value = "400 Gbit/s", source = "by hand" }
latency_per_step = { value = "10 us", source = "by hand" }
half_rate_size_per_port = { value = "2 MiB", source = "by hand" }
all_reduce_bus_rate_per_port = { value = "40 GB/s", source = "by hand" }
"""
TIERS = """
[[network.lab.tier]]
kind = "spine"
n_domains = 8
latency_per_step = { value = "15 us", source = "by hand" }
oversubscription = { value = "4:1", source = "by hand" }

[[network.lab.tier]]
kind = "site"
latency_per_step = { value = "5 ms", source = "by hand" }
rate_per_uplink_one_direction = { value = "64 Gbit/s", source = "by hand" }
"""
LAB = HOST + TIERS


def profile_of(text=LAB, *, n_hosts=1, n_devices_per_host=None):
    return build_hardware_profile(
        text, name="lab", where="lab.toml", n_hosts=n_hosts, network=None, n_devices_per_host=n_devices_per_host
    )


def changed(old, new):
    assert LAB.count(old) == 1, old
    return LAB.replace(old, new)


# --- tiers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_hosts", "expected"),
    [
        (1, [("nvlink", 2)]),
        (2, [("nvlink", 2), ("infiniband", 4)]),
        (4, [("nvlink", 2), ("infiniband", 8)]),
        (5, [("nvlink", 2), ("infiniband", 8), ("spine", 10)]),
        (32, [("nvlink", 2), ("infiniband", 8), ("spine", 64)]),
        (33, [("nvlink", 2), ("infiniband", 8), ("spine", 64), ("site", 66)]),
    ],
)
def test_a_cluster_has_the_tiers_that_it_reaches(n_hosts, expected):
    hardware = profile_of(n_hosts=n_hosts)
    assert [(link.name, link.n_devices) for link in hardware.links] == expected
    named = {path.rpartition(".")[0] for path, _ in hardware.sources if path.startswith("network")}
    in_file = ("network.lab", "network.lab.tier[0]", "network.lab.tier[1]")
    assert named == set(in_file[: len(expected) - 1])


def test_a_rate_is_the_share_of_one_device_while_all_drive_the_tier():
    _, leaf, spine, site = profile_of(n_hosts=64).links
    assert leaf.bytes_per_s == 50e9
    assert spine.bytes_per_s == pytest.approx(12.5e9)  # 4 hosts x 2 devices x 50 GB/s = 400; / 4 = 100; / 8 devices
    assert site.bytes_per_s == pytest.approx(0.125e9)  # 64 Gbit/s = 8 GB/s for 4 x 8 hosts x 2 devices = 64
    assert (spine.latency_s, site.latency_s) == pytest.approx((15e-6, 5e-3))
    for outer in (spine, site):
        assert outer.bus_efficiency == leaf.bus_efficiency == 0.8
        start_up_s = outer.half_rate_bytes / outer.bytes_per_s
        assert start_up_s == pytest.approx(leaf.half_rate_bytes / leaf.bytes_per_s, rel=1e-4)


def test_oversubscriptions_of_several_tiers_multiply():
    text = changed('rate_per_uplink_one_direction = { value = "64 Gbit/s"', 'oversubscription = { value = "2:1"')
    *_, spine, site = profile_of(text, n_hosts=64).links
    assert site.bytes_per_s == pytest.approx(spine.bytes_per_s / 2)


def test_no_tier_is_faster_than_the_ports_below_it():
    text = changed('"64 Gbit/s"', '"800000 Gbit/s"')
    *_, spine, site = profile_of(text, n_hosts=64).links
    assert site.bytes_per_s == spine.bytes_per_s


def test_more_hosts_than_the_network_joins_are_a_usage_error():
    text = changed('kind = "site"', 'kind = "site"\nn_domains = 2')
    assert profile_of(text, n_hosts=64).n_hosts == 64
    with pytest.raises(UsageError, match="--hosts: found 65\n  expected: at most 64(.|\n)*lab.toml"):
        profile_of(text, n_hosts=65)


MISTAKES = {
    "tier is no list": (TIERS, "[network.lab.tier]\n", ["network.lab.tier", "[[network.lab.tier]]"]),
    "no hosts per leaf": ("n_hosts = 4\n", "", ["network.lab.n_hosts", "hosts of one domain", "a tier above"]),
    "one host per leaf": ("n_hosts = 4\n", "n_hosts = 1\n", ["network.lab.n_hosts", "2 to"]),
    "text": ("n_hosts = 4\n", 'n_hosts = "4"\n', ["network.lab.n_hosts", "a whole number"]),
    "open tier inside": ("n_domains = 8\n", "", ["network.lab.tier[0].n_domains", "domains of the tier below"]),
    "no rate": (
        'oversubscription = { value = "4:1", source = "by hand" }',
        "",
        ["network.lab.tier[0]", "no rate", 'oversubscription = { value = "2:1"'],
    ),
    "two rates": (
        'kind = "site"',
        'kind = "site"\noversubscription = { value = "2:1", source = "by hand" }',
        ["network.lab.tier[1]", "both", "not both"],
    ),
    "plain ratio": ('"4:1"', '"4"', ["tier[0].oversubscription", "no unit", ":1"]),
    "undersubscription": ('"4:1"', '"0.5:1"', ["tier[0].oversubscription", "1:1 to"]),
    "bytes for bits": ('"64 Gbit/s"', '"64 GB/s"', ["tier[1].rate_per_uplink", 'did you mean "64 Gbit/s"?']),
    "faster than below": ('"15 us"', '"1 us"', ["tier[0].latency_per_step", "at least 10 us"]),
    "seconds": ('"5 ms"', '"5 s"', ["tier[1].latency_per_step", 'did you mean "5 us"?']),
    "unknown key": ("n_domains = 8", "n_domain = 8", ["tier[0].n_domain", 'did you mean "n_domains"?']),
    "no kind": ('kind = "spine"\n', "", ["tier[0].kind", "what joins the domains below"]),
    "no source": ('"4:1", source = "by hand"', '"4:1"', ["tier[0].oversubscription", "source"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_tier_is_answered_with_file_field_and_fix(mistake, tmp_path):
    old, new, expected = MISTAKES[mistake]
    path = tmp_path / "lab.toml"
    path.write_text(changed(old, new))
    with pytest.raises(InputError) as error:
        validate_file(path)
    for part in ["lab.toml", *expected]:
        assert part in str(error.value), str(error.value)
    assert re.search(r"found .*\n  expected: .+\n  fix: .+", str(error.value))
    assert error.value.exit_code == 3


def test_the_shipped_tiers_say_that_they_are_assumed():
    hardware = load_hardware_profile("dgx_h100_x8+leaf_spine_400g", n_hosts=1024)
    assert [link.name for link in hardware.links] == ["nvlink", "infiniband", "spine", "site"]
    tiers = [source for path, source in hardware.sources if ".tier[" in path]
    assert len(tiers) == 4 and all(source.startswith("assumed: ") for source in tiers)


# --- fragments -------------------------------------------------------------------------------------------------


def test_a_fragment_has_some_devices_of_each_host():
    whole, half = load_hardware_profile("dgx_a100_x8", n_hosts=2), load_hardware_profile("dgx_a100_x8/4", n_hosts=4)
    assert (half.name, half.n_devices_per_host, half.n_devices) == ("dgx_a100_x8/4", 4, 16)
    assert half.device == whole.device
    assert half.host_link == whole.host_link  # the rates of groups of 2, 4 and 8 are those of the whole host
    assert half.networks[0].n_devices == 16
    assert load_hardware_profile("dgx_a100_x8/8", n_hosts=2) == whole
    assert load_hardware_profile("dgx_a100_x8/1", n_hosts=2).host_link is None


@pytest.mark.parametrize(
    ("ports", "n_used", "n_ports_of_a_device"),
    [
        ("1 per device", 8, 1.0),
        ("1 per device", 2, 1.0),  # each drives its own
        ("1 per host", 8, 1 / 8),
        ("1 per host", 2, 1 / 2),  # two share the port
        ("4 per host", 8, 1 / 2),
        ("4 per host", 4, 1.0),
        ("4 per host", 2, 1.0),  # 2 each are free, but a device drives one
        ("16 per host", 2, 2.0),  # as in a whole host
    ],
)
def test_a_device_of_a_fragment_gets_more_of_the_ports_up_to_one(ports, n_used, n_ports_of_a_device):
    text = HOST.replace("n_devices = 2", "n_devices = 8").replace('"1 per device"', f'"{ports}"')
    network = profile_of(text, n_hosts=2, n_devices_per_host=n_used).networks[0]
    assert network.bytes_per_s == pytest.approx(50e9 * n_ports_of_a_device)


def test_uplinks_are_shared_by_the_devices_in_use():
    # 8 x 50 GB/s / 4 out of a leaf of 4 hosts, for 4 devices instead of 8: 25 GB/s each
    assert profile_of(n_hosts=8, n_devices_per_host=1).networks[1].bytes_per_s == pytest.approx(25e9)


@pytest.mark.parametrize("name", ["v100_x8/2", "v100_x8/2+ethernet_10g", "v100_x8/1"])
def test_the_name_of_a_fragment_loads_it_again(name):
    hardware = load_hardware_profile(name, n_hosts=2)
    assert hardware.name == name
    assert load_hardware_profile(hardware.name, n_hosts=2) == hardware


def test_a_file_can_be_a_fragment_too(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    assert load_hardware_profile(f"{path}/1", n_hosts=3).n_devices == 3


@pytest.mark.parametrize("count", ["0", "9", "999999999"])
def test_a_fragment_has_at_least_one_and_at_most_all_devices(count):
    with pytest.raises(UsageError, match=f"found {count}\n  expected: 1 to 8"):
        load_hardware_profile(f"dgx_a100_x8/{count}")


@pytest.mark.parametrize("name", hardware_names())
def test_a_device_of_a_fragment_is_never_worse_off_than_in_the_whole_host(name):
    whole = load_hardware_profile(name, n_hosts=4)
    for n_used in range(1, whole.n_devices_per_host):
        part = load_hardware_profile(f"{name}/{n_used}", n_hosts=4)
        for mine, theirs in zip(part.networks, whole.networks, strict=True):
            assert mine.bytes_per_s >= theirs.bytes_per_s
            assert replace(mine, n_devices=0, bytes_per_s=0, half_rate_bytes=0) == replace(
                theirs, n_devices=0, bytes_per_s=0, half_rate_bytes=0
            )


def test_eight_devices_as_8_as_4_4_as_2_2_2_2_and_one_by_one_take_ever_longer():
    fix = (("dp", "8"), ("zero", "0"), ("micro_batch", "8"), ("recompute", "none"))
    steps_s, comm_s = [], []
    for n_hosts in (1, 2, 4, 8):
        found = plan("examples/gpt.py", hw=f"dgx_a100_x8/{8 // n_hosts}", hosts=n_hosts, global_batch=64, fix=fix)
        steps_s.append(found.best.estimate.step_s)
        comm_s.append(found.best.estimate.breakdown.exposed_dp_s)
    for times in (steps_s, comm_s):
        assert times == sorted(times) and len(set(times)) == 4


@pytest.mark.parametrize(("hw", "n_hosts"), [("dgx_a100_x8/1", 4), ("dgx_h100_x8+leaf_spine_400g", 520)])
def test_every_mesh_has_a_price_whatever_tiers_it_crosses(hw, n_hosts):
    options = Options(global_batch=64)
    graph, hardware = trace_model("examples/gpt.py"), load_hardware_profile(hw, n_hosts=n_hosts)
    offered = priced_space(graph, hardware, options, global_batch=64)
    meshes = list_meshes(offered.space, options)[0]
    assert max(mesh.n_devices for mesh in meshes) > hardware.domain_sizes[0]
    for mesh in meshes[:: max(1, len(meshes) // 100)]:
        table = offered.price(mesh)
        assert table.per_step_s > 0 or mesh.n_devices == 1
        assert mesh.pp == 1 or all(seconds is None or seconds > 0 for seconds in table.cut_s)
