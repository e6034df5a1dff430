"""Starting another program and waiting for its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Start = Callable[[Sequence[str], Path], int]  # of a command in a folder; its exit code


def start_process(command: Sequence[str], folder: Path | None = None) -> int:
    """Run a command, in `folder` where one is given, its output going to stderr; returns its exit code."""
    return subprocess.run(command, cwd=folder, stdout=sys.stderr.fileno(), check=False).returncode
