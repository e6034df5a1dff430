"""Absurd requests: each is answered or refused, by a documented exit code, within a minute, without inf or nan."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from autoplan.cli import run

GPT = str(Path(__file__).parent.parent / "examples" / "gpt.py")
EXIT_CODES = {0, 2, 3, 4, 5, 6}  # all but that of a bug, and those of programs that run
MAX_PROCESSOR_S = 60.0  # where many share the cores of a machine, the same work takes twice as many
HOSTS = ("1", "3", "64", "1000", "4096", "100000", "1000000")
BATCHES = ("1", "3", "7", "1024", "65536", "1000003", "1000000000")
OVERRIDES = ("size=char", "size=1.5b", "size=175b", "n_layers=1", "n_layers=0", "n_layers=150", "n_heads=7", "width=0")
OVERRIDES += (
    "width=7",
    "width=65536",
    "context=1",
    "context=4194304",
    "vocabulary=2",
    "vocabulary=100000007",
    "none=1",
)
HARDWARE = ("dgx_a100_x8", "dgx_h100_x8", "dgx_a100_x8/1", "dgx_a100_x8+ethernet_10g", "a100_pcie_x8", "dgx_a100_x8+:4")
HARDWARE += ("dgx_h100_x8+leaf_spine_400g", "dgx_a100_x8/0", "nothing")
AMOUNTS = ("1", "1e6", "1e12", "1e20", "0", "-1", "1e300", "inf", "nan", "1e-300")
FIGURES = ("1e-9", "0.01", "1", "50", "100", "1e6", "1e12", "1e308", "nan", "-1", "0", "")
GIVEN = {
    "reliability": ("device_mtbf", "checkpoint", "restart", "repair", "notice", "slow_device_speed", "step_jitter"),
    "loading": ("storage_rate", "sample_size", "samples_per_s_per_host"),
    "money": ("electricity", "load", "host_power", "pue", "own.capex", "own.years", "own.utilisation"),
}
UNITS = ("", " s", " h", " d", " %", " GB/s", " KB", " USD", " USD/kWh", " kW")
FIXES = ("dp=8,tp=1,pp=1", "tp=8", "pp=6", "zero=3", "micro_batch=1000003", "recompute=full", "dp=1000000", "dp=0")
LIMITS = ("1e-9", "0.001", "1", "1e6", "1e18", "inf", "0")
DEADLINES = ("1ms", "1s", "1d", "1000000 d", "0d", "nan d", "14")


def _request(seed: int) -> list[str]:
    """A command line, most of it possible."""
    draw = random.Random(seed)
    command = draw.choice(["whatif"] * 4 + ["recommend"] * 2 + ["advise", "plan", "plan", "estimate"])
    asked = [command, GPT, *(["--set", "size=char"] if draw.random() < 0.9 else [])]
    asked += ["--set", draw.choice(OVERRIDES)] if draw.random() < 0.4 else []
    hardware = draw.choice(HARDWARE if draw.random() < 0.4 else HARDWARE[:3])
    asked += ["--among" if command == "recommend" else "--hw", hardware]
    asked += ["--max-hosts" if command in ("recommend", "advise") else "--hosts", draw.choice(HOSTS)]
    asked += ["--global-batch", draw.choice(BATCHES)] if draw.random() < 0.6 else []
    asked += ["--fix", draw.choice(FIXES)] if command == "estimate" or draw.random() < 0.2 else []
    if command in ("plan", "estimate"):
        return [*asked, "--time-limit", draw.choice(LIMITS), "--format", draw.choice(("table", "json"))]
    asked += [draw.choice(("--tokens", "--samples")), draw.choice(AMOUNTS[:4] if draw.random() < 0.8 else AMOUNTS)]
    for table in draw.sample(sorted(GIVEN), draw.choice((0, 1, 1, 2))):
        asked += ["--given", f"{table}.{draw.choice(GIVEN[table])}={draw.choice(FIGURES)}{draw.choice(UNITS)}"]
    if draw.random() < 0.2:
        asked += ["--price", f"{hardware}={draw.choice(FIGURES)}"]
    if command == "recommend":
        asked += draw.choice((["--deadline", draw.choice(DEADLINES)], ["--budget", draw.choice(AMOUNTS)]))
    if command == "whatif":
        asked += draw.choice(([], [], ["--network-scale", draw.choice(FIGURES)], ["--nvlink", "on,off"]))
        asked += draw.choice(([], [], ["--scaling", "weak"], ["--nics", draw.choice(("1", "64", "65", "0"))]))
    return [*asked, "--jobs", "1", "--format", draw.choice(("table", "json"))]


def _check(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    started_s = time.process_time()
    code = run(asked)
    spent_s = time.process_time() - started_s
    out, err = capsys.readouterr()
    assert code in EXIT_CODES, (code, asked, err)
    assert spent_s < MAX_PROCESSOR_S, (spent_s, asked)
    assert not re.search(r"(?<![\w.])[-+]?(nan|inf|infinity)(?!\w)", out, re.IGNORECASE), (asked, out)
    assert code == 0 or err.strip() or out.strip(), asked
    if code in (2, 3):
        assert re.search("found|expected|fix|Usage|Error", err), (asked, err)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_absurd_requests_are_answered_or_refused(seed: int, capsys) -> None:
    _check(_request(seed), capsys)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["plan", "--time-limit", "1e18"], "--time-limit: found 1e+18"),
        (["plan", "--global-batch", "1000000000000"], "--global-batch: found 1000000000000\n  expected: at most"),
        (["plan", "--global-batch", "0"], "--global-batch: found 0\n  expected: a number above 0\n  fix: "),
        (["plan", "--hosts", "1000001"], "--hosts: found 1000001\n  expected: 1 to 1000000\n  fix: "),
        (["plan", "--hosts", "0"], "--hosts: found 0\n  expected: 1 to 1000000\n  fix: "),
        (["whatif", "--samples", "1", "--set", "context=4194304"], "make_batch failed"),
        (["whatif", "--samples", "nan"], "samples"),
        (["whatif", "--samples", "1", "--hosts", "1000001"], "hosts"),
        (["whatif", "--samples", "1", "--given", "reliability.restart=1e308 d"], "reliability.restart"),
        (["whatif", "--samples", "1", "--price", "dgx_a100_x8=-1"], "price"),
        (["whatif", "--samples", "1", "--network-scale", "nan"], "--network-scale"),
        (["advise", "--samples", "1", "--given", "money.pue=0"], "money.pue"),
    ],
)
def test_what_is_impossible_is_refused_by_its_name(asked: list[str], said: str, capsys) -> None:
    command, *options = asked
    assert run([command, GPT, "--set", "size=char", "--hw", "dgx_a100_x8", *options]) in (2, 3)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", [["--hosts", "100000"], ["--global-batch", "735134400"]], ids=lambda size: size[0])
def test_the_time_limit_holds_for_large_spaces(size: list[str], capsys) -> None:
    mlp, limit_s = GPT.replace("gpt.py", "mlp.py"), 1.0
    assert run(["estimate", mlp, "--hw", "dgx_a100_x8", "--fix", "tp=1,pp=1", "--time-limit", "60"]) == 0  # is cached
    started_s = time.process_time()
    assert run(["plan", mlp, "--hw", "dgx_a100_x8", *size, "--time-limit", str(limit_s)]) in (0, 6)
    assert time.process_time() - started_s < limit_s + 4.0  # without a limit on listing these meshes it is 17 s


@pytest.mark.nightly
def test_a_batch_that_nobody_accumulates_is_not_replayed(capsys) -> None:
    # a prime number of samples: one micro-batch, which does not fit, or a million of them
    started_s = time.process_time()
    assert run(["plan", GPT, "--set", "size=char", "--hw", "dgx_a100_x8", "--global-batch", "1000003"]) == 5
    assert time.process_time() - started_s < 20.0
    assert "1000003 x 1" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "asked",
    [
        ["plan", "--set", "size=char"],
        ["estimate", "--set", "size=1.5b", "--fix", "recompute=full", "--format", "json"],  # 583,000 rejected meshes
        ["advise", "--set", "size=char", "--max-hosts", "1000000", "--jobs", "1"],
    ],
    ids=lambda asked: asked[0],
)
def test_a_million_hosts_are_answered_or_given_up_in_a_minute(asked: list[str], capsys) -> None:
    command, *options = asked
    hosts = [] if command == "advise" else ["--hosts", "1000000"]
    started_s = time.process_time()
    code = run([command, GPT, "--hw", "dgx_a100_x8", *hosts, *options])
    assert code in (0, 6)  # 6: where others take the cores, the time limit may pass before there is a plan
    assert time.process_time() - started_s < MAX_PROCESSOR_S  # a third of it where nobody shares the cores
    assert len(capsys.readouterr().out) < 20_000_000
