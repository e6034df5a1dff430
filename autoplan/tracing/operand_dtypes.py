"""Targets in a dtype that torch traces, and refuses when the program runs: classes in int32, or numbers for classes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoplan.errors import InputError
from autoplan.tracing.places import reading_place

_CLASSES = {"cross_entropy_loss": 1, "nll_loss_nd": 1, "nll_loss_forward": 1, "nll_loss2d_forward": 1, "one_hot": 0}
_NUMBERS = {"binary_cross_entropy": 1}  # which operand of an operator they are


def check_operands(program: torch.export.ExportedProgram, *, where: str, run: Callable[[], None]) -> None:
    """Return when losses have targets of a dtype that they take; `run` runs the model and its loss again.

    Raises: InputError with the line of the user's file.
    """
    for node in program.graph.nodes:
        name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
        position = {**_CLASSES, **_NUMBERS}.get(name)
        if position is None:
            continue
        values = [operand.meta["val"] for operand in node.args[: position + 1]]
        targets, is_share = values[-1], name == "cross_entropy_loss" and values[0].dim() == values[1].dim()
        if is_share or (targets.is_floating_point() if name in _NUMBERS else targets.dtype == torch.int64):
            continue
        kind = "float" if name in _NUMBERS else "long"
        raise InputError.of(
            f"{where}: targets of {name}{reading_place(targets, run)}",
            found="floating-point numbers" if targets.is_floating_point() else str(targets.dtype),
            expected="floating-point numbers" if kind == "float" else "classes, as integers of torch.long",
            fix=f"return such from make_batch and from the dataset, or write .{kind}() in the line",
        )
