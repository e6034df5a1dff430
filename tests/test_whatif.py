"""What-if: points, rows and their totals by hand, whatif.toml, JSON and CSV, sweeps that are kept and interrupted."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whatif_toys import NEVER_FAILS, toy_assumptions, toy_result, toy_row

import autoplan
from autoplan import api, cli
from autoplan.errors import InputError, UsageError
from autoplan.options import Options
from autoplan.what_if import asking
from autoplan.what_if import points as whatif_points
from autoplan.what_if import sweep as sweeping
from autoplan.what_if.asking import WhatIf, ask
from autoplan.what_if.conditions import Loading, Reliability
from autoplan.what_if.flags import flag_tables
from autoplan.what_if.money import Money, Own
from autoplan.what_if.points import combinations, points, searched
from autoplan.what_if.question import Question, checked_question, parse_question, read_question
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import SHARES
from autoplan.what_if.tables import row_to_dict, whatif_csv, whatif_schema, whatif_to_dict

CHECKOUT = Path(__file__).parent.parent
GPT = str(CHECKOUT / "examples" / "gpt.py")
MLP = str(CHECKOUT / "examples" / "mlp.py")
CHAR = (("size", "char"),)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of these tests are kept apart; graphs and layouts stay where they are."""
    folder = tmp_path_factory.mktemp("points")
    real = sweeping.cache_entry
    monkeypatch.setattr(
        sweeping, "cache_entry", lambda name, key: folder / f"{key}.json" if name == "points" else real(name, key)
    )


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


# ----------------------------------------------------------------------------------------------------------- questions


QUESTION = """
[workload]
model = "m.py"
set = { size = "8b" }
sweep = { seq = [1024, 2048] }
tokens = 1e12
global_batch = [256, 512]
[clusters]
hw = ["dgx_a100_x8"]
hosts = [1, 2]
network_scale = [1.0, 0.5]
[money]
rent = "reserved"
electricity = "0.12 USD/kWh"
pue = 1.2
price = { dgx_a100_x8 = "1.80 USD/h" }
[money.own]
capex = "25000 USD"
utilisation = "70 %"
[reliability]
device_mtbf = "50000 h"
spare_hosts = 2
restart = "5 min"
[loading]
storage_rate = "10 GB/s"
sample_size = "100 KB"
"""


def test_whatif_toml_is_read_and_flags_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "whatif.toml"
    path.write_text(QUESTION)
    changes = flag_tables(hosts="4", given=['reliability.restart="1 min"', "money.pue=1.5"])
    found = read_question(path, changes=changes)
    assert found.model == str(tmp_path / "m.py") and found.hosts == (4,)
    assert found.sweeps == (("seq", (1024, 2048)),) and found.n_tokens == 1e12
    (condition,) = found.conditions
    assert condition.money == Money("reserved", Own(25_000.0, utilisation=70 * 0.01), 0.12, 1.5)
    assert condition.reliability == Reliability(device_mtbf_s=1.8e8, n_spare_hosts=2, restart_s=60.0)
    assert found.given_usd == (("dgx_a100_x8", 1.8),)


def test_keywords_beat_the_file_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "whatif.toml", []
    path.write_text(QUESTION.replace("spare_hosts = 2", "spare_hosts = [2, 3]"))

    def ask_nothing(question, **_):
        asked.append(question)
        return _answer()

    monkeypatch.setattr(asking, "ask", ask_nothing)
    given = {"hw": ("dgx_h100_x8",), "hosts": (3, 5), "n_tokens": 7e9, "global_batch": 96, "precision": "fp32"}
    given |= {"fix": (("tp", "2"),), "max_micro_batch_size": 4, "overrides": {"size": "big"}}
    # the file has a price of a cluster that is no longer among the hardware
    with pytest.raises(InputError, match="money.price.dgx_a100_x8"):
        autoplan.whatif(path, **given)
    path.write_text(path.read_text().replace("dgx_a100_x8 =", "dgx_h100_x8 ="))
    autoplan.whatif(path, prices_usd_per_device_hour={"dgx_h100_x8": 2.5}, asked={"scaling": "weak"}, **given)
    (found,) = asked
    assert (found.hw, found.hosts, found.n_tokens, found.scaling) == (("dgx_h100_x8",), (3, 5), 7e9, "weak")
    assert (found.global_batches, found.precisions, found.given_usd) == ((96,), ("fp32",), (("dgx_h100_x8", 2.5),))
    assert dict(found.overrides)["size"] == "big" and found.sweeps == (("seq", (1024, 2048)),)
    assert found.options == Options(fix=(("tp", "2"),), max_micro_batch_size=4)
    autoplan.whatif(path, **{**given, "overrides": {"seq": 512}})
    assert asked[-1].sweeps == () and dict(asked[-1].overrides) == {"size": "8b", "seq": 512}
    with pytest.raises(UsageError, match="asked: money: found 2 conditions"):
        autoplan.whatif(path, asked={"money": Money()}, **given)


