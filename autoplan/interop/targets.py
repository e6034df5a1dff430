"""The programs that a plan can be put into the words of, by name, and the files that are written for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from autoplan.checks.options import nearest
from autoplan.errors import UsageError
from autoplan.interop.accelerate import accelerate_file
from autoplan.interop.deepspeed import deepspeed_file
from autoplan.interop.megatron import megatron_file
from autoplan.interop.subject import Configuration, Subject
from autoplan.interop.torchtitan import torchtitan_file

READ_ON = "2026-11-28"
SOURCES: Mapping[str, str] = {
    "torchtitan": "torchtitan 0.3.0 and its source b5bcd76 of 2026-08-21, config/configs.py: fields and docstrings",
    "megatron": "Megatron-LM 0.20.0, source d98e8a6 of 2026-08-22: training/arguments.py: arguments and help",
    "deepspeed": "DeepSpeed 0.19.8: runtime/config.py; https://www.deepspeed.ai/docs/config-json; AutoTP tutorial",
    "accelerate": "Accelerate 1.15.0; https://huggingface.co/docs/accelerate: FSDP, ParallelismConfig, launch",
}
TARGETS: Mapping[str, Callable[[Subject], Configuration]] = {
    "torchtitan": torchtitan_file,
    "megatron": megatron_file,
    "deepspeed": deepspeed_file,
    "accelerate": accelerate_file,
}


def check_targets(names: tuple[str, ...], *, out: Path | None) -> None:
    """Refuse targets before time is spent on a search.

    Raises: UsageError for one that is not known, or without a folder to write to.
    """
    for name in names:
        if name not in TARGETS:
            raise UsageError(
                f"--emit: found {name!r}{nearest(name, TARGETS)}\n  expected: one of {', '.join(TARGETS)}\n"
                "  fix: use one of these"
            )
        if out is None:
            raise UsageError(f"--emit {name}: nowhere to write\n  fix: add --out DIR; it writes into DIR/interop")


def interop_files(names: tuple[str, ...], subject: Subject) -> dict[str, str]:
    """By relative path: for each target its configuration, and a page on how to use it and what it leaves out."""
    found = {}
    for name in names:
        configuration = TARGETS[name](subject)
        found[f"interop/{configuration.file}"] = configuration.text
        found[f"interop/{name}.md"] = _page(name, configuration)
    return found


def _page(name: str, configuration: Configuration) -> str:
    missing = "".join(f"- {sentence}\n" for sentence in configuration.missing)
    return (
        f"# This plan for {name}\n\n{configuration.use}\n\n## Not expressed\n\n{missing}\n"
        f"Fields as in {SOURCES[name]} (read on {READ_ON}).\n"
    )
