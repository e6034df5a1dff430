"""Rows of a what-if: a point, its plan, and what a run there takes, costs and draws.

wall hours   = samples / global batch x wall time of a step
device-hours = wall hours x (devices of the cluster + spare hosts)       whole hosts are paid for, idle or not
cost         = device-hours x price of an hour;  energy = wall hours x power of the whole cluster
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any

from autoplan.hardware.cluster import is_cluster_file
from autoplan.options import AS_COMPUTED
from autoplan.parallel_plan import Breakdown
from autoplan.plain_text import count, percent
from autoplan.search import GOOD_ENOUGH
from autoplan.units import BILLION, SECONDS_PER_HOUR
from autoplan.what_if.conditions import Condition, WallTime, wall_time
from autoplan.what_if.money import WATTS_PER_KW, Money, break_even_utilisation, own_usd_per_device_hour, power_w
from autoplan.what_if.points import Point, PointResult
from autoplan.what_if.prices import FRESH_DAYS, PriceBook, PriceRange, rent_price

SHARES = (
    *(part.name.removesuffix("_s") for part in fields(Breakdown)),
    "stragglers",
    "loading",
    "checkpoints",
    "failures",
    "no_spare",
)
COMMUNICATION = ("exposed_tp", "exposed_dp", "exposed_pp")


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One point; what is unknown, or what no plan gives, is None. `row_tables.MEANINGS` says what each field is."""

    hardware: str
    n_hosts: int
    n_devices: int
    global_batch: int
    status: str
    precision: str = "bf16"
    overrides: tuple[str, ...] = ()
    network_scale: float = 1.0
    host_link: str | None = None
    n_nics: int | None = None
    condition: str | None = None
    device: str = ""
    detail: str | None = None
    gap: float | None = None
    plan: str | None = None
    fix: str | None = None
    n_idle_devices: int | None = None
    step_s: float | None = None
    step_s_interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    chance_short_of_memory: float | None = None
    step_wall_s: float | None = None
    goodput: float | None = None
    mtbf_s: float | None = None
    checkpoint_s: float | None = None
    checkpoint_interval_steps: int | None = None
    shares: tuple[tuple[str, float], ...] = ()
    train_s: float | None = None
    train_s_interval: tuple[float, float] | None = None
    device_hours: float | None = None
    usd_per_device_hour: float | None = None
    price_source: str | None = None
    price_date: str | None = None
    cost_usd: float | None = None
    cost_usd_interval: tuple[float, float] | None = None
    usd_per_billion_tokens: float | None = None
    own_cost_usd: float | None = None
    break_even_utilisation: float | None = None
    power_kw: float | None = None
    energy_kwh: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def exposed_share(self) -> float | None:
        """Share of the wall time that devices wait for communication; None without a plan."""
        return sum(dict(self.shares)[name] for name in COMMUNICATION) if self.shares else None

    @property
    def n_idle_hosts(self) -> int:
        """Hosts of which the plan uses no device; of a mixed cluster, whose hosts differ, none are counted."""
        if not self.n_idle_devices or is_cluster_file(self.hardware):
            return 0
        return self.n_idle_devices * self.n_hosts // self.n_devices

    @property
    def memory_headroom_bytes(self) -> int | None:
        """What the tightest device has left."""
        if self.peak_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True)
class Axis:
    """What tells rows apart: a field of theirs, what it is called, and its value in words."""

    field: str
    name: str
    text: Callable[[WhatIfRow], str]


AXES = (
    Axis("hardware", "hardware", lambda row: row.hardware),
    Axis("n_hosts", "hosts", lambda row: count(row.n_hosts, "host")),
    Axis("global_batch", "global batch", lambda row: f"batch {row.global_batch}"),
    Axis("precision", "precision", lambda row: row.precision),
    Axis("overrides", "model", lambda row: ", ".join(row.overrides)),
    Axis("network_scale", "network", lambda row: f"network x{row.network_scale:g}"),
    Axis("host_link", "links in a host", lambda row: row.host_link or "own links"),
    Axis("n_nics", "NICs", lambda row: "own NICs" if row.n_nics is None else count(row.n_nics, "NIC")),
    Axis("condition", "condition", lambda row: row.condition or ""),
)


def varying(rows: Sequence[WhatIfRow]) -> tuple[Axis, ...]:
    """The axes along which rows differ; of model arguments, only those that some lack are told."""
    common = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    model = Axis("overrides", "model", lambda row: ", ".join(text for text in row.overrides if text not in common))
    axes = (model if axis.field == "overrides" else axis for axis in AXES)
    return tuple(axis for axis in axes if len({getattr(row, axis.field) for row in rows}) > 1)


def point_name(row: WhatIfRow, axes: Sequence[Axis]) -> str:
    """What a row is called by the axes that tell it apart: `dgx_a100_x8, 4 hosts`; empty without any."""
    return ", ".join(text for axis in axes if (text := axis.text(row)))


def pace(row: WhatIfRow) -> float | None:
    """Tokens, or samples where there are none, per second on the wall; None where no total is given."""
    per_s = row.samples_per_s if row.tokens_per_s is None else row.tokens_per_s
    return None if per_s is None or row.goodput is None else per_s * row.goodput