def test_the_example_asks_of_an_example_and_of_shipped_hardware() -> None:
    found = read_question(CHECKOUT / "examples" / "whatif.toml")
    assert Path(found.model).is_file() and set(found.hw) <= set(autoplan.profile_names())
    assert len(found.conditions) == 2


def test_lists_of_conditions_are_rows_without_another_search() -> None:
    tables = {
        "workload": {"model": GPT, "set": {"size": "char"}, "tokens": 1e9, "global_batch": 64},
        "clusters": {"hw": ["dgx_a100_x8"]},
        "reliability": {"device_mtbf": ["50000 h", "500 h"]},
        "money": {"own": {"capex": ["20000 USD", "30000 USD"]}},
    }
    answer = ask(parse_question(tables, where="w"))
    assert len(answer.sweep.results) == 1 and len({row.step_s for row in answer.rows}) == 1
    assert [row.condition for row in answer.rows] == [
        f"capex {capex}, device_mtbf {mtbf}" for capex in ("20000 USD", "30000 USD") for mtbf in ("50000 h", "500 h")
    ]
    assert answer.rows[0].train_s < answer.rows[1].train_s and "device_mtbf 500 h" in whatif_table(answer.rows)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("tokens = 1e12", "tokens = 0", "workload.tokens"),
        ("tokens = 1e12", "tokens = inf", "workload.tokens"),
        ("tokens = 1e12", "tokens = nan", "workload.tokens"),
        ("tokens = 1e12", "tokens = true", "workload.tokens"),
        ("tokens = 1e12", "tokens = 1e12\nsamples = 5", "tokens and samples"),
        ("tokens = 1e12", "toknes = 1e12", 'did you mean "tokens"'),
        ("hosts = [1, 2]", "hosts = [0]", "clusters.hosts"),
        ("hosts = [1, 2]", "hosts = [99999999999]", "clusters.hosts"),
        ("network_scale = [1.0, 0.5]", "network_scale = [0]", "clusters.network_scale"),
        ('hw = ["dgx_a100_x8"]', "hw = []", "clusters.hw"),
        ('rent = "reserved"', 'rent = "free"', "money.rent"),
        ("pue = 1.2", "pue = 0.5", "money.pue"),
        ('"1.80 USD/h"', '"0 USD/h"', "money.price.dgx_a100_x8"),
        ('"1.80 USD/h"', '"-1.80 USD/h"', "money.price.dgx_a100_x8"),
        ('"1.80 USD/h"', '"1.80 EUR/h"', "money.price.dgx_a100_x8"),
        ("dgx_a100_x8 =", "dgx_h100_x8 =", "no such name among the hardware"),
        ('utilisation = "70 %"', 'utilisation = "170 %"', "money.own.utilisation"),
        ('utilisation = "70 %"', 'utilisation = "-70 %"', "money.own.utilisation"),
        ('capex = "25000 USD"', "", "money.own.capex"),
        ('electricity = "0.12 USD/kWh"', "electricity = 0.12", "money.electricity"),
        ('restart = "5 min"', 'restart = "5"', "reliability.restart"),
        ("spare_hosts = 2", "spare_hosts = -1", "reliability.spare_hosts"),
        ("[loading]", "[loadnig]", "loadnig"),
    ],
)
def test_bad_questions_name_the_field(tmp_path: Path, capsys, old: str, new: str, field: str) -> None:
    assert old in QUESTION
    path = tmp_path / "whatif.toml"
    path.write_text(QUESTION.replace(old, new, 1))
    assert cli.run(["whatif", str(path)]) == 3
    error = capsys.readouterr().err
    assert field in error and "whatif.toml" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["whatif"],
        ["whatif", "m.py"],
        ["whatif", "m.py", "--hw", "a", "--tokens", "0"],
        ["whatif", "m.py", "--hw", "a", "--network-scale", "x"],
        ["whatif", "m.py", "--hw", "a", "--sweep", "seq"],
        ["whatif", "m.py", "--hw", "a", "--given", "restart=5"],
        ["whatif", "m.py", "--hw", "a", "--given", "reliability.restrat=5 min"],
        ["whatif", "m.py", "--hw", "a", "--hosts", ",".join(map(str, range(1, 12_000)))],
        ["whatif", "m.py", "--hw", "a", "--price", "b=2"],
        ["recommend", MLP, "--deadline", "14d"],
        ["recommend", MLP, "--samples", "1e6", "--deadline", "14d", "--budget", "5"],
        ["recommend", MLP, "--samples", "1e6", "--deadline", "14"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "0"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "9", "--among", "rtx4090_x8"],  # no price
        ["advise", MLP],
        ["advise", MLP, "--hw", "dgx_a100_x8", "--global-batch", "8,16"],
        ["recommend", MLP, "--samples", "1e6", "--budget", "9", "--precision", "bf16,fp32"],
        ["hw", "prices", "x.csv", "--date", "tomorrow"],
    ],
)
def test_wrong_purchase_command_lines_exit_2(arguments: list[str]) -> None:
    assert cli.run(arguments) == 2


