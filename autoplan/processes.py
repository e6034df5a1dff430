"""Starting another program and waiting for its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_process(command: Sequence[str], folder: Path | None = None) -> int:
    """Run a command, in `folder` where one is given, its output going to stderr; returns its exit code."""
    return subprocess.run(command, cwd=folder, stdout=sys.stderr.fileno(), check=False).returncode
