"""Times of collectives that `hw measure` found: what a file says is what a collective takes."""

import pytest
from test_hardware import TOY

from autoplan.cost.collective_time import axis_group, collective_s, pair_group, send_s
from autoplan.errors import InputError
from autoplan.hardware import CollectiveTimes, HardwareProfile
from autoplan.hardware.file import build_hardware_profile

TIMES = """
[host_link.times]
source = "by hand"
all_reduce.2 = { "4 MiB" = "50 us", "1 MiB" = "20 us" }
send.2 = { "1 MiB" = "9 us", "2 MiB" = "8 us" }
"""
FOUR = TOY.replace("n_devices = 2", "n_devices = 4")
MiB = 2**20


def built(text: str) -> HardwareProfile:
    return build_hardware_profile(text, name="my_box", where="my_box.toml", n_hosts=1, network=None)


def all_reduce_s(size_bytes: float, *, n_devices: int = 2, times: str = TIMES) -> float:
    hardware = built(FOUR.replace("[network.lab]", f"{times}\n[network.lab]"))
    return collective_s(
        "all_reduce", size_bytes, group=axis_group(hardware, size=n_devices, stride=1), hardware=hardware
    )


@pytest.mark.parametrize(
    ("size_mib", "microseconds"),
    [(1, 20), (4, 50), (2, 30), (0.25, 20), (8, 90)],  # measured; in proportion; at least the smallest; on and on
)
def test_a_measured_group_takes_what_was_measured(size_mib: float, microseconds: float) -> None:
    assert all_reduce_s(size_mib * MiB) == pytest.approx(microseconds * 1e-6)


def test_nothing_takes_no_time_and_other_groups_follow_the_figures() -> None:
    assert all_reduce_s(0) == 0.0
    assert all_reduce_s(MiB, n_devices=4) == all_reduce_s(MiB, n_devices=4, times="") > 0.0
    hardware = built(FOUR.replace("[network.lab]", f"{TIMES}\n[network.lab]"))
    group = axis_group(hardware, size=2, stride=1)
    assert collective_s("all_gather", MiB, group=group, hardware=hardware) != pytest.approx(20e-6)
    pair = pair_group(hardware, n_devices=4)
    for size_mib in (1, 2, 100):  # a larger one that was found to be faster is not
        assert send_s(size_mib * MiB, pair=pair, hardware=hardware) == pytest.approx(9e-6)


def test_faster_links_carry_more_and_start_as_slowly() -> None:
    link = built(TOY.replace("[network.lab]", f"{TIMES}\n[network.lab]")).links[0]
    faster = link.at_rate(2 * link.bytes_per_s)
    kind, n_devices, times = faster.timed[0]
    assert (kind, n_devices, dict(times)) == ("all_reduce", 2, pytest.approx({MiB: 20e-6, 4 * MiB: 35e-6}))
    assert CollectiveTimes("send", 2, ((MiB, 8e-6),)).sped_up(2.0).times == ((MiB, 4e-6),)


MISTAKES = {
    "no source": ('source = "by hand"\nall', "all", ["my_box.toml: host_link.times", "source"]),
    "empty source": ('source = "by hand"\nall', 'source = " "\nall', ["my_box.toml: host_link.times", "source"]),
    "kind": ("send.2", "sends.2", ["my_box.toml: host_link.times.sends", 'did you mean "send"?']),
    "group": ("send.2", "send.3", ["my_box.toml: host_link.times.send.3"]),
    "size": ('"1 MiB" = "9 us"', '"1" = "9 us"', ['my_box.toml: host_link.times.send.2."1"', "1 = 9 us"]),
    "no size": ('"1 MiB" = "9 us"', '"0.1 B" = "9 us"', ['host_link.times.send.2."0.1 B"', "at least one byte"]),
    "time": ('"9 us"', '"9"', ['my_box.toml: host_link.times.send.2."1 MiB"', "no unit"]),
    "number": ('"9 us"', "9", ['my_box.toml: host_link.times.send.2."1 MiB"', "found 9", "in quotes"]),
    "the same size": ('"2 MiB" = "8 us"', '"1024 KiB" = "8 us"', ["host_link.times.send.2", "different sizes"]),
    "no sizes": ('{ "1 MiB" = "9 us", "2 MiB" = "8 us" }', "{}", ["my_box.toml: host_link.times.send"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    old, new, expected = MISTAKES[mistake]
    assert TIMES.count(old) == 1
    with pytest.raises(InputError) as error:
        built(TOY.replace("[network.lab]", f"{TIMES.replace(old, new)}\n[network.lab]"))
    assert all(part in str(error.value) for part in expected), str(error.value)
