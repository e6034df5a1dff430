"""What forward decides by the values of constants: `if (mask == causal).all()`, which a trace cannot tell.

torch's own encoders and decoders ask so whether their mask is causal. Where a trace fails for want of values, the model
runs once on meta tensors whose values are known (`runtime.building.known_values`): its buffers, as `build_model` leaves
them, and what follows from them and from constants. The next trace gets the same answers in the same lines:

    run      line 12: bool(x) is True    line 12: bool(y) is False
    trace    line 12: bool(x) -> True    line 12: bool(y) -> False

Weights and batches have no values, nor have buffers that forward writes, since the answers of one step would not be
those of the next. Numbers are no answers: a trace computes in another precision than a program.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MOST_ELEMENTS = 2**24  # of a tensor whose values are kept; a mask of 4096 tokens
_DECISIONS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.item,
        torch.Tensor.equal,
        torch.Tensor.allclose,
        torch.equal,
        torch.allclose,
    }
)
Answers = Mapping[tuple[str, int], tuple[bool, ...]]  # by file and line, as they run


def known_buffers(build_model: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """The values of buffers that follow from constants, by name."""
    from autoplan.runtime.building.known_values import KnownValues, NumbersOnHost

    with torch.device("meta"), KnownValues(MOST_ELEMENTS) as known, NumbersOnHost(known):
        model = build_model()
    return {name: known.real(own) for name, own in model.named_buffers() if known.knows(own)}


def find_answers(run: Callable[[], Any], model: nn.Module, values: Mapping[str, torch.Tensor]) -> Answers:
    """What `run`, which runs the model on the meta device, decides by these values of its buffers.

    Raises: whatever `run` raises where a value is not known.
    """
    from autoplan.runtime.building.known_values import KnownValues, NumbersOnHost

    buffers, asked = dict(model.named_buffers()), _Asked()
    versions = {name: own._version for name, own in buffers.items()}
    with KnownValues(MOST_ELEMENTS) as known, NumbersOnHost(known), asked:
        for name in buffers.keys() & values.keys():
            if buffers[name].is_meta:
                known.remember(buffers[name], values[name])
        run()
    after = dict(model.named_buffers())
    kept = {name: own for name, own in values.items() if after.get(name) is buffers[name]}
    kept = {name: own for name, own in kept.items() if buffers[name]._version == versions[name]}
    return asked.answers if len(kept) == len(values) else find_answers(run, model, kept)


class Answering(TorchFunctionMode):
    """Inside, what was answered before is answered again."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._left = {place: deque(given) for place, given in answers.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DECISIONS and _is_decision(func, args) and (left := self._left.get(_asking_line())):
            return left.popleft()
        return func(*args, **(kwargs or {}))


class _Asked(TorchFunctionMode):
    """Notes the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[tuple[str, int], tuple[bool, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _DECISIONS and _is_decision(func, args):
            place = _asking_line()
            self.answers[place] = (*self.answers.get(place, ()), result)
        return result


def _is_decision(func: Any, args: Any) -> bool:
    return func is not torch.Tensor.item or args[0].dtype == torch.bool


def _asking_line() -> tuple[str, int]:
    """The line outside of function modes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
