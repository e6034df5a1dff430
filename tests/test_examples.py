"""Every model file plans, and the commands in its docstring are commands; the loop of one's own trains."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from print_shown_runs import NOT_DONE, PAGES, blocks, printed_by, renewed, renewed_page, shown_run
from torch.nn import functional as F

import autoplan
from autoplan import cli
from autoplan.checks.options import FIX_VALUES
from autoplan.options import PLAIN_SCHEDULE
from autoplan.registry import load_table

CHECKOUT = Path(__file__).parent.parent
OWN_LOOP = CHECKOUT / "examples" / "in_your_own_loop.py"
EXAMPLES = sorted(path for path in (CHECKOUT / "examples").glob("*.py") if path != OWN_LOOP)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_planned_and_never_slower_than_a_plain_recipe(path: Path) -> None:
    result = autoplan.plan(path, hw="dgx_a100_x8", global_batch=16)
    assert result.status in ("optimal", "feasible")
    assert result.gap is not None and result.gap < 0.3
    assert result.best is not None and result.best.estimate.fits
    assert result.baselines
    for recipe in result.baselines:
        if recipe.estimate.fits:
            assert result.best.estimate.step_s <= recipe.estimate.step_s


@pytest.mark.nightly
def test_large_gpt_is_planned_faster_than_the_text_book_layout() -> None:
    gpt, options = CHECKOUT / "examples" / "gpt.py", {"global_batch": 512, "time_limit_s": 5.0}
    fix = (("pp", "4"), ("tp", "2"), ("dp", "8"))
    found = autoplan.plan(gpt, hw="dgx_a100_x8", hosts=8, overrides={"size": "175b"}, **options)
    fixed = autoplan.plan(gpt, hw="dgx_a100_x8", hosts=8, overrides={"size": "175b"}, fix=fix, **options)
    assert found.best is not None and fixed.best is not None
    assert found.best.estimate.step_s < fixed.best.estimate.step_s
    (ddp,) = (recipe for recipe in found.baselines if recipe.baseline == "DDP")
    assert not ddp.estimate.fits and ddp.plan.mesh.micro_batch_size == 1


@pytest.mark.parametrize("path", [*EXAMPLES, *PAGES], ids=lambda path: path.stem)
def test_commands_in_the_documentation_parse(path: Path) -> None:
    text = path.read_text()
    text = "\n".join(blocks(text)) if path.suffix == ".md" else ast.get_docstring(ast.parse(text)) or ""
    commands = re.findall(r"^\s*(?:\$ )?autoplan ([a-z].*)$", text, re.MULTILINE)
    assert commands or path in PAGES[1:]
    for command in commands:
        arguments = shlex.split(command, comments=True)
        group = cli.cli
        while (child := group.commands.get(arguments[0])) is not None and hasattr(child, "commands"):
            group, arguments = child, arguments[1:]
        assert child is not None, command
        child.make_context(arguments[0], arguments[1:])


def plain_losses() -> list[float]:
    """Of the module and batches in the first cell, trained on this one process as the loop in the third trains."""
    _, first_cell, _, loop, _ = OWN_LOOP.read_text().split("\n# %%")
    assert "model.step(batch)" in loop
    cell = {"__name__": "cell"}
    exec("#" + first_cell, cell)
    module, n_steps, losses = cell["module"], cell["N_STEPS"], []
    optimizer = cell["build_optimizer"](module.parameters())
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, 2 * (1 - step / n_steps))
        inputs, targets = cell["batch_of"](step)
        loss = F.cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.nightly  # tests/test_live.py has two ranks
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_a_loop_of_ones_own_trains_as_on_one_process_whatever_is_planned(tmp_path: Path, n_ranks: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"] if n_ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(OWN_LOOP)], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    planned = re.search(r"^dp (\d+), tp (\d+), pp (\d+)", done.stdout)
    assert planned is not None and torch.tensor([int(degree) for degree in planned.groups()]).prod() == n_ranks
    expected = plain_losses()
    found = {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", done.stdout, re.MULTILINE)
    }
    assert sorted(found) == [50, 100, 150, 200]
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-3), step  # float32
    right = re.search(r"^([\d.]+)% of the sums that it never saw are right$", done.stdout, re.MULTILINE)
    assert right is not None and float(right[1]) > 50.0  # a guess is right in 1 of 31


def shown(page: Path) -> list[tuple[str, list[str]]]:
    return [run for block in blocks(page.read_text()) if (run := shown_run(block)) is not None]


def test_every_page_that_shows_a_plan_shows_runs() -> None:
    assert {page.name for page in PAGES if shown(page)} >= {"README.md", "reading_a_plan.md", "mixed_clusters.md"}


@pytest.mark.nightly
def test_examples_in_the_documentation_print_what_is_shown(tmp_path: Path) -> None:
    """Where not: `python tests/print_shown_runs.py`."""
    run = cache(lambda command: printed_by(command, tmp_path))
    for page in PAGES:
        for command, lines in shown(page):
            assert any(NOT_DONE in line for line in run(command)) or renewed(lines, run(command)) == lines, page


def test_a_shown_run_is_renewed_with_the_same_lines_left_out() -> None:
    old = ["a plan of 8 devices", "...", "step 16.9 s", "dp 8, tp 1", "...", "memory 69 GiB"]
    new = ["a plan of 8 devices", "found", "", "step 17.3 s", "more", "dp 4, tp 2", "", "memory 66 GiB", "end"]
    assert renewed(old, new) == [new[0], "...", *new[3:6], "...", *new[7:]]
    assert renewed(old[:-1], new) == [new[0], "...", *new[3:6], "..."]
    assert renewed(["2 meshes in 1.2 s", "x"], ["2 meshes in 450 ms", "x"]) == ["2 meshes in 1.2 s", "x"]


def test_a_block_of_a_language_is_no_command_and_its_end_begins_none() -> None:
    page = "```python\n$ autoplan x\n```\ntext\n```\n$ autoplan plan m.py\nstep 1 s\n```\n"
    assert [shown_run(block) for block in blocks(page)] == [("autoplan plan m.py", ["step 1 s"])]
    assert renewed_page(page, lambda command: ["step 2 s"]) == page.replace("step 1 s", "step 2 s")


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [*PAGES, CHECKOUT / "benchmarks" / "README.md", *(CHECKOUT / "benchmarks" / "evidence").glob("*.md")],
    ids=lambda page: page.stem,
)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in _anchors(file), target


def test_the_page_has_every_name_and_word_that_fix_takes() -> None:
    section = (CHECKOUT / "docs" / "reading_a_plan.md").read_text().split("## What `--fix` takes")[1].split("\n## ")[0]
    found = {}
    for names, words, _ in re.findall(r"^\| (`.*?) \| (.*?) \| (.*)\|$", section, re.M):
        found |= {name: set(re.findall(r"`(\w+)`", words)) for name in re.findall(r"`(\w+)`", names)}
    schedules = {PLAIN_SCHEDULE, *load_table("autoplan.schedules", "SCHEDULES")}
    assert found == {name: schedules if words == () else set(words or ()) for name, words in FIX_VALUES.items()}
