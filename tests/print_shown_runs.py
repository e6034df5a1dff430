"""Run the commands that README.md and docs/*.md show, and put what they print now in place of what is shown.

    python tests/print_shown_runs.py [PAGE ...]      `git diff` then shows the old lines beside the new

A shown run is a block that begins with "$ autoplan"; "..." stands for lines left out, and stays where it is as far as
the lines around it are found again. What follows a second command (torchrun) is not run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
LEFT_OUT = "..."
NOT_DONE = "no time left to search"  # `explain --sensitivity` on a busy machine


def blocks(page: str) -> list[str]:
    """What stands between fences that name no language."""
    return [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S) if not language]


def shown_run(block: str) -> tuple[str, list[str]] | None:
    """Command and shown lines of a block; None if it shows no run."""
    first, *lines = block.splitlines()
    if not first.startswith("$ autoplan ") or not lines or lines[0].startswith("$"):
        return None
    return first.removeprefix("$ "), lines


def printed_by(command: str, folder: Path) -> list[str]:
    """What a command prints in a folder that has `examples` and the `plans` of earlier commands."""
    if not (folder / "plans").exists():
        (folder / "plans").mkdir()
        (folder / "examples").symlink_to(CHECKOUT / "examples")
    force = " --force" if " --out " in command else ""
    done = subprocess.run(
        f"{sys.executable} -m {command}{force}", shell=True, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 5), done.stderr  # 5: nothing fits
    return done.stdout.splitlines()


def _timeless(line: str) -> str:
    return re.sub(r" in [\d.]+ m?s$", "", line)


@cache
def _likeness(shown: str, printed: str) -> float:
    """1 of equal lines; else, below that, how alike they are when every figure is."""
    if shown == printed:
        return 1.0
    one, other = (re.sub(r"[\d.,]+", "0", re.sub(r"([ #-])\1+", r"\1", line)) for line in (shown, printed))
    likeness = 0.9 * SequenceMatcher(None, one, other, autojunk=False).ratio()
    return likeness if likeness > 0.5 else 0.0


def _matches(shown: list[str], printed: list[str]) -> dict[int, int]:
    """Shown line -> printed line, in order, as alike as possible in all."""
    best = [[0.0] * (len(printed) + 1) for _ in range(len(shown) + 1)]
    for i in reversed(range(len(shown))):
        for j in reversed(range(len(printed))):
            likeness = _likeness(_timeless(shown[i]), _timeless(printed[j]))
            taken = likeness + best[i + 1][j + 1] if likeness else 0.0
            best[i][j] = max(taken, best[i + 1][j], best[i][j + 1])
    found, i, j = {}, 0, 0
    while i < len(shown) and j < len(printed):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            found[i], i, j = j, i + 1, j + 1
    return found


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """The printed lines, without those that the shown lines leave out; the time of a search alone changes nothing."""
    there = [line for line in shown if line != LEFT_OUT]
    found = _matches(there, printed)
    ends, lines, after = {}, [], 0  # of each matched printed line: the shown one, and whether "..." stands before it
    is_left_out = False
    for line in shown:
        if line == LEFT_OUT:
            is_left_out = True
            continue
        if after in found:
            ends[found[after]] = (line, is_left_out)
            is_left_out = False
        after += 1
    last = 0
    for j, (line, is_gap) in sorted({**ends, len(printed): ("", is_left_out)}.items()):
        lines += ([LEFT_OUT] if j > last else []) if is_gap else printed[last:j]
        if j < len(printed):
            lines.append(line if _timeless(line) == _timeless(printed[j]) else printed[j])
        last = j + 1
    return lines


def renewed_page(page: str, run: Callable[[str], list[str]]) -> str:
    for block in blocks(page):
        if shown := shown_run(block):
            command, lines = shown
            printed = run(command)
            if not any(NOT_DONE in line for line in printed):
                page = page.replace(block, "\n".join([f"$ {command}", *renewed(lines, printed)]) + "\n")
    return page


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = cache(lambda command: printed_by(command, Path(folder)))
        for page in [Path(name) for name in names] or PAGES:
            page.write_text(renewed_page(page.read_text(), run))


if __name__ == "__main__":
    main(sys.argv[1:])
