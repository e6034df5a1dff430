"""`python -m runtime export DIR FILE.safetensors`: the weights of a checkpoint, whole, under the model's own names."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from .checkpoints.checkpoint import checkpoint_at
from .checkpoints.folder import check_complete, check_undamaged, damaged_files
from .checkpoints.weight_files import export_checkpoint


def main(arguments: Sequence[str]) -> None:
    """Run one command.

    Raises: CheckpointError when there is no complete checkpoint, or the file cannot be written.
    """
    parser = ArgumentParser(prog="python -m runtime")
    export = parser.add_subparsers(required=True, metavar="export").add_parser("export", help="write the weights")
    export.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, or a folder that holds some")
    export.add_argument("file", type=Path, metavar="FILE.safetensors")
    given = parser.parse_args(arguments)
    path = checkpoint_at(given.folder)
    check_complete(path)
    check_undamaged(path, damaged_files(path, rank=0, n_ranks=1))
    export_checkpoint(path, given.file)
    print(f"{given.file}: the weights of {path}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
