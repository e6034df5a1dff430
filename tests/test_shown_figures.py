"""Estimated figures in the text of the documentation are those that its commands print.

A row has a page, a command, and two regular expressions with the same groups: of what the command prints, and of what
the page says. Figures in blocks that show a run are in `test_examples.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from print_shown_runs import CHECKOUT, printed_by

STEP = r"^step ([\d.]+ m?s) "
SMALL_GPT = (
    "estimate examples/gpt.py --set size=124m --global-batch 64 --fix dp=8,zero=0,recompute=none --hw dgx_a100_x8"
)
QUICK = [
    ("reading_a_plan.md", SMALL_GPT, STEP, r"^\| 8 \| .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/4 --hosts 2", STEP, r"^\| 4 \+ 4 \| .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/2 --hosts 4", STEP, r"^\| 2 \+ 2 \+ .* \| (.*) \|$"),
    ("reading_a_plan.md", f"{SMALL_GPT}/1 --hosts 8", STEP, r"^\| one in each .* \| (.*) \|$"),
]


@pytest.mark.parametrize(("page", "command", "printed", "said"), QUICK)
def test_a_figure_of_a_page_is_what_its_command_prints(
    tmp_path: Path, page: str, command: str, printed: str, said: str
) -> None:
    text = "\n".join(printed_by(f"autoplan {command}", tmp_path))
    found = [re.search(pattern, where, re.M) for pattern, where in ((printed, text), (said, _page(page)))]
    assert all(found), found
    assert found[0].groups() == found[1].groups()


def _page(name: str) -> str:
    return (CHECKOUT / "docs" / name).read_text()
