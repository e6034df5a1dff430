"""Every example plans, and the commands in its docstring are commands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import autoplan
from autoplan import cli

CHECKOUT = Path(__file__).parent.parent
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.py"))


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


@pytest.mark.parametrize("path", [*EXAMPLES, CHECKOUT / "README.md"], ids=lambda path: path.stem)
def test_commands_in_the_documentation_parse(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    else:
        text = ast.get_docstring(ast.parse(text)) or ""
    commands = re.findall(r"^\s*(?:\$ )?autoplan ([a-z].*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        arguments = shlex.split(command, comments=True)
        group = cli.cli
        while (child := group.commands.get(arguments[0])) is not None and hasattr(child, "commands"):
            group, arguments = child, arguments[1:]
        assert child is not None, command
        child.make_context(arguments[0], arguments[1:])