def test_mlp_reads_no_tokens() -> None:
    with pytest.raises(UsageError, match="use --samples"):
        autoplan.whatif(MLP, hw=("dgx_a100_x8",), n_tokens=1e9)


# ------------------------------------------------------------------------------------------------------- text and data


def _answer(*rows) -> WhatIf:
    sweep = sweeping.Sweep((), n_kept=0, is_interrupted=False, processor_s=1.0, wall_s=1.0)
    return WhatIf(tuple(rows), sweep, toy_assumptions())


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
    rows = [toy_row(n_samples=100), toy_row(result=toy_result(step_s=None, status="infeasible", detail="too big"))]
    _check(json.loads(json.dumps(whatif_to_dict(_answer(*rows)), allow_nan=False)), schema)
    with pytest.raises(AssertionError):
        _check({**json.loads(json.dumps(whatif_to_dict(_answer(*rows)))), "rows": [{"hardware": 1}]}, schema)


def test_csv_has_a_column_for_every_figure() -> None:
    row = toy_row(n_samples=100)
    (found,) = csv.DictReader(io.StringIO(whatif_csv([row])))
    assert float(found["train_s"]) == row.train_s and float(found["train_s_interval_low"]) == row.train_s_interval[0]
    assert float(found["share_compute"]) == dict(row.shares)["compute"]
    assert len(found) == len(row_to_dict(row)) - 1 + 3 + len(SHARES)  # three intervals of two columns


# -------------------------------------------------------------------------------------------------------------- sweeps


def _question(**changes) -> Question:
    return replace(
        Question(GPT, ("dgx_a100_x8",), hosts=(1, 2), overrides=CHAR, global_batches=(64,), n_tokens=1e9), **changes
    )


def test_a_second_sweep_searches_only_what_is_new() -> None:
    first = ask(_question())
    assert (first.sweep.n_kept, len(first.rows)) == (0, 2)
    dearer = replace(_question(given_usd=(("dgx_a100_x8", 9.0),)), hosts=(1, 2, 4))
    second = ask(dearer)
    assert (second.sweep.n_kept, len(second.rows)) == (2, 3)
    assert [row.step_s for row in second.rows[:2]] == [row.step_s for row in first.rows]
    assert second.rows[0].cost_usd == pytest.approx(9.0 * first.rows[0].device_hours)


def test_a_damaged_result_is_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "cache_entry", lambda name, key: tmp_path / f"{key}.json")
    first = ask(_question(hosts=(1,)))
    (entry,) = tmp_path.glob("*.json")
    for text in ("{", json.dumps({**json.loads(entry.read_text()), "result": '{"step_s": 1e-9}'}), "[1]"):
        entry.write_text(text)
        again = ask(_question(hosts=(1,)))
        assert again.sweep.n_kept == 0 and again.rows == first.rows
    assert ask(_question(hosts=(1,))).sweep.n_kept == 1


