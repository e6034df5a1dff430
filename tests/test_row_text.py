"""Rows as text: what each table says, in the width of the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from whatif_toys import toy_answer, toy_result, toy_row

from autoplan.what_if.loss_text import LOSSES, bar
from autoplan.what_if.points import Point
from autoplan.what_if.report_text import whatif_report
from autoplan.what_if.row_tables import whatif_to_dict
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import SHARES


def test_fastest_is_the_smallest_of_equals_and_cheapest_has_a_price() -> None:
    results = [toy_result(n_hosts=n, n_devices=4 * n) for n in (4, 1, 2)]
    rows = [toy_row(result=item, point=Point("a", item.n_hosts, 8, "bf16"), n_samples=100) for item in results]
    speeds, _, totals = whatif_table(rows).partition("global batch")
    marks = [line.rpartition("%")[2].strip() for line in speeds.splitlines()[2:5]]
    assert marks == ["as fast, 12 idle", "fastest", "as fast, 4 idle"]
    (cheapest,) = (line for line in totals.splitlines() if line.endswith("cheapest"))
    assert cheapest.startswith("1 x a ")
    assert "4 x a: dp 4; 12 of 16 devices idle, 3 whole hosts: fewer hosts do; 20.0 GiB left" in whatif_table(rows)


def test_scaling_is_speed_per_device_against_the_highest_of_all_clusters() -> None:
    # twice the devices are 1.6 times as fast: 80 % each
    one = toy_row(point=Point("a", 1, 8, "bf16"))
    two = replace(one, n_hosts=2, n_devices=8, tokens_per_s=1.6 * one.tokens_per_s)
    lines = whatif_table([one, two]).splitlines()
    assert "scaling" in lines[0] and "100%" in lines[2] and "80%" in lines[3]
    # a batch that does not divide over two hosts: each device is half as fast there as on four
    uneven = replace(two, tokens_per_s=0.8 * one.tokens_per_s)
    four = replace(one, n_hosts=4, n_devices=16, tokens_per_s=3.2 * one.tokens_per_s)
    lines = whatif_table([uneven, four]).splitlines()
    assert " 50% " in lines[2] and " 100% " in lines[3]


def test_some_of_the_devices_of_a_host_are_the_same_hardware() -> None:
    one = toy_row(result=toy_result(n_hosts=1, n_devices=1), point=Point("a/1", 1, 8, "bf16"))
    four = replace(one, hardware="a/4", n_devices=4, tokens_per_s=2 * one.tokens_per_s)
    lines = whatif_table([one, four]).splitlines()
    assert " 100% " in lines[2] and " 50% " in lines[3]


def test_scaling_is_not_told_of_other_batches_and_is_told_where_batches_grow() -> None:
    one = toy_row(point=Point("a", 1, 8, "bf16"))
    larger = replace(one, global_batch=16, tokens_per_s=4 * one.tokens_per_s)
    assert "scaling" not in whatif_table([one, larger])
    weak = replace(larger, n_hosts=2, n_devices=8, tokens_per_s=1.8 * one.tokens_per_s)
    assert "90%" in whatif_table([one, weak]).splitlines()[3]


@pytest.mark.parametrize("width", [72, 80, 120])
def test_no_line_of_the_text_is_wider_than_the_terminal(width: int) -> None:
    names = ("dgx_a100_x8", "dgx_h100_x8+leaf_spine_400g")
    rows = [
        toy_row(
            result=toy_result(n_hosts=n, n_devices=8 * n), point=Point(name, n, 8, "bf16", (("size", 7),)), n_samples=n
        )
        for name in names
        for n in (1, 1000)
    ]
    shares = tuple((name, 1.0 / len(SHARES)) for name in SHARES)  # every column of losses
    rows = [replace(row, shares=shares) for row in rows]
    text = whatif_table([*rows, replace(rows[0], overrides=("size=13",))], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("1000 x dgx_h100_x8+leaf_spine_400g") >= 4


def test_a_row_whose_search_ended_early_is_marked_named_and_warned_of() -> None:
    # step 2 s, interval 1 s to 4 s: with a gap of 75 % a plan of 0.5 s is possible, 300 % is the most that 2 s are more
    sure = toy_row(result=toy_result(gap=0.2))
    early = toy_row(result=toy_result(gap=0.75, status="feasible", n_hosts=2, n_devices=8))
    text = whatif_report(toy_answer(sure, early), search="quick", width=400)
    assert [line.rpartition("  ")[2] for line in text.splitlines()[2:4]] == ["fastest", "as fast, 4 idle, gap 75%"]
    assert "a plan is at most 25.0% slower than any other of these; but that of 2 x toy_x4 by up to 300%" in text
    assert sure.warnings == () and "- gap: share of the step" in text
    (warning,) = whatif_to_dict(toy_answer(sure, early))["rows"][1]["warnings"]
    assert warning.startswith("2 hosts of toy_x4, batch 8, bf16: its plan is at most 300% slower than any other")
    assert "gap" not in whatif_report(toy_answer(sure), search="quick")


def test_every_share_has_a_column() -> None:
    assert sorted(part for loss in LOSSES for part in loss.parts) == sorted(SHARES)
    assert len({loss.letter for loss in LOSSES}) == len(LOSSES)


def test_bars_are_whole_and_say_what_the_numbers_say() -> None:
    # 10 letters: 5.5, 2.5 and 2 become 6, 2 and 2, or 5, 3 and 2
    assert bar("#d-", (0.55, 0.25, 0.2), width=10) == "######dd--"
    assert bar("#d", (1.0, 0.0), width=16) == "#" * 16
    assert len(bar("#d-", (1 / 3, 1 / 3, 1 / 3), width=20)) == 20


def test_a_range_of_offers_has_a_unit_at_each_end() -> None:
    row = replace(toy_row(n_samples=100), cost_usd_interval=(513_000.0, 1_920_000.0))
    assert "513k to 1.92M" in whatif_table([row])
    assert "999 to 1M" in whatif_table([replace(row, cost_usd_interval=(999.0, 999_900.0))])
