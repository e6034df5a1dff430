"""Mixed clusters: groups of different hosts, read from one file."""

import re

import pytest

from autoplan.errors import InputError
from autoplan.hardware import load_hardware_profile
from autoplan.hardware.cluster import GroupLink, load_cluster
from autoplan.hardware.file import PROFILE_PACKAGE
from autoplan.hardware.usual import unusual_of_file

MIXED = """
description = "8 hosts of A100 and 4 halves of V100"

[[group]]
profile = "dgx_a100_x8"
n_hosts = 8

[[group]]
profile = "v100_x8/4+ethernet_10g"
n_hosts = 4

[between]
kind = "ethernet"
latency_per_step = { value = "50 us", source = "by hand" }
rate_per_group_one_direction = { value = "400 Gbit/s", source = "by hand" }
bus_efficiency = { value = "80 %", source = "by hand" }
"""


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "mixed.toml"
        path.write_text(text)
        return path

    return write_text


def test_a_cluster_is_its_groups_and_what_joins_them(write):
    cluster = load_cluster(write(MIXED))
    assert (cluster.name, cluster.n_devices) == ("mixed", 8 * 8 + 4 * 4)
    a100, v100 = cluster.groups
    assert a100 == load_hardware_profile("dgx_a100_x8", n_hosts=8)
    assert v100 == load_hardware_profile("v100_x8/4+ethernet_10g", n_hosts=4)
    assert cluster.between == GroupLink("ethernet", pytest.approx(50e-6), 50e9, 0.8)
    assert {path for path, _ in cluster.sources} == {
        "between.latency_per_step",
        "between.rate_per_group_one_direction",
        "between.bus_efficiency",
    }


@pytest.mark.parametrize("suffix", ["", "/2", "/2+ethernet_100g"])
def test_a_profile_of_a_group_may_lie_beside_the_cluster_file(write, tmp_path, suffix):
    from importlib.resources import files

    (tmp_path / "mine.toml").write_text(files(PROFILE_PACKAGE).joinpath("v100_x8.toml").read_text())
    cluster = load_cluster(write(MIXED.replace('"dgx_a100_x8"', f'"mine.toml{suffix}"')))
    assert cluster.groups[0].device == load_hardware_profile("v100_x8").device
    assert cluster.groups[0].n_devices_per_host == (2 if suffix else 8)


MISTAKES = {
    "one group": (MIXED[MIXED.rindex("[[group]]") : MIXED.index("[between]")], "", ["group", "two tables [[group]]"]),
    "no hosts": ("n_hosts = 4\n", "", ["group[1].n_hosts", "hosts of this group"]),
    "zero hosts": ("n_hosts = 4", "n_hosts = 0", ["group[1].n_hosts", "1 to"]),
    "a number for a name": ('"dgx_a100_x8"', "8", ["group[0].profile", "as for --hw"]),
    "unknown key": ("n_hosts = 4", "hosts = 4", ["group[1].hosts", 'did you mean "n_hosts"?']),
    "no network": (MIXED[MIXED.index("[between]") :], "", ["between", "[between]"]),
    "rate in bytes": ('"400 Gbit/s"', '"400 GB/s"', ["between.rate_per_group", 'did you mean "400 Gbit/s"?']),
    "no source": ('"80 %", source = "by hand"', '"80 %"', ["between.bus_efficiency", "source"]),
    "misspelt kind": ('kind = "ethernet"', 'kinds = "ethernet"', ["between.kinds", 'did you mean "kind"?']),
    "misspelt table": ("[between]", "[betwen]", ["betwen", 'did you mean "between"?']),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_cluster_is_answered_with_file_field_and_fix(mistake, write):
    old, new, expected = MISTAKES[mistake]
    assert MIXED.count(old) == 1
    with pytest.raises(InputError) as error:
        load_cluster(write(MIXED.replace(old, new)))
    for part in ["mixed.toml", *expected]:
        assert part in str(error.value), str(error.value)
    assert re.search(r"found .*\n  expected: .+\n  fix: .+", str(error.value), re.DOTALL)


@pytest.mark.parametrize(
    ("profile", "found", "fix"),
    [
        ("v100x8", "'v100x8'", 'did you mean "v100_x8"?'),
        ("v100_x8+ethernet_1g", "v100_x8.toml: network: found 'ethernet_1g'", 'did you mean "ethernet_10g"?'),
        ("v100_x8/9", "devices of each host, v100_x8.toml: found 9", "write /8 or less"),
    ],
)
def test_a_group_of_an_unknown_profile_is_a_bad_file_that_names_the_nearest(write, profile, found, fix):
    with pytest.raises(InputError) as caught:
        load_cluster(write(MIXED.replace("v100_x8/4+ethernet_10g", profile)))
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "mixed.toml: group[1].profile: " in text and found in text and fix in text


def test_unusual_figures_of_groups_and_of_what_joins_them_are_named(write):
    assert unusual_of_file(write(MIXED)) == ()
    (said,) = unusual_of_file(write(MIXED.replace("400 Gbit/s", "400 Mbit/s")))
    assert said.startswith("between.rate_per_group_one_direction is 400 Mbit/s, where 1 Gbit/s to ")
