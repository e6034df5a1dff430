"""Racks, spines and sites: how groups lie over them, what crossing them takes, and fragments of hosts."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoplan.cost.collective_time import KINDS, Group, Spread, axis_group, collective_s, pair_group, route_of, send_s
from autoplan.errors import InputError
from autoplan.hardware import NO_SHARDING, Device, HardwareProfile, LinkTier, load_hardware_profile
from autoplan.overlap import Overlap
from autoplan.units import GB, MiB

DEVICE = Device("toy", (("fp32", 1e12),), 10**9, 1e9, 1.0, 1.0, 1e-6, 1e-6, 1e-6, NO_SHARDING)
RACK = (Spread(8, 2),)  # 16 devices: 8 in each of two racks


def toy(*, latencies_s=(0.0, 0.0, 0.0), rates=(1.0 * GB, 0.1 * GB, 0.05 * GB), half=0, n_hosts=8, per_host=4):
    """8 hosts of 4 devices, 2 hosts in a rack: 1 GB/s in a host, 0.1 between hosts, 0.05 between racks (2:1)."""
    n_devices = per_host * n_hosts
    sizes = (per_host, min(2 * per_host, n_devices), n_devices)
    tiers = [
        LinkTier(name, size, latency_s, rate, 1.0, half)
        for name, size, latency_s, rate in zip(("wire", "leaf", "spine"), sizes, latencies_s, rates, strict=True)
    ]
    links = tuple(tiers[: 1 if n_hosts == 1 else 2 if n_hosts == 2 else 3][per_host == 1 :])
    return HardwareProfile("toy", "", DEVICE, per_host, n_hosts, links, Overlap(0.0, 0.0), Overlap(0.0, 0.0), None, ())


def flat():
    """The same hosts, all on one leaf."""
    hardware = toy()
    return replace(hardware, links=(hardware.links[0], replace(hardware.links[1], n_devices=32)))


# --- how a group lies over the tiers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (4, 1, Group(4, 4)),  # one host
        (2, 4, Group(2, 1)),  # ranks 0 4: two hosts of one rack
        (8, 1, Group(8, 4)),  # one rack
        (16, 1, Group(16, 4, above_hosts=(Spread(8, 2),))),  # ranks 0..15: two racks
        (4, 8, Group(4, 1, above_hosts=(Spread(1, 4),))),  # ranks 0 8 16 24: one in each rack
        (8, 4, Group(8, 1, above_hosts=(Spread(2, 4),))),  # ranks 0 4 8 ...: one in each host
        (3, 4, Group(3, 1, above_hosts=(Spread(1, 2),))),  # ranks 0 4 8: two in rack 0, one in rack 1
    ],
)
def test_ranks_fill_hosts_and_hosts_fill_racks(size, stride, expected):
    assert axis_group(toy(), size=size, stride=stride) == expected


@given(
    per_host=st.integers(1, 9),
    per_rack=st.integers(2, 4),
    n_racks=st.integers(2, 4),
    size=st.integers(1, 40),
    stride=st.integers(1, 40),
)
def test_an_axis_lies_as_badly_as_its_worst_group(per_host, per_rack, n_racks, size, stride):
    n_devices = per_host * per_rack * n_racks
    assume(size * stride <= n_devices)
    tiers = (LinkTier("leaf", per_host * per_rack, 0, 1, 1, 1), LinkTier("spine", n_devices, 0, 1, 1, 1))
    links = ((LinkTier("wire", per_host, 0, 1, 1, 1),) if per_host > 1 else ()) + tiers
    hardware = HardwareProfile(
        "toy", "", DEVICE, per_host, per_rack * n_racks, links, Overlap(0.0, 0.0), Overlap(0.0, 0.0), None, ()
    )
    found = axis_group(hardware, size=size, stride=stride)
    groups = [
        [block * size * stride + offset + i * stride for i in range(size)]
        for block in range(n_devices // (size * stride))
        for offset in range(stride)
    ]
    for domain, n_members in ((per_host, found.n_per_host), (per_host * per_rack, _n_per_rack(found))):
        assert n_members == min(min(Counter(rank // domain for rank in group).values()) for group in groups)


def _n_per_rack(group: Group) -> int:
    return group.above_hosts[0].n_members if group.above_hosts else group.n_devices


def test_a_mesh_is_placed_on_its_own_devices_only():
    # groups of 6 on 6 devices in racks of 8: one rack; on all 32 devices the second group, 6..11, crosses
    assert axis_group(toy(), size=6, stride=1, n_devices=6).above_hosts == ()
    assert axis_group(toy(), size=6, stride=1).above_hosts == (Spread(2, 2),)


@pytest.mark.parametrize(
    ("n_devices", "expected"),
    [
        (1, Group(1, 1)),
        (4, Group(2, 2)),
        (6, Group(2, 1)),
        (8, Group(2, 1)),
        (12, Group(2, 1, above_hosts=(Spread(1, 2),))),
    ],
)
def test_stages_are_as_far_apart_as_the_farthest_neighbours(n_devices, expected):
    assert pair_group(toy(), n_devices=n_devices) == expected


def test_a_group_over_racks_that_do_not_exist_is_an_error():
    with pytest.raises(InputError, match="1 tiers above the first network(.|\n)*more tiers"):
        collective_s("all_reduce", 1.0, group=Group(16, 4, above_hosts=RACK), hardware=flat())


# --- by hand ---------------------------------------------------------------------------------------------------


def test_a_ring_takes_the_latency_of_each_tier_it_hops_over():
    # 16 ranks: 12 hops in hosts, 2 between the hosts of a rack, 1 between racks
    hardware = toy(latencies_s=(1.0, 10.0, 100.0))
    seconds = collective_s("all_gather", 1e-9, group=Group(16, 4, above_hosts=RACK), hardware=hardware)
    assert seconds == pytest.approx(12 * 1 + 2 * 10 + 1 * 100)


def test_members_behind_the_same_uplinks_pool_their_shares():
    # 15/16 GB leave each host through 4 shares of 0.1 GB/s (2.34 s) and each rack through 8 shares of 0.05 GB/s
    # (2.34 s as well): two hosts fill the uplinks of 2:1
    hardware, group = toy(), Group(16, 4, above_hosts=RACK)
    assert collective_s("all_gather", 1 * GB, group=group, hardware=hardware) == pytest.approx(2.34375)
    assert collective_s("all_gather", 1 * GB, group=Group(16, 4), hardware=flat()) == pytest.approx(2.34375)
    # one member in each of 4 racks: 3/4 GB through one share of 0.05 GB/s
    alone = Group(4, 1, above_hosts=(Spread(1, 4),))
    assert collective_s("all_gather", 1 * GB, group=alone, hardware=hardware) == pytest.approx(15.0)


def test_an_all_reduce_over_racks_shrinks_at_every_tier():
    # leaf 10 times and spine 100 times slower than the host's link; 16 devices, 4 x 2 x 2:
    # in the host 2 x 3/4 GB / 1 = 1.5 s; 1/4 GB in the rack: 2 x 1/2 x 1/4 / 0.1 = 2.5 s;
    # 1/8 GB between racks: 2 x 1/2 x 1/8 / 0.01 = 12.5 s. A ring over the 4 hosts sends 2 x 3/4 x 1/4 GB
    # over the spine, through two shares: 18.75 s
    hardware = toy(rates=(1.0 * GB, 0.1 * GB, 0.01 * GB))
    seconds = collective_s("all_reduce", 1 * GB, group=Group(16, 4, above_hosts=RACK), hardware=hardware)
    assert seconds == pytest.approx(1.5 + 2.5 + 12.5)


def test_a_small_all_reduce_between_racks_takes_a_tree_of_trees():
    # one member per host, 8 hosts in 4 racks of 2: one level of 10 s in the rack, two of 100 s between racks, both ways
    group = Group(8, 1, above_hosts=(Spread(2, 4),))
    hardware = toy(latencies_s=(1.0, 10.0, 100.0))
    assert collective_s("all_reduce", 1e-9, group=group, hardware=hardware) == pytest.approx(2 * (10 + 200))


def test_what_a_device_sends_to_another_rack_passes_leaf_and_spine():
    # 16 devices, 1/16 GB each, in pieces of 1/256 GB: 12 leave the host over 0.1 GB/s (0.47 s), 8 the rack over 0.05
    # (0.625 s)
    group = Group(16, 4, above_hosts=RACK)
    assert collective_s("all_to_all", 1 * GB, group=group, hardware=toy()) == pytest.approx(8 / 256 / 0.05)
    # with a spine as fast as the leaf the leaf carries both: 12 pieces
    even = toy(rates=(1.0 * GB, 0.1 * GB, 0.1 * GB))
    assert collective_s("all_to_all", 1 * GB, group=group, hardware=even) == pytest.approx(12 / 256 / 0.1)


def test_one_device_sends_nothing():
    assert send_s(1 * GB, pair=pair_group(toy(per_host=1), n_devices=1), hardware=toy(per_host=1)) == 0.0


def test_a_send_takes_the_outermost_tier_between_the_two():
    hardware = toy(latencies_s=(0.5, 1.0, 2.0))
    for n_devices, expected_s in ((4, 0.5 + 1), (8, 1 + 10), (16, 2 + 20)):
        pair = pair_group(hardware, n_devices=n_devices)
        assert send_s(1 * GB, pair=pair, hardware=hardware) == pytest.approx(expected_s)


# --- properties ------------------------------------------------------------------------------------------------

SIZES = st.floats(1.0, 1e11)
# 8 devices, ever farther apart; 4 and 8 devices per rack.
SPREADS = (
    Group(8, 8),
    Group(8, 4),
    Group(8, 2),
    Group(8, 2, above_hosts=(Spread(4, 2),)),
    Group(8, 1),
    Group(8, 1, above_hosts=(Spread(4, 2),)),
    Group(8, 1, above_hosts=(Spread(2, 4),)),
    Group(8, 1, above_hosts=(Spread(1, 8),)),
)
# (nearer, farther): more hosts over the same racks, or more racks over the same hosts
FARTHER = ((0, 1), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5), (5, 6), (6, 7))


def outwards_slower(latency_s, latency_ratio, rate_ratio, half_s):
    """8 x 8 hosts of 8 devices: each tier outwards has a longer step, a lower rate and the same start-up of it."""
    tiers = []
    for k, (name, size) in enumerate((("wire", 8), ("leaf", 64), ("spine", 512))):
        rate = 100 * GB / rate_ratio**k
        tiers.append(LinkTier(name, size, latency_s * latency_ratio**k, rate, 1.0, round(half_s * rate)))
    return HardwareProfile("toy", "", DEVICE, 8, 64, tuple(tiers), Overlap(0.0, 0.0), Overlap(0.0, 0.0), None, ())


@given(
    kind=st.sampled_from(KINDS),
    size=SIZES,
    pair=st.sampled_from(FARTHER),
    latency_ratio=st.floats(4, 50),
    rate_ratio=st.floats(1, 20),
    half_s=st.floats(0, 1e-4),
)
def test_the_same_group_over_more_hosts_or_racks_is_never_faster(kind, size, pair, latency_ratio, rate_ratio, half_s):
    # An all-reduce without bytes takes 14 steps in one host of 8, and 6 with 2 longer ones over two hosts of 4: a step
    # between hosts must be 4 times as long for the one host to win.
    hardware = outwards_slower(1e-6, latency_ratio, rate_ratio, half_s)
    near, far = (collective_s(kind, size, group=SPREADS[i], hardware=hardware) for i in pair)
    assert near <= far * (1 + 1e-9)


@given(kind=st.sampled_from(KINDS), size=SIZES, group=st.sampled_from([g for g in SPREADS if g.above_hosts]))
def test_a_tier_above_never_makes_anything_faster(kind, size, group):
    tiered = outwards_slower(1e-6, 3.0, 4.0, 1e-5)
    one_leaf = replace(tiered, links=(tiered.links[0], replace(tiered.links[1], n_devices=512)))
    below = replace(group, above_hosts=())
    assert collective_s(kind, size, group=below, hardware=one_leaf) <= collective_s(
        kind, size, group=group, hardware=tiered
    ) * (1 + 1e-9)


@given(kind=st.sampled_from(KINDS), size=SIZES, more=st.floats(1, 100), group=st.sampled_from(SPREADS))
def test_more_bytes_never_take_less_time_over_any_tier(kind, size, more, group):
    hardware = outwards_slower(1e-6, 3.0, 4.0, 1e-5)
    small, large = (collective_s(kind, n, group=group, hardware=hardware) for n in (size, size * more))
    assert small <= large * (1 + 1e-12)


@given(size=SIZES, tier=st.integers(0, 2), faster=st.floats(1, 50), group=st.sampled_from(SPREADS))
def test_more_bandwidth_of_any_tier_never_takes_more_time(size, tier, faster, group):
    hardware = outwards_slower(1e-6, 3.0, 4.0, 1e-5)
    links = list(hardware.links)
    links[tier] = replace(links[tier], bytes_per_s=links[tier].bytes_per_s * faster)
    for kind in KINDS:
        slow, fast = (
            collective_s(kind, size, group=group, hardware=p) for p in (hardware, replace(hardware, links=tuple(links)))
        )
        assert fast <= slow * (1 + 1e-12)


@given(n_hosts=st.integers(1, 16), more=st.integers(1, 16), size=st.integers(1, 64), stride=st.integers(1, 64))
def test_a_larger_cluster_never_moves_a_mesh_apart(n_hosts, more, size, stride):
    small, large = toy(n_hosts=n_hosts), toy(n_hosts=n_hosts + more)
    n_devices = size * stride
    assume(n_devices <= small.n_devices)
    near, far = (axis_group(p, size=size, stride=stride, n_devices=n_devices) for p in (small, large))
    assert near == far


def test_the_levels_of_a_route_are_the_tiers_that_it_crosses():
    hardware = outwards_slower(1e-6, 3.0, 4.0, 1e-5)
    crossed = [[round(level.link.latency_s * 1e6) for level in route_of(g, hardware).levels] for g in SPREADS]
    assert crossed == [[1], [1, 3], [1, 3], [1, 3, 9], [3], [3, 9], [3, 9], [9]]


# --- fragments of hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx_a100_x8", "dgx_h100_x8", "hgx_h200_x8", "dgx_b200_x8", "v100_x8"])
@given(size=st.floats(4 * MiB, 1e11), kind=st.sampled_from(KINDS))
def test_eight_devices_of_fewer_hosts_are_never_slower(name, size, kind):
    # Below 1 MiB start-up decides: the model has no all-reduce in a host that takes fewer steps than a ring, so that
    # two hosts of 4 look up to 20 us faster than one of 8. Above it, where NVLink is faster than the network, never.
    times = []
    for n_per_host in (8, 4, 2, 1):
        hardware = load_hardware_profile(f"{name}/{n_per_host}", n_hosts=8 // n_per_host)
        times.append(collective_s(kind, size, group=axis_group(hardware, size=8, stride=1), hardware=hardware))
    assert all(near <= far * (1 + 1e-9) for near, far in zip(times, times[1:], strict=False)), times