def rate_unit(rows: Sequence[WhatIfRow]) -> str:
    """What `pace` counts."""
    return "tokens/s" if any(row.tokens_per_s is not None for row in rows) else "samples/s"


def off_by(row: WhatIfRow) -> str | None:
    """`-20% +25%`: the interval of its step; None without a plan."""
    if row.step_s is None or row.step_s_interval is None:
        return None
    return " ".join(f"{bound_s / row.step_s - 1.0:+.0%}" for bound_s in row.step_s_interval)


def share_above_bound(row: WhatIfRow) -> float | None:
    """By what share its step may be longer than another plan's: step / bound - 1; None where nothing is proved."""
    return None if row.gap is None or row.gap >= 1.0 else row.gap / (1.0 - row.gap)


def may_be_far_off(row: WhatIfRow) -> bool:
    """Whether the search left room for a plan whose step is below the interval of this one."""
    if row.step_s is None or row.step_s_interval is None or row.gap is None:
        return False
    return (1.0 - row.gap) * row.step_s < row.step_s_interval[0]


def as_fast(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """The rows than which none is faster, by more than a search leaves open."""
    known = [(per_s, row) for row in rows if (per_s := pace(row)) is not None]
    most = max((per_s for per_s, _ in known), default=0.0)
    return tuple(row for per_s, row in known if per_s >= (1.0 - GOOD_ENOUGH) * most)


def fastest(rows: Sequence[WhatIfRow]) -> WhatIfRow | None:
    """Of the rows that are as fast as any, the one with the fewest devices."""
    return min(as_fast(rows), key=lambda row: row.n_devices, default=None)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What rows are made with beside the results of the search.

    Attributes:
        given_usd: (hardware, US dollars per device-hour) pairs that beat all other prices.
        prices: the user's price file.
        shipped: that of autoplan.
        today: prices are old or fresh by it.
        memory_confidence: with which plans fit, see `Options`; rows without such a plan have a warning.
    """

    shipped: PriceBook
    today: date
    condition: Condition = Condition()
    prices: PriceBook | None = None
    given_usd: tuple[tuple[str, float], ...] = ()
    memory_confidence: float = AS_COMPUTED


def row_of(
    point: Point, result: PointResult, given: Assumptions, *, n_samples: float | None, n_tokens: float | None
) -> WhatIfRow:
    """The row of a point; with neither samples nor tokens it has speeds and no totals."""
    row = WhatIfRow(
        hardware=point.hw,
        n_hosts=result.n_hosts,
        n_devices=result.n_devices,
        global_batch=point.global_batch,
        status=result.status,
        precision=point.precision,
        overrides=tuple(f"{name}={value}" for name, value in point.overrides),
        network_scale=point.network_scale,
        host_link=point.host_link or None,
        n_nics=point.n_nics,
        condition=given.condition.words or None,
        device=result.device,
        detail=result.detail or None,
    )
    if result.step_s is None:
        return row
    wall = wall_time(result, given.condition.reliability, given.condition.loading, global_batch=point.global_batch)
    row = _with_speed(row, result, wall)
    if n_tokens is not None and result.tokens_per_sample is not None:
        n_samples = n_tokens / result.tokens_per_sample
    return _with_totals(row, result, wall, given, n_samples=n_samples)


def _with_speed(row: WhatIfRow, result: PointResult, wall: WallTime) -> WhatIfRow:
    assert result.step_s is not None and result.n_used_devices is not None
    parts = dict(wall.parts_s or ())
    total_s = wall.total_s
    row = replace(
        row,
        gap=result.gap,
        plan=result.plan,
        fix=result.fix,
        n_idle_devices=result.n_devices - result.n_used_devices,
        step_s=result.step_s,
        step_s_interval=result.step_s_interval,
        samples_per_s=result.samples_per_s,
        tokens_per_s=result.tokens_per_s,
        mfu=result.mfu,
        peak_bytes=result.peak_bytes,
        memory_limit_bytes=result.memory_limit_bytes,
        chance_short_of_memory=result.chance_short_of_memory,
        step_wall_s=wall.step_wall_s,
        goodput=None if total_s is None else result.step_s / total_s,
        mtbf_s=wall.mtbf_s,
        checkpoint_s=wall.checkpoint_s,
        checkpoint_interval_steps=None if wall.goodput is None else wall.goodput.n_steps,
        shares=() if total_s is None else tuple((name, parts[f"{name}_s"] / total_s) for name in SHARES),
    )
    return replace(row, warnings=(*wall.warnings, *_memory_warnings(row, result), *_search_warnings(row)))


def _memory_warnings(row: WhatIfRow, result: PointResult) -> tuple[str, ...]:
    """Where nothing was found whose memory suffices with the confidence asked for."""
    if result.unmet_confidence is None or result.chance_short_of_memory is None:
        return ()
    text = f"no plan was found that fits with {percent(result.unmet_confidence)} confidence"
    return (f"{_place(row)}: {text}; memory falls short with a chance of {result.chance_short_of_memory:.0%}",)


def _search_warnings(row: WhatIfRow) -> tuple[str, ...]:
    """Where the search ended so early that its interval does not say how fast the cluster may be."""
    more = share_above_bound(row)
    if more is None or not may_be_far_off(row):
        return ()
    text = f"its plan is at most {more:.0%} slower than any other of the space searched"
    return (f"{_place(row)}: {text}, which is more than its interval; a longer --time-limit may find a better one",)


def _place(row: WhatIfRow) -> str:
    return f"{count(row.n_hosts, 'host')} of {row.hardware}, batch {row.global_batch}, {row.precision}"


def _with_totals(
    row: WhatIfRow, result: PointResult, wall: WallTime, given: Assumptions, *, n_samples: float | None
) -> WhatIfRow:
    figures = given.prices.of(result.device) if given.prices is not None else None
    if figures is None or figures.power_w is None:
        figures = given.shipped.of(result.device)
    watts = (
        None if figures is None or figures.power_w is None else _watts(given.condition.money, result, figures.power_w)
    )
    price = rent_price(
        result.device,
        given.condition.money.rent,
        given_usd=dict(given.given_usd).get(row.hardware),
        own=given.prices,
        shipped=given.shipped,
        profile_usd=result.price_usd_per_device_hour,
    )
    row = replace(
        row,
        power_kw=None if watts is None else watts * _n_paid(result, given) / WATTS_PER_KW,
        warnings=(*row.warnings, *_price_warnings(price, result, given)),
        **_price_fields(price),
    )
    per_step_s = wall.total_s
    if n_samples is None or per_step_s is None:
        return row
    train_s = n_samples / row.global_batch * per_step_s
    hours = train_s / SECONDS_PER_HOUR
    row = replace(
        row,
        train_s=train_s,
        train_s_interval=_like(row.step_s_interval, train_s, row.step_s),
        device_hours=hours * _n_paid(result, given),
        energy_kwh=None if row.power_kw is None else row.power_kw * hours,
    )
    return _with_cost(
        row, result, price, watts, given, n_samples=n_samples, device_hours=hours * _n_paid(result, given)
    )


def _with_cost(
    row: WhatIfRow,
    result: PointResult,
    price: PriceRange | None,
    watts: float | None,
    given: Assumptions,
    *,
    n_samples: float,
    device_hours: float,
) -> WhatIfRow:
    own, usd_per_kwh = given.condition.money.own, given.condition.money.usd_per_kwh
    if own is not None and watts is not None and usd_per_kwh is not None:
        hourly_usd = own_usd_per_device_hour(own, watts=watts, usd_per_kwh=usd_per_kwh)
        row = replace(row, own_cost_usd=device_hours * hourly_usd)
        if price is not None:
            share = break_even_utilisation(own, watts=watts, usd_per_kwh=usd_per_kwh, rent_usd_per_hour=price.usd)
            row = replace(row, break_even_utilisation=share)
    if price is None:
        return row
    cost_usd = device_hours * price.usd
    billions = None if result.tokens_per_sample is None else n_samples * result.tokens_per_sample / BILLION
    return replace(
        row,
        cost_usd=cost_usd,
        cost_usd_interval=(device_hours * price.low_usd, device_hours * price.high_usd),
        usd_per_billion_tokens=None if billions is None else cost_usd / billions,
    )


def _n_paid(result: PointResult, given: Assumptions) -> float:
    """Devices that are paid for: those of the cluster, and of its spare hosts."""
    return result.n_devices * (1.0 + given.condition.reliability.n_spare_hosts / result.n_hosts)


def _watts(money: Money, result: PointResult, device_power_w: float) -> float:
    return power_w(money, device_power_w=device_power_w, n_devices_per_host=result.n_devices // result.n_hosts)


def _price_fields(price: PriceRange | None) -> dict[str, Any]:
    if price is None:
        return {}
    day = None if price.day is None else price.day.isoformat()
    return {"usd_per_device_hour": price.usd, "price_source": price.source, "price_date": day}


def _price_warnings(price: PriceRange | None, result: PointResult, given: Assumptions) -> tuple[str, ...]:
    if price is None:
        return (f"no {given.condition.money.rent.replace('_', '-')} price known for {result.device}: no cost",)
    age = price.age_days(given.today)
    is_old = age is not None and age > FRESH_DAYS
    old = (f"price of {result.device} is {age} days old ({price.day}): check it",) if is_old else ()
    return (*_at_an_end(price, result.device), *old)


def _at_an_end(price: PriceRange, device: str) -> tuple[str, ...]:
    """Where a price is the lowest or the highest of several offers, and is compared with others that are not."""
    ends = {price.high_usd: "highest", price.low_usd: "lowest"}
    if len(ends) == 1 or price.usd not in ends:
        return ()
    offers = f"{price.low_usd:.2f} to {price.high_usd:.2f}"
    return (f"price of {device} is the {ends[price.usd]} of its offers ({offers}), not a middle one: give your own",)


def _like(interval: tuple[float, float] | None, value: float, of: float | None) -> tuple[float, float] | None:
    """The interval of another value, in the same ratio."""
    return None if interval is None or of is None else (interval[0] / of * value, interval[1] / of * value)