def test_processes_and_the_command_line_give_the_same_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    alone = ask(_question())
    monkeypatch.setattr(sweeping, "cache_entry", lambda name, key: tmp_path / f"{key}.json")
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1,2", "--global-batch", "64"]
    assert cli.run([*arguments, "--tokens", "1e9", "--jobs", "2", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["n_known_before"] == 0 and "2 of 2 points" in err
    assert found["rows"] == json.loads(json.dumps([row_to_dict(row) for row in alone.rows]))
    library = api.whatif(GPT, hw=("dgx_a100_x8",), hosts=(1, 2), n_tokens=1e9, overrides=dict(CHAR), global_batch=64)
    assert library == alone.rows


def test_batch_and_precision_of_the_options_are_those_of_the_question() -> None:
    given = replace(_question(), global_batches=(), options=Options(global_batch=32, precision="fp32"))
    folded = checked_question(given, where="q")
    assert (folded.global_batches, folded.precisions) == ((32,), ("fp32",))
    assert folded.options == Options() and checked_question(folded, where="q") == folded
    for changes in ({"global_batches": (64,)}, {"precisions": ("fp16", "bf16")}):
        with pytest.raises(InputError, match="expected: one of the two"):
            checked_question(replace(given, **changes), where="q")


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    solve, n_done = sweeping.solve_point, []

    def interrupted_at_the_second(problem, **given):
        if n_done:
            raise KeyboardInterrupt
        n_done.append(1)
        return solve(problem, **given)

    monkeypatch.setattr(sweeping, "solve_point", interrupted_at_the_second)
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1,2", "--global-batch", "64"]
    assert cli.run([*arguments, "--jobs", "1", "--format", "json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["is_interrupted"] and [row["status"] == "interrupted" for row in found["rows"]] == [False, True]
    monkeypatch.setattr(sweeping, "solve_point", solve)
    assert ask(_question()).sweep.n_kept == 1


def test_an_unusable_cluster_is_a_row(capsys) -> None:
    # a V100 has no bf16
    arguments = ["whatif", MLP, "--hw", "v100_x8,dgx_a100_x8", "--jobs", "1", "--format", "json"]
    assert cli.run(arguments) == 0
    v100, a100 = json.loads(capsys.readouterr().out)["rows"]
    assert v100["status"] == "unusable" and "bf16" in v100["detail"]
    assert a100["step_s"] is not None and a100["global_batch"] == v100["global_batch"] == 64
    # 16 data-parallel ranks do not fit on one host of 8
    assert cli.run(["whatif", MLP, "--hw", "dgx_a100_x8", "--hosts", "1,2", "--fix", "dp=16", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "infeasible" in text and "fastest" in text and "global batch: 128 samples on every cluster" in text


def test_absurd_sizes_are_answered_without_infinities(capsys) -> None:
    arguments = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--hosts", "1", "--global-batch", "64"]
    for tokens in ("1", "1e20"):
        assert cli.run([*arguments, "--tokens", tokens, "--jobs", "1", "--format", "json"]) == 0
        (row,) = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["rows"]
        assert row["train_s"] > 0


def test_quick_searches_are_of_one_stage_per_rank_unless_a_schedule_is_fixed() -> None:
    assert dict(searched(Options(), search="quick").fix)["schedule"] == "plain"
    fixed = Options(fix=(("schedule", "gpipe"),))
    assert searched(fixed, search="quick").fix == fixed.fix and searched(Options(), search="full").fix == ()


@pytest.mark.parametrize(
    ("arguments", "limits_s"),
    [
        ([], [(1.0, 15.0)]),
        (["--time-limit", "1"], [(1.0, None)]),
        (["--time-limit", "7"], [(7.0, None)]),
        (["--search", "full"], [(15.0, None)]),
    ],
)
def test_a_time_limit_that_is_given_is_that_of_each_search(
    monkeypatch: pytest.MonkeyPatch, capsys, arguments: list[str], limits_s: list[tuple[float, float | None]]
) -> None:
    asked: list[tuple[float | None, float | None]] = []
    decide = whatif_points.decide

    def find_nothing(problem, *, clock, patience_s):
        asked.append((problem.options.time_limit_s, patience_s))
        answer = decide(problem, clock=clock, patience_s=patience_s)
        return replace(answer, result=replace(answer.result, status="unknown", best=None))

    monkeypatch.setattr(whatif_points, "decide", find_nothing)
    command = ["whatif", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--fix", "dp=8,tp=1,pp=1,recompute=none"]
    assert cli.run([*command, "--global-batch", "64", "--jobs", "1", *arguments]) == 0
    assert asked == limits_s
    library = {"hw": ("dgx_a100_x8",), "overrides": dict(CHAR), "global_batch": 64, "fix": (("dp", "8"),)}
    if arguments[:1] == ["--time-limit"]:
        autoplan.whatif(GPT, time_limit_s=float(arguments[1]), **library)
        assert asked == 2 * limits_s


def test_a_question_names_no_more_points_than_can_be_answered() -> None:
    tables = {
        "workload": {"model": "m.py", "global_batch": list(range(1, 200))},
        "clusters": {"hw": ["a"], "hosts": list(range(1, 200))},
    }
    with pytest.raises(InputError, match="39601 points"):
        parse_question(tables, where="w")
