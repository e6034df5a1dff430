"""Toys of the what-if tests: a plan of round figures on 4 devices, and prices of a device called Toy."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from autoplan.what_if import sweep
from autoplan.what_if.asking import WhatIf
from autoplan.what_if.conditions import Condition, Loading, Reliability
from autoplan.what_if.points import Point, PointResult
from autoplan.what_if.prices import PriceBook, parse_prices
from autoplan.what_if.rows import Assumptions, WhatIfRow, row_of

TODAY = date(2026, 5, 11)
LISTED = {"money", "reliability", "loading"}
LOADED_NOTHING = Loading()
NEVER_FAILS = Reliability(device_mtbf_s=1e15, checkpoint_s=1e-9)
PRICES = """
[[device]]
name = "Toy"
catalog_names = ["TOY-1"]
power = { value = "500 W", source = "toy data sheet" }
[device.on_demand]
low = "1.00 USD/h"
high = "3.00 USD/h"
per = "device"
date = 2026-05-01
source = "toy market"
[device.spot]
low = "4.00 USD/h"
high = "8.00 USD/h"
per = "host"
n_devices = 8
date = 2026-03-01
source = "toy market"
"""


def toy_prices(text: str = PRICES) -> PriceBook:
    return parse_prices(text, where="toy_prices.toml")


PARTS = (
    "compute",
    "recompute",
    "exposed_tp",
    "exposed_dp",
    "exposed_pp",
    "bubble",
    "optimizer",
    "launch",
    "exposed_batch_copy",
)


def toy_result(**changes: Any) -> PointResult:
    """4 devices, 8 samples of 100 tokens in 2 s: 1.5 s of compute, 0.5 s of exposed communication."""
    seconds = {"compute": 1.5, "exposed_dp": 0.5}
    result = PointResult(
        status="optimal",
        device="Toy",
        n_hosts=1,
        n_devices=4,
        model_state_bytes=12 * 10**9,
        tokens_per_sample=100,
        price_usd_per_device_hour=None,
        gap=0.0,
        plan="dp 4",
        fix="dp=4",
        n_used_devices=4,
        step_s=2.0,
        step_s_interval=(1.0, 4.0),
        samples_per_s=4.0,
        tokens_per_s=400.0,
        mfu=0.5,
        breakdown=tuple((f"{name}_s", seconds.get(name, 0.0)) for name in PARTS),
        peak_bytes=60 * 2**30,
        memory_limit_bytes=80 * 2**30,
    )
    return replace(result, **changes)


def toy_assumptions(**changes: Any) -> Assumptions:
    """Toy prices, nothing fails; `changes` are of the assumptions or of their condition."""
    condition = Condition(**{"reliability": NEVER_FAILS, **{name: changes.pop(name) for name in LISTED & set(changes)}})
    return replace(Assumptions(shipped=toy_prices(), today=TODAY, condition=condition), **changes)


def toy_row(*, n_samples: float | None = None, n_tokens: float | None = None, **changes: Any) -> WhatIfRow:
    """A row of `toy_result`; `changes` are of the assumptions, but for `result` and `point`."""
    point = changes.pop("point", Point("toy_x4", 1, 8, "bf16"))
    result = changes.pop("result", toy_result())
    return row_of(point, result, toy_assumptions(**changes), n_samples=n_samples, n_tokens=n_tokens)


def keep_points_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of sweeps lie in this folder; graphs and layouts stay where they are."""
    real = sweep.cache_entry
    monkeypatch.setattr(
        sweep, "cache_entry", lambda name, key: folder / f"{key}.json" if name == "points" else real(name, key)
    )


def toy_answer(*rows: WhatIfRow) -> WhatIf:
    """An answer with these rows, of a sweep that took a second."""
    swept = sweep.Sweep((), n_kept=0, is_interrupted=False, processor_s=1.0, wall_s=1.0)
    return WhatIf(tuple(rows), swept, toy_assumptions())
