"""Estimated figures in the text of the documentation are those that its commands print.

A row has a page, a command, and two regular expressions with the same groups: of what the command prints, and of what
the page says. Figures in blocks that show a run are in `test_examples.py`, ratios in `test_whatif_cases.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from print_shown_runs import CHECKOUT, printed_by

from autoplan.answers.intervals import memory_margin
from autoplan.cost.table import MEASURED
from autoplan.cost.waits import start_s
from autoplan.hardware import hardware_names, load_hardware_profile
from autoplan.options import Options

STEP = r"^step ([\d.]+ m?s) "
STEP_AND_MEMORY = r"([\d.]+ m?s) +\d+% +([\d.]+) +<- chosen"
SMALL_GPT = (
    "estimate examples/gpt.py --set size=124m --global-batch 64 --fix dp=8,zero=0,recompute=none --hw dgx_a100_x8"
)
QUICK = [
    ("reading_a_plan.md", SMALL_GPT, STEP, r"^\| 8 \| .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/4 --hosts 2", STEP, r"^\| 4 \+ 4 \| .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/2 --hosts 4", STEP, r"^\| 2 \+ 2 \+ .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/1 --hosts 8", STEP, r"^\| one in each .* \| (.*) \|$"),
]

LARGE_GPT = "examples/gpt.py --set size=175b --hw dgx_a100_x8 --hosts 8 --global-batch 512"
LONG = "plan examples/llama.py --set size=8b --set context=32768 --hw dgx_h100_x8 --global-batch 32 --fix tp=1,pp=1"
MIXED = "plan examples/llama.py --set size=7b --global-batch 512 --precision fp16 --time-limit 60 --hw"
ODD_HEADS = (
    "plan examples/llama.py --set n_layers=2 --set n_heads=3 --set n_kv_heads=3 --set width=384 --set hidden=1024"
    " --set context=32768 --global-batch 1 --hw dgx_a100_x8"
)
SLOW_NETWORK = (
    "plan examples/gpt.py --set size=1.5b --hw dgx_a100_x8+ethernet_10g --hosts 2 --global-batch 64 --fix dp=16,zero=0"
)
SLOW = [
    ("reading_a_plan.md", LONG, STEP, r"takes an estimated (.*) a step, and .* with$"),
    ("reading_a_plan.md", f"{LONG},keep_attention=off", STEP, r"a step, and (.*) with$"),
    ("reading_a_plan.md", f"plan {LARGE_GPT} --time-limit 60", STEP, r"a step, and the plan (.*):$"),
    (
        "reading_a_plan.md",
        f"estimate {LARGE_GPT} --fix pp=4,tp=2,dp=8",
        STEP,
        r"takes an estimated (.*) a step, and the",
    ),
    ("limits.md", f"{ODD_HEADS}/2", STEP, r"takes an estimated (.*) a step on 2"),
    ("limits.md", f"{ODD_HEADS}/1", STEP, r"on 2 A100, and (.*) on one:$"),
    ("mixed_clusters.md", f"{MIXED} dgx_a100_x8 --hosts 8", STEP, r"alone take (.*) a step, "),
    ("mixed_clusters.md", f"{MIXED} examples/a100_v100.toml", r"1f1b +\w+ +([\d.]+ s)", r"the best pipeline (.*)\.$"),
    (
        "mixed_clusters.md",
        f"{MIXED} 200_gbit.toml",
        STEP + r"(?=[^!]*pipeline ranks: all on dgx_a100_x8$)",
        r"hosts alone are fastest \((.*?)\)",
    ),
    (
        "mixed_clusters.md",
        f"{MIXED} two_a100_hosts.toml",
        STEP + r"(?=[^!]*pipeline ranks: \d on dgx_a100_x8)",
        r"fastest as a pipeline \((.*?)\)",
    ),
    ("training.md", SLOW_NETWORK, STEP_AND_MEMORY, r"^\| whole \| (.*) \| (.*) GiB \|$"),
    (
        "training.md",
        f"{SLOW_NETWORK},grad_compression=bf16",
        STEP_AND_MEMORY,
        r"^\| bf16 \| (.*s) \| (.*) GiB \|$",
    ),
    (
        "training.md",
        f"{SLOW_NETWORK},grad_compression=powersgd",
        STEP_AND_MEMORY,
        r"^\| PowerSGD \| (.*) \| (.*) GiB \|$",
    ),
]


def page_text(name: str) -> str:
    return (CHECKOUT / "docs" / name).read_text()


def named(rows: list[tuple[str, ...]], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(*row, id=f"{row[0]}-{n}", marks=marks) for n, row in enumerate(rows)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place for commands, with the clusters that a page speaks of beside that of the example."""
    mixed = (CHECKOUT / "examples" / "a100_v100.toml").read_text()
    (tmp_path / "200_gbit.toml").write_text(mixed.replace("400 Gbit/s", "200 Gbit/s"))
    two = mixed.replace("400 Gbit/s", "100 Gbit/s").replace("n_hosts = 8", "n_hosts = 2")
    (tmp_path / "two_a100_hosts.toml").write_text(two)
    return tmp_path


@pytest.mark.parametrize(("page", "command", "printed", "said"), [*named(QUICK), *named(SLOW, pytest.mark.nightly)])
def test_a_figure_of_a_page_is_what_its_command_prints(
    folder: Path, page: str, command: str, printed: str, said: str
) -> None:
    text = "\n".join(printed_by(f"autoplan {command}", folder))
    found = re.search(printed, text, re.M)
    shown = re.search(said, page_text(page), re.M)
    assert found is not None and shown is not None, text
    assert found.groups() == shown.groups()


def test_the_page_has_what_starting_a_step_takes_with_the_shipped_profiles() -> None:
    devices = [load_hardware_profile(name).device for name in hardware_names()]
    one, several = ([f"{start_s(device, n_devices=n) * 1e3:.1f}" for device in devices] for n in (1, 2))
    expected = (min(one), max(one), min(several), max(several))
    said = r"begins, an estimated (\S+) to (\S+) ms on one device and (\S+) to (\S+) ms on several"
    assert re.findall(said, page_text("reading_a_plan.md")) == [expected]


def test_the_page_has_the_memory_that_is_left_free() -> None:
    margins = [memory_margin(sources, confidence=Options().memory_confidence) for sources in ((), (MEASURED,))]
    said = r"beside what it needs: (\S+) %, or (\S+) % if"
    assert re.findall(said, page_text("reading_a_plan.md")) == [tuple(f"{margin * 100:.1f}" for margin in margins)]
