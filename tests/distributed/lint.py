"""Generated files as formatters and linters see them."""

import subprocess
import sys
from pathlib import Path


def run_ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`ruff` with these arguments."""
    return subprocess.run([sys.executable, "-m", "ruff", *arguments], capture_output=True, text=True, check=False)


def assert_formatted_and_free_of_lint(*paths: Path) -> None:
    """Laid out as the formatter does it, no unused import, no undefined name."""
    options, names = ("--isolated", "--line-length", "120"), list(map(str, paths))
    done = run_ruff("format", *options, "--diff", *names)
    assert done.returncode == 0, done.stdout
    done = run_ruff("check", *options, "--select", "F,E7,E9,E501", *names)
    assert done.returncode == 0, done.stdout
