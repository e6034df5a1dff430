"""Money and energy: what a device-hour costs, rented or owned, and what a run draws.

    rent  = wall hours x (n_devices + spares) x price of a device-hour, low and high
    own   = wall hours x (n_devices + spares) x (fixed / (HOURS_PER_YEAR x utilisation) + power of a device x USD/kWh)
    fixed = capex (1 + network_share) (1 - residual) / years + capex x support_share + staff, per device and year
    power = (device W x load + host W / devices of a host) x PUE

Idle power of owned devices is left out. `break_even_utilisation` is where own = rent.
"""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_YEAR = 8760
WATTS_PER_KW = 1000
RENTS = ("on_demand", "reserved", "spot")


@dataclass(frozen=True, slots=True)
class Own:
    """What owned hardware costs; all per device.

    Attributes:
        capex_usd: purchase, with its share of the host.
        network_share: of switches, cables and storage, as a share of `capex_usd`.
        years: of use; `residual_share` of the purchase is left then.
        utilisation: share of the hours in which it trains something.
        staff_usd_per_year: people and room.
        support_share_per_year: of `capex_usd`.
    """

    capex_usd: float
    network_share: float = 0.0
    years: float = 4.0
    residual_share: float = 0.0
    utilisation: float = 1.0
    staff_usd_per_year: float = 0.0
    support_share_per_year: float = 0.0


@dataclass(frozen=True, slots=True)
class Money:
    """What to price with.

    Attributes:
        rent: of `RENTS`.
        own: None when nothing is owned.
        usd_per_kwh: None when unknown: then energy has no price, and owned hardware none either.
        pue: power of the whole site / that of its machines.
        load: mean power of a device in training / its board power.
        host_power_w: of a host without its devices; None leaves it out.
    """

    rent: str = "on_demand"
    own: Own | None = None
    usd_per_kwh: float | None = None
    pue: float = 1.3
    load: float = 1.0
    host_power_w: float | None = None


def power_w(money: Money, *, device_power_w: float, n_devices_per_host: int) -> float:
    """Of one device with its share of host and site, in training."""
    host_w = 0.0 if money.host_power_w is None else money.host_power_w / n_devices_per_host
    return (device_power_w * money.load + host_w) * money.pue


def fixed_usd_per_year(own: Own) -> float:
    """Of one owned device, whether it runs or not."""
    purchase = own.capex_usd * (1.0 + own.network_share) * (1.0 - own.residual_share) / own.years
    return purchase + own.capex_usd * own.support_share_per_year + own.staff_usd_per_year


def own_usd_per_device_hour(own: Own, *, watts: float, usd_per_kwh: float) -> float:
    """Of one hour of training on one owned device."""
    return fixed_usd_per_year(own) / (HOURS_PER_YEAR * own.utilisation) + watts / WATTS_PER_KW * usd_per_kwh


def break_even_utilisation(own: Own, *, watts: float, usd_per_kwh: float, rent_usd_per_hour: float) -> float | None:
    """The share of hours above which owning is cheaper than renting; None where it never is."""
    saved = rent_usd_per_hour - watts / WATTS_PER_KW * usd_per_kwh
    if saved <= 0.0:
        return None
    share = fixed_usd_per_year(own) / (HOURS_PER_YEAR * saved)
    return share if share <= 1.0 else None
