"""Clusters with other links: scaled networks, other links in a host, ports by number, NVLink off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan import cli
from autoplan.errors import InputError
from autoplan.hardware.file import with_ports
from autoplan.options import Options
from autoplan.what_if.asking import ask
from autoplan.what_if.other_links import changed, kind_without_nvlink
from autoplan.what_if.points import Point
from autoplan.what_if.question import parse_question

CHECKOUT = Path(__file__).parent.parent
GPT = str(CHECKOUT / "examples" / "gpt.py")
CASE = {"workload": {"model": GPT, "global_batch": 64, "set": {"size": "124m"}}, "clusters": {"hw": ["dgx_a100_x8"]}}


def test_other_links_are_other_hardware() -> None:
    hardware = autoplan.load_hardware_profile("dgx_a100_x8", n_hosts=2)
    half = changed(hardware, Point("dgx_a100_x8", 2, 8, "bf16", network_scale=0.5))
    assert half.networks[0].bytes_per_s == hardware.networks[0].bytes_per_s / 2 and half.links[0] == hardware.links[0]
    pcie = changed(hardware, Point("dgx_a100_x8", 2, 8, "bf16", host_link="pcie4"))
    assert pcie.links[0].bytes_per_s == 31e9 and pcie.networks == hardware.networks


def test_ports_are_named_after_the_network() -> None:
    # 8 ports of 25 GB/s for 8 devices are the default; 4 ports leave a device half of one
    own, four, one = (
        autoplan.load_hardware_profile(name, n_hosts=2) for name in ("dgx_a100_x8", "dgx_a100_x8+:4", "dgx_a100_x8+:1")
    )
    assert [hardware.networks[0].bytes_per_s for hardware in (own, four, one)] == [25e9, 12.5e9, 3.125e9]
    assert four.name == "dgx_a100_x8+infiniband_200g:4" and autoplan.load_hardware_profile(four.name, n_hosts=2) == four
    assert with_ports("dgx_a100_x8+ethernet_10g", 2) == "dgx_a100_x8+ethernet_10g:2"
    assert with_ports("dgx_a100_x8+ethernet_10g:8", 2) == "dgx_a100_x8+ethernet_10g:2"
    with pytest.raises(InputError, match="infiniband_200g.ports: found 'x per host'"):
        autoplan.load_hardware_profile("dgx_a100_x8+:x", n_hosts=2)


@pytest.mark.nightly
def test_nics_and_nvlink_are_axes_of_a_sweep() -> None:
    asked = {**CASE, "clusters": {"hw": ["dgx_a100_x8"], "hosts": [2], "nics": [1, 8], "nvlink": ["on", "off"]}}
    question = parse_question(asked, where="test", options=Options(fix=(("dp", "16"), ("zero", "0"))))
    rows = ask(question).rows
    assert [(row.n_nics, row.host_link) for row in rows] == [(1, None), (8, None), (1, "no_nvlink"), (8, "no_nvlink")]
    one, eight, one_off, eight_off = (row.step_s for row in rows)
    assert one > eight and eight_off > eight and one_off > eight_off


def test_links_that_join_hosts_are_no_network_and_have_no_other_in_their_place() -> None:
    racks = autoplan.load_hardware_profile("gb200_nvl72_x4", n_hosts=36)
    slower = changed(racks, Point(racks.name, 36, 8, "bf16", network_scale=0.5))
    assert slower.links[:2] == racks.links[:2]
    assert slower.links[2].bytes_per_s == racks.links[2].bytes_per_s / 2
    with pytest.raises(InputError, match="links that join 72 devices of several hosts"):
        changed(racks, Point(racks.name, 36, 8, "bf16", host_link="pcie5"))


def test_nvlink_off_is_the_pci_express_of_the_same_devices() -> None:
    for name, kind in (("dgx_a100_x8", "pcie4"), ("dgx_h100_x8", "pcie5"), ("dgx_b200_x8", "pcie5")):
        hardware = autoplan.load_hardware_profile(name)
        assert kind_without_nvlink(hardware) == kind
        off, named = (changed(hardware, Point(name, 1, 8, "bf16", host_link=link)) for link in ("no_nvlink", kind))
        assert off == named != hardware
    with pytest.raises(InputError, match="l40s_x8: NVLink off: found 'no NVLink'"):
        kind_without_nvlink(autoplan.load_hardware_profile("l40s_x8"))
    half = autoplan.load_hardware_profile("dgx_a100_x8")
    half = replace(half, links=(replace(half.links[0], bytes_per_s=123e9),))
    with pytest.raises(InputError, match="NVLink of another rate"):
        kind_without_nvlink(half)


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        ({"nvlink": ["maybe"]}, "clusters.nvlink"),
        ({"nvlink": ["on"], "host_link": ["pcie4"]}, "clusters.nvlink: found 'host_link, too'"),
        ({"nics": [0]}, "clusters.nics: found 0"),
        ({"nics": [1000]}, "clusters.nics: found 1000"),
    ],
)
def test_bad_links_are_named(clusters: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_question({**CASE, "clusters": {"hw": ["dgx_a100_x8"], **clusters}}, where="test")
    assert said in str(error.value)


def test_ports_of_a_mixed_cluster_are_in_its_file(capsys) -> None:
    file = str(CHECKOUT / "examples" / "a100_v100.toml")
    assert cli.run(["whatif", GPT, "--hw", file, "--nics", "4"]) == 3
    assert "nics: found" in capsys.readouterr().err
