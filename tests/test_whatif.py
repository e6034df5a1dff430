"""What-if: rows and their totals by hand, points, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whatif_toys import NEVER_FAILS, keep_points_apart, toy_answer, toy_result, toy_row

from autoplan import cli
from autoplan.what_if.conditions import Loading, Reliability
from autoplan.what_if.money import Money, Own
from autoplan.what_if.points import combinations, points
from autoplan.what_if.row_tables import row_to_dict, whatif_csv, whatif_schema, whatif_to_dict
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import SHARES


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_points_apart(tmp_path_factory.mktemp("points"), monkeypatch)


# -------------------------------------------------------------------------------------------------------------- totals


def test_totals_by_hand() -> None:
    # 7200 samples / 8 x 2 s = 1800 s = 0.5 h; x 4 devices = 2 device-hours; x 2 USD = 4 USD, 2 to 6
    # 720,000 tokens: 4 USD / 0.00072 billion; 4 x 500 W x 1.3 = 2.6 kW, 1.3 kWh
    row = toy_row(n_samples=7200)
    assert (row.train_s, row.device_hours) == (pytest.approx(1800.0), pytest.approx(2.0))
    assert row.cost_usd == pytest.approx(4.0) and row.cost_usd_interval == pytest.approx((2.0, 6.0))
    assert row.usd_per_billion_tokens == pytest.approx(4.0 / 0.00072)
    assert (row.power_kw, row.energy_kwh) == (pytest.approx(2.6), pytest.approx(1.3))
    assert row.train_s_interval == pytest.approx((900.0, 3600.0))
    assert row.memory_headroom_bytes == 20 * 2**30 and row.exposed_share == pytest.approx(0.25)
    assert toy_row(n_tokens=720_000) == row


@given(
    st.builds(
        Reliability,
        device_mtbf_s=st.floats(1e5, 1e9),
        restart_s=st.floats(1.0, 3600.0),
        n_spare_hosts=st.integers(0, 3),
        repair_s=st.none() | st.floats(60.0, 1e5),
        slow_device_speed=st.floats(0.2, 1.0),
        step_jitter=st.floats(0.0, 0.2),
    ),
    st.builds(Loading, samples_per_s_per_host=st.none() | st.floats(0.1, 100.0)),
)
def test_shares_are_the_whole_wall_time(reliability: Reliability, loading: Loading) -> None:
    row = toy_row(n_samples=1000, reliability=reliability, loading=loading)
    if row.shares:
        assert [name for name, _ in row.shares] == list(SHARES)
        assert sum(share for _, share in row.shares) == pytest.approx(1.0, abs=1e-12)
        assert min(share for _, share in row.shares) >= 0.0
        assert row.train_s == pytest.approx(1000 / 8 * row.step_s / row.goodput)


def test_loading_bounds_the_step() -> None:
    # 8 samples at 2 per second take 4 s, the step 2 s: half of the time devices wait
    row = toy_row(loading=Loading(samples_per_s_per_host=2.0))
    assert row.step_wall_s == pytest.approx(4.0) and dict(row.shares)["loading"] == pytest.approx(0.5)
    # the storage gives 100 B/s, a sample has 50 B: the same
    assert toy_row(loading=Loading(storage_bytes_per_s=100.0, sample_bytes=50.0)).step_wall_s == pytest.approx(4.0)


def test_one_device_at_half_clock_doubles_the_compute() -> None:
    assert toy_row(reliability=replace(NEVER_FAILS, slow_device_speed=0.5)).step_wall_s == pytest.approx(3.5)


def test_spare_hosts_are_paid_for() -> None:
    rows = [toy_row(n_samples=7200, reliability=replace(NEVER_FAILS, n_spare_hosts=n)) for n in (0, 1)]
    assert rows[1].cost_usd == pytest.approx(2 * rows[0].cost_usd)


def test_spot_interruptions_count_as_failures_and_short_notice_is_said() -> None:
    often = replace(
        NEVER_FAILS, device_mtbf_s=1e9, checkpoint_s=60.0, interruptions_per_device_hour=0.01, notice_s=30.0
    )
    row = toy_row(reliability=often)
    # 4 devices x 0.01 per hour: one in 25 h
    assert row.mtbf_s == pytest.approx(25 * 3600, rel=1e-3) and "30 s of notice" in row.warnings[0]


def test_own_hardware_by_hand() -> None:
    # 8760 USD over 1 year at full use: 1 USD/h; 500 W x 1.3 at 0.10 USD/kWh: 0.065 USD/h; 2 device-hours
    money = Money(own=Own(capex_usd=8760.0, years=1.0), usd_per_kwh=0.10)
    row = toy_row(n_samples=7200, money=money)
    assert row.own_cost_usd == pytest.approx(2 * 1.065)
    # rent is 2 USD/h: owning pays above 1 / (2 - 0.065) of the hours
    assert row.break_even_utilisation == pytest.approx(1 / 1.935)
    assert toy_row(n_samples=7200, money=replace(money, usd_per_kwh=None)).own_cost_usd is None


def test_without_a_price_there_is_no_cost_and_the_plan_stands() -> None:
    row = toy_row(n_samples=7200, result=toy_result(device="Unknown"))
    assert row.train_s == pytest.approx(1800.0) and (row.cost_usd, row.power_kw) == (None, None)
    assert "no on-demand price known for Unknown" in row.warnings[0]
    assert "n/a" in whatif_table([row])


def test_an_old_price_is_said_to_be_old() -> None:
    assert toy_row().warnings == ()
    row = toy_row(money=Money(rent="spot"))
    assert row.usd_per_device_hour == pytest.approx(0.75)  # 4 to 8 USD for a host of 8
    assert "71 days old (2026-03-01)" in row.warnings[0]


@pytest.mark.parametrize(("usd", "end"), [(1.0, "lowest"), (3.0, "highest"), (2.0, ""), (9.0, "")])
def test_a_price_at_an_end_of_its_offers_is_said_to_be_there(usd: float, end: str) -> None:
    # offers are 1 to 3 USD; a price of 9 USD is not among them
    said = toy_row(result=toy_result(price_usd_per_device_hour=usd)).warnings
    assert said == (
        (f"price of Toy is the {end} of its offers (1.00 to 3.00), not a middle one: give your own",) * bool(end)
    )


# -------------------------------------------------------------------------------------------------------------- points


def test_points_are_all_combinations_once() -> None:
    found = points([("a", 1), ("a", 2)], global_batches=(8, 16), precisions=("bf16",), network_scales=(1.0, 0.5))
    assert len(found) == len(set(found)) == 8
    weak = points([("a", 1), ("a", 4)], global_batches=(8,), precisions=("bf16",), scaling="weak")
    assert [point.global_batch for point in weak] == [8, 32]


def test_swept_arguments_take_the_place_of_fixed_ones() -> None:
    assert combinations([("seq", (1, 2))], fixed=(("seq", 9), ("size", "s"))) == (
        (("size", "s"), ("seq", 1)),
        (("size", "s"), ("seq", 2)),
    )


# ------------------------------------------------------------------------------------------------------- text and data


def _check(value: object, schema: dict) -> None:
    """The few words of JSON Schema that `whatif_schema` uses."""
    if "anyOf" in schema:
        assert any(_is(value, item) for item in schema["anyOf"]), (value, schema)
    elif "const" in schema:
        assert value == schema["const"]
    else:
        assert _is(value, schema), (value, schema)


def _is(value: object, schema: dict) -> bool:
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "null": type(None)}
    kind = schema["type"]
    if kind == "object":
        assert isinstance(value, dict) and set(value) <= set(schema["properties"])
        assert set(schema.get("required", ())) <= set(value)
        for name, item in value.items():
            _check(item, schema["properties"][name])
        return True
    if kind == "array":
        if not isinstance(value, list):
            return False
        for item, own in zip(value, schema.get("prefixItems", [schema.get("items")] * len(value)), strict=True):
            _check(item, own)
        return True
    return isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))


def test_json_follows_the_published_schema(capsys) -> None:
    assert cli.run(["whatif", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == whatif_schema()
    fields = schema["properties"]["rows"]["items"]["properties"]
    of_hosts = {name for name, own in fields.items() if "of whole hosts" in own.get("description", "")}
    assert of_hosts == {"device_hours", "cost_usd", "cost_usd_interval", "usd_per_billion_tokens", "own_cost_usd"}
    assert all(own["description"] for own in (*fields.values(), *list(schema["properties"].values())[2:]))
    rows = [toy_row(n_samples=100), toy_row(result=toy_result(step_s=None, status="infeasible", detail="too big"))]
    assert "" not in row_to_dict(rows[0]).values()  # nothing is null
    _check(json.loads(json.dumps(whatif_to_dict(toy_answer(*rows)), allow_nan=False)), schema)
    with pytest.raises(AssertionError):
        _check({**json.loads(json.dumps(whatif_to_dict(toy_answer(*rows)))), "rows": [{"hardware": 1}]}, schema)


def test_csv_has_a_column_for_every_figure() -> None:
    row = toy_row(n_samples=100)
    (found,) = csv.DictReader(io.StringIO(whatif_csv([row])))
    assert float(found["train_s"]) == row.train_s and float(found["train_s_interval_low"]) == row.train_s_interval[0]
    assert float(found["share_compute"]) == dict(row.shares)["compute"]
    assert len(found) == len(row_to_dict(row)) - 1 + 3 + len(SHARES)  # three intervals of two columns
