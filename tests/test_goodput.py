"""Goodput: the interval between checkpoints, what failures take, and spare hosts; against simulation and by hand."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whatif_toys import LOADED_NOTHING, toy_result

from autoplan.what_if.conditions import DEVICE_MTBF_S, Reliability, wall_time
from autoplan.what_if.goodput import (
    best_interval_s,
    expected_wall_s,
    first_order_loss,
    goodput,
    share_without_spares,
)

TIMES = st.tuples(
    st.floats(1e4, 1e8),  # MTBF
    st.floats(1.0, 300.0),  # checkpoint
    st.floats(1.0, 2000.0),  # restart
    st.floats(0.1, 100.0),  # step
)


def test_published_example_saves_every_24_steps() -> None:
    # changlan.org/posts/optimal-checkpointing: MTBF 6000 s, checkpoint 10 s, restart 600 s, step 15 s.
    # sqrt(10^2 + 2 (6000 + 600) 10) = 363.5 s of work = 24.2 steps
    found = goodput(mtbf_s=6000.0, checkpoint_s=10.0, restart_s=600.0, step_s=15.0)
    assert found is not None and found.n_steps == 24
    assert best_interval_s(mtbf_s=6000.0, checkpoint_s=10.0, restart_s=600.0) == pytest.approx(363.455, abs=1e-3)


def test_interval_of_rare_failures_is_youngs() -> None:
    assert best_interval_s(mtbf_s=1e9, checkpoint_s=10.0, restart_s=1.0) == pytest.approx(
        math.sqrt(2 * 1e9 * 10.0), rel=1e-3
    )


def test_llama_3_fleet_fails_as_often_as_reported() -> None:
    # 419 stops in 54 days on 16,384 devices: one every 3.1 h; a thousand devices: 50.7 h
    assert pytest.approx(54 * 24 / 419) == DEVICE_MTBF_S / 16_384 / 3600
    assert pytest.approx(50.7, abs=0.05) == DEVICE_MTBF_S / 1000 / 3600


@given(TIMES)
def test_shares_sum_to_one_and_are_not_negative(times: tuple[float, float, float, float]) -> None:
    mtbf_s, checkpoint_s, restart_s, step_s = times
    found = goodput(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s, step_s=step_s)
    if found is not None:
        shares = (found.work_share, found.checkpoint_share, found.failure_share)
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0 and found.interval_s > 0.0


@given(TIMES)
def test_closed_form_is_within_one_percent_of_the_least_loss(times: tuple[float, float, float, float]) -> None:
    mtbf_s, checkpoint_s, restart_s, _ = times
    best = best_interval_s(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)

    def available(interval_s: float) -> float:
        cycle_s = interval_s + checkpoint_s
        return interval_s / (cycle_s * (1.0 + (restart_s + cycle_s / 2.0) / mtbf_s))

    around = [available(best * 1.01**k) for k in range(-200, 201)]
    assert available(best) >= max(around) * (1.0 - 1e-9)


def _simulated_wall_s(
    generator: random.Random, *, interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float
) -> float:
    """One interval and its checkpoint, event by event."""
    wall_s = 0.0
    while True:
        fails_s = generator.expovariate(1.0 / mtbf_s)
        if fails_s >= interval_s + checkpoint_s:
            return wall_s + interval_s + checkpoint_s
        wall_s += fails_s
        while (again_s := generator.expovariate(1.0 / mtbf_s)) < restart_s:  # a failure during the restart
            wall_s += again_s
        wall_s += restart_s


@pytest.mark.parametrize(
    ("mtbf_s", "checkpoint_s", "restart_s"), [(6000.0, 10.0, 600.0), (1e5, 60.0, 600.0), (900.0, 5.0, 60.0)]
)
def test_expected_wall_time_is_within_two_sigma_of_simulation(
    mtbf_s: float, checkpoint_s: float, restart_s: float
) -> None:
    interval_s = best_interval_s(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    times = {"interval_s": interval_s, "mtbf_s": mtbf_s, "checkpoint_s": checkpoint_s, "restart_s": restart_s}
    generator = random.Random(7)
    samples = [_simulated_wall_s(generator, **times) for _ in range(40_000)]
    assert abs(fmean(samples) - expected_wall_s(**times)) < 2.0 * stdev(samples) / math.sqrt(len(samples))


def test_nothing_is_said_where_more_than_half_is_lost() -> None:
    times = {"mtbf_s": 600.0, "checkpoint_s": 60.0, "restart_s": 600.0}
    assert first_order_loss(interval_s=best_interval_s(**times), **times) > 0.5
    assert goodput(**times, step_s=1.0) is None
    wall = wall_time(toy_result(), Reliability(device_mtbf_s=100.0), LOADED_NOTHING, global_batch=8)
    assert wall.total_s is None and "more than half of the time is lost" in wall.warnings[0]


def test_a_cluster_without_spares_and_slow_repair_has_no_total() -> None:
    hopeless = Reliability(device_mtbf_s=3.6e5, checkpoint_s=1.0, restart_s=10.0, repair_s=1e6)
    wall = wall_time(toy_result(), hopeless, LOADED_NOTHING, global_batch=8)
    assert wall.total_s is None and "in repair than there are spares" in wall.warnings[0]


def test_goodput_stays_possible_up_to_a_hundred_thousand_devices() -> None:
    losses = []
    for n_devices in (8, 1_000, 16_384, 100_000):
        found = goodput(mtbf_s=DEVICE_MTBF_S / n_devices, checkpoint_s=5.0, restart_s=120.0, step_s=10.0)
        assert found is not None
        losses.append(1.0 - found.work_share)
    assert losses == sorted(losses) and 0.0 < losses[0] < 0.001 and 0.1 < losses[-1] < 0.3


def test_formula_of_the_literature_at_1000_and_16384_devices() -> None:
    # checkpoint 60 s, restart 600 s: 2.9 % and 15.8 % lost
    for n_devices, lost in ((1_000, 0.029), (16_384, 0.158)):
        times = {"mtbf_s": DEVICE_MTBF_S / n_devices, "checkpoint_s": 60.0, "restart_s": 600.0}
        loss = first_order_loss(interval_s=math.sqrt(2 * times["mtbf_s"] * 60.0), **times)
        assert loss == pytest.approx(lost, abs=0.003)


def test_spares_cover_the_hosts_in_repair() -> None:
    # 100 hosts, a failure per host every 1000 h, 10 h of repair: one in repair on the mean; P(N > 1) = 1 - 2 / e
    figures = {"n_hosts": 100, "host_mtbf_s": 3.6e6, "repair_s": 3.6e4}
    assert share_without_spares(**figures, n_spare_hosts=1) == pytest.approx(1.0 - 2.0 / math.e)
    shares = [share_without_spares(**figures, n_spare_hosts=count) for count in range(8)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 1e-4
