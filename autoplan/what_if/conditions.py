"""What a cluster meets outside of the model: failures, slow devices, loading of data; and the time that takes.

    step on the wall = max(step + stragglers, samples of a step / samples that can be loaded per second)
    wall of the run  = steps x step on the wall / (share of time that is training)         see `goodput`

    stragglers = compute x (1 / slow_device_speed - 1) + step x step_jitter x sqrt(2 ln n)

A step waits for the slowest of n devices. One device at a lower clock slows all by its compute; and the largest of n
equal, normal spreads lies about sqrt(2 ln n) standard deviations above the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoplan.units import GB, SECONDS_PER_HOUR
from autoplan.what_if.goodput import MAX_LOSS, Goodput, goodput, share_without_spares
from autoplan.what_if.money import Money
from autoplan.what_if.points import PointResult

SECONDS_PER_DAY = 24 * SECONDS_PER_HOUR
# 419 unexpected stops in 54 days on 16,384 H100: Llama 3, as reported by datacenterdynamics.com.
DEVICE_MTBF_S = 16_384 * 54 / 419 * SECONDS_PER_DAY
COMPUTE_PARTS = ("compute_s", "recompute_s")


@dataclass(frozen=True, slots=True)
class Reliability:
    """How the cluster fails, and what that takes; None is unknown, and then left out of the sums.

    Attributes:
        device_mtbf_s: mean time between failures that stop a run, per device.
        checkpoint_s: time that training stands still for a checkpoint; None computes it from its bytes.
        checkpoint_bytes_per_s_per_host: rate at which each host saves.
        restart_s: from a failure to the first step again, without repeated work.
        n_spare_hosts: idle hosts that are paid for, and take the place of failed ones.
        repair_s: until a failed host is back; None: it is replaced at once.
        interruptions_per_device_hour: of spot devices, beside failures.
        notice_s: warning before such an interruption.
        slow_device_speed: of the slowest device, as a share of the others.
        step_jitter: standard deviation of one device's time for the same step, as a share.
    """

    device_mtbf_s: float = DEVICE_MTBF_S
    checkpoint_s: float | None = None
    checkpoint_bytes_per_s_per_host: float = 2.0 * GB
    restart_s: float = 600.0
    n_spare_hosts: int = 0
    repair_s: float | None = None
    interruptions_per_device_hour: float = 0.0
    notice_s: float | None = None
    slow_device_speed: float = 1.0
    step_jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Loading:
    """How fast samples come; None is unknown, and then no bound.

    Attributes:
        samples_per_s_per_host: that the processors of a host prepare.
        storage_bytes_per_s: that the storage of the whole cluster reads.
        sample_bytes: of one sample in storage.
    """

    samples_per_s_per_host: float | None = None
    storage_bytes_per_s: float | None = None
    sample_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """What the user says of money, failures and loading, and in words what sets it apart from other such."""

    words: str = ""
    money: Money = Money()
    reliability: Reliability = Reliability()
    loading: Loading = Loading()


@dataclass(frozen=True, slots=True)
class WallTime:
    """One step on the wall, and what it is spent on.

    Attributes:
        parts_s: (name, seconds) of the wall time that stands for one step; None where failures leave too little of it.
        goodput: None likewise.
        mtbf_s: of the whole cluster.
    """

    step_wall_s: float
    parts_s: tuple[tuple[str, float], ...] | None
    goodput: Goodput | None
    mtbf_s: float
    checkpoint_s: float
    warnings: tuple[str, ...] = ()

    @property
    def total_s(self) -> float | None:
        """Wall time per step of training."""
        return None if self.parts_s is None else sum(seconds for _, seconds in self.parts_s)


def wall_time(result: PointResult, reliability: Reliability, loading: Loading, *, global_batch: int) -> WallTime:
    """Of one step of a plan; `result` has one."""
    assert result.step_s is not None and result.n_used_devices is not None
    straggling_s = _straggling_s(result, reliability)
    loading_s = max(0.0, _loading_s(loading, global_batch, n_hosts=result.n_hosts) - result.step_s - straggling_s)
    step_wall_s = result.step_s + straggling_s + loading_s
    saving_s = checkpoint_s(result, reliability)
    rate_per_s = 1.0 / reliability.device_mtbf_s + reliability.interruptions_per_device_hour / SECONDS_PER_HOUR
    mtbf_s = 1.0 / (result.n_used_devices * rate_per_s)
    found = goodput(mtbf_s=mtbf_s, checkpoint_s=saving_s, restart_s=reliability.restart_s, step_s=step_wall_s)
    warnings = _warnings(reliability, saving_s)
    waiting = _waiting_share(result, reliability, rate_per_s)
    if waiting > MAX_LOSS:
        short = f"{waiting:.0%} of the time more hosts are in repair than there are spares; no total is given"
        return WallTime(step_wall_s, None, None, mtbf_s, saving_s, (*warnings, short))
    if found is None:
        lost = (
            f"a failure every {mtbf_s / SECONDS_PER_HOUR:.2g} h, {saving_s:.3g} s for a checkpoint: more than half of "
            "the time is lost; no total is given"
        )
        return WallTime(step_wall_s, None, None, mtbf_s, saving_s, (*warnings, lost))
    per_step_s = step_wall_s / found.work_share / (1.0 - waiting)
    parts = [
        *result.breakdown,
        ("stragglers_s", straggling_s),
        ("loading_s", loading_s),
        ("checkpoints_s", step_wall_s * found.checkpoint_share / found.work_share),
        ("failures_s", step_wall_s * found.failure_share / found.work_share),
        ("no_spare_s", per_step_s * waiting),
    ]
    return WallTime(step_wall_s, tuple(parts), found, mtbf_s, saving_s, warnings)


def checkpoint_s(result: PointResult, reliability: Reliability) -> float:
    """Time that training stands still for one checkpoint."""
    if reliability.checkpoint_s is not None:
        return reliability.checkpoint_s
    return result.model_state_bytes / (reliability.checkpoint_bytes_per_s_per_host * result.n_hosts)


def _straggling_s(result: PointResult, reliability: Reliability) -> float:
    assert result.step_s is not None and result.n_used_devices is not None
    compute_s = sum(seconds for name, seconds in result.breakdown if name in COMPUTE_PARTS)
    slowest_s = compute_s * (1.0 / reliability.slow_device_speed - 1.0)
    return slowest_s + result.step_s * reliability.step_jitter * math.sqrt(2.0 * math.log(result.n_used_devices))


def _loading_s(loading: Loading, global_batch: int, *, n_hosts: int) -> float:
    """Least time in which the samples of a step can be there."""
    rates = []
    if loading.samples_per_s_per_host is not None:
        rates.append(loading.samples_per_s_per_host * n_hosts)
    if loading.storage_bytes_per_s is not None and loading.sample_bytes is not None:
        rates.append(loading.storage_bytes_per_s / loading.sample_bytes)
    return global_batch / min(rates) if rates else 0.0


def _waiting_share(result: PointResult, reliability: Reliability, rate_per_s: float) -> float:
    """Share of time in which no spare is left; a repair takes a whole host."""
    if reliability.repair_s is None:
        return 0.0
    n_devices_per_host = result.n_devices / result.n_hosts
    return share_without_spares(
        n_hosts=result.n_hosts,
        host_mtbf_s=1.0 / (rate_per_s * n_devices_per_host),
        repair_s=reliability.repair_s,
        n_spare_hosts=reliability.n_spare_hosts,
    )


def _warnings(reliability: Reliability, saving_s: float) -> tuple[str, ...]:
    notice_s = reliability.notice_s
    if notice_s is None or notice_s >= saving_s:
        return ()
    return (f"{notice_s:.3g} s of notice do not suffice for a checkpoint of {saving_s:.3g} s",)
