"""Cached layouts: read instead of solved, for exactly what the programs depend on, and never trusted when damaged."""

import json
from dataclasses import fields, replace

import pytest
from distributed.programs import graph_of

from autoplan import user_cache
from autoplan.cost.layout_prices import sharding_figures
from autoplan.hardware import NO_SHARDING, ShardingHost, load_hardware_profile
from autoplan.options import Options
from autoplan.parallel_plan import Mesh, SegmentSharding
from autoplan.space import layouts
from autoplan.space.layouts import LAYOUT_SIZES
from autoplan.space.priced import priced_space
from autoplan.tensor_parallel import layout_cache
from autoplan.tensor_parallel.layout_cache import cached_layouts

LAYOUTS = {
    "R": (SegmentSharding(0, (("x", "R"), ("w", "S(1/3)")), (("add", "0", "V"), ("", "x", "R"))),),
    "S(1)": (SegmentSharding(0, (("x", "S(1)"),), ()),),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    return tmp_path / "cache" / "layouts"


@pytest.fixture
def solved(monkeypatch):
    """The programs that were solved, one entry for each."""
    calls = []

    def counted(model, **limits):
        calls.append(model)
        return solve(model, **limits)

    solve = layouts.minimize
    monkeypatch.setattr(layouts, "minimize", counted)
    return calls


def counting(calls):
    def solve_now():
        calls.append(1)
        return LAYOUTS

    return solve_now


def test_a_second_call_reads_the_same_layouts_without_solving():
    calls = []
    found = [cached_layouts(("graph", "bf16"), (), counting(calls)) for _ in range(2)]
    assert found == [LAYOUTS, LAYOUTS]
    assert len(calls) == 1


def test_another_name_or_another_text_of_a_rules_file_is_solved_anew(tmp_path):
    calls, rules = [], tmp_path / "my_rules.py"
    rules.write_text("RULES = {}")
    for named in ("bf16", "fp32"):
        cached_layouts((named,), (str(rules),), counting(calls))
    rules.write_text("RULES = {}  # another")
    cached_layouts(("bf16",), (str(rules),), counting(calls))
    cached_layouts(("bf16",), (), counting(calls))
    assert len(calls) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("S(1/3)", "S(1/4)", 1),
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps(json.loads(text) | {"key": "of another question"}),
        lambda text: json.dumps(json.loads(text) | {"layouts": 7}),
    ],
    ids=["altered", "cut off", "no record", "foreign", "no text"],
)
def test_a_damaged_or_foreign_entry_is_solved_anew_and_replaced(folder, damage):
    calls = []
    cached_layouts(("graph",), (), counting(calls))
    (entry,) = folder.glob("*.json")
    entry.write_text(damage(entry.read_text()))
    assert cached_layouts(("graph",), (), counting(calls)) == LAYOUTS
    assert cached_layouts(("graph",), (), counting(calls)) == LAYOUTS
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_solving(tmp_path):
    (tmp_path / "cache").write_text("")
    calls = []
    assert cached_layouts(("graph",), (), counting(calls)) == cached_layouts(("graph",), (), counting(calls))
    assert len(calls) == 2


def offered(hardware, **options):
    chosen = Options(global_batch=16, **options)
    return priced_space(graph_of("gpt"), hardware, chosen, global_batch=16)


def test_hosts_network_memory_and_price_use_the_layouts_again(solved):
    first = offered(load_hardware_profile("dgx_a100_x8"))
    n_programs = len(solved)
    assert n_programs > 0
    hardware = load_hardware_profile("dgx_a100_x8+ethernet_10g", n_hosts=4)
    smaller = replace(hardware.device, memory_bytes=hardware.device.memory_bytes // 2)
    second = offered(replace(hardware, device=smaller, price_usd_per_device_hour=7.0))
    assert len(solved) == n_programs
    assert first.space.shardings == second.space.shardings


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"fix": (("micro_batch", "2"),)}])
def test_another_precision_or_micro_batch_is_solved_anew(solved, options):
    offered(load_hardware_profile("dgx_a100_x8"))
    n_programs = len(solved)
    offered(load_hardware_profile("dgx_a100_x8"), **options)
    n_sizes = 1 if options.get("fix") else len(LAYOUT_SIZES)
    assert len(solved) == n_programs + n_programs * n_sizes // len(LAYOUT_SIZES)


def test_a_slower_link_in_the_host_is_solved_anew(solved):
    hardware = load_hardware_profile("dgx_a100_x8")
    offered(hardware)
    n_programs = len(solved)
    link = replace(hardware.links[0], bytes_per_s=hardware.links[0].bytes_per_s / 2)
    offered(replace(hardware, links=(link, *hardware.links[1:])))
    assert len(solved) == 2 * n_programs


def test_layouts_read_back_give_the_same_prices(solved):
    hardware = load_hardware_profile("dgx_a100_x8")
    solved_now, read = offered(hardware), offered(hardware)
    for tp, keys in solved_now.space.shardings[1:]:
        mesh = Mesh(tp=tp, sharding=keys[0])
        assert solved_now.price(mesh) == read.price(mesh)


FREE_OF_LAYOUTS = (
    "name", "memory_bytes", "collective_launch_s", "pipeline_action_s", "pipeline_transfer_s", "sharding"
)  # fmt: skip


def test_the_figures_hold_every_field_of_the_device_that_layouts_depend_on():
    hardware = load_hardware_profile("dgx_a100_x8")
    before = sharding_figures(hardware, degree=4)
    for field in fields(hardware.device):
        value = getattr(hardware.device, field.name)
        other = value[:1] if isinstance(value, tuple) else f"{value}x" if isinstance(value, str) else value
        other = 2 * value if isinstance(value, float | int) else other
        other = NO_SHARDING if isinstance(value, ShardingHost) else other
        figures = sharding_figures(replace(hardware, device=replace(hardware.device, **{field.name: other})), degree=4)
        assert (figures == before) == (field.name in FREE_OF_LAYOUTS), field.name


def test_only_the_text_of_autoplan_counts_and_no_other_file_of_a_checkout(monkeypatch):
    read = []
    monkeypatch.setattr(layout_cache, "file_sha256", lambda file: read.append(file) or "0")
    layout_cache.own_hash.__wrapped__()
    names = {file.parent.name for file in read}
    assert {"autoplan", "what_if", "cost_models"} <= names and "tests" not in names
    assert len(read) == len(set(read))
