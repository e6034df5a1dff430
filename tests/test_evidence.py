"""The raw rows of `benchmarks/results`: each is named where a figure rests on it, and each name is that of a file."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
RESULTS = CHECKOUT / "benchmarks" / "results"
FOLDERS = ("autoplan", "benchmarks", "cost_models", "docs", "hardware_profiles")
TEXTS = [
    CHECKOUT / "README.md",
    *(path for name in FOLDERS for path in (CHECKOUT / name).rglob("*") if path.suffix in {".md", ".py", ".toml"}),
]


def _named() -> set[str]:
    """Files and folders of results as texts name them, with "*" for parts that they leave open."""
    found: set[str] = set()
    for path in TEXTS:
        if RESULTS not in path.parents:
            text = path.read_text()
            found |= set(re.findall(r"results/([\w*./-]*[\w*])", text))
            found |= set(re.findall(r"[a-z][\w*.-]*_\d{4}-\d\d-\d\d(?:[\w*.-]*[\w*])?", text))  # given in `results`
    return found


def test_every_raw_file_is_named_where_its_figures_are_used() -> None:
    named = _named()
    files = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*") if path.is_file()}
    wanted = {file: (file, file.split("/")[0]) for file in files}
    assert sorted(f for f, names in wanted.items() if not any(fnmatch(n, p) for n in names for p in named)) == []


def test_every_raw_file_that_a_text_names_is_there() -> None:
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*")}
    assert sorted(name for name in _named() if not any(fnmatch(path, f"{name}*") for path in there)) == []
